"""Text models of mlx-vlm, which a small package in tests/fake_mlx_vlm stands in for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_blockpool_plugins import vision_text
from models import CONFIGS, write_model

from mlx_blockpool.engine.opening import open_caches
from mlx_blockpool.engine.stock import StockCaches
from mlx_blockpool.errors import SpecError, UnknownModelTypeError
from mlx_blockpool.model_files.loading import load
from mlx_blockpool.plugins import model_classes, spec_from_config, spec_of_model
from mlx_blockpool.testing import conformance, tiny_model
from mlx_blockpool.testing.kit import FAILED

FAKE = Path(__file__).parent / "fake_mlx_vlm"
SKETCH: dict[str, Any] = {
    "model_type": "sketch-vl",
    "text_config": {"hidden_size": 32, "vocab_size": 131},
    "vision_config": {"hidden_size": 8},
    "torch_dtype": "float32",
}
DECAYING = {**CONFIGS["llama"], "model_type": "decaying"}
PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6]]


@pytest.fixture(autouse=True)
def mlx_vlm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package in FAKE in place of an installed one."""
    monkeypatch.syspath_prepend(str(FAKE))
    for name in [n for n in sys.modules if n.partition(".")[0] == "mlx_vlm"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "mlx_vlm"]:
        del sys.modules[name]


def test_a_type_that_mlx_lm_has_imports_nothing() -> None:
    assert model_classes(dict(CONFIGS["llama"]))[0].__module__ == "mlx_lm.models.llama"
    assert "mlx_vlm" not in sys.modules


@pytest.mark.parametrize(("config", "package"), [(SKETCH, "mlx_vlm_of_nobody"), ({}, "mlx_vlm")])
def test_a_type_that_is_not_there_is_said(
    config: dict[str, Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_text, "PACKAGE", package)
    with pytest.raises(UnknownModelTypeError, match=r"neither mlx-lm .*with mlx-vlm, its text mod"):
        model_classes(config)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("finder", "it has no language model"),
        ("painter", "it has no language model"),
        ("scatter", "it does not generate one token after another"),
        ("paligemma", "its prompts cannot be computed in parts"),
        ("heavy", "its module does not load (No module named 'a_package_that_is_not_there')"),
        (
            "pictures",
            "its language model does not run on text alone (ValueError: pixel_values are needed)",
        ),
    ],
)
def test_what_a_model_of_mlx_vlm_lacks_is_said(kind: str, why: str) -> None:
    with pytest.raises(UnknownModelTypeError) as info:
        spec_from_config({**SKETCH, "model_type": kind}, "m")
    assert str(info.value).startswith(f"m: model type '{kind}' is mlx-vlm's, and {why}. Serve ")


def test_a_language_model_passes_every_check_and_is_ragged() -> None:
    found = {result.check: result for result in conformance(SKETCH)}
    assert [str(result) for result in found.values() if result.outcome == FAILED] == []
    assert "read in place" in found["batch"].text


def test_the_positions_of_other_requests_do_not_reach_a_text() -> None:
    model = tiny_model(SKETCH)
    own = import_module("mlx_vlm.models.cache").make_prompt_cache(model.language_model)
    expected = model.language_model(mx.array(PROMPT), cache=own).logits
    for _ in range(2):
        assert mx.array_equal(model(mx.array(PROMPT), cache=model.make_cache()), expected)
        # As after an image.
        model.language_model._rope_deltas = 20


def test_a_model_with_another_cache_class_runs_on_it_alone() -> None:
    model = tiny_model(DECAYING)
    assert {type(cache).__name__ for cache in model.make_cache()} == {"DecayingKVCache"}
    assert isinstance(open_caches(model, 20_000_000), StockCaches)
    with pytest.raises(SpecError, match="m: mlx-lm has no cache class DecayingKVCache"):
        spec_of_model(model, DECAYING, "m")


def test_weights_of_the_language_model_are_loaded_without_the_others(tmp_path: Path) -> None:
    model = tiny_model(SKETCH)
    folder = write_model(tmp_path / "m", model, SKETCH)
    weights = {
        name.replace("language_model.", "model.text."): value
        for name, value in tree_flatten(model.parameters())
    }
    weights["vision_tower.weight"] = mx.zeros((4, 8))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    loaded, _, config = load(str(folder), return_config=True)
    assert config == json.loads((folder / "config.json").read_text()) | {"model_file": None}
    assert [name for name, _ in tree_flatten(loaded.parameters())] == [
        name for name, _ in tree_flatten(model.parameters())
    ]
    assert mx.array_equal(loaded(mx.array(PROMPT)), model(mx.array(PROMPT)))
