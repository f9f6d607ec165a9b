"""A turn that does not end is noticed; one that does, or that is slow by nature, is not."""

from __future__ import annotations

import signal

import pytest
from ranks.rings import ring

from mlx_blockpool.errors import GroupLostError
from mlx_blockpool.ranks.watchdog import TurnWatchdog


class Watched:
    """A watchdog over a clock that stands still, and what it has reported."""

    def __init__(self) -> None:
        self.now = 0.0
        self.errors: list[str] = []
        self.watchdog = TurnWatchdog(
            20, lambda error: self.errors.append(str(error)), clock=lambda: self.now
        )

    def looks_at(self, now: float) -> bool:
        self.now = now
        return self.watchdog.check_turn()


def test_a_late_turn_is_reported_with_what_it_did() -> None:
    watched = Watched()
    watched.watchdog.begin("a step")
    assert [watched.looks_at(now) for now in (0, 20, 20.5)] == [False, False, True]
    assert watched.errors == [
        "A rank was lost (a step has taken more than 20 seconds). The server starts again; send "
        "the request again."
    ]


def test_each_part_of_a_turn_has_its_own_time() -> None:
    watched = Watched()
    watched.watchdog.begin("an exchange")
    watched.now = 15
    watched.watchdog.begin("a load", 600)
    assert not watched.looks_at(600)
    watched.watchdog.begin("a step")
    assert not watched.looks_at(620)
    assert watched.looks_at(621)


def test_nothing_is_awaited_between_turns() -> None:
    watched = Watched()
    watched.watchdog.begin("a step")
    assert not watched.looks_at(10)
    watched.watchdog.rest()
    assert not watched.looks_at(1000)
    assert watched.errors == []


TURNS = """
import mlx.core as mx
from mlx_blockpool.ranks.group import ranks_of
from mlx_blockpool.ranks.head import Head
from mlx_blockpool.ranks.watchdog import TurnWatchdog
ranks = ranks_of(mx.distributed.init(strict=True, backend="ring"), "tensor")

def lost(error):
    os.write(2, f"{error}\\n".encode())
    os._exit(75)

watchdog = TurnWatchdog(1.5, lost)
watchdog.start()
while True:
    watchdog.begin("an exchange")
    ranks.exchange(Head())
    watchdog.rest()
    os.write(2, b"a turn\\n")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_whose_peer_is_stopped_ends(stopped: int) -> None:
    with ring(TURNS) as ranks:
        ranks[stopped].read_until("a turn")
        ranks[stopped].send_signal(signal.SIGSTOP)
        ranks[1 - stopped].read_until("an exchange has taken more than 1.5 seconds")
        assert ranks[1 - stopped].wait(30) == 75


def test_the_error_is_one_that_clients_may_try_again() -> None:
    assert GroupLostError().rank is None
    assert (
        str(GroupLostError(1))
        == "Rank 1 was lost. The server starts again; send the request again."
    )
