"""Exchanges, votes and draws: on threads, on a ring, and alone."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import mlx.core as mx
import pytest
from ranks.rings import on_ring
from ranks.threads import ThreadRanks, on_ranks

from mlx_blockpool.errors import GroupLostError, UnavailableError
from mlx_blockpool.ranks.group import ALONE, Joined, Ranks, Sent, ranks_of
from mlx_blockpool.ranks.head import Act, Head

COLLECTIVES = ("exchange", "least", "draw")
MAILS = (b"", b"x", bytes(range(256)) * 4096)


def rounds(ranks: Ranks) -> list[object]:
    """What a rank sees of exchanges with mail of several lengths, of a vote and of a draw."""
    head = Head(act=Act.STEP, now_us=10**12 + ranks.rank, fingerprint=2**32 - 1)
    seen: list[object] = [
        ranks.exchange(head, MAILS[(ranks.rank + i) % 3][: i * 400_000]) for i in range(4)
    ]
    seen.append(ranks.least([2**40 + ranks.rank, -ranks.rank, 7]))
    seen.append(ranks.least([]))
    drawn = ranks.draw(mx.array([5, 2**31, 0]) if ranks.rank == 0 else None, 3, mx.ones((3, 4)))
    return [*seen, drawn.tolist()]


def expected(size: int) -> list[object]:
    mails = [[MAILS[(rank + i) % 3][: i * 400_000] for rank in range(size)] for i in range(4)]
    heads = [
        [
            Sent(Head(act=Act.STEP, now_us=10**12 + r, fingerprint=2**32 - 1, mail_bytes=len(m)), m)
            for r, m in enumerate(each)
        ]
        for each in mails
    ]
    return [*heads, [2**40, 1 - size, 7], [], [5, 2**31, 0]]


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_see_the_same(size: int) -> None:
    assert on_ranks(size, rounds) == [expected(size)] * size


def test_one_rank_sees_itself() -> None:
    assert rounds(ALONE) == [*expected(1)]


def test_a_group_of_one_is_no_group() -> None:
    class One:
        def size(self) -> int:
            return 1

    assert ranks_of(One(), "tensor") is ALONE


def test_a_draw_alone_is_the_array_itself() -> None:
    tokens = mx.array([1, 2])
    assert ALONE.draw(tokens, 2, tokens) is tokens


def test_a_rank_that_has_left_is_an_error_for_all() -> None:
    def act(ranks: ThreadRanks) -> list[str]:
        ranks.exchange(Head())
        if ranks.rank == 1:
            ranks.leave()
        return [name for name in COLLECTIVES if is_refused(ranks, name)]

    assert on_ranks(2, act) == [list(COLLECTIVES)] * 2


def test_a_rank_that_has_left_names_no_other_rank_as_lost() -> None:
    ranks = Joined(SimpleNamespace(rank=lambda: 0, size=lambda: 2), "tensor")
    ranks.leave()
    with pytest.raises(GroupLostError, match=r"^A rank was lost"):
        ranks.least([1])


def is_refused(ranks: Ranks, name: str) -> bool:
    """Whether a collective raises what clients get as an answer."""
    try:
        {
            "exchange": lambda: ranks.exchange(Head()),
            "least": lambda: ranks.least([1]),
            "draw": lambda: ranks.draw(mx.array([1]) if ranks.rank == 0 else None, 1, mx.zeros(1)),
        }[name]()
    except GroupLostError as error:
        return (
            isinstance(error, UnavailableError)
            and ranks.is_lost
            and "send the request again" in str(error)
        )
    return False


def test_ranks_in_different_collectives_are_found() -> None:
    def act(ranks: ThreadRanks) -> None:
        _ = ranks.least([1]) if ranks.rank else ranks.exchange(Head())

    with pytest.raises(
        AssertionError, match="different collectives: \\['exchange', 'least of 1'\\]"
    ):
        on_ranks(2, act)


def test_a_rank_that_does_not_come_is_found() -> None:
    def act(ranks: ThreadRanks) -> None:
        if ranks.rank == 0:
            ranks.least([1])

    with pytest.raises(GroupLostError, match="rank 0 waited in least of 1"):
        on_ranks(2, act, seconds=0.05)


def see_the_other_die(ranks: Ranks) -> list[str]:
    """What rank 0 sees once rank 1 has ended between two exchanges."""
    ranks.exchange(Head())
    if ranks.rank == 1:
        os._exit(9)
    try:
        while True:
            ranks.exchange(Head())
    except GroupLostError as error:
        return [str(error), *(name for name in COLLECTIVES if is_refused(ranks, name))]


@pytest.mark.thorough
def test_the_loss_of_a_rank_is_an_error_and_nothing_is_sent_after_it() -> None:
    seen = on_ring(see_the_other_die, ends=[0, 9])[0]
    assert re.fullmatch(
        r"Rank 1 was lost \(.*connection to a peer was lost.*\)\. .*; send the request again\.",
        seen[0],
    )
    assert seen[1:] == list(COLLECTIVES)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3])
def test_the_ranks_of_a_ring_see_the_same(size: int) -> None:
    assert on_ring(rounds, size) == [expected(size)] * size
