"""Text models of an installed mlx-vlm: they pass the conformance kit, and give mlx-vlm's logits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from architectures.pooled import POOL, distance, prompt
from mlx_blockpool.engine.opening import open_caches
from mlx_blockpool.engine.stock import StockCaches
from mlx_blockpool.errors import UnknownModelTypeError
from mlx_blockpool.kv.prompt_cache import make_prompt_cache
from mlx_blockpool.plugins import model_classes
from mlx_blockpool.testing import conformance, tiny_model
from mlx_blockpool.testing.kit import FAILED

pytest.importorskip("mlx_vlm")

TEXT: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
SECTIONS = {"type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "image_size": 28,
    "out_hidden_size": 64,
}


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in TEXT.items() if key not in keys}


# Positions in two axes and in three, windows, experts, and states.
CONFIGS: dict[str, dict[str, Any]] = {
    "glm_ocr": {
        "text_config": {**without("rope_theta"), "model_type": "glm_ocr_text"},
        "vision_config": {**VISION, "model_type": "glm_ocr_vision"},
    },
    "glm4v": {
        "text_config": {
            **without("head_dim"),
            "model_type": "glm4v_text",
            "eos_token_id": [1],
            "rope_scaling": SECTIONS,
            "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5},
        },
        "vision_config": {**VISION, "model_type": "glm4v"},
    },
    "kolibri1": {
        **TEXT,
        **EXPERTS,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_5_text": {**TEXT, **LINEAR},
}
OWN_CACHES: dict[str, Any] = {
    "model_type": "glm5_next",
    "text_config": {
        **without("head_dim", "rope_theta"),
        "model_type": "glm5_next_text",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_head_dim": 16,
        "v_head_dim": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
        "index_kpool": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "vision_config": {**VISION, "model_type": "glm5_next_vision"},
    "torch_dtype": "float32",
}


def config_of(name: str) -> dict[str, Any]:
    return {**CONFIGS[name], "model_type": name, "torch_dtype": "float32"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_text_model_passes_every_check_and_is_ragged(name: str) -> None:
    found = {result.check: result for result in conformance(config_of(name))}
    assert [str(result) for result in found.values() if result.outcome == FAILED] == []
    assert "read in place" in found["batch"].text


@pytest.mark.parametrize("name", CONFIGS)
def test_pooled_caches_give_the_logits_of_mlx_vlm(name: str) -> None:
    from mlx_vlm.models.cache import make_prompt_cache as own_prompt_cache

    model = tiny_model(config_of(name))
    caches: Any = open_caches(model, POOL)
    language, own = model.language_model, own_prompt_cache(model.language_model)
    pooled = make_prompt_cache(model, caches.prefix.arena)
    parts = [mx.array([part]) for part in (prompt(0, 40), [7], [9])]
    # The module has the position of its last call: all calls of mlx-vlm come first.
    expected = [language(part, cache=own).logits for part in parts]
    assert distance(expected, [model(part, cache=pooled) for part in parts]) < 1e-5


def test_a_model_with_caches_that_mlx_lm_lacks_runs_on_them() -> None:
    model = tiny_model(OWN_CACHES)
    assert isinstance(open_caches(model, POOL), StockCaches)
    cut, whole = model.make_cache(), model.make_cache()
    tokens = mx.array([prompt(1, 12)])
    model(tokens[:, :5], cache=cut)
    expected = [model(tokens, cache=whole)[0, -1]]
    assert distance(expected, [model(tokens[:, 5:], cache=cut)[0, -1]]) < 1e-5


@pytest.mark.parametrize(
    ("kind", "why"), [("mllama", "computed in parts"), ("flux2", "no language model")]
)
def test_what_cannot_be_served_is_said(kind: str, why: str) -> None:
    with pytest.raises(UnknownModelTypeError, match=f"'{kind}' is mlx-vlm's, and .*{why}"):
        model_classes({"model_type": kind})
