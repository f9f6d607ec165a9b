"""GET /v1/cache/events: what a client of the stream gets to know, and that it makes a replica of the trie."""

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
from models import save_model
from prefix.replica import Contents, contents_of

from mlx_blockpool.config import AccessConfig
from mlx_blockpool.server.jobs import run_on_generation_thread
from mlx_blockpool.server.live import snapshot
from mlx_blockpool.server.live.events import ModelLoading
from mlx_blockpool.server.live.snapshot import Snapshots
from server.serving import Client, at_once, blockpool_server

PATH = "/v1/cache/events"
LONG = "There is a long story about a block. " * 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    store = str(tmp_path_factory.mktemp("store"))
    with blockpool_server(model, "--pool-bytes", "2MB", "--prefill-step-size", "256", "--store-dir", store) as running:
        yield running


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
        connection.request("GET", PATH + query, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream"), response.read()
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
        (contents[data["tier"]].update if kind == "blocks_stored" else contents[data["tier"]].difference_update)(hashes)


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
    assert begun["prompt_tokens"] == next(d["total"] for kind, d in requests if kind == "request_progress")
    stored = [data for _, kind, data in found if kind == "blocks_stored" and data["tier"] == "memory"]
    assert sum(data["tokens"] for data in stored) >= 512
    numbers = [number for number, _, _ in found]
    assert numbers == sorted(set(numbers))


def work(server: Client) -> None:
    """Requests, of whose blocks the older half leaves the memory."""
    at_once([lambda n=n: chat(server, f"{n % 3} {LONG * (1 + n % 2)}", f"agent {n % 4}") for n in range(6)])
    prefix = only_model(server).prefix
    run_on_generation_thread(server.generator, lambda: prefix.trim_to(prefix.nbytes // 2))


def only_model(server: Client) -> Any:
    [served] = server.generator.registry.loaded.values()
    return served


def check_replica(server: Client, stream: Stream) -> set[str]:
    """A client that applies the events until now has what the trie has. Returns their kinds."""
    generator, index = server.generator, only_model(server).prefix.index
    last, expected = run_on_generation_thread(generator, lambda: (generator.registry.log.end - 1, contents_of(index)))
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
    monkeypatch.setattr(snapshot, "AT_ONCE", 2)
    monkeypatch.setattr(snapshot, "LONGEST", 3)
    monkeypatch.setattr(server.generator, "snapshots", Snapshots(server.generator))
    work(server)
    with listening(server, "?snapshot=1") as stream:
        chat(server, "One more.", "more")
        check_replica(server, stream)


def test_clients_that_begin_at_the_same_time_share_a_snapshot(server: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    held, snapshots = snapshot.held, Snapshots(server.generator)
    monkeypatch.setattr(snapshot, "held", lambda generator: held(taken.append(generator) or generator))
    monkeypatch.setattr(snapshot, "LEAST_SECONDS", 1000.0)
    monkeypatch.setattr(server.generator, "snapshots", snapshots)
    at_once([lambda: read_all(server) for _ in range(4)])
    chat(server, f"{LONG} Since.", "since")
    expected = run_on_generation_thread(server.generator, lambda: contents_of(only_model(server).prefix.index))
    with listening(server, "?snapshot=1") as stream:
        chat(server, "Last.", "last")
        found = stream.until("request_begun", agent="last")
    contents: Contents = {"memory": set(), "disk": set()}
    for event in found:
        apply(contents, event)
    assert len(taken) == 1
    assert contents["memory"] == expected["memory"], "the events since the snapshot complete it"
    assert [kind for _, kind, _ in found if kind.startswith("request")] == ["request_begun"], "earlier requests are not repeated"


def read_all(server: Client) -> None:
    with listening(server, "?snapshot=1&follow=0") as stream:
        while stream.next() is not None:
            pass


def test_a_reader_that_does_not_follow_ends_while_events_keep_coming(server: Client) -> None:
    log, has_ended = server.generator.registry.log, threading.Event()

    def append() -> None:
        while not has_ended.wait(0):
            log.append("busy", ModelLoading())

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


def test_there_is_room_for_so_many_clients(server: Client) -> None:
    readers = server.generator.access.event_readers
    for _ in range(AccessConfig.event_readers):
        assert readers.acquire(timeout=30)
    status, answer = server.send(PATH)
    assert (status, "32 clients already read events" in answer["error"]) == (503, True)
    for _ in range(AccessConfig.event_readers):
        readers.release()


@pytest.mark.parametrize("given", ["x", "-1", "1.5", "9" * 30, "²"])
def test_a_bad_number_is_an_error_that_says_so(server: Client, given: str) -> None:
    status, answer = server.send(f"{PATH}?last_event_id={quote(given)}")
    assert (status, answer["error"].startswith("Last-Event-ID: Input should be the id of an event")) == (400, True)


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
        gone = [kind for _, kind, _ in stream.until("model_unloaded") if not kind.startswith("blocks")]
        chat(server, "After.", "mover")
        back = [kind for _, kind, _ in stream.until("request_ended")]
    assert gone == ["all_cleared", "model_unloaded"]
    come = [kind for kind in back if kind != "blocks_stored"]
    assert come[:3] == ["request_begun", "model_loading", "model_loaded"]
    assert come.index("request_started") < come.index("request_ended")
    assert "blocks_stored" in back[: back.index("model_loaded")], "what is on disk is known with the model"


def test_a_restore_is_told_with_its_tokens_and_bytes(server: Client) -> None:
    chat(server, f"{LONG} To be restored.", "restored")
    server.settle()
    prefix = only_model(server).prefix
    run_on_generation_thread(server.generator, lambda: prefix.stored.write_tails())
    assert prefix.stored.store.flush()
    run_on_generation_thread(server.generator, lambda: prefix.trim_to(0))
    with listening(server) as stream:
        chat(server, f"{LONG} To be restored.", "restored")
        events = {kind: data for _, kind, data in stream.until("request_ended")}
    begun, ended = events["restore_begun"], events["restore_ended"]
    assert begun["tokens"] == ended["tokens"] == events["request_started"]["cached_tokens"] > 500
    assert begun["bytes"] == ended["bytes"] > 10_000
    assert begun["id"] == ended["id"] == events["request_ended"]["id"]
