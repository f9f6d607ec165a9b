"""Models whose classes a plugin brings are loaded as mlx-lm loads its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.tuner.utils import linear_to_lora_layers
from models import make_model, save_model

from mlx_blockpool import plugins
from mlx_blockpool.errors import UnknownModelTypeError
from mlx_blockpool.hooks import hookimpl
from mlx_blockpool.model_files.loading import load, load_model

TOKENS = mx.array([[3, 5, 7, 11]])


class Sketch(llama.Model):  # type: ignore[misc]
    """The model of a type that mlx-lm does not have."""


class Plugin:
    @hookimpl
    def model_classes(self, config: dict[str, Any]) -> tuple[type, type] | None:
        return (Sketch, llama.ModelArgs) if config["model_type"] == "sketch" else None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A llama that calls itself a sketch."""
    found = save_model(tmp_path / "model", "llama")
    change_config(found, model_type="sketch")
    return found


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = plugins.make_plugin_manager()
    manager.register(Plugin())
    monkeypatch.setattr(plugins, "make_plugin_manager", lambda: manager)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def parameters(model: Any) -> dict[str, Any]:
    return {name: array.tolist() for name, array in tree_flatten(model.parameters())}


def logits(model: Any) -> list[Any]:
    found: list[Any] = model(TOKENS).tolist()
    return found


@pytest.mark.usefixtures("plugin")
def test_a_model_of_a_plugin_is_loaded_with_tokenizer_and_config(folder: Path) -> None:
    model, tokenizer, config = load(str(folder), lazy=True, return_config=True)
    assert (type(model), config["model_type"]) == (Sketch, "sketch")
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    change_config(folder, model_type="llama")
    assert logits(model) == logits(mlx_lm.load(str(folder))[0])


def test_a_type_that_nobody_has_is_said(folder: Path) -> None:
    with pytest.raises(UnknownModelTypeError, match="has model_type 'sketch'"):
        load(str(folder))


@pytest.mark.usefixtures("plugin")
def test_a_plugin_replaces_the_code_in_the_folder(folder: Path) -> None:
    change_config(folder, model_file="own.py")
    (folder / "own.py").write_text("raise RuntimeError('it ran')")
    for trusts in (False, True):
        assert type(load_model(folder, trust_remote_code=trusts)[0]) is Sketch
    change_config(folder, model_type="llama")
    with pytest.raises(ValueError, match=r"own\.py.*trust_remote_code"):
        load_model(folder)


@pytest.mark.usefixtures("plugin")
def test_adapters_are_applied(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    lora = {"rank": 4, "scale": 8.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    described = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": lora}
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    trained = make_model("llama")
    linear_to_lora_layers(trained, 2, lora)
    weights = {
        name: mx.random.normal(array.shape)
        for name, array in tree_flatten(trained.parameters())
        if "lora" in name
    }
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights)
    model = load(str(folder), adapter_path=str(adapter))[0]
    found = parameters(model)
    assert {name: found[name] for name in weights} == {n: a.tolist() for n, a in weights.items()}
    assert logits(model) != logits(load(str(folder))[0])
