"""PooledKVCache and PooledRotatingKVCache against mlx-lm's own, operation by operation: every
result equal to the bit.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv.arrays import make_slabs, numbered
from mlx_lm.models.cache import KVCache, RotatingKVCache, load_prompt_cache, save_prompt_cache
from thorough import tried

from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.prompt_cache import pooled_caches
from mlx_blockpool.spec import FullLayer, ModelCacheSpec

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from([1, 1, 1, 2, 5, 255, 256, 257, 300])),
        st.tuples(st.just("decode"), st.integers(1, 40)),
        st.tuples(st.just("trim"), st.integers(0, 300)),
        st.tuples(st.just("fork"), st.just(0)),
        st.tuples(st.just("state"), st.just(0)),
    ),
    max_size=12,
)


def apply(
    step: tuple[str, int], caches: list[Any], clock: list[int], tokens: Any = numbered
) -> list[Any]:
    """Do one step with every cache, with `tokens` for what is written; what each returned."""
    name, count = step
    if name == "trim":
        return [c.trim(count) if c.is_trimmable() else None for c in caches]
    if name == "fork":
        # The fork writes something of its own, which the original must not see.
        for cache in caches:
            fork = copy.deepcopy(cache)
            fork.update_and_fetch(*tokens(-7, 3))
        return []
    if name == "state":
        mx.eval([c.state for c in caches])
        return []
    sizes = [1] * count if name == "decode" else [count]
    results: list[Any] = []
    for size in sizes:
        keys, values = tokens(clock[0], size)
        clock[0] += size
        results = [c.update_and_fetch(keys, values) for c in caches]
    return results


def assert_same(ours: Any, stock: Any) -> None:
    assert ours.offset == stock.offset
    assert ours.size() == stock.size()
    assert ours.is_trimmable() == stock.is_trimmable()
    if stock.offset:
        for mine, theirs in zip(ours.keys_and_values(), stock.keys_and_values(), strict=True):
            assert mx.array_equal(mine, theirs[..., -mine.shape[2] :, :])


@tried(20, 600)
@given(STEPS)
def test_full_layer_follows_kvcache(steps: list[tuple[str, int]]) -> None:
    slabs = make_slabs(blocks=200)
    ours, stock, clock = pooled_caches(slabs)[0], KVCache(), [0]
    for step in steps:
        results = apply(step, [ours, stock], clock)
        assert_equal_results(results)
        assert_same(ours, stock)
        for n in (1, 7):
            assert_equal_masks(
                ours.make_mask(n, return_array=False, window_size=None),
                stock.make_mask(n, return_array=False, window_size=None),
            )
    del ours
    slabs.pool.check()
    assert [c.held for c in slabs.pool.settle()] == [0]


@tried(30, 800)
@given(STEPS, st.sampled_from([(128, 0), (256, 0), (300, 0), (300, 4), (700, 4)]))
def test_window_layer_follows_rotating_kvcache(
    steps: list[tuple[str, int]], window: tuple[int, int]
) -> None:
    slabs = make_slabs(window, blocks=200)
    ours, stock, clock = pooled_caches(slabs)[2], RotatingKVCache(*window), [0]
    for step in steps:
        assert_equal_masks(
            ours.make_mask(9, window_size=window[0]), stock.make_mask(9, window_size=window[0])
        )
        assert_equal_results(apply(step, [ours, stock], clock))
        assert ours.offset == stock.offset
        assert ours.size() == stock.size()
        assert ours.is_trimmable() == stock.is_trimmable()
    del ours
    slabs.pool.check()


def assert_equal_results(results: list[Any]) -> None:
    if results and isinstance(results[0], tuple):
        for mine, theirs in zip(*results, strict=True):
            assert mx.array_equal(mine, theirs)
    elif results:
        assert results[0] == results[1]


def assert_equal_masks(ours: Any, stock: Any) -> None:
    if isinstance(stock, mx.array):
        assert mx.array_equal(ours, stock)
    else:
        assert ours == stock


def test_window_takes_no_more_blocks_than_its_ring() -> None:
    slabs = make_slabs((1024, 0))
    ours = pooled_caches(slabs)[2]
    for start in range(0, 5000, 500):
        ours.update_and_fetch(*numbered(start, 500))
    table = ours.sequence.tables[1]
    assert len(table) == 4
    with pytest.raises(PoolExhaustedError):
        slabs.pool.extend(table, 1)


def test_fork_shares_blocks_until_one_of_them_writes() -> None:
    slabs = make_slabs()
    ours = pooled_caches(slabs)
    for cache in ours:
        cache.update_and_fetch(*numbered(0, 600))
    fork = copy.deepcopy(ours)
    assert fork[0].sequence is fork[1].sequence
    assert fork[0].sequence.tables[0].ids == ours[0].sequence.tables[0].ids
    fork[0].update_and_fetch(*numbered(5000, 1))
    mine, theirs = ours[0].sequence.tables[0].ids, fork[0].sequence.tables[0].ids
    assert mine[:2] == theirs[:2]
    assert mine[2] != theirs[2]
    assert fork[0].keys[0, 0, 600, 0].item() == 5000
    assert fork[1].keys[0, 0, 599, 0].item() == 599, (
        "the copied block has what the other layers wrote"
    )
    assert ours[0].keys.shape[2] == 600
    slabs.pool.check()


def test_batch_of_two_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="merge"):
        pooled_caches(make_slabs())[0].update_and_fetch(*numbered(0, 3, batch=2))


def test_state_goes_round_through_the_setter() -> None:
    slabs = make_slabs((300, 4))
    for layer in (0, 2):
        one, two = pooled_caches(slabs)[layer], pooled_caches(slabs)[layer]
        for start, count in ((0, 500), (500, 1), (501, 1)):
            one.update_and_fetch(*numbered(start, count))
        two.state = one.state
        assert two.offset == one.offset
        assert_equal_results(
            [two.update_and_fetch(*numbered(502, 1)), one.update_and_fetch(*numbered(502, 1))]
        )


def test_stock_state_can_be_taken_over() -> None:
    slabs = make_slabs((300, 4))
    for ours, stock in (
        (pooled_caches(slabs)[0], KVCache()),
        (pooled_caches(slabs)[2], RotatingKVCache(300, 4)),
    ):
        for start, count in ((0, 200), (200, 250), (450, 1)):
            stock.update_and_fetch(*numbered(start, count))
        ours.state = stock.state
        assert_equal_results(
            [ours.update_and_fetch(*numbered(451, 1)), stock.update_and_fetch(*numbered(451, 1))]
        )


def test_from_state_gives_mlx_lms_own_cache() -> None:
    slabs = make_slabs((300, 4))
    for layer, kind in ((0, KVCache), (2, RotatingKVCache)):
        ours = pooled_caches(slabs)[layer]
        ours.update_and_fetch(*numbered(0, 290))
        stock = type(ours).from_state(ours.state)
        assert type(stock) is kind
        assert_equal_results(
            [ours.update_and_fetch(*numbered(290, 1)), stock.update_and_fetch(*numbered(290, 1))]
        )


def test_saved_by_mlx_lm_from_stock_copies(tmp_path: Any) -> None:
    """from_state makes what save_prompt_cache writes and load_prompt_cache reads."""
    ours = pooled_caches(make_slabs())[:2]
    for cache in ours:
        cache.update_and_fetch(*numbered(0, 40))
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, [type(c).from_state(c.state) for c in ours])
    loaded = load_prompt_cache(file)
    assert all(
        mx.array_equal(a.keys_and_values()[0], b.keys_and_values()[0])
        for a, b in zip(loaded, ours, strict=True)
    )


def test_to_quantized_equals_stocks() -> None:
    layer = FullLayer(2, 64, 64)
    ours = pooled_caches(KVArena(ModelCacheSpec("test", (layer,), "float32"), 1_000_000))[0]
    stock = KVCache()
    keys, values = mx.random.normal((2, 1, 2, 256, 64))
    for cache in (ours, stock):
        cache.update_and_fetch(keys, values)
    mine, theirs = ours.to_quantized(bits=8), stock.to_quantized(bits=8)
    assert mine.offset == theirs.offset == 256
    assert all(mx.array_equal(a, b) for a, b in zip(mine.keys, theirs.keys, strict=True))


def test_nbytes_counts_whole_blocks() -> None:
    slabs = make_slabs()
    ours = pooled_caches(slabs)[0]
    assert ours.nbytes == 0
    assert ours.empty()
    ours.update_and_fetch(*numbered(0, 257))
    assert ours.nbytes == 2 * 256 * 2 * (4 + 6) * 4
    assert not ours.empty()


@tried(15, 400)
@given(
    held=st.lists(st.sampled_from([1, 3, 100, 255, 300]), min_size=1, max_size=4),
    is_shared=st.booleans(),
    count=st.sampled_from([1, 2, 5, 32, 260]),
    reserved=st.integers(0, 2),
)
def test_a_run_takes_no_more_blocks_than_it_is_said_to_miss(
    held: list[int], is_shared: bool, count: int, reserved: int
) -> None:
    """A run is written as one chunk and the token after it."""
    slabs = make_slabs((300, 4), layers=1)
    caches = pooled_caches(slabs)
    for tokens in held:
        for cache in caches:
            cache.update_and_fetch(*numbered(0, tokens))
    shared = copy.deepcopy(caches) if is_shared else None
    for cache in caches:
        slabs.pool.reserve([cache.sequence.tables[cache.place.group]], [reserved])
    missing = [cache.missing_blocks(count) for cache in caches]
    before = [each.held for each in slabs.pool.settle()]
    for cache in caches:
        for tokens in (count - 1, 1) if count > 1 else (1,):
            cache.update_and_fetch(*numbered(0, tokens))
    taken = [each.held - held for each, held in zip(slabs.pool.settle(), before, strict=True)]
    assert missing[0] == max(0, taken[0] - reserved)
    assert missing[1] >= taken[1] - reserved
    del shared
