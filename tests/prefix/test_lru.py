"""PrefixCache in place of mlx-lm's LRUPromptCache: the same code runs on both and gets the same
replies.
"""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import mlx.core as mx
import pytest
from kv.arrays import HEADS, KEY_DIM, VALUE_DIM, make_slabs, numbered
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ChunkedKVCache,
    KVCache,
    LRUPromptCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from models import make_model
from thorough import only

from mlx_blockpool.config import PoolConfig
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.kv.prompt_cache import from_stock, make_prompt_cache, sequence_of
from mlx_blockpool.prefix.cache import PrefixCache
from mlx_blockpool.spec import ChunkLayer, FullLayer, ModelCacheSpec

MODEL = ("some/model", None, None)
NAMES = ["llama", "gemma3_text", "lfm2", "gemma2"]


@functools.cache
def model_of(name: str) -> Any:
    return make_model(name)


def prompt(seed: int, count: int) -> list[int]:
    return [(seed * 31 + i * 7 + i * i) % 120 for i in range(count)]


def talk(known: Any, model: Any, turns: list[list[int]], make: Any) -> tuple[list[int], list[int]]:
    """A script as people write them for LRUPromptCache.

    Returns all tokens, and how many each turn had left to compute.
    """
    tokens: list[int] = []
    left = []
    for turn in turns:
        tokens = tokens + turn
        caches, rest = known.fetch_nearest_cache(MODEL, tokens)
        left.append(len(rest))
        if caches is None:
            caches = make()
        for token, _ in generate_step(mx.array(rest), model, max_tokens=5, prompt_cache=caches):
            tokens.append(token)
        # generate_step() computes the last token too, before it is asked for the next.
        known.insert_cache(MODEL, tokens, caches)
    return tokens, left


@pytest.mark.sampled
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", only(NAMES, "llama", "lfm2"))
def test_a_script_for_mlx_lms_prompt_cache_gets_the_same_replies(name: str, pooled: bool) -> None:
    """The caches of its first turn are mlx-lm's own, or pooled."""
    model = model_of(name)
    turns = [prompt(1, 300), prompt(2, 40), prompt(3, 20)]
    needed, left = talk(LRUPromptCache(), model, turns, lambda: stock_prompt_cache(model))
    prefix = PrefixCache(open_pool(model, 30_000_000))
    make = (
        (lambda: make_prompt_cache(model, prefix.arena))
        if pooled
        else (lambda: stock_prompt_cache(model))
    )
    found, found_left = talk(prefix, model, turns, make)
    assert found == needed
    assert found_left == left == [300, 40, 20]
    prefix.check()
    assert all(count.held == 0 for count in prefix.pool.settle())


def entry(prefix: PrefixCache, tokens: list[int], kind: str = "assistant") -> None:
    caches = [KVCache() for _ in prefix.arena.spec.layers]
    for cache in caches:
        cache.update_and_fetch(*numbered(0, len(tokens)))
    prefix.insert_cache(MODEL, tokens, caches, cache_type=kind)


def words(first: int, count: int) -> list[int]:
    return [first, *range(1000, 1000 + count - 1)]


@pytest.fixture
def prefix() -> PrefixCache:
    slabs = make_slabs(layers=1, blocks=64)
    slabs.capabilities = RAGGED
    return PrefixCache(slabs, config=PoolConfig(max_tokens=20))


def test_what_is_fetched_is_a_copy_that_nobody_else_writes_to(prefix: PrefixCache) -> None:
    entry(prefix, words(1, 300))
    (one,), rest = prefix.fetch_nearest_cache(MODEL, [*words(1, 300), 7])  # type: ignore[misc]
    assert rest == [7]
    one.update_and_fetch(*numbered(5000, 1))
    (two,), _ = prefix.fetch_nearest_cache(MODEL, [*words(1, 300), 8])  # type: ignore[misc]
    assert two.offset == 300
    assert two.keys_and_values()[0][0, 0, :, 0].tolist() == list(range(300))
    assert one.keys_and_values()[0][0, 0, -1, 0].item() == 5000


def test_caches_that_were_inserted_may_be_used_on(prefix: PrefixCache) -> None:
    entry(prefix, words(1, 300))
    caches, _ = prefix.fetch_nearest_cache(MODEL, [*words(1, 300), 7])
    assert caches is not None
    prefix.insert_cache(MODEL, words(1, 300), caches)
    caches[0].update_and_fetch(*numbered(5000, 1))
    again, _ = prefix.fetch_nearest_cache(MODEL, [*words(1, 300), 8])
    assert again is not None
    assert again[0].keys_and_values()[0][0, 0, :, 0].tolist() == list(range(300))


def test_one_token_is_always_left(prefix: PrefixCache) -> None:
    entry(prefix, words(1, 300))
    caches, rest = prefix.fetch_nearest_cache(MODEL, words(1, 300))
    assert (caches is not None and caches[0].offset, rest) == (299, words(1, 300)[-1:])


def test_nothing_known_is_none_and_takes_no_blocks(prefix: PrefixCache) -> None:
    assert prefix.fetch_nearest_cache(MODEL, [5, 6, 7]) == (None, [5, 6, 7])
    assert prefix.fetch_nearest_cache(MODEL, []) == (None, [])
    assert (prefix.num_lookups, prefix.num_prompt_tokens) == (1, 3)
    assert prefix.pool.nbytes == 0


def test_a_prompt_beyond_the_pool_is_a_miss(prefix: PrefixCache) -> None:
    entry(prefix, words(1, 300))
    long = [*words(1, 300), *([9] * 64 * 256)]
    assert prefix.fetch_nearest_cache(MODEL, long) == (None, long)


def test_a_prompt_without_room_now_is_a_miss(prefix: PrefixCache) -> None:
    entry(prefix, words(1, 300))
    others = [prefix.acquire(words(2 + i, 256 * 20), 20).caches for i in range(3)]
    assert prefix.fetch_nearest_cache(MODEL, [*words(1, 300), *([9] * 256 * 3)])[0] is None
    for caches in others:
        prefix.discard(caches)
    prefix.check()
    assert prefix.fetch_nearest_cache(MODEL, [*words(1, 300), 5])[0] is not None, (
        "what was known of it is known still"
    )


def test_another_model_is_a_miss_and_is_not_kept(
    prefix: PrefixCache, caplog: pytest.LogCaptureFixture
) -> None:
    entry(prefix, words(1, 300))
    other = ("other/model", None, None)
    caches = [KVCache()]
    caches[0].update_and_fetch(*numbered(0, 300))
    with caplog.at_level(logging.WARNING):
        assert prefix.fetch_nearest_cache(other, words(1, 300)) == (None, words(1, 300))
        prefix.insert_cache(other, words(2, 300), caches)
        prefix.insert_cache(other, words(3, 300), caches)
    assert len(caplog.records) == 1
    assert "('other/model', None, None)" in caplog.text
    assert len(prefix) == 1
    assert prefix.look(words(2, 300)).matched == 0


def strange_caches(slabs: Any) -> dict[str, list[Any]]:
    def filled(cache: Any, batch: int = 1, dtype: mx.Dtype = mx.float32) -> Any:
        cache.update_and_fetch(*(a.astype(dtype) for a in numbered(0, 8, batch)))
        return cache

    return {
        "These are 2 layer caches": [filled(KVCache()), filled(KVCache())],
        "Cache 0 is a RotatingKVCache; test has a KVCache there": [
            filled(RotatingKVCache(max_size=100))
        ],
        "Cache 0 is a QuantizedKVCache; test has a KVCache there": [QuantizedKVCache()],
        "(2, 2, 256, 4,": [filled(KVCache(), batch=2)],
        "mlx.core.float16": [filled(KVCache(), dtype=mx.float16)],
    }


@pytest.mark.parametrize("reason", list(strange_caches(None)))
def test_caches_that_no_block_can_hold_are_not_kept_and_the_log_says_why(
    prefix: PrefixCache, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    with caplog.at_level(logging.WARNING):
        prefix.insert_cache(MODEL, words(1, 8), strange_caches(prefix.arena)[reason])
    assert reason in caplog.text
    assert (len(prefix), prefix.nbytes, prefix.num_skipped) == (0, 0, 1)


def test_caches_of_another_pool_are_copied(prefix: PrefixCache) -> None:
    other = make_slabs(layers=1, blocks=64)
    other.capabilities = RAGGED
    theirs = PrefixCache(other)
    # So that its blocks have other ids.
    entry(theirs, words(9, 600))
    caches = theirs.acquire(words(1, 301), 5).caches
    caches[0].update_and_fetch(*numbered(0, 300))
    prefix.insert_cache(MODEL, words(1, 300), caches)
    prefix.check()
    found, _ = prefix.fetch_nearest_cache(MODEL, [*words(1, 300), 7])
    assert found is not None
    sequence = sequence_of(found)
    assert sequence is not None
    assert sequence.arena is prefix.arena
    assert found[0].keys_and_values()[0][0, 0, :, 0].tolist() == list(range(300))


def test_figures_add_up(prefix: PrefixCache) -> None:
    entry(prefix, words(1, 300), "system")
    entry(prefix, words(1, 700), "user")
    entry(prefix, [*words(1, 256), *words(5, 300)], "assistant")
    stats = prefix.stats_by_type()
    assert {kind: found["n_sequences"] for kind, found in stats.items()} == {
        "assistant": 1,
        "user": 1,
        "system": 0,
    }
    assert sum(found["n_bytes"] for found in stats.values()) == prefix.nbytes > 0
    assert len(prefix) == 2


def test_figures_of_a_hybrid_model_add_up_too() -> None:
    model = model_of("lfm2")
    prefix = PrefixCache(open_pool(model, 30_000_000))
    talk(prefix, model, [prompt(1, 300), prompt(2, 40)], lambda: stock_prompt_cache(model))
    stats = prefix.stats_by_type()
    assert (
        sum(found["n_bytes"] for found in stats.values())
        == prefix.nbytes
        > prefix.index.state_bytes
        > 0
    )
    assert sum(found["n_sequences"] for found in stats.values()) == len(prefix) == 1


def test_trimming_spares_what_is_held_or_pinned(prefix: PrefixCache) -> None:
    for first in (5, 6, 7):
        entry(prefix, words(first, 300))
    held = prefix.acquire([*words(5, 300), 3], 5)
    prefix.pin(words(6, 300))
    prefix.trim_to(0)
    assert {first: prefix.look(words(first, 300)).matched > 0 for first in (5, 6, 7)} == {
        5: True,
        6: True,
        7: False,
    }
    prefix.check()
    prefix.discard(held.caches)
    prefix.unpin(words(6, 300))
    prefix.trim_to(0)
    assert (len(prefix), prefix.nbytes) == (0, 0)
    prefix.check()


@pytest.mark.parametrize("pooled", [False, True])
def test_a_chunk_without_its_first_tokens_is_not_known_to_others(pooled: bool) -> None:
    """mlx-lm's cache has let them go: their blocks would hold whatever was there before."""
    spec = ModelCacheSpec(
        "test",
        (ChunkLayer(HEADS, KEY_DIM, VALUE_DIM, 300), FullLayer(HEADS, KEY_DIM, VALUE_DIM)),
        "float32",
    )
    slabs = KVArena(spec, 64 * sum(map(spec.bytes_per_block, spec.groups)))
    prefix = PrefixCache(slabs)
    caches: list[Any] = [ChunkedKVCache(300), KVCache()]
    for start in (0, 350):
        for cache in caches:
            cache.update_and_fetch(*numbered(start, 350))
        caches[0].maybe_trim_front()
    if pooled:
        caches = from_stock(caches, slabs)
        assert caches[0].keys_and_values()[0][0, 0, :, 0].tolist() == list(range(400, 700))
    assert prefix.release(words(1, 700), caches) == 0
    assert prefix.look([*words(1, 700), 3]).matched == 0
    assert prefix.num_skipped == 1
    prefix.check()


def test_a_chunk_of_another_type_is_refused() -> None:
    spec = ModelCacheSpec("test", (ChunkLayer(HEADS, KEY_DIM, VALUE_DIM, 300),), "float32")
    cache = ChunkedKVCache(300)
    cache.update_and_fetch(*(array.astype(mx.float16) for array in numbered(0, 10)))
    with pytest.raises(
        ValueError,
        match=r"keys of .* \[\(1, 2, 10, 4, mlx.core.float32\)\]; those given are .*float16",
    ):
        from_stock([cache], KVArena(spec, 1 << 20))


def test_a_deep_copy_of_what_was_fetched_is_independent(prefix: PrefixCache) -> None:
    entry(prefix, words(1, 300))
    caches, _ = prefix.fetch_nearest_cache(MODEL, [*words(1, 300), 7])
    assert caches is not None
    other = copy.deepcopy(caches)
    caches[0].update_and_fetch(*numbered(5000, 1))
    other[0].update_and_fetch(*numbered(6000, 1))
    assert [c[0].keys_and_values()[0][0, 0, -1, 0].item() for c in (caches, other)] == [5000, 6000]
