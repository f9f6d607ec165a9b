"""Layer caches over quantised blocks: words as mlx-lm's QuantizedKVCache has them, never
quantised twice.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv.arrays import HEADS, drawn, make_quantised
from kv.test_layer_caches import STEPS, apply
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from thorough import only, tried

from mlx_blockpool.config import KVBits
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.batch_cache import PooledBatchCache
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.prompt_cache import from_stock, pooled_caches
from mlx_blockpool.kv.quantised import arrays_of, dense, each
from mlx_blockpool.kv.rounded_caches import rounded_cache
from mlx_blockpool.spec import ChunkLayer, FullLayer, ModelCacheSpec, WindowLayer

FULL = FullLayer(HEADS, 64, 64)
RING = WindowLayer(HEADS, 64, 64, 300, 4)
CHUNK = ChunkLayer(HEADS, 64, 64, 280)
EIGHT, FOUR, K8V4, K16V8 = KVBits(8, 8), KVBits(4, 4, 32), KVBits(8, 4), KVBits(None, 8)
ALL_BITS = only([EIGHT, FOUR, K8V4, K16V8], EIGHT, K8V4)


def assert_equal(mine: Any, theirs: Any) -> None:
    """Rows or arrays, those of ours that are words as the values that they stand for."""
    assert mine.dtype == theirs.dtype
    assert mx.array_equal(dense(mine), theirs)


@tried(15, 400)
@given(STEPS, st.sampled_from([EIGHT, FOUR]))
def test_full_layer_has_the_words_of_quantizedkvcache(
    steps: list[tuple[str, int]], bits: KVBits
) -> None:
    ours = pooled_caches(make_quantised(FULL, bits=bits))[0]
    stock, clock = QuantizedKVCache(bits.group_size, bits.keys or 0), [0]
    for step in steps:
        apply(step, [ours, stock], clock, drawn)
        assert (ours.offset, ours.bits, ours.group_size) == (
            stock.offset,
            stock.bits,
            stock.group_size,
        )
        assert ours.is_trimmable()
        if stock.offset:
            for mine, theirs in zip((ours.keys, ours.values), stock.keys_and_values(), strict=True):
                assert all(mx.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


@tried(15, 400)
@given(
    STEPS,
    st.sampled_from([(128, 0), (256, 0), (300, 4)]),
    st.sampled_from([EIGHT, FOUR, K8V4, K16V8]),
)
def test_window_layer_follows_a_rounded_rotating_cache(
    steps: Any, window: tuple[int, int], bits: KVBits
) -> None:
    arena = make_quantised(WindowLayer(HEADS, 64, 64, *window), bits=bits)
    ours = pooled_caches(arena)[0]
    stock, clock = rounded_cache(RotatingKVCache(*window), ours.forms), [0]
    for step in steps:
        if step[0] == "fork":
            copy.deepcopy(ours).update_and_fetch(*drawn(-7, 3))
            continue
        results = apply(step, [ours, stock], clock, drawn)
        if step[0] != "trim" and results:
            for mine, theirs in zip(*results, strict=True):
                assert_equal(mine, theirs)
        assert (ours.offset, ours.ring_index) == (stock.offset, min(stock._idx, window[0]))


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_ring_beyond_its_wrap_holds_each_token_as_it_was_quantised_first(
    dtype: str, bits: KVBits
) -> None:
    """In bfloat16 most groups change when they are quantised again."""
    ours = pooled_caches(make_quantised(RING, bits=bits, dtype=dtype))[0]
    written, sizes = [], (250, 100, 1, 1, 40, 310, 1, 7)
    for start, count in zip((sum(sizes[:i]) for i in range(len(sizes))), sizes, strict=True):
        written.append(drawn(start, count, dtype=getattr(mx, dtype)))
        ours.update_and_fetch(*written[-1])
    for rows, all_tokens, form in zip(
        ours.held()[:2], zip(*written, strict=True), ours.forms, strict=True
    ):
        tokens = mx.concatenate(all_tokens, axis=2)
        tokens = mx.concatenate([tokens[:, :, :4], tokens[:, :, 4 - 300 :]], axis=2)
        needed = (
            [tokens]
            if form is None
            else mx.quantize(tokens, group_size=form.group_size, bits=form.bits)
        )
        assert all(
            mx.array_equal(ours._temporal_order(a), b)
            for a, b in zip(arrays_of(rows), needed, strict=True)
        )


def test_a_chunk_layer_follows_a_rounded_chunked_cache() -> None:
    ours = pooled_caches(make_quantised(CHUNK, preallocate=True))[0]
    stock, forks, runs = rounded_cache(ChunkedKVCache(280), ours.forms), [], []
    for start, count in ((0, 200), (200, 150), (350, 1), (351, 1), (352, 400), (752, 1)):
        for cache in (ours, stock):
            cache.maybe_trim_front()
        for mine, theirs in zip(
            *(c.update_and_fetch(*drawn(start, count)) for c in (ours, stock)), strict=True
        ):
            assert_equal(mine, theirs)
        assert ours.start_position == stock.start_position
        runs.append((len(ours.views()), len(ours.attended())))
        # The next write copies the last block to somewhere else.
        forks.append(copy.copy(ours))
    assert runs[-2:] == [(3, 3), (2, 1)], (
        "a chunk in several runs, and one that begins after the first"
    )


def filled(layer: FullLayer, bits: KVBits = EIGHT, dtype: str = "float32") -> Any:
    cache = pooled_caches(make_quantised(layer, bits=bits, dtype=dtype))[0]
    for start, count in ((0, 250), (250, 270), (520, 1)):
        cache.update_and_fetch(*drawn(start, count, dtype=getattr(mx, dtype)))
    return cache


def words(cache: Any) -> list[mx.array]:
    return [array for rows in cache.held()[:2] for array in arrays_of(rows)]


def same(these: list[mx.array], those: list[mx.array]) -> bool:
    return all(mx.array_equal(a, b) for a, b in zip(these, those, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("bits", [EIGHT, FOUR, K8V4, K16V8])
@pytest.mark.parametrize(
    ("layer", "stock"), [(FULL, KVCache), (RING, RotatingKVCache), (CHUNK, ChunkedKVCache)]
)
def test_states_are_of_mlx_lms_classes_and_go_round(
    layer: FullLayer, stock: type, bits: KVBits
) -> None:
    ours, again = filled(layer, bits), filled(layer, bits)
    has_words = layer is FULL and bits in (EIGHT, FOUR)
    needed = QuantizedKVCache if has_words else stock
    for cache in (type(ours).from_state(ours.state), pickle.loads(pickle.dumps(ours))):
        assert type(cache) is needed
        assert hasattr(cache, "bits") == has_words == hasattr(ours, "bits")
        assert cache.state[2:] == ours.state[2:]
        assert has_words or all(
            mx.array_equal(a, dense(b))
            for a, b in zip(cache.state[:2], ours.held()[:2], strict=True)
        )
        again.trim(again.offset if again.is_trimmable() else 0)
        again.state = cache.state
        assert again.state[2:] == ours.state[2:]
        # The rest is quantised again, by which some words change by one.
        assert not has_words or same(words(again), words(ours))
        assert all(
            mx.allclose(dense(a), dense(b), atol=0.05 if bits == EIGHT else 0.6)
            for a, b in zip(again.held()[:2], ours.held()[:2], strict=True)
        )


@pytest.mark.parametrize("layer", [FULL, RING, CHUNK])
def test_caches_of_another_pool_are_taken_over_word_by_word(layer: FullLayer) -> None:
    theirs = filled(layer, dtype="bfloat16")
    (ours,) = from_stock([theirs], make_quantised(layer, dtype="bfloat16"))
    assert same(words(ours), words(theirs))
    assert ours.held()[2:] == theirs.held()[2:]


def test_evaluating_states_dequantises_nothing() -> None:
    caches = [filled(layer, bits) for layer in (FULL, RING, CHUNK) for bits in (EIGHT, K8V4)]
    mx.eval([words(cache) for cache in caches])
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval([cache.state for cache in caches])
    assert mx.get_peak_memory() - before < 300 * HEADS * 64 * 4


def test_a_state_keeps_no_blocks() -> None:
    cache = filled(RING)
    state, pool = cache.state, cache.sequence.pool
    del cache
    assert [count.held for count in pool.settle()] == [0]
    assert state[0].shape == (1, HEADS, 300, 64)


def test_writing_and_reading_states_copies_no_slab() -> None:
    arena = make_quantised(WindowLayer(HEADS, 64, 64, 300), FULL, blocks=400)
    others = [arena.pool.open_table(group) for group in range(2)]
    arena.pool.reserve(others, [64, 64])
    caches = pooled_caches(arena)
    for cache in caches:
        cache.update_and_fetch(*drawn(0, 290))
    mx.eval(arena.arrays())
    before, words_of_a_slab = mx.get_active_memory(), arena.arrays()[0].nbytes
    for start, count in ((290, 20), (310, 1), (311, 310), (621, 1)):
        mx.reset_peak_memory()
        attended = [cache.update_and_fetch(*drawn(start, count)) for cache in caches]
        mx.eval(arena.arrays())
        mx.eval(
            [each(mx.contiguous, rows) for view in attended for rows in view],
            [cache.state for cache in caches],
        )
        del attended
        assert mx.get_peak_memory() - before < words_of_a_slab, start


def test_assigned_words_are_written_and_arrays_are_refused() -> None:
    ours = filled(FULL)
    fork, held = copy.copy(ours), [mx.contiguous(array) for array in words(ours)]
    ours.keys = tuple(array[:, :, ::-1] for array in ours.keys)
    assert same(words(ours), [array[:, :, ::-1] for array in held[:3]] + held[3:])
    assert same(words(fork), held), "a fork does not see it"
    with pytest.raises(ValueError, match=r"8 bits, groups of 64.*to_quantized\(64, 8\)"):
        ours.values = drawn(0, 521)[1]
    with pytest.raises(ValueError, match="state is not quantised"):
        ours.state = (*drawn(0, 521), 521)
    with pytest.raises(ValueError, match="given a tuple"):
        filled(RING).keys = ours.keys
    with pytest.raises(ValueError, match="in 4 bits, groups of 32"):
        ours.state = (ours.keys, ours.values, 521, 32, 4)
    with pytest.raises(
        ValueError, match=r"takes keys .*\(1, 2, 521, 16, mlx.core.uint32\), \(1, 2, 521, 1, mlx"
    ):
        ours.state = ([array[:, :1] for array in ours.keys], ours.values, 521, 64, 8)
    assert same(words(fork), held)


def test_arrays_that_are_assigned_to_a_window_are_quantised() -> None:
    ours, stock = filled(RING), RotatingKVCache(300, 4)
    stock.update_and_fetch(*drawn(7, 200))
    ours.state = stock.state
    assert same(
        words(ours),
        [array for rows in drawn(7, 200) for array in mx.quantize(rows, group_size=64, bits=8)],
    )
    ours.keys = drawn(8, 200)[0]
    assert same(words(ours)[:3], list(mx.quantize(drawn(8, 200)[0], group_size=64, bits=8)))
    rows = mx.quantize(drawn(7, 200)[0], group_size=64, bits=8)
    with pytest.raises(
        ValueError, match="takes keys and values that are arrays, and was given a list"
    ):
        ours.state = (rows, rows, 200, 4, 300, 200)


@pytest.mark.parametrize("layer", [FULL, RING])
def test_mlx_lms_kv_bits_find_nothing_left_to_quantise(layer: FullLayer) -> None:
    """maybe_quantize_kv_cache() calls to_quantized() on each cache before each step."""
    caches = [filled(layer, bits) for bits in (EIGHT, KVBits(4, 4))]
    for bits, start in ((8, 0), (4, 1)):
        prompt_cache = caches[start : start + 1]
        maybe_quantize_kv_cache(prompt_cache, 0, 64, bits)
        assert prompt_cache == caches[start : start + 1]
    with pytest.raises(
        ValueError, match=r"Keys are in 4 bits here and values in 4.*KVBits\(8, 8, 64\)"
    ):
        maybe_quantize_kv_cache([caches[1]], 0, 64, 8)


def test_stock_caches_are_taken_into_a_quantised_pool_or_refused_by_name() -> None:
    arena = make_quantised(FULL, RING)
    full, ring = QuantizedKVCache(64, 8), RotatingKVCache(300, 4)
    for cache in (full, ring):
        cache.update_and_fetch(*drawn(0, 260))
    ours = from_stock([full, ring], arena)
    assert same(words(ours[0]), [array[:, :, :260] for rows in full.state[:2] for array in rows])
    assert same(words(ours[1]), words(ours[0]))
    exact, four = KVCache(), QuantizedKVCache(64, 4)
    for cache in (exact, four):
        cache.update_and_fetch(*drawn(0, 260))
    with pytest.raises(
        ValueError,
        match=r"Cache 0 is a KVCache; test has a QuantizedKVCache there. Call to_quantized\(64, "
        r"8\)",
    ):
        from_stock([exact, ring], arena)
    with pytest.raises(ValueError, match="in 8 bits, groups of 64, and this state is in 4 bits"):
        from_stock([four, ring], arena)
    with pytest.raises(ValueError, match="Cache 0 is a QuantizedKVCache; test has a KVCache there"):
        from_stock([full], KVArena(ModelCacheSpec("test", (FULL,), "float32"), 10_000_000))
    with pytest.raises(ValueError, match=r"keys of .*uint32"):
        from_stock([full, ring], make_quantised(FullLayer(1, 64, 64), RING))


def test_batches_are_ragged_and_of_one_form() -> None:
    caches = pooled_caches(make_quantised(FULL, RING))
    for cache in caches:
        cache.update_and_fetch(*drawn(0, 290))
    batch = [type(cache).merge([cache, cache]) for cache in caches]
    assert [type(layer) for layer in batch] == [PooledBatchCache] * 2
    for layer, cache in zip(batch, caches, strict=True):
        rows = [
            mx.concatenate(pair)
            for pair in zip(*(drawn(start, 1) for start in (600, 700)), strict=True)
        ]
        layer.update_and_fetch(*rows)
        cache.update_and_fetch(*drawn(700, 1))
        assert same(words(layer.extract(1)), words(cache))
    others = pooled_caches(make_quantised(FULL, RING, bits=FOUR))
    exact = pooled_caches(KVArena(ModelCacheSpec("test", (FULL, RING), "float32"), 10_000_000))
    for other in (others, exact, [QuantizedKVCache(), RotatingKVCache(300, 4)]):
        for mine, their in zip(caches, other, strict=True):
            for pair in ([mine, their], [their, mine]):
                if hasattr(type(pair[0]), "merge") and not type(pair[0]).__module__.startswith(
                    "mlx_lm"
                ):
                    with pytest.raises(
                        ValueError, match=r"several bits|cannot be extended|cannot hold|padded"
                    ):
                        type(pair[0]).merge(pair)
    with pytest.raises(ValueError, match="bits"):
        batch[0].extend(type(others[0]).merge(others[:1]))
    caches[0].sequence.arena.capabilities = Capabilities()
    with pytest.raises(ValueError, match="padded"):
        type(caches[0]).merge(caches[:1])
