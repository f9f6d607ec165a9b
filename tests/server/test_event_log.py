"""The log of events: any number of readers, each at its own speed, and what each may see."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_blockpool.hashing import encode
from mlx_blockpool.prefix.changes import DISK, MEMORY, BlocksRemoved, BlocksStored
from mlx_blockpool.prefix.salts import SHARED, salt_of
from mlx_blockpool.prefix.trie import Node
from mlx_blockpool.server.live import snapshot
from mlx_blockpool.server.live.events import ModelLoaded, RequestBegun, RequestProgress, Sight, SwappedOut, Who, who_of
from mlx_blockpool.server.live.log import TAKEN, EventLog, Reader
from mlx_blockpool.server.live.snapshot import Walk
from mlx_blockpool.server.live.watch import RequestWatch
from mlx_blockpool.server.request import RequestOptions

WHO = Who("req_1", "ann", None)


def progress(number: int) -> RequestProgress:
    return RequestProgress(WHO, number, 1000)


def numbers(reader: Reader) -> list[int]:
    """What a reader takes at once: the `done` of each event, and the lost ones as one negative number."""
    lost, events = reader.take()
    done = [event.what.done for event in events if isinstance(event.what, RequestProgress)]
    return [*([-lost] if lost else []), *done]


def test_readers_take_the_events_since_they_came_in_order() -> None:
    log = EventLog()
    early = Reader(log)
    log.append("m", progress(1))
    late = Reader(log)
    log.append("m", progress(2))
    assert (numbers(early), numbers(late), numbers(late)) == ([1, 2], [2], [])


def test_a_slow_reader_is_told_how_many_it_lost_and_nobody_else_is_held_up() -> None:
    log = EventLog(kept=10)
    slow, quick = Reader(log), Reader(log)
    for number in range(25):
        log.append("m", progress(number))
        assert numbers(quick) == [number]
    assert numbers(slow) == [-15, *range(15, 25)]
    assert numbers(slow) == []


def test_a_reader_takes_a_bounded_part_at_a_time() -> None:
    log = EventLog()
    reader = Reader(log)
    for number in range(TAKEN + 5):
        log.append("m", progress(number))
    assert (len(numbers(reader)), len(numbers(reader))) == (TAKEN, 5)


def test_a_reader_that_comes_back_goes_on_behind_its_last_event() -> None:
    log = EventLog(kept=10)
    first = log.end
    for number in range(8):
        log.append("m", progress(number))
    assert numbers(Reader(log, after=first + 4)) == [5, 6, 7]
    assert numbers(Reader(log, after=first + 7)) == []


@pytest.mark.parametrize("foreign", [0, 17, 1 << 60])
def test_a_number_of_another_process_is_a_gap(foreign: int) -> None:
    log = EventLog(kept=10)
    log.append("m", progress(1))
    assert numbers(Reader(log, after=foreign)) == [-1, 1]


def test_numbers_do_not_come_again_after_a_restart() -> None:
    before = EventLog()
    for number in range(100):
        before.append("m", progress(number))
    threading.Event().wait(0.001)
    assert EventLog().first > before.end


def test_waiting_readers_wake_up_for_an_event_and_at_the_end() -> None:
    log, found = EventLog(), list[bool]()

    def wait(reader: Reader) -> None:
        found.append(reader.wait(60))

    for act in (lambda: log.append("m", progress(1)), log.close):
        threads = [threading.Thread(target=wait, args=[Reader(log)]) for _ in range(5)]
        for thread in threads:
            thread.start()
        act()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert len(found) == 10
    assert found[5:] == [False] * 5


def test_many_writers_and_readers_keep_one_order() -> None:
    log = EventLog(kept=1 << 12)
    readers = [Reader(log) for _ in range(3)]
    start = log.end

    def write() -> None:
        for number in range(500):
            log.append("m", progress(number))

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert log.end == start + 2000
    taken: list[list[Any]] = [[], [], []]
    for events, reader in zip(taken, readers, strict=True):
        while (part := reader.take()) != (0, []):
            events += part[1]
    assert taken[0] == taken[1] == taken[2]
    assert [event.number for event in taken[0]] == list(range(start, start + 2000))


# -- what a reader may see ---------------------------------------------------------------------------------------------


def blocks(salt: bytes) -> BlocksStored:
    return BlocksStored(b"\x01", (b"\x02", b"\x03"), (encode([5] * 256), encode([6] * 9)), ((1,), (2,)), MEMORY, salt)


def test_blocks_are_shown_without_their_tokens() -> None:
    assert Sight().data(blocks(SHARED)) == {
        "hashes": ["02", "03"], "parent": "01", "tokens": 265, "blocks": [[1], [2]], "tier": "memory",
    }  # fmt: skip
    assert Sight().data(BlocksRemoved((b"\x02",), DISK, SHARED)) == {"hashes": ["02"], "tier": "disk"}


def test_private_blocks_are_shown_to_their_own_key() -> None:
    for change in (blocks(salt_of("ann")), blocks(salt_of("ann", "of one request"))):
        assert Sight("ann", is_private=True).data(change)
        assert Sight("bob", is_private=True).data(change) is None
    assert Sight("bob", is_private=True).data(blocks(SHARED)) is None
    assert Sight("bob").data(blocks(SHARED))


def test_requests_are_shown_to_the_name_of_their_key() -> None:
    options = RequestOptions(id="req_1", agent="ann\x1fwork", owner="ann")
    own = RequestBegun(who_of(options), 7)
    assert Sight("ann").data(own) == {"id": "req_1", "agent": "work", "prompt_tokens": 7}
    assert Sight("bob").data(own) is None
    assert Sight().data(own) is None


def test_a_request_without_an_agent_shows_nothing_that_gives_access_to_its_text() -> None:
    options = RequestOptions(id="req_secret", conversation="content-0123")
    watch, shown = EventLog(), Sight().data(SwappedOut(who_of(options)))
    assert shown is not None
    assert set(shown) == {"id"}
    assert "secret" not in str(shown)
    assert Sight().data(SwappedOut(who_of(options))) == shown
    assert Sight().data(SwappedOut(who_of(RequestOptions()))) != shown
    named = RequestOptions(id="req_2", agent="ann")
    assert Sight().data(RequestBegun(who_of(named), 3)) == {"id": "req_2", "agent": "ann", "prompt_tokens": 3}
    assert Sight().data(ModelLoaded()) == {}
    assert watch.end == watch.first


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_request_ends_once_and_its_progress_is_told_now_and_then() -> None:
    log = EventLog()
    reader = Reader(log)
    watch = RequestWatch(log.of("m"), RequestOptions(id="req_1", agent="ann"), 1000)
    watch.started(200, None)
    for done in range(300, 1001, 100):
        watch.progress(done, 1000)
    watch.token()
    watch.token()
    watch.ended("stop")
    watch.ended("error")
    shown = [(type(event.what).__name__, Sight().data(event.what)) for event in reader.take()[1]]
    ended = shown.pop()[1]
    assert shown == [
        ("RequestBegun", {"id": "req_1", "agent": "ann", "prompt_tokens": 1000}),
        ("RequestStarted", {"id": "req_1", "cached_tokens": 200}),
        ("RequestProgress", {"id": "req_1", "done": 1000, "total": 1000}),
    ]
    assert ended is not None
    assert 0 <= ended.pop("ttft") <= ended.pop("seconds")
    counts = {"prompt_tokens": 1000, "cached_tokens": 200, "completion_tokens": 2, "forced_tokens": 0}
    assert ended == {"id": "req_1", "reason": "stop", **counts}


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_a_walk_passes_nodes_that_have_left_the_trie_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "AT_ONCE", 1)
    nodes = [Node(None, 0, b"", bytes([number])) for number in range(4)]
    nodes[2].removed = nodes[3].removed = True
    root = Node(None, 0, b"", b"root", children=nodes)
    for node in nodes:
        node.parent = root
    nodes[1].residency.in_memory = False
    walk, found = Walk(SimpleNamespace(trie=SimpleNamespace(roots=lambda: [root]))), list[bytes]()  # type: ignore[arg-type]
    while not walk.is_over:
        found += [digest for change in walk.next() for digest in change.hashes]
    assert found == [bytes([0])]
