"""BlockPool by exact ids: one layer of one head with dim 2 in float32, so that a block is 4096
bytes.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thorough import tried

from mlx_blockpool.config import PoolConfig
from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.kv.blocks import BlockCounts, BlockTable
from mlx_blockpool.kv.pool import BlockPool
from mlx_blockpool.prefix.eviction import evict, evict_for, eviction_order
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, WindowLayer

BLOCK = 4096
FULL = FullLayer(1, 2, 2)
WINDOW = WindowLayer(1, 2, 2, 1024)
FULL_NAME = "full x1 (1 heads, dim 2)"
WINDOW_NAME = "window 1024 x1 (1 heads, dim 2)"


def spec_of(*layers: FullLayer) -> ModelCacheSpec:
    return ModelCacheSpec("m", layers, "float32")


def one_slab(blocks: int) -> BlockPool:
    """A pool of one full layer whose blocks are neighbours."""
    return BlockPool(spec_of(FULL), blocks * BLOCK, PoolConfig(preallocate=True))


def two_groups(blocks: int, **config: Any) -> BlockPool:
    """Group 0 is full, group 1 a window of 1024 tokens."""
    return BlockPool(spec_of(FULL, WINDOW), blocks * BLOCK, PoolConfig(**config))


def table_with(pool: BlockPool, count: int, group: int = 0, cached: bool = False) -> BlockTable:
    table = pool.open_table(group)
    pool.extend(table, count)
    if cached:
        for block in table.ids:
            pool.groups[group].cache(block, 256)
    return table


def evictable(pool: BlockPool, count: int, group: int = 0) -> list[int]:
    """Known blocks that nobody holds."""
    table = table_with(pool, count, group, cached=True)
    ids = list(table.ids)
    pool.release(table)
    return ids


def state(pool: BlockPool) -> tuple[Any, ...]:
    groups = range(len(pool.counts()))
    evictable = [eviction_order(pool, g) for g in groups]
    return (
        pool.counts(),
        [dict(pool.groups[g].slabs) for g in groups],
        pool.layout_version,
        pool.nbytes,
        evictable,
    )


def figures(pool: BlockPool, group: int = 0) -> tuple[int, int, int, int]:
    """(total, free, held, evictable)"""
    counts = pool.counts()[group]
    return counts.total, counts.free, counts.held, counts.evictable


# -- which ids -------------------------------------------------------------------------------------


def test_the_first_sequence_takes_the_first_blocks_and_grows_in_place() -> None:
    pool = one_slab(16)
    table = table_with(pool, 2)
    assert table.ids == [0, 1]
    pool.extend(table, 1)
    pool.extend(table, 3)
    assert table.ids == [0, 1, 2, 3, 4, 5]
    assert table.runs == [(0, 6)]


def test_a_new_sequence_starts_where_there_is_most_room_and_leaves_half_of_it() -> None:
    pool = one_slab(16)
    first, second = table_with(pool, 4), table_with(pool, 2)
    # 12 free after block 3, 2 wanted: 5 of the other 10 stay with the first sequence.
    assert second.ids == [9, 10]
    pool.extend(first, 5)
    assert first.runs == [(0, 9)]
    pool.extend(first, 2)
    assert first.runs == [(0, 9), (12, 2)]
    assert table_with(pool, 1).ids == [14]


def test_a_block_of_its_own_lies_next_to_the_one_before_it_where_that_is_free() -> None:
    pool = one_slab(16)
    table = table_with(pool, 2)
    fork = pool.fork(table)
    # Block 1 is in use, so the copy goes to the middle of what is free.
    assert pool.take_own(fork, 1) == (1, 8)
    other = pool.fork(fork)
    pool.release(table)
    assert pool.take_own(other, 1) == (8, 1)
    assert (fork.ids, other.ids) == ([0, 8], [0, 1])
    pool.check()


def test_runs_do_not_cross_slabs() -> None:
    pool = two_groups(12)
    tables = [pool.open_table(0), pool.open_table(1)]
    for _ in range(4):
        for table in tables:
            pool.extend(table, 1)
    for table in tables:
        slabs = pool.groups[table.group].slabs
        for first, count in table.runs:
            index, position = divmod(first, pool.groups[table.group].stride)
            assert position + count <= slabs[index]


def test_replace_gives_neighbours_and_keeps_the_old_blocks_in_a_table() -> None:
    pool = one_slab(16)
    table = table_with(pool, 4)
    fork = pool.fork(table)
    pool.take_own(fork, 1)
    scattered = list(fork.ids)
    assert len(fork.runs) == 3
    old = pool.take_own_run(fork)
    assert old.ids == scattered
    assert (len(fork), len(fork.runs)) == (4, 1)
    assert not set(fork.ids) & {*scattered, *table.ids}
    pool.check()
    pool.release(old)
    assert figures(pool) == (16, 8, 8, 0)


# -- all or nothing --------------------------------------------------------------------------------


def test_exhausted_says_the_figures_and_changes_nothing() -> None:
    pool = one_slab(10)
    held = table_with(pool, 3)
    evictable(pool, 2)
    reserving = pool.open_table(0)
    pool.reserve([reserving], [1])
    table = table_with(pool, 1)
    before = state(pool)
    with pytest.raises(PoolExhaustedError) as info:
        pool.extend(table, 5)
    error = info.value
    assert (error.needed, error.free, error.evictable, error.group) == (5, 3, 2, FULL_NAME)
    assert str(error) == (
        f"5 blocks of {FULL_NAME} are needed; 3 are free and 2 evictable. "
        "Raise --pool-bytes, or lower max_tokens or the number of agents."
    )
    assert state(pool) == before
    assert (len(held), len(table)) == (3, 1)
    pool.check()


def test_extend_is_all_or_nothing() -> None:
    pool = one_slab(4)
    table = table_with(pool, 3)
    with pytest.raises(PoolExhaustedError):
        pool.extend(table, 2)
    assert table.ids == [0, 1, 2]
    pool.extend(table, 1)
    assert table.ids == [0, 1, 2, 3]


def test_reserve_is_all_or_nothing_over_all_groups() -> None:
    pool = two_groups(6)
    tables = [pool.open_table(0), pool.open_table(1)]
    with pytest.raises(PoolExhaustedError):
        pool.reserve(tables, [3, 4])
    assert [t.reserved for t in tables] == [0, 0]
    assert [c.reserved for c in pool.counts()] == [0, 0]
    pool.reserve(tables, [3, 3])
    assert [t.reserved for t in tables] == [3, 3]


def test_exhausted_keeps_the_slabs_of_all_groups() -> None:
    pool = two_groups(8)
    held = table_with(pool, 2)
    pool.release(table_with(pool, 2, group=1))
    before = state(pool)
    with pytest.raises(PoolExhaustedError):
        pool.reserve([held], [9])
    assert state(pool) == before


@pytest.mark.parametrize("pool_bytes", [2 * BLOCK, 5 * BLOCK + 1, 11 * BLOCK - 1, 30 * BLOCK + 77])
def test_the_byte_budget_is_hard(pool_bytes: int) -> None:
    pool = BlockPool(spec_of(FULL, WINDOW), pool_bytes)
    tables: list[BlockTable] = []
    for step in range(60):
        table = pool.open_table(step % 2)
        tables.append(table)
        try:
            pool.extend(table, 1 + step % 3)
        except PoolExhaustedError:
            pool.release(tables.pop(0))
        assert pool.nbytes <= pool_bytes
        pool.check()
    assert pool.nbytes > pool_bytes - 2 * BLOCK, "the budget was never used up"


def test_a_pool_without_room_for_one_block_of_each_group_is_refused() -> None:
    with pytest.raises(
        PoolExhaustedError,
        match=r"One block of each group takes 8192 bytes.*The pool has 8191 bytes",
    ):
        BlockPool(spec_of(FULL, WINDOW), 2 * BLOCK - 1)
    assert BlockPool(spec_of(FULL, WINDOW), 2 * BLOCK).sequence_capacity() >= 0


# -- windows ---------------------------------------------------------------------------------------


def test_a_fifth_block_of_a_1024_token_window_is_exhausted() -> None:
    pool = two_groups(20)
    ring = table_with(pool, 4, group=1)
    ids = list(ring.ids)
    with pytest.raises(
        PoolExhaustedError, match="is a ring in 4 blocks and holds 4 already"
    ) as info:
        pool.extend(ring, 1)
    assert (info.value.needed, info.value.group) == (1, WINDOW_NAME)
    assert ring.ids == ids
    pool.check()


def test_the_cap_of_a_window_holds_for_adopted_blocks_too() -> None:
    pool = two_groups(20)
    ring, other = table_with(pool, 3, group=1), table_with(pool, 2, group=1)
    with pytest.raises(PoolExhaustedError, match="holds 3 already"):
        pool.append_shared(ring, other.ids)
    pool.append_shared(ring, other.ids[:1])
    assert ring.ids[3] == other.ids[0]
    pool.check()


def test_a_full_ring_can_still_own_and_replace_its_blocks() -> None:
    pool = two_groups(20)
    ring = table_with(pool, 4, group=1)
    fork = pool.fork(ring)
    old, new = pool.take_own(fork, 2)
    assert (old, new) == (ring.ids[2], fork.ids[2])
    pool.release(pool.take_own_run(fork))
    assert not set(fork.ids) & set(ring.ids)
    pool.check()


# -- promises --------------------------------------------------------------------------------------


def test_a_promise_cannot_be_taken_by_others() -> None:
    pool = one_slab(6)
    mine, other = pool.open_table(0), pool.open_table(0)
    pool.reserve([mine], [4])
    pool.extend(other, 2)
    with pytest.raises(PoolExhaustedError) as info:
        pool.extend(other, 1)
    assert (info.value.needed, info.value.free) == (1, 0)
    for _ in range(4):
        pool.extend(mine, 1)
    assert len(mine) == 4
    assert mine.reserved == 0
    assert figures(pool) == (6, 0, 6, 0)


def test_owning_and_replacing_use_the_promise() -> None:
    pool = one_slab(6)
    table = table_with(pool, 2)
    fork = pool.fork(table)
    pool.reserve([fork], [4])
    pool.take_own(fork, 0)
    assert fork.reserved == 3
    pool.release(pool.take_own_run(fork))
    assert fork.reserved == 1
    assert len(set(fork.ids) | set(table.ids)) == 4
    pool.check()


def test_promises_add_up_and_end_with_the_table() -> None:
    pool = one_slab(6)
    table = pool.open_table(0)
    pool.reserve([table, table], [1, 2])
    pool.reserve([table], [1])
    assert (table.reserved, pool.counts()[0].reserved) == (4, 4)
    pool.release(table)
    assert (table.reserved, pool.counts()[0].reserved) == (0, 0)
    assert table_with(pool, 6).ids == [0, 1, 2, 3, 4, 5]


def test_more_than_the_promise_is_taken_where_it_is_free() -> None:
    pool = one_slab(6)
    table = pool.open_table(0)
    pool.reserve([table], [2])
    pool.extend(table, 5)
    assert (len(table), table.reserved) == (5, 0)
    pool.check()


# -- order of use ----------------------------------------------------------------------------------


def test_evict_returns_leaves_first() -> None:
    pool = one_slab(8)
    assert evictable(pool, 3) == [0, 1, 2]
    assert evict(pool, 0, 1) == [(0, 2)]
    assert evict(pool, 0, 5) == [(0, 1), (0, 0)]
    assert figures(pool) == (8, 8, 0, 0)


def test_evict_takes_the_sequence_released_first() -> None:
    pool = one_slab(8)
    first, second = table_with(pool, 2, cached=True), table_with(pool, 2, cached=True)
    order = [first.ids[1], first.ids[0], second.ids[1], second.ids[0]]
    pool.release(first)
    pool.release(second)
    assert [block for _, block in evict(pool, 0, 4)] == order


def test_touch_makes_a_block_the_last_to_go() -> None:
    pool = one_slab(8)
    evictable(pool, 3)
    pool.groups[0].touch(2)
    assert evict(pool, 0, 2) == [(0, 1), (0, 0)]
    assert evict(pool, 0, 2) == [(0, 2)]


def test_holding_and_releasing_again_makes_a_block_the_last_to_go() -> None:
    pool = one_slab(8)
    evictable(pool, 3)
    table = pool.open_table(0)
    pool.append_shared(table, [2])
    assert figures(pool) == (8, 5, 1, 2)
    assert evict(pool, 0, 3) == [(0, 1), (0, 0)]
    pool.release(table)
    assert evict(pool, 0, 3) == [(0, 2)]


def test_a_pinned_block_is_not_evicted() -> None:
    pool = one_slab(8)
    evictable(pool, 3)
    pool.groups[0].pin(2, 1)
    pool.groups[0].pin(2, 1)
    assert pool.counts()[0].pinned == 1
    assert evict(pool, 0, 3) == [(0, 1), (0, 0)]
    pool.groups[0].pin(2, -1)
    assert evict(pool, 0, 1) == []
    pool.groups[0].pin(2, -1)
    assert evict(pool, 0, 1) == [(0, 2)]


def test_a_free_block_is_not_pinned() -> None:
    pool = one_slab(8)
    table = table_with(pool, 1)
    pool.groups[0].pin(table.ids[0], 1)
    pool.release(table)
    assert figures(pool) == (8, 8, 0, 0)
    assert pool.counts()[0].pinned == 0


def test_a_block_that_two_entries_cache_stays_until_both_uncache_it() -> None:
    pool = one_slab(8)
    table = table_with(pool, 1, cached=True)
    pool.groups[0].cache(0, 100)
    pool.release(table)
    pool.groups[0].uncache(0)
    assert figures(pool) == (8, 7, 0, 1)
    pool.groups[0].uncache(0)
    assert figures(pool) == (8, 8, 0, 0)
    pool.check()


def test_a_held_block_stays_when_it_is_forgotten() -> None:
    pool = one_slab(8)
    table = table_with(pool, 1, cached=True)
    pool.groups[0].uncache(0)
    assert figures(pool) == (8, 7, 1, 0)
    pool.release(table)
    assert figures(pool) == (8, 8, 0, 0)


def test_a_free_block_can_be_neither_cached_nor_uncached() -> None:
    pool = one_slab(8)
    with pytest.raises(AssertionError, match=r"block 3 of full x1 .* is free and cannot be cached"):
        pool.groups[0].cache(3, 256)
    with pytest.raises(AssertionError, match=r"block 3 of full x1 .* uncached but not cached"):
        pool.groups[0].uncache(3)


# -- room ------------------------------------------------------------------------------------------


def test_make_room_evicts_just_what_is_missing() -> None:
    pool = one_slab(8)
    evictable(pool, 5)
    assert evict_for(pool, {0: 3}) == []
    assert evict_for(pool, {0: 5}) == [(0, 4), (0, 3)]
    assert figures(pool) == (8, 5, 0, 3)
    pool.reserve([pool.open_table(0)], [5])


def test_make_room_evicts_nothing_where_it_cannot_be_enough() -> None:
    pool = one_slab(8)
    held = table_with(pool, 3)
    evictable(pool, 4)
    before = state(pool)
    assert evict_for(pool, {0: 6}) == []
    assert state(pool) == before
    assert len(evict_for(pool, {0: 5})) == 4
    assert len(held) == 3


def test_make_room_leaves_pinned_and_promised_blocks() -> None:
    pool = one_slab(8)
    ids = evictable(pool, 4)
    pool.groups[0].pin(ids[3], 1)
    tables = [pool.open_table(0), pool.open_table(0)]
    pool.reserve(tables[:1], [3])
    assert evict_for(pool, {0: 5}) == []
    assert evict_for(pool, {0: 3}) == [(0, ids[2]), (0, ids[1])]
    pool.reserve(tables[1:], [3])
    pool.check()


def test_make_room_lets_the_pool_grow_before_it_evicts() -> None:
    pool = BlockPool(spec_of(FULL), 8 * BLOCK)
    evictable(pool, 2)
    assert evict_for(pool, {0: 6}) == []
    table = table_with(pool, 6)
    assert len(table) == 6
    assert pool.counts()[0].evictable == 2


def test_an_empty_slab_goes_to_the_group_that_needs_it() -> None:
    pool = two_groups(8, preallocate=True)
    assert [counts.total for counts in pool.counts()] == [4, 4]
    table = table_with(pool, 8)
    assert len(table) == 8
    assert [counts.total for counts in pool.counts()] == [8, 0]
    pool.check()


def test_a_slab_of_evictable_blocks_goes_to_the_group_that_needs_it() -> None:
    pool = two_groups(8)
    ids = evictable(pool, 8)
    victims = evict_for(pool, {1: 4})
    assert set(victims) <= {(0, block) for block in ids}
    assert len(victims) >= 4
    ring = table_with(pool, 4, group=1)
    assert len(ring) == 4
    pool.check()


def test_a_slab_in_use_stays() -> None:
    pool = two_groups(8)
    table = table_with(pool, 8)
    kept = list(table.ids)
    before = state(pool)
    assert evict_for(pool, {1: 1}) == []
    with pytest.raises(PoolExhaustedError):
        table_with(pool, 1, group=1)
    assert state(pool) == before
    assert table.ids == kept


@tried(100, 3000)
@given(st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.integers(1, 9)), max_size=60))
def test_a_pool_has_at_most_twice_what_is_used_in_few_slabs(
    steps: list[tuple[int, bool, int]],
) -> None:
    """Whether sequences reserve their blocks or take them, alone or together."""
    pool = two_groups(10_000)
    tables = [pool.open_table(0) for _ in range(8)]
    for number, reserves, count in steps:
        if reserves:
            pool.reserve([tables[number]], [count])
        else:
            pool.extend(tables[number], count)
        (counts, _), slabs = pool.settle(), pool.groups[0].slabs.values()
        used = counts.held + counts.reserved
        assert counts.total <= 2 * used + 1
        assert len(slabs) <= 1 + math.log(counts.total, 1.5)
    for table in tables:
        pool.release(table)
    pool.settle()
    assert pool.nbytes <= BLOCK


def test_a_full_pool_has_a_slab_for_each_doubling_up_to_a_quarter_of_it() -> None:
    pool = BlockPool(spec_of(FULL), 1000 * BLOCK)
    table = pool.open_table(0)
    for _ in range(1000):
        pool.extend(table, 1)
    assert list(pool.groups[0].slabs.values()) == [*(3 * 2**i for i in range(7)), 250, 250, 119]


@pytest.mark.parametrize("together", [False, True])
def test_eight_agents_of_8k_tokens_lie_in_few_slabs(together: bool) -> None:
    pool = BlockPool(spec_of(FULL), 10_000 * BLOCK)
    tables = [pool.open_table(0) for _ in range(8)]
    if together:
        pool.reserve(tables, [33] * 8)
    for table in tables:
        pool.reserve([table], [0 if together else 33])
        pool.extend(table, 32)
    for table in tables:
        pool.extend(table, 1)
    assert len(pool.groups[0].slabs) <= 4
    assert all(len(table.runs) <= 2 for table in tables)


def test_what_is_empty_is_given_back_while_more_than_half_is_free() -> None:
    pool = BlockPool(spec_of(FULL), 100 * BLOCK)
    tables = [table_with(pool, count) for count in (1, 2, 4, 8)]
    assert list(pool.groups[0].slabs.values()) == [3, 10, 16]
    pool.cut(tables[3], 1)
    pool.release(tables[2])
    pool.settle()
    assert list(pool.groups[0].slabs.values()) == [3, 16], "one block is held in the last slab"
    for table, left in ((tables[3], [3]), (tables[1], [3]), (tables[0], [])):
        pool.release(table)
        pool.settle()
        assert list(pool.groups[0].slabs.values()) == left


def test_layout_changes_with_every_slab() -> None:
    pool = two_groups(8)
    before = pool.layout_version
    pool.release(table_with(pool, 8))
    grown = pool.layout_version
    assert grown > before
    table_with(pool, 4, group=1)
    assert pool.layout_version > grown


def test_make_room_is_enough_for_reserve_in_all_groups_together() -> None:
    pool = BlockPool(spec_of(FULL, WINDOW), 6 * BLOCK)
    evictable(pool, 3)
    free = pool.counts()[0].free
    # The pool can grow by 3 - free blocks. They are for the window; the full layer has 3 evictable
    # ones of its own.
    wanted = {0: free + 3, 1: 3 - free}
    evict_for(pool, wanted)
    tables = [pool.open_table(0), pool.open_table(1)]
    pool.reserve(tables, [wanted[0], wanted[1]])
    pool.check()


def test_make_room_evicts_nothing_for_room_that_is_promised_to_others() -> None:
    pool = two_groups(20)
    table = pool.open_table(0)
    pool.reserve([table], [14])
    evictable(pool, 2, group=1)
    before = state(pool)
    # 14 are promised: there cannot be 7 of 20 blocks for windows.
    assert evict_for(pool, {1: 7}) == []
    assert state(pool) == before
    assert table.reserved == 14


# -- whole pools -----------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [5, 6, 7, 8, 9, 12, 30, 101])
def test_a_sequence_of_exactly_the_capacity_fits_and_a_block_more_does_not(blocks: int) -> None:
    capacity = two_groups(blocks).sequence_capacity()
    assert capacity % 256 == 0
    needed = capacity // 256
    pool = two_groups(blocks)
    pool.reserve([pool.open_table(0), pool.open_table(1)], [needed, min(needed, 4)])
    pool = two_groups(blocks)
    with pytest.raises(PoolExhaustedError):
        pool.reserve([pool.open_table(0), pool.open_table(1)], [needed + 1, min(needed + 1, 4)])


def test_capacity_by_hand() -> None:
    assert one_slab(10).sequence_capacity() == 2560
    assert BlockPool(spec_of(FULL), 11 * BLOCK - 1).sequence_capacity() == 2560
    # 12 blocks less a ring of 4.
    assert two_groups(12).sequence_capacity() == 8 * 256
    # Two full layers: 8192 bytes a block; 100000 bytes less a ring of 16384 are 10 of them.
    assert BlockPool(spec_of(FULL, FULL, WINDOW), 100_000).sequence_capacity() == 10 * 256
    # 3 tokens of 256 in both groups; the ring is not full yet.
    assert two_groups(6).sequence_capacity() == 3 * 256


def test_a_model_of_windows_only_takes_sequences_of_any_length() -> None:
    assert BlockPool(spec_of(WINDOW), 4 * BLOCK).sequence_capacity() > 10**9
    assert BlockPool(spec_of(WINDOW), 2 * BLOCK).sequence_capacity() == 512


@pytest.mark.parametrize("served", [(1, 1), (2, 2), (7, 4), (13, 4)])
@pytest.mark.parametrize("cached", [False, True])
def test_the_capacity_is_there_whatever_was_served_before(
    served: tuple[int, int], cached: bool
) -> None:
    pool = two_groups(20)
    first = [pool.open_table(0), pool.open_table(1)]
    pool.reserve(first, served)
    for table, count in zip(first, served, strict=True):
        pool.extend(table, count)
        for block in table.ids if cached else ():
            pool.groups[table.group].cache(block, 256)
        pool.release(table)
    assert pool.sequence_capacity() == 16 * 256
    evict_for(pool, {0: 16, 1: 4})
    second = [pool.open_table(0), pool.open_table(1)]
    pool.reserve(second, [16, 4])
    pool.check()


def test_preallocate_takes_the_budget_at_the_start() -> None:
    pool = two_groups(12, preallocate=True)
    assert [c.total for c in pool.counts()] == [8, 4]
    assert pool.nbytes == 12 * BLOCK
    layout = pool.layout_version
    table_with(pool, 8)
    table_with(pool, 4, group=1)
    assert pool.layout_version == layout


def test_nothing_is_taken_at_the_start_otherwise() -> None:
    assert two_groups(12).nbytes == 0


@pytest.mark.parametrize("blocks", [2, 3, 4, 5, 7])
def test_preallocate_keeps_the_budget_of_a_small_pool(blocks: int) -> None:
    assert two_groups(blocks, preallocate=True).nbytes <= blocks * BLOCK


def test_preallocate_leaves_blocks_after_a_window_that_the_pool_cannot_fill() -> None:
    pool = BlockPool(spec_of(WINDOW, FULL), 4 * BLOCK, PoolConfig(preallocate=True))
    assert [c.total for c in pool.counts()] == [2, 2]


# -- threads and models ----------------------------------------------------------------------------


def release_elsewhere(pool: BlockPool, table: BlockTable) -> None:
    thread = threading.Thread(target=pool.release_deferred, args=(table,))
    thread.start()
    thread.join()


def test_release_from_another_thread_takes_effect_at_the_next_operation() -> None:
    pool = one_slab(4)
    table = table_with(pool, 3)
    pool.reserve([table], [1])
    release_elsewhere(pool, table)
    assert (table.ids, table.reserved) == ([], 0)
    assert figures(pool) == (4, 1, 3, 0)
    assert [c.free for c in pool.settle()] == [4]
    assert table_with(pool, 4).ids == [0, 1, 2, 3]


def test_what_was_given_back_can_be_taken_at_once() -> None:
    pool = one_slab(4)
    release_elsewhere(pool, table_with(pool, 4))
    assert table_with(pool, 4).ids == [0, 1, 2, 3]


def test_what_was_given_back_can_be_evicted_at_once() -> None:
    pool = one_slab(4)
    release_elsewhere(pool, table_with(pool, 2, cached=True))
    assert evict(pool, 0, 2) == [(0, 1), (0, 0)]


def test_what_was_given_back_is_shared_no_more() -> None:
    pool = one_slab(4)
    table = table_with(pool, 1)
    release_elsewhere(pool, pool.fork(table))
    assert not pool.is_shared(table, 0, 0)


def test_giving_back_twice_is_the_same_as_once() -> None:
    pool = one_slab(4)
    table, other = table_with(pool, 2), table_with(pool, 1)
    pool.release_deferred(table)
    pool.release(table)
    pool.release_deferred(table)
    assert [c.held for c in pool.settle()] == [len(other)]
    pool.check()


# -- sharing ---------------------------------------------------------------------------------------


def test_a_fork_shares_its_blocks() -> None:
    pool = one_slab(8)
    table = table_with(pool, 2)
    assert not pool.is_shared(table, 1, 0)
    fork = pool.fork(table)
    assert fork.ids == [0, 1]
    assert figures(pool) == (8, 6, 2, 0)
    assert pool.is_shared(table, 1, 255)
    assert pool.is_shared(fork, 0, 0)
    pool.extend(fork, 1)
    assert (len(table), len(fork)) == (2, 3)
    assert not pool.is_shared(fork, 2, 0)
    pool.release(table)
    assert not pool.is_shared(fork, 0, 0)
    assert figures(pool) == (8, 5, 3, 0)


def test_own_gives_a_block_that_nobody_else_reads() -> None:
    pool = one_slab(8)
    table = table_with(pool, 2)
    fork = pool.fork(table)
    old, new = pool.take_own(fork, 1)
    assert old == 1
    assert fork.ids == [0, new]
    assert table.ids == [0, 1]
    assert not pool.is_shared(fork, 1, 0)
    assert not pool.is_shared(table, 1, 0)
    assert pool.is_shared(table, 0, 0)
    pool.check()


def test_a_cached_block_may_be_written_after_what_is_cached_of_it() -> None:
    pool = one_slab(8)
    table = table_with(pool, 1)
    pool.groups[0].cache(0, 100)
    assert pool.is_shared(table, 0, 99)
    assert not pool.is_shared(table, 0, 100)
    pool.groups[0].cache(0, 120)
    assert pool.is_shared(table, 0, 119)
    pool.groups[0].cache(0, 50)
    assert pool.is_shared(table, 0, 119)
    for _ in range(3):
        pool.groups[0].uncache(0)
    assert not pool.is_shared(table, 0, 0)


def test_a_cached_block_stays_cached_after_take_own() -> None:
    pool = one_slab(8)
    table = table_with(pool, 1, cached=True)
    assert pool.take_own(table, 0)[0] == 0
    assert figures(pool) == (8, 6, 1, 1)
    assert evict(pool, 0, 1) == [(0, 0)]


def test_own_without_room_changes_nothing() -> None:
    pool = one_slab(2)
    table = table_with(pool, 2)
    fork = pool.fork(table)
    before = state(pool)
    with pytest.raises(PoolExhaustedError):
        pool.take_own(fork, 0)
    assert fork.ids == table.ids == [0, 1]
    assert state(pool) == before
    pool.check()


def test_swap_holds_another_block_and_lets_go_of_its_own() -> None:
    pool = one_slab(8)
    first, second = table_with(pool, 1, cached=True), table_with(pool, 1)
    mine = second.ids[0]
    pool.replace_shared(second, 0, first.ids[0])
    assert second.ids == first.ids == [0]
    assert pool.is_shared(second, 0, 255)
    assert figures(pool) == (8, 7, 1, 0)
    assert mine not in second.ids
    pool.release(first)
    pool.release(second)
    assert figures(pool) == (8, 7, 0, 1)
    pool.check()


def test_a_table_tells_its_runs_after_every_change() -> None:
    pool = one_slab(16)
    table = table_with(pool, 2)
    assert table.runs == [(0, 2)]
    pool.extend(table, 2)
    assert table.runs == [(0, 4)]
    fork = pool.fork(table)
    _, new = pool.take_own(fork, 1)
    assert fork.runs == [(0, 1), (new, 1), (2, 2)]
    pool.replace_shared(fork, 1, 1)
    assert fork.runs == [(0, 4)]
    pool.release(fork)
    assert fork.runs == []


# -- figures ---------------------------------------------------------------------------------------


def test_counts() -> None:
    pool = one_slab(10)
    held = table_with(pool, 2, cached=True)
    ids = evictable(pool, 3)
    pool.groups[0].pin(ids[0], 1)
    pool.groups[0].pin(held.ids[0], 1)
    pool.reserve([held], [1])
    assert pool.counts() == [BlockCounts(FULL_NAME, 10, 5, 2, 3, 2, 1, BLOCK)]


def test_fragmentation() -> None:
    pool = one_slab(8)
    assert pool.groups[0].fragmentation == 0.0
    first, second = table_with(pool, 1), table_with(pool, 1)
    # # . . . # . . .
    assert second.ids == [4]
    assert pool.groups[0].fragmentation == 0.5
    pool.release(second)
    assert pool.groups[0].fragmentation == 0.0
    pool.extend(first, 7)
    assert pool.groups[0].fragmentation == 0.0


def test_check_finds_a_lost_reference() -> None:
    pool = one_slab(8)
    table = table_with(pool, 2)
    table.ids.pop()
    with pytest.raises(AssertionError, match=r"full x1 .* block 1: ref_count 1 != 0 tables"):
        pool.check()


def test_check_finds_a_lost_promise() -> None:
    pool = one_slab(8)
    table = pool.open_table(0)
    pool.reserve([table], [2])
    table.reserved = 1
    with pytest.raises(AssertionError, match="2 reserved != 1 in tables"):
        pool.check()


def test_surplus_blocks_are_evicted_first_until_they_are_used_again() -> None:
    pool = one_slab(6)
    ids = evictable(pool, 6)
    # Released last to first: the last one was used longest ago.
    assert eviction_order(pool, 0) == ids[::-1]
    for block in (ids[1], ids[0], ids[2]):
        pool.groups[0].demote(block)
    assert eviction_order(pool, 0) == [ids[1], ids[0], ids[2], ids[5], ids[4], ids[3]]
    table = pool.open_table(0)
    pool.append_shared(table, [ids[0]])
    pool.release(table)
    pool.groups[0].touch(ids[2])
    assert eviction_order(pool, 0) == [ids[1], ids[5], ids[4], ids[3], ids[0], ids[2]]
    pool.groups[0].demote(ids[3])
    pool.groups[0].pin(ids[1], 1)
    assert evict(pool, 0, 2) == [(0, ids[3]), (0, ids[5])]
    pool.check()


def test_a_slab_of_surplus_blocks_goes_before_a_block_that_is_none() -> None:
    pool = two_groups(16)
    full, window = evictable(pool, 4), evictable(pool, 4, group=1)
    assert pool.groups[0].slabs == pool.groups[1].slabs == {0: 7}
    for block in window:
        pool.groups[1].demote(block)
    assert set(evict_for(pool, {0: 6})) == {(1, block) for block in window}
    pool.reserve([pool.open_table(0)], [6])
    assert eviction_order(pool, 0) == full[::-1]
