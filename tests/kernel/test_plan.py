"""Plans: which items, how long, for which vectors; and which partial sums are merged."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from thorough import seeds

from mlx_blockpool.kernel.plan import ITEM_INTS, SIMDGROUPS, KernelPlan, Piece, Source, plan_of

SLAB = Source(10_000, 1)


def items(plan: KernelPlan, most_sources: int = 13) -> list[list[int]]:
    """Of all launches: [source, head stride, token stride, first, count, rows, first vector,
    vectors, mask, words, place, 0].
    """
    found = []
    for launch in plan.launches(most_sources):
        work = np.array(launch.work)
        found += work[: launch.items * ITEM_INTS].reshape(-1, ITEM_INTS).tolist()
    return found


def lengths(plan: KernelPlan) -> list[int]:
    return [item[4] for item in items(plan)]


def alone(*counts: int, **options: Any) -> KernelPlan:
    """Members that read a piece each, one row of each member, with one vector, on one kv head."""
    pieces = [Piece(0, 100 * i, count, (i,)) for i, count in enumerate(counts)]
    return plan_of(
        pieces, [SLAB], **{"rows": len(counts), "group": 1, "kv_heads": 1, "fill": 1, **options}
    )


def test_an_item_for_each_piece() -> None:
    plan = plan_of(
        [Piece(1, 30, 70, (0, 1)), Piece(0, 5, 20, (1,))],
        [SLAB, Source(1, 2)],
        rows=2,
        group=2,
        kv_heads=2,
        fill=1,
    )
    (launch,) = plan.launches(2)
    assert (list(launch.sources), launch.items, launch.places, plan.queries) == ([0, 1], 2, 6, 4)
    assert items(plan) == [
        [0, 10_000, 1, 5, 20, 24, 0, 2, -1, 0, 0, 0],
        [1, 1, 2, 30, 70, 25, 0, 4, -1, 0, 2, 0],
    ]
    assert launch.work.tolist()[24:] == [1, 0, 1]
    # Vectors 0 and 1 are those of row 0, which reads the second item; those of row 1 read both.
    assert plan.places.tolist() == [5, 6, 7, 9, 11, 2, 3, 0, 4, 1, 5]


def test_sources_that_do_not_fit_are_other_launches() -> None:
    pieces = [Piece(number, 0, 10, (0,)) for number in (4, 1, 0)]
    plan = plan_of(pieces, [SLAB] * 5, rows=1, group=3, kv_heads=1, fill=1)
    assert [(list(launch.sources), launch.items, launch.places) for launch in plan.launches(2)] == [
        ([0, 1], 2, 6),
        ([4], 1, 3),
    ]
    # Sources and places are counted from the launch's first ones.
    assert [(item[0], item[10]) for item in items(plan, 2)] == [(0, 0), (1, 3), (0, 0)]
    assert [len(plan.launches(most)) for most in (1, 2, 5)] == [3, 2, 1]
    assert plan.places.tolist() == [4, 7, 10, 13, 0, 3, 6, 1, 4, 7, 2, 5, 8]


def test_pieces_are_cut_while_the_device_has_room() -> None:
    assert lengths(alone(4096, fill=1)) == [4096]
    assert lengths(alone(4096, fill=4)) == [1024] * 4
    assert lengths(alone(4096, fill=4, kv_heads=2)) == [2048] * 2
    assert lengths(alone(4096, fill=1000)) == [256] * 16
    assert lengths(alone(300, 4096, fill=1000)) == [192, 108, *[256] * 16]
    assert lengths(alone(*[4096] * 8, fill=8)) == [4096] * 8


def test_a_piece_much_longer_than_the_others_is_cut_though_they_fill_the_device() -> None:
    assert lengths(alone(*[300] * 7, 32_000, fill=8)) == [*[300] * 7, *[4032] * 7, 3776]


def test_short_arrays_are_made_longer() -> None:
    """mlx passes those of fewer than eight elements in another way."""
    plan = alone(1)
    assert (plan.places.size, plan.launches(1)[0].work.size) == (8, 13)


def test_tokens_that_no_row_sees_are_not_read() -> None:
    sees = np.zeros((2, 1000), bool)
    sees[0, 300:400] = sees[1, 300:700] = sees[:, 900:] = True
    plan = plan_of([Piece(0, 50, 1000, (0, 1), sees)], [SLAB], rows=2, group=1, kv_heads=1, fill=4)
    # Parts of 256 tokens: in the first one no row sees anything, in the last one all see all from
    # 900 on.
    assert [(item[3], item[4]) for item in items(plan)] == [(306, 256), (562, 256), (818, 232)]
    assert all(item[8] > 0 for item in items(plan))


def test_masks_are_bits_of_the_tokens_of_an_item() -> None:
    sees = np.ones((3, 40), bool)
    sees[0, 33:] = sees[2, 0] = False
    plan = plan_of([Piece(0, 7, 40, (0, 1, 2), sees)], [SLAB], rows=3, group=2, kv_heads=1, fill=1)
    (item,) = items(plan)
    assert item[8:10] == [ITEM_INTS + 3, 2]
    work = np.array(plan.launches(1)[0].work)[item[8] :].view(np.uint32)
    assert work.tolist() == [2**32 - 1, 1, 2**32 - 1, 255, 2**32 - 2, 255]


def test_parts_that_all_see_have_no_mask() -> None:
    sees = np.ones((2, 600), bool)
    sees[0, 599] = False
    plan = plan_of([Piece(0, 0, 600, (0, 1), sees)], [SLAB], rows=2, group=1, kv_heads=1, fill=2)
    assert [item[8] > 0 for item in items(plan)] == [False, True]


@pytest.mark.parametrize(
    ("vectors", "queries", "spans"),
    [
        (1, 1, [1]),
        (2, 2, [2]),
        (4, 4, [4]),
        (8, 4, [8]),
        (16, 4, [16]),
        (17, 4, [12, 5]),
        (40, 4, [16, 16, 8]),
    ],
)
def test_items_have_as_many_vectors_as_a_threadgroup_holds(
    vectors: int, queries: int, spans: list[int]
) -> None:
    plan = plan_of(
        [Piece(0, 0, 64, tuple(range(vectors)))], [SLAB], rows=vectors, group=1, kv_heads=1, fill=1
    )
    assert plan.queries == queries
    assert [item[7] for item in items(plan)] == spans
    assert [item[6] for item in items(plan)] == [sum(spans[:i]) for i in range(len(spans))]
    assert [item[10] for item in items(plan)] == [item[6] for item in items(plan)]


def test_many_pieces_of_one_vector_weigh_more_than_a_short_shared_one() -> None:
    together = Piece(0, 0, 10, tuple(range(8)))
    own = [Piece(0, 100, 900, (i,)) for i in range(8)]
    assert plan_of([together, *own], [SLAB], rows=8, group=1, kv_heads=1, fill=1).queries == 1
    assert (
        plan_of(
            [Piece(0, 0, 20_000, tuple(range(8))), *own],
            [SLAB],
            rows=8,
            group=1,
            kv_heads=1,
            fill=1,
        ).queries
        == 4
    )


def test_a_row_without_keys_is_our_own_bug() -> None:
    plan = plan_of([Piece(0, 0, 10, (0,))], [SLAB], rows=2, group=1, kv_heads=1, fill=1)
    with pytest.raises(AssertionError, match=r"rows \[1\] have nothing to read"):
        _ = plan.places


def test_rows_that_32_bits_cannot_count_are_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="rows of a source that 32 bits cannot count"):
        plan_of([Piece(0, 0, 10, (0,))], [Source(2**28, 1)], rows=1, group=1, kv_heads=8, fill=1)


@pytest.mark.parametrize("seed", seeds(20, 200))
def test_every_vector_reads_every_token_of_its_pieces_once(seed: int) -> None:
    rng = random.Random(seed)
    rows, group = rng.randint(1, 12), rng.choice([1, 2, 3, 8])
    pieces = [Piece(0, 0, rng.randint(1, 50), tuple(range(rows)))]
    for _ in range(rng.randint(0, 6)):
        some = tuple(sorted(rng.sample(range(rows), rng.randint(1, rows))))
        pieces.append(Piece(rng.randrange(3), rng.randrange(500), rng.randint(1, 3000), some))
    plan = plan_of(
        pieces, [SLAB] * 3, rows, group, rng.choice([1, 2, 8]), rng.choice([1, 8, 100, 600])
    )
    places = np.array(plan.places)
    owners = {p: v for v in range(rows * group) for p in places[places[v] : places[v + 1]].tolist()}
    read: dict[int, list[tuple[int, int]]] = {v: [] for v in range(rows * group)}
    before = 0
    for launch in plan.launches(2):
        work = np.array(launch.work)
        for number in range(launch.items):
            source, _, _, first, count, at, first_vector, vectors, mask, _, place, _ = work[
                number * ITEM_INTS :
            ][:ITEM_INTS].tolist()
            assert mask == -1
            assert vectors <= SIMDGROUPS * plan.queries
            for i in range(vectors):
                vector = (
                    int(work[at + (first_vector + i) // group]) * group + (first_vector + i) % group
                )
                assert owners.pop(before + place + i) == vector
                read[vector] += [
                    (source + launch.sources.start, token) for token in range(first, first + count)
                ]
        before += launch.places
    assert owners == {}
    for vector, tokens in read.items():
        needed = [
            (p.source, p.start + i)
            for p in pieces
            if vector // group in p.rows
            for i in range(p.count)
        ]
        assert sorted(tokens) == sorted(needed)


def test_arrays_are_of_int32() -> None:
    plan = alone(300, 400)
    assert {plan.places.dtype, plan.launches(1)[0].work.dtype} == {mx.int32}
