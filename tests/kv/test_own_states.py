"""States of cache classes that mlx-lm does not have: what their adapters save is resumed, shared
and stored, and wrong adapters are caught.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from inspect import get_annotations
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import pytest
from architectures.configs import CONFIGS
from hypothesis import given
from hypothesis import strategies as st
from kv.test_proof import replies
from mlx_blockpool_plugins import deepseek_v41, default
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache
from models import make_model
from store.stores import open_store
from thorough import only, tried

from mlx_blockpool import plugins
from mlx_blockpool.config import PoolConfig
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.opening import wrap
from mlx_blockpool.engine.request import Failed, Request
from mlx_blockpool.engine.stock import StockCaches
from mlx_blockpool.errors import RequestTooLargeError, SpecError
from mlx_blockpool.hooks import CacheAdapter, hookimpl
from mlx_blockpool.kv.build import allocate, describe, open_served
from mlx_blockpool.kv.own_states import OwnState, as_arrays, from_arrays
from mlx_blockpool.kv.prompt_cache import as_stock, from_stock, make_prompt_cache
from mlx_blockpool.spec import StateLayer
from mlx_blockpool.testing import tiny_model

ROOMY = 30_000_000
SYSTEM = [3 + i % 50 for i in range(300)]
PROMPTS = [SYSTEM, [*SYSTEM, 7, 8, 9], [*SYSTEM, *range(60, 73)], [7, 8, 9]]


class InPlace(KVCache):  # type: ignore[misc]
    """Writes into its arrays, which grow 256 tokens at a time."""

    def prefix_cache_snapshot(self) -> dict[str, Any]:
        return {"held": (self.keys, self.values), "offset": self.offset}

    def prefix_cache_restore(self, saved: dict[str, Any]) -> None:
        (self.keys, self.values), self.offset = saved["held"], saved["offset"]


def in_place(**changes: Any) -> Any:
    model = make_model("llama", **changes)
    model.make_cache = lambda: [InPlace() for _ in model.layers]
    return model


def mixed() -> Any:
    """A state next to keys and values, and to a window."""
    model = make_model("llama", num_hidden_layers=3)
    model.make_cache = lambda: [KVCache(), InPlace(), RotatingKVCache(32)]
    return model


def expected(model: Any, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    return [
        [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=8)]
        for prompt in prompts
    ]


def install(monkeypatch: pytest.MonkeyPatch, *adapters: CacheAdapter) -> None:
    make = plugins.make_plugin_manager

    class Plugin:
        @hookimpl
        def cache_adapters(self) -> list[CacheAdapter]:
            return [*adapters]

    def manager() -> Any:
        made = make()
        made.register(Plugin(), "states")
        return made

    monkeypatch.setattr(plugins, "make_plugin_manager", manager)


def v41() -> Any:
    return tiny_model(CONFIGS["deepseek_v41"])


@functools.cache
def expected_of_v41() -> list[list[int]]:
    return expected(v41())


def layer_cache() -> type:
    return type(v41().make_cache()[0])


@pytest.mark.parametrize("make", only([in_place, mixed, v41], in_place, mixed))
def test_prompts_are_resumed_where_they_were_saved(make: Callable[[], Any]) -> None:
    engine = BlockPoolBatchEngine.open(make(), ROOMY)
    prefix = engine.caches.prefix
    assert replies(engine, PROMPTS) == expected(make())
    # The third prompt begins where the second left the first.
    assert prefix.num_hit_tokens >= len(SYSTEM)
    prefix.check()
    assert prefix.arena.running_bytes == 0


def test_a_class_with_the_two_methods_is_proven_and_named() -> None:
    spec = describe(in_place())
    assert spec.source == f"{__name__}.InPlace"
    assert {type(layer) for layer in spec.layers} == {StateLayer}
    # Keys and values of 2 heads of 16 floats, with a few for those that are not written yet.
    assert all(256 <= layer.growth < 300 for layer in spec.layers if isinstance(layer, StateLayer))
    assert spec.fingerprint() == describe(in_place()).fingerprint()
    assert spec.fingerprint() != describe(in_place(num_hidden_layers=1)).fingerprint()


def test_a_restart_resumes_what_was_stored(tmp_path: Path) -> None:
    def life(prompt: list[int]) -> tuple[list[int], int]:
        model = v41()
        arena = open_served(model, describe(model), ROOMY, PoolConfig())
        caches = wrap(arena, store=open_store(tmp_path))
        (found,) = replies(BlockPoolBatchEngine(model, caches), [prompt])
        assert caches.prefix.close()
        return found, caches.prefix.num_hit_tokens

    (first,) = expected(v41(), [SYSTEM])
    assert life(SYSTEM) == (first, 0)
    prompt = [*SYSTEM, *first, 5, 6]
    assert life(prompt) == (expected(v41(), [prompt])[0], len(SYSTEM) + len(first))


def without(name: str) -> tuple[Any, Any]:
    """An adapter of deepseek_v41 that forgets one of the fields."""

    def restore(cache: Any, saved: list[Any]) -> None:
        value = getattr(cache, name)
        deepseek_v41._restore(cache, saved)
        setattr(cache, name, value)

    return deepseek_v41._save, restore


def short_window(cache: Any) -> list[Any]:
    window, *rest = deepseek_v41._save(cache)
    # Only a full one lacks a row.
    return [window[:, 1:] if window.shape[1] == cache.window_size else window, *rest]


def fails(cache: Any, saved: Any = None) -> Any:
    raise ZeroDivisionError("by nothing")


def more_at_first(cache: Any) -> list[Any]:
    return [*deepseek_v41._save(cache), mx.zeros((100_000 if cache.offset < 1000 else 0,))]


def restores(cache: Any, saved: list[Any]) -> None:
    deepseek_v41._restore(cache, saved[:6])


WRONG: dict[str, tuple[tuple[Any, Any], str]] = {
    "no position": (without("offset"), "logits after token"),
    "no rows of a group": (without("pending_kv"), "logits after token|Error"),
    "no groups": (without("compress_kv"), "logits after token|Error"),
    "a row less": ((short_window, deepseek_v41._restore), "layer cache 0 .* holds"),
    "an object": ((lambda cache: [cache], deepseek_v41._restore), "a state has a PooledLayerCache"),
    "fails to save": ((fails, deepseek_v41._restore), "LayerCache of .* failed: ZeroDivisionError"),
    "fails to restore": ((deepseek_v41._save, fails), "ZeroDivisionError: by nothing"),
    "takes more": ((more_at_first, restores), "states of layer cache 0 take"),
}


@pytest.mark.parametrize("case", only(WRONG, "no position", "takes more"))
def test_with_a_wrong_adapter_the_model_runs_on_its_own_caches(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (save, restore), said = WRONG[case]
    install(monkeypatch, CacheAdapter(layer_cache(), save=save, restore=restore))
    engine = BlockPoolBatchEngine.open(v41(), ROOMY)
    assert isinstance(engine.caches, StockCaches)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(*engine.caches.capabilities.differs)
    assert replies(engine, PROMPTS) == expected_of_v41()


@pytest.mark.thorough
def test_a_right_adapter_of_an_installed_plugin_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CacheAdapter(layer_cache(), save=deepseek_v41._save, restore=deepseek_v41._restore)
    install(monkeypatch, right)
    engine = BlockPoolBatchEngine.open(v41(), ROOMY)
    assert engine.caches.prefix.arena.spec.source
    assert replies(engine, PROMPTS) == expected_of_v41()


def test_records_of_other_code_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "some_cache.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "from kv.test_own_states import InPlace\nclass Other(InPlace): pass\n"
    found = []
    for text in (code, code, f"{code}# Saves something else.\n"):
        file.write_text(text)
        sys.modules.pop("some_cache", None)
        model = in_place()
        other = importlib.import_module("some_cache").Other
        model.make_cache = lambda model=model, other=other: [other() for _ in model.layers]
        found.append(describe(model).fingerprint())
    assert found[0] == found[1] != found[2]


def test_a_state_without_a_name_of_its_code_is_refused() -> None:
    with pytest.raises(SpecError, match="saved_by"):
        StateLayer((), own=(CacheAdapter(InPlace), InPlace()))


class Moody(InPlace):
    """Fails at some of its calls. fails: the names of those."""

    fails: ClassVar[set[str]] = set()

    def prefix_cache_snapshot(self) -> dict[str, Any]:
        if "save" in self.fails:
            raise ZeroDivisionError("by nothing")
        return super().prefix_cache_snapshot()

    def prefix_cache_restore(self, saved: dict[str, Any]) -> None:
        if "restore" in self.fails:
            raise ZeroDivisionError("by nothing")
        super().prefix_cache_restore(saved)


@pytest.mark.parametrize("fails", ["save", "restore"])
def test_a_state_that_fails_later_is_computed_again_and_harms_no_request(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = in_place()
    model.make_cache = lambda: [Moody() for _ in model.layers]
    engine = BlockPoolBatchEngine.open(model, ROOMY)
    prefix = engine.caches.prefix
    assert replies(engine, PROMPTS[:3]) == expected(in_place(), PROMPTS[:3])
    hits = prefix.num_hit_tokens
    monkeypatch.setattr(Moody, "fails", {fails})
    later = [[*SYSTEM, 7, 8, 9, 1], [5, 6, 7], [*SYSTEM, 44]]
    assert replies(engine, later) == expected(in_place(), later)
    assert f"does not {fails} a state: ZeroDivisionError" in caplog.text
    assert (prefix.num_hit_tokens == hits) == (fails == "restore")
    prefix.check()
    assert prefix.arena.running_bytes == 0


def test_caches_that_hold_more_than_the_tokens_are_not_resumed() -> None:
    model = in_place()
    caches = wrap(allocate(describe(model), ROOMY))
    acquired = caches.prefix.acquire(SYSTEM, 10)
    model(mx.array([[*SYSTEM, 5, 6]]), cache=acquired.caches)
    caches.prefix.release(SYSTEM, acquired.caches)
    assert caches.prefix.acquire([*SYSTEM, 8], 10).lookup.hit == 0


class Doubling(InPlace):
    """Has memory for up to twice the tokens."""

    def prefix_cache_snapshot(self) -> dict[str, Any]:
        memory = 1 << max(self.offset - 1, 1).bit_length()
        keys, values = (array[:, :, : self.offset] for array in (self.keys, self.values))
        spare = mx.zeros((memory - self.offset, 2, 2, 16))
        return {"held": (keys, values), "offset": self.offset, "spare": spare}


def test_the_names_that_a_class_may_not_use_are_known() -> None:
    added = {name for cls in OwnState.__mro__[:-1] for name in {*vars(cls), *get_annotations(cls)}}
    # What mlx-lm's classes have too, and no model calls.
    expected = {"from_state", "state", "_stock"}
    assert {name for name in added if not name.startswith("__")} - expected == default.TAKEN


def test_a_class_without_a_file_is_described_alike_each_time() -> None:
    other: Any = type("Other", (InPlace,), {"__module__": "nowhere"})
    model = in_place()
    model.make_cache = lambda: [other() for _ in model.layers]
    assert describe(model) == describe(model)


def test_a_pinned_state_that_fails_later_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = in_place()
    model.make_cache = lambda: [Moody() for _ in model.layers]
    prefix = wrap(allocate(describe(model), ROOMY)).prefix
    acquired = prefix.acquire(SYSTEM, 10)
    model(mx.array([SYSTEM]), cache=acquired.caches)
    prefix.release(SYSTEM, acquired.caches)
    prefix.pin(SYSTEM)
    monkeypatch.setattr(Moody, "fails", {"restore"})
    again = prefix.acquire([*SYSTEM, 5], 10)
    assert again.lookup.hit == 0
    prefix.discard(again.caches)
    prefix.check()
    prefix.clear()
    prefix.check()


def test_memory_that_doubles_is_counted() -> None:
    model = in_place()
    model.make_cache = lambda: [Doubling() for _ in model.layers]
    spec = describe(model)
    for tokens in (1, 100, 300, 1025, 4097, 8193, 16385):
        memory = 1 << max(tokens - 1, 1).bit_length()
        assert spec.state_bytes(tokens) >= 2 * 256 * memory, tokens


def test_copies_and_what_they_are_made_of_do_not_change_each_other() -> None:
    model = in_place()
    arena = allocate(describe(model), ROOMY)
    caches = make_prompt_cache(model, arena)
    own = model.make_cache()
    model(mx.array([SYSTEM]), cache=caches)
    model(mx.array([SYSTEM]), cache=own)
    copies = {
        "deepcopy": deepcopy(caches),
        "taken over": from_stock(own, arena),
        "unpickled": pickle.loads(pickle.dumps(caches)),
    }
    assert {type(cache) for cache in copies["unpickled"]} == {InPlace}
    needed = [model(mx.array([[token]]), cache=caches) for token in (5, 6)]
    mx.eval(needed)
    for name, copy in copies.items():
        first = model(mx.array([[5]]), cache=copy)
        assert mx.array_equal(first, needed[0]), name
        assert mx.array_equal(model(mx.array([[6]]), cache=copy), needed[1]), name


def test_files_of_mlx_lm_have_no_place_for_them() -> None:
    model = in_place()
    caches = make_prompt_cache(model, allocate(describe(model), ROOMY))
    with pytest.raises(ValueError, match=r"have no place for states of InPlace\."):
        as_stock(caches)


def test_a_cache_of_another_class_does_not_fit() -> None:
    model = in_place()
    arena = allocate(describe(model), ROOMY)
    with pytest.raises(ValueError, match=r"Cache 0 is a KVCache; the model has a InPlace there\."):
        from_stock([KVCache() for _ in model.layers], arena)


def test_states_that_grow_stay_within_the_pool() -> None:
    model = in_place()
    spec = describe(model)
    # For one sequence of 512 tokens and a checkpoint of as many.
    pool_bytes = 2 * spec.state_bytes(512)
    arena = allocate(spec, pool_bytes)
    caches = wrap(arena)
    engine = BlockPoolBatchEngine(model, caches)
    prompts = [[n, *SYSTEM, *range(3, 60)] for n in range(4)]
    engine.insert_all([Request(prompt, 130) for prompt in prompts])
    while len(engine):
        assert not [event for event in engine.next() if isinstance(event, Failed)]
        assert arena.running_bytes + caches.prefix.index.state_bytes <= pool_bytes
    caches.prefix.check()
    most = caches.capacity()
    assert most is not None
    assert spec.state_bytes(most) <= pool_bytes < spec.state_bytes(most + 1)
    with pytest.raises(RequestTooLargeError, match=str(most)):
        caches.prefix.acquire(SYSTEM, most)


leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
arrays = st.sampled_from(
    [mx.arange(3), mx.ones((1, 2, 2), mx.bfloat16), mx.zeros((1, 0, 4)), mx.array(True)]
)
values = st.recursive(
    leaves | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
)


@tried(30, 200)
@given(values)
def test_what_was_saved_comes_back(saved: Any) -> None:
    assert same(from_arrays(as_arrays(saved)), saved)


def same(found: Any, needed: Any) -> bool:
    if type(found) is not type(needed):
        return False
    if isinstance(needed, mx.array):
        alike = (found.shape, found.dtype) == (needed.shape, needed.dtype)
        return alike and bool(mx.array_equal(found, needed))
    if isinstance(needed, dict):
        return list(found) == list(needed) and all(same(found[k], needed[k]) for k in needed)
    if isinstance(needed, list | tuple):
        return len(found) == len(needed) and all(map(same, found, needed))
    return bool(found == needed)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "a state has a object"),
        ({1, 2}, "a state has a set"),
        (b"bytes", "a state has a bytes"),
        (mx.zeros(2, mx.complex64), "an array of complex64"),
    ],
)
def test_what_cannot_be_stored_is_named(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        as_arrays([value])
