"""Naps that rank 0 ends, over real sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ranks.threads import ThreadRanks, on_ranks

from mlx_blockpool.ranks import wakes
from mlx_blockpool.ranks.wakes import Wakes, addresses_of_rank_0, connect

LONG = 3600.0


def ring_of(folder: Path, *hosts: str) -> Mapping[str, str]:
    """The environment of a ring whose rank 0 has these addresses."""
    file = folder / "hosts.json"
    file.write_text(json.dumps([[f"{host}:32323" for host in hosts], ["127.0.0.1:32324"]]))
    return {"MLX_HOSTFILE": str(file)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("hosts", [("127.0.0.1",), ("192.0.2.1", "127.0.0.1")])
def test_rank_0_ends_the_naps_of_all_others(
    size: int, hosts: tuple[str, ...], tmp_path: Path
) -> None:
    """Also where it has several addresses of which not every rank reaches each."""
    environment = ring_of(tmp_path, *hosts)

    def act(ranks: ThreadRanks) -> bool:
        own = connect(ranks, environment)
        for _ in range(3):
            if ranks.rank:
                own.nap(LONG)
            else:
                own.wake()
        # Nobody has closed its end before.
        ranks.least([0])
        are_connected = own.are_connected
        own.close()
        return are_connected

    assert on_ranks(size, act) == [True] * size


@pytest.fixture
def pair() -> Any:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_a_wake_that_comes_before_its_nap_ends_it_and_no_other(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = Wakes([pair[0]]), Wakes([pair[1]])
    monkeypatch.setattr(wakes, "LATE_SECONDS", 0.001)
    own.wake()
    own.wake()
    other.nap(LONG)
    other.nap(LONG)
    # Rank 0 is late, and ends this nap when it has ended by time.
    other.nap(0)
    own.wake()
    woken = threading.Event()
    napping = threading.Thread(target=lambda: (other.nap(LONG), woken.set()), daemon=True)
    napping.start()
    while other._num_bytes < 3:
        threading.Event().wait(0.001)
    assert not woken.is_set(), "the late wake has ended the next nap"
    own.wake()
    napping.join(30)
    assert woken.is_set()


def test_ranks_that_have_lost_their_connection_do_not_sleep_long(pair: Any) -> None:
    """Rank 0 has ended, or the exchange that follows finds it."""
    own, other = Wakes([pair[0]]), Wakes([pair[1]])
    own.close()
    other.nap(LONG)
    assert not other.are_connected
    other.close()


def test_where_one_rank_cannot_be_woken_any_more_no_rank_takes_long_naps() -> None:
    first, second = socket.socketpair(), socket.socketpair()
    own, other = Wakes([first[0], second[0]]), Wakes([second[1]])
    first[1].close()
    own.wake()
    assert not own.are_connected
    other.nap(LONG)
    assert not other.are_connected


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_cannot_connect_leaves_all_without(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakes, "CONNECT_SECONDS", 0.1)
    known, environment = ring_of(tmp_path, "127.0.0.1"), {0: {}, 1: {}, 2: {}}
    environment = {each: {} if each == rank else dict(known) for each in environment}
    assert (
        on_ranks(3, lambda ranks: connect(ranks, environment[ranks.rank]).are_connected)
        == [False] * 3
    )


def test_a_stranger_ends_no_naps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reach = wakes._reach

    def come_first(addresses: list[str], port: bytes, secret: bytes) -> list[socket.socket]:
        reach(addresses, port, bytes(len(secret)))[0].close()
        return reach(addresses, port, secret)

    monkeypatch.setattr(wakes, "_reach", come_first)
    environment = ring_of(tmp_path, "127.0.0.1")

    def act(ranks: ThreadRanks) -> bool:
        own = connect(ranks, environment)
        if ranks.rank:
            own.nap(LONG)
        else:
            own.wake()
        return own.are_connected

    assert on_ranks(2, act) == [True, True]


@pytest.mark.parametrize(
    ("content", "environment", "expected"),
    [
        ([["10.0.0.1:5", "10.0.1.1:6"], ["10.0.0.2:5"]], {}, ["10.0.0.1", "10.0.1.1"]),
        ([["[::1]:5"]], {}, ["::1"]),
        ([], {}, []),
        ({"hosts": 3}, {}, []),
        (None, {"MLX_JACCL_COORDINATOR": "10.0.0.1:32323"}, ["10.0.0.1"]),
        (None, {}, []),
    ],
)
def test_the_address_of_rank_0_is_the_one_that_mlx_has(
    content: Any, environment: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps(content))
    given = {} if content is None else {"MLX_HOSTFILE": str(file)}
    assert addresses_of_rank_0({**environment, **given}) == expected
