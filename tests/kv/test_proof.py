"""What a plugin says of a model is proven: a wrong spec never gives a wrong reply, is served more
simply, and the sentence says what differs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from architectures.configs import CONFIGS
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import RotatingKVCache
from test_plugins import Fixed, manager_with
from testing import saboteurs as wrong
from thorough import only

from mlx_blockpool import plugins
from mlx_blockpool.config import KVBits
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request, Token
from mlx_blockpool.engine.stock import StockCaches
from mlx_blockpool.errors import PluginError, PoolExhaustedError
from mlx_blockpool.hooks import AttentionAdapter
from mlx_blockpool.kv import probe as probing
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.attach import bind, is_by_member, sources_of
from mlx_blockpool.kv.build import describe, open_pool
from mlx_blockpool.kv.by_member import attend_by_member
from mlx_blockpool.kv.proof import long_prompts
from mlx_blockpool.spec import FullLayer, LayerSpec, ModelCacheSpec, StateLayer, WindowLayer
from mlx_blockpool.testing import tiny_model

ROOMY = 60_000_000
# Each layer more takes as long again.
ONE_LAYER = {**CONFIGS["llama"], "num_hidden_layers": 1, "layer_types": ["full_attention"]}
PLAIN = ModelCacheSpec("llama", (FullLayer(2, 16, 16),), "float32")
Change = Callable[[ModelCacheSpec], Any]


def window_of(change: int) -> Callable[[LayerSpec], LayerSpec]:
    return lambda layer: (
        replace(layer, max_size=layer.max_size + change)
        if isinstance(layer, WindowLayer)
        else layer
    )


def a_window(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer, FullLayer)
    return WindowLayer(layer.kv_heads, layer.key_dim, layer.value_dim, 32)


def swapped_dims(layer: LayerSpec) -> LayerSpec:
    return replace(layer, key_dim=layer.key_dim * 2) if isinstance(layer, FullLayer) else layer


def fewer_bytes(layer: LayerSpec) -> LayerSpec:
    arrays = () if not isinstance(layer, StateLayer) else layer.arrays
    return (
        StateLayer(tuple(((1, *shape[1:-1], 1), dtype) for shape, dtype in arrays))
        if arrays
        else layer
    )


def small(name: str) -> Any:
    """A tiny model with two layers of those that have all kinds in the first two."""
    config = CONFIGS[name]
    if name in ("llama", "gpt_oss"):
        config = {**config, "num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    return tiny_model(config)


TYPES = ["llama", "gpt_oss", "qwen3_next", "falcon_h1", "llama4"]
WRONG: dict[str, tuple[str, Change, str]] = {
    "heads": (
        "llama",
        wrong.layers_with(wrong.wrong_heads),
        "the spec has the arrays keys, values",
    ),
    "dim": ("llama", wrong.layers_with(swapped_dims), "the model's cache writes"),
    "a layer too few": (
        "llama",
        wrong.one_less,
        r"the spec has \d layers and the model makes \d caches",
    ),
    "a layer too many": (
        "llama",
        lambda spec: replace(spec, layers=(*spec.layers, spec.layers[0])),
        r"the spec has \d layers and the model makes \d caches",
    ),
    "kind": ("llama", wrong.layers_with(a_window), "logits after token"),
    "window too small": ("gpt_oss", wrong.layers_with(window_of(-1)), "differ|holds"),
    "window too large": ("gpt_oss", wrong.layers_with(window_of(1)), "differ|holds"),
    "state forgotten": ("qwen3_next", wrong.layers_with(wrong.without_state), "Error"),
    "bytes of a state": ("mamba2", wrong.layers_with(fewer_bytes), "bytes; the spec says"),
}


# One for each step of the proof that finds it.
QUICK = ("heads", "a layer too few", "window too small", "state forgotten", "bytes of a state")


def described_by(change: Change, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model which an installed plugin describes, and differently from the bundled one."""
    model = small(name)
    plugin = wrong.Provider(model.args.model_type, change)
    monkeypatch.setattr(plugins, "make_plugin_manager", lambda: manager_with(plugin))
    return model


@pytest.mark.parametrize("case", only(WRONG, *QUICK))
def test_a_wrong_spec_gives_the_replies_of_the_models_own_caches(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change, said = WRONG[case]
    model = described_by(change, name, monkeypatch)
    prompts = [[3 + i % 50 for i in range(300)], [7, 8, 9]]
    needed = [
        [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=8)]
        for prompt in prompts
    ]
    engine = BlockPoolBatchEngine.open(model, ROOMY)
    assert isinstance(engine.caches, StockCaches)
    (sentence,) = engine.caches.capabilities.differs
    assert "the caches that provider (testing.saboteurs.Provider, " in sentence
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(sentence)
    assert replies(engine, prompts) == needed


@pytest.mark.sampled
@pytest.mark.parametrize("name", only(TYPES, "llama", "gpt_oss"))
@pytest.mark.parametrize("bits", [None, KVBits()])
def test_a_right_spec_of_a_plugin_is_served_as_the_bundled_one_is(
    name: str, bits: KVBits | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = BlockPoolBatchEngine.open(small(name), ROOMY, bits=bits)
    model = described_by(lambda spec: spec, name, monkeypatch)
    engine = BlockPoolBatchEngine.open(model, ROOMY, bits=bits)
    assert engine.caches.ragged == bundled.caches.ragged
    assert engine.caches.capabilities.verifies == bundled.caches.capabilities.verifies
    assert engine.caches.capabilities.differs == bundled.caches.capabilities.differs


@pytest.mark.parametrize("change", [wrong.explode, lambda _: "a spec"])
def test_a_plugin_that_has_no_spec_leaves_the_model_on_its_own_caches(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = BlockPoolBatchEngine.open(described_by(change, "llama", monkeypatch), ROOMY)
    (sentence,) = engine.caches.capabilities.differs
    assert "provider (testing.saboteurs.Provider, " in sentence
    assert len(replies(engine, [[7, 8, 9]])[0]) == 8


def test_a_spec_that_needs_more_than_the_pool_has_an_error_that_names_its_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change = wrong.layers_with(lambda layer: replace(layer, kv_heads=50_000))
    model = described_by(change, "llama", monkeypatch)
    why = r"Raise --pool-bytes, or correct the spec of provider \(testing.saboteurs.Provider, "
    with pytest.raises(PoolExhaustedError, match=why):
        BlockPoolBatchEngine.open(model, ROOMY)


class Unnamed(RotatingKVCache):  # type: ignore[misc]
    """A cache of a model's code, whose window is not among its figures."""

    def __init__(self, size: int) -> None:
        self._size = [size]
        super().__init__(size)

    @property
    def max_size(self) -> int:
        return self._size[0]

    @max_size.setter
    def max_size(self, size: int) -> None:
        pass


def sliding(size: int, make: Callable[[int], Any] = RotatingKVCache) -> Any:
    """A tiny llama whose own caches have windows."""
    model = tiny_model(ONE_LAYER)
    model.make_cache = lambda: [make(size) for _ in model.layers]
    return model


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "is_right"), [(1400, True), (1200, False)])
def test_a_window_that_the_models_own_caches_do_not_show_is_passed(
    size: int, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sliding(1400, Unnamed)
    spec = replace(PLAIN, layers=(WindowLayer(2, 16, 16, size),))
    monkeypatch.setattr(plugins, "make_plugin_manager", lambda: manager_with(Fixed(spec)))
    if is_right:
        assert open_pool(model, ROOMY).capabilities.ragged
        return
    with pytest.raises(PluginError, match=r"logits after token 1203 differ"):
        open_pool(model, ROOMY)


@pytest.mark.parametrize(
    ("make", "length"), [(RotatingKVCache, 532), (Unnamed, 2820)], ids=["stock", "unnamed"]
)
def test_windows_of_the_models_own_caches_are_not_passed(make: Any, length: int) -> None:
    model = sliding(1400, make)
    spec = replace(PLAIN, layers=(WindowLayer(2, 16, 16, 1400),))
    long, _ = long_prompts(model, KVArena(spec, ROOMY), model.make_cache())
    assert len(long) == length


def test_models_of_one_class_share_no_adapters_name() -> None:
    adapters = [
        AttentionAdapter(name, lambda cls: cls is llama.Attention, attend_by_member, source="mine")
        for name in ("first", "second")
    ]
    models = [tiny_model(CONFIGS["llama"]) for _ in range(3)]
    assert bind(models[0], adapters[:1])
    assert bind(models[1], adapters)
    assert bind(models[2], by_member=True)
    assert [*map(sources_of, models)] == [
        ["adapter first of mine"],
        ["adapter second of mine"],
        [],
    ]
    assert all(map(is_by_member, models))
    assert sources_of(copy.deepcopy(models[1])) == ["adapter second of mine"]


def test_a_script_is_told_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = described_by(wrong.layers_with(wrong.wrong_heads), "llama", monkeypatch)
    with pytest.raises(PluginError, match="the spec has the arrays keys, values"):
        open_pool(model, ROOMY)


def test_specs_of_the_bundled_provider_are_tried_with_short_prompts_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unexpected(*_: Any) -> Any:
        raise AssertionError("a long prompt")

    monkeypatch.setattr(probing, "difference_alone", unexpected)
    monkeypatch.setattr(probing, "long_prompts", unexpected)
    assert BlockPoolBatchEngine.open(tiny_model(CONFIGS["gpt_oss"]), ROOMY).caches.ragged


def test_the_models_own_logits_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = probing._stock_caches, []
    monkeypatch.setattr(probing, "_stock_caches", lambda *a: made.append(a) or make(*a))
    caches = BlockPoolBatchEngine.open(tiny_model(CONFIGS["lfm2"]), ROOMY).caches
    # In a batch, with padding and rolled back.
    assert (caches.ragged, caches.capabilities.verifies) == (True, "padded")
    assert len(made) == len(probing.PROMPTS)


@pytest.mark.parametrize(
    ("name", "most"), [("llama", 14), ("gemma3", 14), ("gpt_oss", 14), ("lfm2", 15), ("mamba2", 15)]
)
def test_a_model_is_described_and_tried_in_few_forward_passes(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(CONFIGS[name])
    calls, own = list[Any](), type(model).__call__
    monkeypatch.setattr(
        type(model), "__call__", lambda *args, **given: calls.append(args) or own(*args, **given)
    )
    assert BlockPoolBatchEngine.open(model, ROOMY).caches.ragged
    assert 0 < len(calls) <= most


@pytest.mark.parametrize("name", only(["llama", "gpt_oss", "qwen3_next"], "llama"))
def test_a_pool_too_small_for_a_right_spec_says_what_is_needed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = described_by(lambda spec: spec, name, monkeypatch)
    spec = describe(model)
    least = sum(map(spec.bytes_per_block, spec.groups)) + spec.fixed_bytes_per_agent()
    # The smallest pool in which two short sequences are tried.
    for times in range(2, 20):
        with suppress(PoolExhaustedError):
            engine = BlockPoolBatchEngine.open(model, times * least)
            break
    *_, sentence = engine.caches.capabilities.differs
    assert "Correct the plugin" not in sentence
    said = re.search(r"too small to prove it: .* Raise --pool-bytes to (\d+) or more", sentence)
    assert said is not None
    engine.close()
    engine = BlockPoolBatchEngine.open(model, int(said[1]))
    bundled = BlockPoolBatchEngine.open(small(name), ROOMY)
    assert engine.caches.ragged == bundled.caches.ragged
    assert engine.caches.capabilities.differs == bundled.caches.capabilities.differs


def replies(engine: BlockPoolBatchEngine, prompts: list[list[int]]) -> list[list[int]]:
    uids = engine.insert_all([Request(prompt, 8) for prompt in prompts])
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while len(engine):
        for event in engine.next():
            if isinstance(event, Token):
                found[event.uid].append(event.token)
    return [found[uid] for uid in uids]
