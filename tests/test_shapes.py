"""Models built for their shapes: the same as mlx-lm builds; and what their weights take."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_blockpool_plugins import default, shapes
from models import CONFIGS, make_model
from published import (
    FOUR_BITS,
    GEMMA_12B,
    GPT_OSS_20B,
    LLAMA_8B,
    LLAMA_8B_4BIT,
    QWEN3_NEXT_80B,
    QWEN_14B,
)

from mlx_blockpool.errors import SpecError
from mlx_blockpool.plugins import spec_from_config


def weight_bytes(config: dict[str, Any]) -> tuple[int, int, int | None]:
    return shapes.weight_bytes(copy.deepcopy(config))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_built_is_what_mlx_lm_builds(name: str) -> None:
    found = shapes.build(copy.deepcopy(CONFIGS[name]))
    expected = make_model(name)
    assert type(found) is type(expected)
    assert [(n, a.shape, a.dtype) for n, a in tree_flatten(found.parameters())] == [
        (n, a.shape, a.dtype) for n, a in tree_flatten(expected.parameters())
    ]
    assert default.trace(found, "m") == default.trace(expected, "m")


def test_state_has_the_dtype_that_the_model_is_published_in() -> None:
    state = spec_from_config(copy.deepcopy(QWEN3_NEXT_80B), "m").layers[0]
    assert getattr(state, "arrays", None) == (
        ((1, 3, 8192), "bfloat16"),
        ((1, 32, 128, 128), "float32"),
    )


def test_a_model_type_that_nobody_knows_is_said() -> None:
    with pytest.raises(ValueError, match="has model_type 'unheard_of'"):
        shapes.build({"model_type": "unheard_of"})


def test_a_model_that_needs_a_package_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        SpecError,
        match="cannot load its module for model_type 'olmo': To run olmo install ai2-olmo",
    ):
        spec_from_config({"model_type": "olmo"}, "m")
    assert capsys.readouterr().out == ""


def test_weights_of_published_models() -> None:
    # 8,030,261,248 parameters of 2 bytes
    assert weight_bytes(LLAMA_8B) == (16_060_522_496, 8_030_261_248, None)
    # The text model alone, whose head is its embedding.
    assert weight_bytes(GEMMA_12B) == (2 * 11_766_034_176, 11_766_034_176, None)
    assert weight_bytes(QWEN_14B) == (2 * 14_770_033_664, 14_770_033_664, None)
    # total_size in the index of openai/gpt-oss-20b
    assert weight_bytes(GPT_OSS_20B) == (13_761_264_768, 20_914_757_184, 4)


def test_weights_in_4_bits_have_a_scale_and_a_bias_in_64() -> None:
    # 65 norms of 4,096 in bfloat16; all else 4 bits and 32 in 64
    norms = 65 * 4096
    assert weight_bytes(LLAMA_8B_4BIT) == (
        (8_030_261_248 - norms) * 9 // 16 + 2 * norms,
        8_030_261_248,
        4,
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "quantisation",
    [None, {"group_size": 32, "bits": 8}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}],
)
def test_an_estimate_is_what_a_model_in_memory_takes(
    name: str, quantisation: dict[str, Any] | None
) -> None:
    config = {**CONFIGS[name], "tie_word_embeddings": False}
    model = make_model(name, tie_word_embeddings=False)
    if quantisation:
        nn.quantize(
            model,
            **quantisation,
            class_predicate=lambda _, m: (
                hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
            ),
        )
        config["quantization"] = quantisation
    size, _, bits = weight_bytes(config)
    assert size == sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert bits == (quantisation["bits"] if quantisation else None)


def test_modules_may_be_quantised_in_another_way_or_not_at_all() -> None:
    plain = {**LLAMA_8B, **FOUR_BITS}
    path = "model.layers.0.mlp.down_proj"
    spared = {**plain, "quantization": {**FOUR_BITS["quantization"], path: False}}
    finer = {
        **plain,
        "quantization": {**FOUR_BITS["quantization"], path: {"group_size": 64, "bits": 8}},
    }
    size = 4096 * 14336
    assert weight_bytes(spared)[0] - weight_bytes(plain)[0] == size * 2 - size * 9 // 16
    assert weight_bytes(finer)[0] - weight_bytes(plain)[0] == size // 2


def test_an_awq_config_spares_embeddings_and_head() -> None:
    config = {
        **LLAMA_8B,
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
    }
    # embedding, head and 65 norms in bfloat16; all else 4 bits and 32 in 128
    plain = 2 * 128256 * 4096 + 65 * 4096
    assert weight_bytes(config) == (
        2 * plain + (8_030_261_248 - plain) * 17 // 32,
        8_030_261_248,
        4,
    )


def test_parameters_stay_lazy() -> None:
    before = mx.get_active_memory()
    model = shapes.build(copy.deepcopy(LLAMA_8B))
    assert mx.get_active_memory() - before < 10**6
    del model
