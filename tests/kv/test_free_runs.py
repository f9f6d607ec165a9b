"""Free runs: which ids are taken, and how runs join again. And the runs of a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_blockpool.kv.blocks import BlockTable, FreeRuns


def free_runs(*runs: tuple[int, int], stride: int = 100) -> FreeRuns:
    free = FreeRuns(stride)
    for start, end in runs:
        free.add(start, end)
    return free


def test_nothing_is_free_at_first() -> None:
    free = FreeRuns(8)
    assert (list(free), free.count, free.longest) == ([], 0, 0)


def test_the_first_sequence_starts_at_the_beginning_of_the_slab() -> None:
    free = free_runs((0, 10))
    assert free.take(3) == [0, 1, 2]
    assert list(free) == [(3, 10)]
    assert free.count == 7


def test_a_sequence_continues_after_its_last_block() -> None:
    free = free_runs((3, 10), (20, 90))
    assert free.take(2, after=2) == [3, 4]
    assert list(free) == [(5, 10), (20, 90)]


def test_a_sequence_that_cannot_continue_moves_to_the_longest_run() -> None:
    free = free_runs((3, 5), (20, 90))
    # [20, 90) starts after somebody's block 19 and leaves it half of the 69 blocks that are not
    # needed.
    assert free.take(1, after=9) == [54]
    assert list(free) == [(3, 5), (20, 54), (55, 90)]


def test_what_does_not_fit_after_the_last_block_comes_from_the_longest_run() -> None:
    free = free_runs((3, 5), (100, 108), (200, 205))
    assert free.take(4, after=2) == [3, 4, 100, 101]
    assert list(free) == [(102, 108), (200, 205)]


def test_a_new_sequence_leaves_half_of_the_room_to_the_one_before_it() -> None:
    free = free_runs((0, 16))
    assert free.take(4) == [0, 1, 2, 3]
    # 12 are free and 2 are wanted: 5 of the other 10 stay free after block 3.
    assert free.take(2) == [9, 10]
    assert list(free) == [(4, 9), (11, 16)]


def test_of_equal_runs_the_lowest_is_taken() -> None:
    assert free_runs((200, 205), (100, 105), (300, 305)).take(1) == [100]


def test_a_run_that_fits_exactly_is_taken_whole() -> None:
    free = free_runs((3, 8))
    assert free.take(5) == [3, 4, 5, 6, 7]
    assert (list(free), free.count) == ([], 0)


def test_many_blocks_come_from_the_longest_runs_first() -> None:
    free = free_runs((1, 3), (10, 14), (20, 23))
    assert free.take(6) == [10, 11, 12, 13, 20, 21]


def test_neighbours_join() -> None:
    free = free_runs((2, 3), (4, 5))
    free.add(3, 4)
    assert list(free) == [(2, 5)]
    free.add(5, 9)
    free.add(0, 2)
    assert list(free) == [(0, 9)]
    assert (free.count, free.longest) == (9, 9)


def test_a_run_never_crosses_into_the_next_slab() -> None:
    free = free_runs((8, 16), (0, 8), (16, 24), stride=8)
    assert list(free) == [(0, 8), (8, 16), (16, 24)]
    assert free.longest == 8
    # Block 7 is the last of its slab: 8 is not its neighbour.
    assert free.take(7) == [0, 1, 2, 3, 4, 5, 6]
    assert free.take(2, after=6) == [7, 8]
    assert free.take(8, after=15) == [16, 17, 18, 19, 20, 21, 22, 23]
    free.add(7, 8)
    assert list(free) == [(7, 8), (9, 16)]


def test_a_slab_is_given_back_whole() -> None:
    free = free_runs((0, 8), (8, 16), stride=8)
    free.remove(8, 16)
    assert (list(free), free.count) == ([(0, 8)], 8)
    free.take(1)
    with pytest.raises(AssertionError, match=r"\[0, 8\) is not one free run: \{1: 8\}"):
        free.remove(0, 8)


def test_more_than_is_free_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="3 wanted > 2 free"):
        free_runs((0, 2)).take(3)


@given(st.data())
def test_runs_are_exactly_the_free_ids_whatever_is_taken_and_given_back(
    data: st.DataObject,
) -> None:
    stride = 7
    free = free_runs((0, 7), (7, 14), (14, 18), stride=stride)
    held: list[int] = []
    for _ in range(data.draw(st.integers(1, 20))):
        if held and data.draw(st.booleans()):
            block = held.pop(data.draw(st.integers(0, len(held) - 1)))
            free.add(block, block + 1)
        else:
            count = data.draw(st.integers(0, min(5, free.count)))
            after = data.draw(st.sampled_from([None, *held]))
            ids = free.take(count, after)
            assert len(set(ids)) == count
            assert not set(ids) & set(held)
            held += ids
        expected = sorted(set(range(18)) - set(held))
        assert [i for start, end in free for i in range(start, end)] == expected
        assert free.count == len(expected)
        for start, end in free:
            assert start // stride == (end - 1) // stride
            neighbours = [
                i for i in (start - 1, end) if i in expected and i // stride == start // stride
            ]
            assert not neighbours, f"[{start}, {end}) should have been joined with {neighbours}"


def table_of(ids: list[int], stride: int = 8) -> BlockTable:
    table = BlockTable(0, stride, None)
    table.ids += ids
    return table


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], []),
        ([3], [(3, 1)]),
        ([3, 4, 5], [(3, 3)]),
        ([5, 4], [(5, 1), (4, 1)]),
        ([6, 7, 8, 9], [(6, 2), (8, 2)]),
        ([0, 1, 20, 21, 22, 3], [(0, 2), (20, 3), (3, 1)]),
        ([15, 16, 0, 1], [(15, 1), (16, 1), (0, 2)]),
    ],
)
def test_runs_of_a_table(ids: list[int], expected: list[tuple[int, int]]) -> None:
    assert table_of(ids).runs == expected


def test_runs_of_a_table_follow_its_changes() -> None:
    table = table_of([0, 1])
    assert table.runs == [(0, 2)]
    table.ids.append(2)
    table.changed()
    assert table.runs == [(0, 3)]
    assert len(table) == 3
