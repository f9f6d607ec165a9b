"""The log of events: any number of readers, each at its own speed, and what each may see."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_blockpool.prefix.changes import DISK, MEMORY, AllCleared, BlocksRemoved, BlocksStored
from mlx_blockpool.prefix.salts import SHARED, salt_of
from mlx_blockpool.prefix.trie import Node
from mlx_blockpool.server.request import RequestOptions
from mlx_blockpool.server.watch import snapshot
from mlx_blockpool.server.watch.event_log import (
    BLOCK_KINDS,
    TAKEN,
    Event,
    EventLog,
    EventReader,
    EventView,
    Who,
    who_of,
)
from mlx_blockpool.server.watch.request_watch import RequestWatch
from mlx_blockpool.server.watch.snapshot import read_blocks
from mlx_blockpool.store.hashing import encode

WHO = Who("req_1", "ann", None)


def append(log: EventLog, number: int) -> None:
    log.append("m", "request_progress", {"done": number, "total": 1000}, WHO)


def numbers(reader: EventReader) -> list[int]:
    """What a reader takes at once: the `done` of each event, and the lost ones as one negative
    number.
    """
    lost, events = reader.take()
    done = [event.what["done"] for event in events if isinstance(event.what, dict)]
    return [*([-lost] if lost else []), *done]


def test_readers_take_the_events_since_they_came_in_order() -> None:
    log = EventLog()
    early = EventReader(log)
    append(log, 1)
    late = EventReader(log)
    append(log, 2)
    assert (numbers(early), numbers(late), numbers(late)) == ([1, 2], [2], [])


def test_a_slow_reader_is_told_how_many_it_lost_and_nobody_else_is_held_up() -> None:
    log = EventLog(kept=10)
    slow, quick = EventReader(log), EventReader(log)
    for number in range(25):
        append(log, number)
        assert numbers(quick) == [number]
    assert numbers(slow) == [-15, *range(15, 25)]
    assert numbers(slow) == []


def test_a_reader_takes_a_bounded_part_at_a_time() -> None:
    log = EventLog()
    reader = EventReader(log)
    for number in range(TAKEN + 5):
        append(log, number)
    assert (len(numbers(reader)), len(numbers(reader))) == (TAKEN, 5)


def test_a_reader_that_comes_back_goes_on_behind_its_last_event() -> None:
    log = EventLog(kept=10)
    first = log.end
    for number in range(8):
        append(log, number)
    assert numbers(EventReader(log, after=first + 4)) == [5, 6, 7]
    assert numbers(EventReader(log, after=first + 7)) == []


@pytest.mark.parametrize("foreign", [0, 17, 1 << 60])
def test_a_number_of_another_process_is_a_gap(foreign: int) -> None:
    log = EventLog(kept=10)
    append(log, 1)
    assert numbers(EventReader(log, after=foreign)) == [-1, 1]


def test_numbers_do_not_come_again_after_a_restart() -> None:
    before = EventLog()
    for number in range(100):
        append(before, number)
    threading.Event().wait(0.001)
    assert EventLog().first > before.end


def test_waiting_readers_wake_up_for_an_event_and_at_the_end() -> None:
    log, found = EventLog(), list[bool]()

    def wait(reader: EventReader) -> None:
        found.append(reader.wait(60))

    for act in (lambda: append(log, 1), log.close):
        threads = [threading.Thread(target=wait, args=[EventReader(log)]) for _ in range(5)]
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
    readers = [EventReader(log) for _ in range(3)]
    start = log.end

    def write() -> None:
        for number in range(500):
            append(log, number)

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


# -- what a reader may see -------------------------------------------------------------------------


def blocks(salt: bytes) -> BlocksStored:
    return BlocksStored(
        b"\x01",
        (b"\x02", b"\x03"),
        (encode([5] * 256), encode([6] * 9)),
        ((1,), (2,)),
        MEMORY,
        salt,
    )


def shown(view: EventView, what: Any, who: Who | None = None) -> Any:
    """The fields that a reader sees of an event; None for one that it may not see."""
    kind = BLOCK_KINDS.get(type(what), "swapped_out")
    packet = view.packet(Event(1, 0.0, "m", kind, what, who)).decode()
    if not packet:
        return None
    data = json.loads(packet.splitlines()[2].removeprefix("data: "))
    assert [data.pop(name) for name in ("kind", "time", "model")] == [kind, 0.0, "m"]
    return data


def test_blocks_are_shown_without_their_tokens() -> None:
    assert shown(EventView(), blocks(SHARED)) == {
        "hashes": ["02", "03"],
        "parent": "01",
        "tokens": 265,
        "blocks": [[1], [2]],
        "tier": "memory",
    }
    assert shown(EventView(), BlocksRemoved((b"\x02",), DISK, SHARED)) == {
        "hashes": ["02"],
        "tier": "disk",
    }
    assert shown(EventView("ann", is_private=True), AllCleared()) == {}


def test_private_blocks_are_shown_to_their_own_key() -> None:
    for change in (blocks(salt_of("ann")), blocks(salt_of("ann", "of one request"))):
        assert shown(EventView("ann", is_private=True), change)
        assert shown(EventView("bob", is_private=True), change) is None
    assert shown(EventView("bob", is_private=True), blocks(SHARED)) is None
    assert shown(EventView("bob"), blocks(SHARED))


def test_requests_are_shown_to_the_name_of_their_key() -> None:
    who = who_of(RequestOptions(id="req_1", agent="ann\x1fwork", owner="ann"))
    assert who.agent == "work"
    assert shown(EventView("ann"), {"total": 7}, who) == {"id": "req_1", "total": 7}
    assert shown(EventView("bob"), {"total": 7}, who) is None
    assert shown(EventView(), {"total": 7}, who) is None


def test_a_request_without_an_agent_shows_nothing_that_gives_access_to_its_text() -> None:
    who = who_of(RequestOptions(id="req_secret", conversation="content-0123"))
    found = shown(EventView(), {}, who)
    assert set(found) == {"id"}
    assert "secret" not in str((found, who))
    assert (
        who_of(RequestOptions(id="req_secret", conversation="content-0123"))
        == who
        != who_of(RequestOptions())
    )
    assert who_of(RequestOptions(id="req_2", agent="ann")) == Who("req_2", "ann", None)
    assert shown(EventView(), {}) == {}


# -- requests --------------------------------------------------------------------------------------


def test_a_request_ends_once_and_its_progress_is_told_now_and_then() -> None:
    log = EventLog()
    reader = EventReader(log)
    watch = RequestWatch(log.of_model("m"), RequestOptions(id="req_1", agent="ann"), 1000)
    watch.started(200, None)
    for done in range(300, 1001, 100):
        watch.progress(done, 1000)
    watch.token()
    watch.token()
    watch.ended("stop")
    watch.ended("error")
    found = [(event.kind, shown(EventView(), event.what, event.who)) for event in reader.take()[1]]
    last = found.pop()
    assert found == [
        ("request_begun", {"id": "req_1", "agent": "ann", "prompt_tokens": 1000}),
        ("request_started", {"id": "req_1", "cached_tokens": 200}),
        ("request_progress", {"id": "req_1", "done": 1000, "total": 1000}),
    ]
    assert last[0] == "request_ended"
    assert 0 <= last[1].pop("ttft") <= last[1].pop("seconds")
    counts = {
        "prompt_tokens": 1000,
        "cached_tokens": 200,
        "completion_tokens": 2,
        "forced_tokens": 0,
    }
    assert last[1] == {"id": "req_1", "reason": "stop", **counts}


# -- snapshots -------------------------------------------------------------------------------------


def test_a_walk_passes_nodes_that_have_left_the_trie_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot, "BLOCKS_AT_ONCE", 1)
    nodes = [Node(None, 0, b"", bytes([number])) for number in range(4)]
    nodes[2].removed = nodes[3].removed = True
    root = Node(None, 0, b"", b"root", children=nodes)
    for node in nodes:
        node.parent = root
    nodes[1].in_memory = False
    served: Any = SimpleNamespace(
        prefix=SimpleNamespace(index=SimpleNamespace(trie=SimpleNamespace(roots=lambda: [root])))
    )
    found: list[BlocksStored] = []
    for _ in read_blocks(served, found):
        pass
    assert [digest for change in found for digest in change.hashes] == [bytes([0])]
