"""GET /v1/cache/events: what a client of the stream gets to know, and that it makes a replica of
the trie.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from prefix.replica import Contents, contents_of

from mlx_blockpool.config import AccessConfig
from mlx_blockpool.server import jobs
from mlx_blockpool.server.access import EventReaders, ReaderPlace, reader_client
from mlx_blockpool.server.jobs import between_steps
from mlx_blockpool.server.watch import event_log, snapshot
from mlx_blockpool.server.watch.snapshot import BlocksSnapshots
from mlx_blockpool.tier.restore import Rates
from server.serving import Client, at_once, blockpool_server, with_access

pytestmark = pytest.mark.server(
    "--pool-bytes 2MB --prefill-step-size 256", model="llama", is_stored=True
)

PATH = "/v1/cache/events"
LONG = "There is a long story about a block. " * 16


class Stream:
    """The events of one connection."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.response = response

    def next(self) -> tuple[int, str, dict[str, Any]] | None:
        """The number, kind and data of the next event; None at the end of the stream."""
        fields: dict[str, str] = {}
        while line := self.response.readline().decode():
            name, _, value = line.rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "event" in fields:
                data = json.loads(fields["data"])
                assert data["kind"] == fields["event"]
                return int(fields["id"]), fields["event"], data
            else:
                fields = {}
        return None

    def until(self, kind: str, **wanted: Any) -> list[tuple[int, str, dict[str, Any]]]:
        """The events up to one of this kind with these fields."""
        found = []
        while (event := self.next()) is not None:
            found.append(event)
            if event[1] == kind and wanted.items() <= event[2].items():
                return found
        raise AssertionError(f"the stream ended without {kind} {wanted}")


@contextmanager
def listening(server: Client, query: str = "", **headers: str) -> Iterator[Stream]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(
            "GET",
            PATH + query,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )
        response = connection.getresponse()
        assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream"), (
            response.read()
        )
        assert response.readline().startswith(b":")
        yield Stream(response)
    finally:
        connection.close()


def chat(server: Client, text: str, agent: str, **options: Any) -> None:
    server.chat([{"role": "user", "content": text}], user=agent, max_tokens=3, **options)


def apply(contents: Contents, event: tuple[int, str, dict[str, Any]]) -> None:
    _, kind, data = event
    if kind == "all_cleared":
        for tier in contents.values():
            tier.clear()
    elif kind in ("blocks_stored", "blocks_removed"):
        hashes = set(map(bytes.fromhex, data["hashes"]))
        (
            contents[data["tier"]].update
            if kind == "blocks_stored"
            else contents[data["tier"]].difference_update
        )(hashes)


def test_the_life_of_a_request(server: Client) -> None:
    with listening(server) as stream:
        chat(server, f"{LONG} One.", "life")
        found = stream.until("request_ended")
    name = server.generator.registry.catalog.id_of(server.generator.model_provider.model_key[0])
    requests = [(kind, data) for _, kind, data in found if kind.startswith("request")]
    assert [kind for kind, _ in requests][:2] == ["request_begun", "request_started"]
    assert {data["model"] for _, data in requests} == {name}
    assert len({data["id"] for _, data in requests}) == 1
    begun, started, ended = requests[0][1], requests[1][1], requests[-1][1]
    assert (begun["agent"], started["cached_tokens"]) == ("life", 0)
    assert ended["prompt_tokens"] == begun["prompt_tokens"] > 500
    assert (ended["reason"], ended["completion_tokens"]) == ("length", 3)
    assert 0 < ended["ttft"] <= ended["seconds"]
    assert begun["prompt_tokens"] == next(
        d["total"] for kind, d in requests if kind == "request_progress"
    )
    stored = [
        data for _, kind, data in found if kind == "blocks_stored" and data["tier"] == "memory"
    ]
    assert sum(data["tokens"] for data in stored) >= 512
    numbers = [number for number, _, _ in found]
    assert numbers == sorted(set(numbers))


def work(server: Client) -> None:
    """Requests, of whose blocks the older half leaves the memory."""
    at_once(
        [
            lambda n=n: chat(server, f"{n % 3} {LONG * (1 + n % 2)}", f"agent {n % 4}")
            for n in range(6)
        ]
    )
    prefix = only_model(server).prefix
    between_steps(server.generator, lambda: prefix.trim_to(prefix.nbytes // 2))


def only_model(server: Client) -> Any:
    [served] = server.generator.registry.loaded.values()
    return served


def check_replica(server: Client, stream: Stream) -> set[str]:
    """A client that applies the events until now has what the trie has. Returns their kinds."""
    generator, index = server.generator, only_model(server).prefix.index
    last, expected = between_steps(
        generator, lambda: (generator.registry.log.end - 1, contents_of(index))
    )
    contents, kinds, number = {"memory": set[bytes](), "disk": set[bytes]()}, set[str](), 0
    while number < last:
        event = stream.next()
        assert event is not None
        number = event[0]
        kinds.add(event[1])
        apply(contents, event)
    assert contents == expected
    assert contents["memory"]
    return kinds


def test_a_client_that_applies_all_events_has_what_the_trie_has(server: Client) -> None:
    with listening(server, "?snapshot=1") as stream:
        work(server)
        assert {"blocks_stored", "blocks_removed", "request_ended"} <= check_replica(server, stream)


def test_a_client_that_has_lost_events_begins_again_with_a_snapshot(server: Client) -> None:
    with listening(server, Last_Event_ID="17") as stream:
        event = stream.next()
    assert event is not None
    assert event[1] == "gap"
    assert event[2]["lost"] >= 1
    with listening(server, "?snapshot=1", Last_Event_ID="17") as stream:
        first = stream.next()
        work(server)
        check_replica(server, stream)
    assert first is not None
    assert (first[1], first[2]["model"]) == ("all_cleared", None)


def test_a_client_that_comes_back_goes_on_behind_its_last_event(server: Client) -> None:
    with listening(server) as stream:
        chat(server, "Once.", "back")
        [*_, last] = stream.until("request_ended")
        chat(server, "Twice.", "back")
        expected = stream.until("request_ended")
    with listening(server, Last_Event_ID=str(last[0])) as stream:
        assert stream.until("request_ended") == expected


def test_a_snapshot_of_many_parts(server: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "BLOCKS_AT_ONCE", 2)
    monkeypatch.setattr(jobs, "SLICE_SECONDS", -1.0)
    monkeypatch.setattr(event_log, "LONGEST", 3)
    monkeypatch.setattr(server.generator, "snapshots", BlocksSnapshots(server.generator))
    work(server)
    with listening(server, "?snapshot=1") as stream:
        chat(server, "One more.", "more")
        check_replica(server, stream)


def test_clients_that_begin_at_the_same_time_share_a_snapshot(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    stored_blocks, snapshots = snapshot.stored_blocks, BlocksSnapshots(server.generator)
    monkeypatch.setattr(
        snapshot,
        "stored_blocks",
        lambda generator: stored_blocks(taken.append(generator) or generator),
    )
    monkeypatch.setattr(snapshot, "LEAST_SECONDS", 1000.0)
    monkeypatch.setattr(server.generator, "snapshots", snapshots)
    at_once([lambda: read_all(server) for _ in range(4)])
    chat(server, f"{LONG} Since.", "since")
    expected = between_steps(server.generator, lambda: contents_of(only_model(server).prefix.index))
    with listening(server, "?snapshot=1") as stream:
        chat(server, "Last.", "last")
        found = stream.until("request_begun", agent="last")
    contents: Contents = {"memory": set(), "disk": set()}
    for event in found:
        apply(contents, event)
    assert len(taken) == 1
    assert contents["memory"] == expected["memory"], "the events since the snapshot complete it"
    assert [kind for _, kind, _ in found if kind.startswith("request")] == ["request_begun"], (
        "earlier requests are not repeated"
    )


def read_all(server: Client) -> None:
    with listening(server, "?snapshot=1&follow=0") as stream:
        while stream.next() is not None:
            pass


def test_a_reader_that_does_not_follow_ends_while_events_keep_coming(server: Client) -> None:
    log, has_ended = server.generator.registry.log, threading.Event()

    def append() -> None:
        while not has_ended.wait(0):
            log.append("busy", "model_loading", {})

    thread = threading.Thread(target=append)
    thread.start()
    try:
        read_all(server)
    finally:
        has_ended.set()
        thread.join()


def test_many_clients_read_the_same(server: Client) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(listening(server)) for _ in range(8)]
        chat(server, f"{LONG} Many.", "many")
        found = [stream.until("request_ended") for stream in streams]
    assert all(events == found[0] for events in found)


# -- places of readers -----------------------------------------------------------------------------


def test_as_many_clients_as_there_are_places_keep_out_the_next_one(server: Client) -> None:
    with with_access(server) as access:
        readers = access.event_readers
        places = [readers.enter(f"client {number}") for number in range(AccessConfig.event_readers)]
        status, answer = server.send(PATH)
        assert (status, "32 clients already read events" in answer["error"]) == (503, True)
        assert places[0] is not None
        readers.leave(places[0])
        with listening(server), listening(server):
            # The second one has the first one's place, and none of another client.
            assert not any(place is None or place.is_lost for place in places)


def test_one_client_cannot_take_all_places(server: Client) -> None:
    """All clients are on one machine and have no keys: the one that comes last gets in, and the
    one that came first ends.
    """
    with with_access(server, event_readers=3), ExitStack() as stack:
        streams = [stack.enter_context(listening(server)) for _ in range(3)]
        newest = stack.enter_context(listening(server))
        rest = streams[0].response.read().decode()
        assert rest.endswith(": a newer reader has this place\nretry: 30000\n\n")
        chat(server, f"{LONG} Places.", "places")
        found = [stream.until("request_ended") for stream in (*streams[1:], newest)]
        assert found[0] == found[1] == found[2]


def test_a_key_keeps_its_share_whatever_another_key_opens(server: Client) -> None:
    keys = (("ann", "key of ann"), ("bob", "key of bob"))
    with with_access(server, event_readers=4, api_keys=keys), ExitStack() as stack:

        def read(name: str) -> Stream:
            return stack.enter_context(listening(server, x_api_key=f"key of {name}"))

        anns, bobs = [read("ann") for _ in range(4)], [read("bob")]
        assert anns[0].response.read().endswith(b"retry: 30000\n\n")
        bobs.append(read("bob"))
        assert anns[1].response.read().endswith(b"retry: 30000\n\n")
        # Each has half of the places, and more readers of ann end those of ann alone.
        for number in (2, 3):
            anns.append(read("ann"))
            assert anns[number].response.read().endswith(b"retry: 30000\n\n")
        options = {"x-api-key": "key of bob"}
        status, _ = server.send(
            "/v1/completions", {"prompt": "Bob", "max_tokens": 1}, headers=options
        )
        assert status == 200
        assert [stream.until("request_ended")[-1][1] for stream in bobs] == ["request_ended"] * 2


def test_places_of_readers_are_shared_among_clients() -> None:
    readers = EventReaders(4)
    places: dict[str, list[ReaderPlace | None]] = {name: [] for name in "abcde"}

    def enter(names: str) -> list[int]:
        """Let readers enter, and return how many each client has then."""
        for name in names:
            places[name].append(readers.enter(name))
        return [
            sum(place is not None and not place.is_lost for place in own) for own in places.values()
        ]

    assert enter("aaaa") == [4, 0, 0, 0, 0]
    assert enter("aab") == [3, 1, 0, 0, 0]
    assert enter("bb") == [2, 2, 0, 0, 0], "a third one takes the place of its own client's first"
    assert enter("c") == [1, 2, 1, 0, 0]
    assert enter("d") == [1, 1, 1, 1, 0]
    assert enter("eee") == [1, 1, 1, 1, 0]
    assert enter("abcd") == [1, 1, 1, 1, 0]
    assert places["a"][-1] is not None
    # One that has lost its place gives none back.
    readers.leave(places["a"][0] or places["a"][-1])
    assert enter("e") == [1, 1, 1, 1, 0]
    readers.leave(places["a"][-1])
    assert enter("e") == [1, 1, 1, 1, 1]


def test_which_readers_are_one_client() -> None:
    own = {
        reader_client(None, address)
        for address in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1")
    }
    assert own == {"this machine"}
    assert (
        reader_client(None, "192.0.2.1")
        == reader_client(None, "::ffff:192.0.2.1")
        != reader_client(None, "192.0.2.2")
    )
    assert (
        reader_client(None, "fe80::1%eth0")
        == reader_client(None, "fe80::2")
        != reader_client(None, "2001:db8::1")
    )
    assert (
        reader_client("ann", "127.0.0.1")
        == reader_client("ann", "192.0.2.1")
        != reader_client("bob", "127.0.0.1")
    )


@pytest.mark.parametrize("given", ["x", "-1", "1.5", "9" * 30, "²"])
def test_a_bad_number_is_an_error_that_says_so(server: Client, given: str) -> None:
    status, answer = server.send(f"{PATH}?last_event_id={quote(given)}")
    assert (
        status,
        answer["error"].startswith("Last-Event-ID: Input should be the id of an event"),
    ) == (400, True)


def test_the_headers_alone(server: Client) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{PATH}", method="HEAD")
    with urllib.request.urlopen(request, timeout=30) as response:
        assert (response.headers["Content-Type"], response.read()) == ("text/event-stream", b"")


def test_clients_see_the_end_of_the_server_and_of_all_blocks(model: Path) -> None:
    with blockpool_server(model, "--pool-bytes", "2MB") as running, ExitStack() as stack:
        streams = [stack.enter_context(listening(running)) for _ in range(3)]
        chat(running, LONG, "last")
        running.generator.stop_and_join()
        for stream in streams:
            events = [stream.next()]
            while events[-1] is not None:
                events.append(stream.next())
            assert events[-2] is not None
            assert events[-2][1] == "all_cleared"


def test_models_come_and_go(server: Client) -> None:
    with listening(server) as stream:
        chat(server, "Before.", "mover")
        stream.until("request_ended")
        assert server.send("/admin/unload", {"model": "default_model"})[0] == 200
        gone = [
            kind for _, kind, _ in stream.until("model_unloaded") if not kind.startswith("blocks")
        ]
        chat(server, "After.", "mover")
        back = [kind for _, kind, _ in stream.until("request_ended")]
    assert gone == ["all_cleared", "model_unloaded"]
    come = [kind for kind in back if kind != "blocks_stored"]
    assert come[:3] == ["request_begun", "model_loading", "model_loaded"]
    assert come.index("request_started") < come.index("request_ended")
    assert "blocks_stored" in back[: back.index("model_loaded")], (
        "what is on disk is known with the model"
    )


def test_a_restore_is_told_with_its_tokens_and_bytes(server: Client) -> None:
    chat(server, f"{LONG} To be restored.", "restored")
    server.settle()
    prefix = only_model(server).prefix
    between_steps(server.generator, lambda: prefix.stored.write_tails())
    assert prefix.stored.store.flush()
    between_steps(server.generator, lambda: prefix.trim_to(0))
    # As if nothing had been read yet: by what was measured under load, computing may be faster.
    prefix.stored.restores.rates = Rates()
    with listening(server) as stream:
        chat(server, f"{LONG} To be restored.", "restored")
        events = {kind: data for _, kind, data in stream.until("request_ended")}
    begun, ended = events["restore_begun"], events["restore_ended"]
    assert begun["tokens"] == ended["tokens"] == events["request_started"]["cached_tokens"] > 500
    assert begun["bytes"] == ended["bytes"] > 10_000
    assert begun["id"] == ended["id"] == events["request_ended"]["id"]
