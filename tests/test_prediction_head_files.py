"""Heads for multi-token prediction in files: what is read of them, and what is not used."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import heads
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_blockpool_plugins import prediction_heads
from mlx_lm.models.cache import make_prompt_cache
from thorough import only

from mlx_blockpool.kv.build import describe
from mlx_blockpool.kv.prediction_head import drop_head, head_of
from mlx_blockpool.model_files.loading import load_model

NAMES = only(heads.NAMES, "glm4_moe", "qwen3_5")
PROMPT = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


def logits(model: Any) -> mx.array:
    found: mx.array = model(PROMPT, cache=make_prompt_cache(model))
    return found


def is_stock(model: Any, name: str) -> bool:
    """Whether a model is what mlx-lm makes of the same files."""
    own = heads.trained(name)[0]
    return (
        type(model) is type(own)
        and head_of(model) is None
        and len(make_prompt_cache(model)) == len(make_prompt_cache(own))
        and bool(mx.array_equal(logits(model), logits(own)))
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_model_keeps_the_head_that_its_files_have(name: str, tmp_path: Path) -> None:
    model, _ = load_model(heads.save(tmp_path, name))
    stock, head = heads.trained(name)
    found = head_of(model)
    assert found is not None
    assert len(make_prompt_cache(model)) == len(make_prompt_cache(stock)) + 1
    assert mx.array_equal(logits(model), logits(stock))
    expected = dict(tree_flatten(head.parameters()))
    assert all(
        mx.array_equal(value, expected[key]) for key, value in tree_flatten(found.parameters())
    )
    drop_head(model)
    assert is_stock(model, name)
    assert not any("prediction_head" in key for key, _ in tree_flatten(model.parameters()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["none", "absent", "shape", "norm", "layer", "bias", "scales"])
def test_a_head_that_cannot_be_used_is_left_out_and_named(
    name: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tensors = heads.tensors_of(name)
    projection = next(
        key for key in tensors if f".{prediction_heads.LAYOUTS[name].projection}." in key
    )
    norm = next(key for key in tensors if ("norm" in key and "layer" not in key) or "hnorm" in key)
    layer = next(key for key in tensors if key.endswith("o_proj.weight"))
    changes: dict[str, dict[str, mx.array | None]] = {
        "none": dict.fromkeys(tensors),
        "absent": {projection: None},
        "shape": {projection: mx.zeros((3, 5))},
        "norm": {norm: mx.zeros((3, 5))},
        "layer": {layer: None},
        "bias": {layer.replace("weight", "bias"): mx.zeros((64,))},
        "scales": {layer.replace("weight", "scales"): mx.zeros((64, 2))},
    }
    model, _ = load_model(heads.save(tmp_path, name, **changes[damage]))
    assert is_stock(model, name)
    (line,) = [record.message for record in caplog.records if "prediction head" in record.message]
    assert {
        "none": "files have none",
        "shape": "(3, 5)",
        "norm": "(3, 5)",
        "bias": "layer has no",
        "scales": "has no",
    }.get(damage, "files have no ") in line


def test_windows_of_max_kv_size_have_no_head(tmp_path: Path) -> None:
    model, _ = load_model(heads.save(tmp_path, "glm4_moe"))
    spec = describe(model, max_kv_size=512)
    assert spec.layers == describe(heads.trained("glm4_moe")[0], max_kv_size=512).layers
    assert head_of(model) is None


def test_a_config_without_a_head_has_the_classes_of_mlx_lm() -> None:
    config = heads.config_of("deepseek_v3")
    assert prediction_heads.model_classes(config) is not None
    assert prediction_heads.model_classes({**config, "num_nextn_predict_layers": 0}) is None
    assert prediction_heads.model_classes({**config, "model_type": "llama"}) is None


def test_a_quantised_head_is_read_as_its_model_is(tmp_path: Path) -> None:
    folder = heads.save(tmp_path, "glm4_moe")
    path = str(folder / "model.safetensors")
    tensors = {}
    for key, value in mx.load(path).items():
        if key.endswith(("_proj.weight", "lm_head.weight")) and value.shape[-1] % 32 == 0:
            stem = key.removesuffix("weight")
            names = (key, f"{stem}scales", f"{stem}biases")
            tensors |= dict(zip(names, mx.quantize(value, 32, 8), strict=True))
        else:
            tensors[key] = value
    mx.save_safetensors(path, tensors, {"format": "mlx"})
    config = {**heads.config_of("glm4_moe"), "quantization": {"group_size": 32, "bits": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    model, _ = load_model(folder)
    head = head_of(model)
    assert head is not None
    assert isinstance(head.projection, nn.QuantizedLinear)
    assert isinstance(head.layer.self_attn.q_proj, nn.QuantizedLinear)
    guessed = head.guess([[3, 4]], mx.zeros((1, 2, 64)), 2, make_prompt_cache(model)[-1])
    assert [len(own) for own in guessed] == [2]


def test_norms_that_files_have_less_one_are_read_as_mlx_lm_reads_them(tmp_path: Path) -> None:
    """As the files of Qwen's own have them, next to convolutions in another order."""
    folder = heads.save(tmp_path, "qwen3_5")
    path = str(folder / "model.safetensors")
    tensors = {}
    for key, value in mx.load(path).items():
        if "conv1d" in key:
            value = mx.moveaxis(value, 1, 2)
        elif "norm" in key and "linear_attn" not in key:
            value = value - 1.0
        tensors[key] = value
    mx.save_safetensors(path, tensors, {"format": "pt"})
    model, _ = load_model(folder)
    expected = dict(tree_flatten(heads.trained("qwen3_5")[1].parameters()))
    found = head_of(model)
    assert found is not None
    assert mx.allclose(logits(model), logits(heads.trained("qwen3_5")[0]), atol=1e-4)
    for key, value in tree_flatten(found.parameters()):
        assert mx.allclose(value, expected[key], atol=1e-5), key
