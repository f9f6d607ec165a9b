"""The examples of plugins/README.md: what each says is proven for a model that it describes, and
what is wrong is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from architectures.configs import CONFIGS
from documents import blocks
from kv import test_cache_adapters as slopes
from test_plugins import Fixed, manager_with
from thorough import only

from mlx_blockpool import hooks, plugins, spec
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.stock import StockCaches
from mlx_blockpool.spec import CompositeLayer, FullLayer, ModelCacheSpec, StateLayer
from mlx_blockpool.testing import tiny_model

POOL = 500_000_000
HEADS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 1,
}
# The models of the layers, and what changes one into a layer that they do not have.
LAYERS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "windows": (
        {
            **CONFIGS["gpt_oss"],
            **HEADS,
            "num_hidden_layers": 2,
            "head_dim": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 128,
        },
        lambda layer: replace(layer, max_size=127),
    ),
    "states": (
        {
            **CONFIGS["mamba2"],
            "num_hidden_layers": 1,
            "num_heads": 16,
            "head_dim": 64,
            "state_size": 64,
        },
        lambda layer: StateLayer(layer.arrays[:1]),
    ),
    "both": (
        {
            **CONFIGS["falcon_h1"],
            **HEADS,
            "mamba_n_heads": 16,
            "mamba_d_head": 64,
            "mamba_d_ssm": 1024,
            "mamba_d_state": 64,
        },
        lambda layer: CompositeLayer(layer.parts[::-1]),
    ),
}
WRONG_ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "write": lambda adapter: replace(adapter, write="add"),
    "size": lambda adapter: replace(adapter, size="count"),
    "arrays": lambda adapter: replace(adapter, arrays=slopes.few_heads),
    "save": lambda adapter: replace(adapter, save=lambda cache: [cache.parts, 0]),
    "restore": lambda adapter: replace(adapter, restore=lambda cache, saved: None),
}
ROWS, STATE = (None, "write", "size", "arrays"), (None, "save", "restore")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the model with the cache class of the examples."""
    monkeypatch.syspath_prepend(str(slopes.PACKAGE))
    from blockpool_slopes import model

    return model


@pytest.fixture
def examples(model: Any) -> dict[str, Any]:
    """What the examples define."""
    given = {**vars(hooks), **vars(spec), **vars(model)}
    names = dict(given)
    for code in blocks("python", "plugins/README.md"):
        if not code.startswith("def "):
            exec(code, names)
    return {name: value for name, value in names.items() if given.get(name) is not value}


def opened(model: Any) -> Any:
    return BlockPoolBatchEngine.open(model, POOL).caches


def test_every_example_is_tried(examples: dict[str, Any]) -> None:
    found = {name: value for name, value in examples.items() if name != "__builtins__"}
    assert found.keys() == {*LAYERS, "rows", "state"}


@pytest.mark.parametrize("name", only(LAYERS, "states"))
@pytest.mark.parametrize("is_right", [True, False])
def test_the_layer_of_an_example_is_proven(
    name: str, is_right: bool, examples: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, change = LAYERS[name]
    layer = examples[name] if is_right else change(examples[name])
    more = (FullLayer(8, 64, 64),) * (config["num_hidden_layers"] - 1)
    found = Fixed(ModelCacheSpec("mine", (layer, *more)))
    monkeypatch.setattr(plugins, "make_plugin_manager", lambda: manager_with(found))
    caches = opened(tiny_model(config))
    assert type(caches) is (PooledCaches if is_right else StockCaches)
    assert (caches.capabilities.differs == ()) == is_right
    assert caches.ragged == is_right


@pytest.mark.parametrize(("name", "wrong"), [*product(["rows"], ROWS), *product(["state"], STATE)])
def test_the_adapters_of_the_examples_are_proven(
    name: str,
    wrong: str | None,
    model: Any,
    examples: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change = (lambda adapter: adapter) if wrong is None else WRONG_ADAPTERS[wrong]
    slopes.install(model, monkeypatch, lambda: [change(examples[name])])
    caches = opened(tiny_model(slopes.CONFIG, plugins.make_plugin_manager()))
    assert type(caches) is (PooledCaches if wrong is None else StockCaches)
    assert (caches.capabilities.differs == ()) == (wrong is None)
