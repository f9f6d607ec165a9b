"""--kv-events: the blocks of a server in vLLM's form, over real ZeroMQ sockets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import msgpack
import pytest
import zmq
from models import save_model
from zmq.utils.monitor import recv_monitor_message

from mlx_blockpool.config import KVEventsConfig, is_bound
from mlx_blockpool.errors import BlockpoolError
from mlx_blockpool.prefix.changes import DISK, MEMORY, AllCleared, BlocksRemoved, BlocksStored
from mlx_blockpool.prefix.salts import SHARED, salt_of
from mlx_blockpool.server.options import kv_events_config
from mlx_blockpool.server.watch.event_log import EventLog
from mlx_blockpool.server.watch.kv_events import SENT_AGAIN, KVPublisher, number_of
from mlx_blockpool.store.hashing import encode
from server.serving import blockpool_server, parse

WHOLE, OTHER, PARTIAL = list(range(256)), list(range(256, 512)), [5, 6, 7]
A, B, C = (bytes(24) + bytes([number] * 8) for number in (1, 2, 3))


def stored(
    parent: bytes | None, *edges: tuple[bytes, list[int]], tier: str = MEMORY, salt: bytes = SHARED
) -> BlocksStored:
    hashes, tokens = zip(*edges, strict=True)
    return BlocksStored(parent, hashes, tuple(map(encode, tokens)), (), tier, salt)


class Router:
    """A subscriber to all topics."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.monitor = self.sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.sub.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sub.disable_monitor()
        self.context.destroy(linger=0)

    def next(self) -> tuple[str, int, list[Any]]:
        """The topic, number and batch of the next message."""
        assert self.sub.poll(30_000), "no message came"
        topic, number, payload = self.sub.recv_multipart()
        return topic.decode(), int.from_bytes(number, "big"), msgpack.unpackb(payload)

    def events(self, count: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < count:
            found += self.next()[2][1]
        return found


@contextmanager
def published(
    tmp_path: Path, log: EventLog, snapshot: Iterable[tuple[str, BlocksStored]] = (), **config: Any
) -> Iterator[Router]:
    """A publisher of a log, and a router that hears all of it."""
    endpoint = f"ipc://{tmp_path}/pub"
    publisher = KVPublisher(KVEventsConfig(endpoint, f"ipc://{tmp_path}/replay", **config))
    with Router(endpoint) as router:
        # Without a subscription that has arrived, messages are dropped.
        while not router.sub.poll(5):
            publisher._pub.send_multipart((b"", b"", b"probe"))
        publisher._pub.send_multipart((b"", b"", b"last"))
        while router.sub.recv_multipart()[2] != b"last":
            pass
        thread = publisher.start(log, lambda: snapshot)
        try:
            yield router
        finally:
            log.close()
            thread.join(30)
            assert not thread.is_alive()


def test_a_client_that_reads_later_gets_all_past_messages(tmp_path: Path) -> None:
    publisher = KVPublisher(KVEventsConfig(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"))
    blocks = publisher._blocks_of("m")
    for _ in range(4000):
        publisher._send(blocks, blocks.fields_of(stored(None, (A, WHOLE))))
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.connect(f"ipc://{tmp_path}/replay")
    client.send_multipart((b"", (0).to_bytes(8, "big")))
    assert publisher._router.poll(30_000)
    numbers = []
    while not numbers or numbers[-1] != -1:
        while not client.poll(0):
            publisher._replay()
        numbers.append(int.from_bytes(client.recv_multipart()[1], "big", signed=True))
    assert numbers == [*range(4000), -1]
    context.destroy(linger=0)
    publisher._context.destroy(linger=0)


def test_clients_that_ask_for_everything_and_read_nothing_cost_little(tmp_path: Path) -> None:
    """Each look at the requests sends a bounded number of messages, and another client still
    gets its own.
    """
    publisher = KVPublisher(
        KVEventsConfig(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay", replay_queued=20)
    )
    blocks = publisher._blocks_of("m")
    for _ in range(400):
        publisher._send(blocks, blocks.fields_of(stored(None, (A, WHOLE))))
    sent: list[int] = []
    router, send = publisher._router, publisher._router.send_multipart
    publisher._router = SimpleNamespace(
        poll=router.poll,
        recv_multipart=router.recv_multipart,
        send_multipart=lambda *a: (send(*a), sent.append(1)),
    )
    context = zmq.Context()
    flood, client = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for each in (flood, client):
        each.rcvhwm = 5
        each.connect(f"ipc://{tmp_path}/replay")
    for _ in range(500):
        flood.send_multipart((b"", bytes(8)))
    client.send_multipart((b"", (390).to_bytes(8, "big")))
    numbers: list[int] = []
    while not numbers or numbers[-1] != -1:
        before = len(sent)
        publisher._replay()
        assert len(sent) - before <= SENT_AGAIN
        while client.poll(0):
            numbers.append(int.from_bytes(client.recv_multipart()[1], "big", signed=True))
    assert numbers == [*range(390, 400), -1]
    while router.poll(0):
        publisher._replay()
    assert len(sent) < 400, "messages wait for a client that reads none"
    flood.close(linger=0)
    while publisher._answering:
        publisher._replay()
    context.destroy(linger=0)
    publisher._context.destroy(linger=0)


def test_past_messages_have_a_limit_in_bytes(tmp_path: Path) -> None:
    publisher = KVPublisher(KVEventsConfig(f"ipc://{tmp_path}/pub", kept_bytes=2000))
    blocks = publisher._blocks_of("m")
    for _ in range(9):
        publisher._send(blocks, blocks.fields_of(stored(None, (A, WHOLE))))
    assert (publisher._count, 0 < len(publisher._past) <= 3) == (9, True)
    assert sum(map(len, publisher._past)) == publisher._past_bytes <= 2000
    publisher._context.destroy(linger=0)


def test_many_tokens_go_in_several_messages(tmp_path: Path) -> None:
    log = EventLog()
    for _ in range(5):
        log.of_model("m").append(stored(None, (A, WHOLE)))
    with published(tmp_path, log, message_tokens=512) as router:
        assert [len(router.next()[2][1]) for _ in range(3)] == [2, 2, 1]


def test_a_subscriber_that_answers_nothing_is_dropped(tmp_path: Path) -> None:
    """Its process is stopped: what waits for it would never be received."""
    publisher = KVPublisher(KVEventsConfig(f"ipc://{tmp_path}/pub", silent_seconds=0.2))
    monitor = publisher._pub.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    )
    program = f"""if True:
        import os, signal, zmq
        sub = zmq.Context().socket(zmq.SUB)
        sub.subscribe(b"")
        sub.connect("ipc://{tmp_path}/pub")
        sub.recv()
        os.kill(os.getpid(), signal.SIGSTOP)"""
    subscriber = subprocess.Popen([sys.executable, "-c", program])
    try:
        seen: list[int] = []
        while zmq.EVENT_DISCONNECTED not in seen:
            publisher._pub.send_multipart((b"", bytes(8), b"an event"))
            while monitor.poll(20):
                seen.append(recv_monitor_message(monitor)["event"])
        assert seen == [zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED]
    finally:
        subscriber.kill()
        subscriber.wait()
        publisher._pub.disable_monitor()
        publisher._context.destroy(linger=0)


def test_events_have_vllms_fields_and_order(tmp_path: Path) -> None:
    log = EventLog()
    with published(tmp_path, log) as router:
        log.of_model("m").append(stored(None, (A, WHOLE), (B, OTHER)))
        log.of_model("m").append(stored(B, (C, PARTIAL)))
        log.of_model("m").append(stored(None, (A, WHOLE), tier=DISK))
        log.of_model("m").append(BlocksRemoved((B, C), MEMORY, SHARED))
        log.of_model("m").append(AllCleared())
        topic, number, (seconds, events, rank) = router.next()
        events += router.events(4 - len(events)) if len(events) < 4 else []
    assert (topic, number, rank) == ("", 0, 0)
    assert seconds > 1e9
    one, two = number_of(A), number_of(B)
    assert one == int.from_bytes(bytes([1] * 8), "big")
    rest = {"parent_block_hash": None, "block_size": 256, "lora_id": None, "lora_name": None}
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [one, two],
            "token_ids": WHOLE + OTHER,
            "medium": "GPU",
            **rest,
        },
        {
            "type": "BlockStored",
            "block_hashes": [one],
            "token_ids": WHOLE,
            "medium": "DISK",
            **rest,
        },
        {"type": "BlockRemoved", "block_hashes": [two], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]
    assert list(events[0]) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ]


def test_arrays_have_the_fields_in_vllms_order(tmp_path: Path) -> None:
    log = EventLog()
    with published(tmp_path, log, as_arrays=True) as router:
        log.of_model("m").append(stored(A, (B, WHOLE)))
        log.of_model("m").append(BlocksRemoved((B,), MEMORY, SHARED))
        log.of_model("m").append(AllCleared())
        assert router.events(3) == [
            ["BlockStored", [number_of(B)], number_of(A), WHOLE, 256, None, "GPU", None],
            ["BlockRemoved", [number_of(B)], "GPU"],
            ["AllBlocksCleared"],
        ]


def test_nothing_under_a_salt_and_no_other_event_is_published(tmp_path: Path) -> None:
    log = EventLog()
    with published(tmp_path, log) as router:
        log.of_model("m").append(stored(None, (A, WHOLE), salt=salt_of("ann")))
        log.of_model("m").append(BlocksRemoved((A,), MEMORY, salt_of("ann")))
        log.of_model("m").append(stored(None, (B, WHOLE)))
        assert [event["block_hashes"] for event in router.events(1)] == [[number_of(B)]]


def test_models_under_one_topic_do_not_clear_each_other(tmp_path: Path) -> None:
    log = EventLog()
    with published(tmp_path, log) as router:
        log.of_model("a").append(stored(None, (A, WHOLE)))
        log.of_model("b").append(stored(None, (B, WHOLE)))
        log.of_model("a").append(AllCleared())
        log.of_model("b").append(AllCleared())
        kinds = [(event["type"], event.get("block_hashes")) for event in router.events(4)]
    assert kinds[2:] == [("BlockRemoved", [number_of(A)]), ("AllBlocksCleared", None)]


def test_a_topic_names_the_model(tmp_path: Path) -> None:
    log = EventLog()
    with published(tmp_path, log, topic="kv@node@{model}") as router:
        log.of_model("a").append(stored(None, (A, WHOLE)))
        log.of_model("b").append(stored(None, (B, WHOLE)))
        log.of_model("a").append(AllCleared())
        found = [router.next() for _ in range(3)]
    assert [(topic, number) for topic, number, _ in found] == [
        ("kv@node@a", 0),
        ("kv@node@b", 1),
        ("kv@node@a", 2),
    ]
    assert found[2][2][1] == [{"type": "AllBlocksCleared"}]


def test_past_messages_are_sent_again(tmp_path: Path) -> None:
    log = EventLog()
    with published(tmp_path, log, kept=2) as router:
        sent = []
        for number in range(3):
            log.of_model("m").append(stored(None, (bytes(31) + bytes([number]), WHOLE)))
            sent.append(router.next()[1:])
        assert [number for number, _ in sent] == [0, 1, 2]
        replay = router.context.socket(zmq.DEALER)
        replay.connect(f"ipc://{tmp_path}/replay")
        for first, expected in ((1, sent[1:]), (0, sent[1:]), (3, [])):
            replay.send_multipart((b"", first.to_bytes(8, "big")))
            found = []
            while (frames := replay.recv_multipart())[2]:
                found.append((int.from_bytes(frames[1], "big"), msgpack.unpackb(frames[2])))
            assert (found, frames) == (expected, [b"", b"\xff" * 8, b""])


def test_a_request_that_is_none_is_left_out(tmp_path: Path) -> None:
    log = EventLog()
    with published(tmp_path, log) as router:
        replay = router.context.socket(zmq.DEALER)
        replay.connect(f"ipc://{tmp_path}/replay")
        replay.send(b"nonsense")
        replay.send_multipart((b"", bytes(8)))
        assert replay.recv_multipart() == [b"", b"\xff" * 8, b""]


def test_after_lost_events_everything_is_published_again(tmp_path: Path) -> None:
    log = EventLog(kept=2)
    for number in range(5):
        log.of_model("m").append(stored(None, (bytes(31) + bytes([number]), WHOLE)))
    with published(tmp_path, log, [("m", stored(None, (C, WHOLE)))]) as router:
        assert [event["block_hashes"] for event in router.events(1)] == [[number_of(C)]]
        log.of_model("m").append(stored(C, (B, WHOLE)))
        assert [event["block_hashes"] for event in router.events(1)] == [[number_of(B)]]


# -- a server --------------------------------------------------------------------------------------


def test_a_server_publishes_what_its_trie_holds(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/pub"
    model = save_model(tmp_path / "model", "llama")
    with (
        Router(endpoint) as router,
        blockpool_server(model, "--pool-bytes", "2MB", "--kv-events", endpoint) as server,
    ):
        assert router.monitor.poll(30_000), "the subscriber is not connected"
        server.chat(
            [{"role": "user", "content": "There is a long story about a block. " * 20}],
            max_tokens=2,
        )
        server.settle()
        [served] = server.generator.registry.loaded.values()
        expected = {number_of(node.hash): node for node in served.prefix.index.trie if node.is_full}
        found = list[Any]()
        while len(found) < len(expected):
            found += [event for event in router.next()[2][1] if event["type"] == "BlockStored"]
        assert {digest for event in found for digest in event["block_hashes"]} == set(expected)
        first = next(event for event in found if event["parent_block_hash"] is None)
        assert len(first["token_ids"]) == 256 * len(first["block_hashes"])
        server.generator.stop_and_join()
        while router.next()[2][1] != [{"type": "AllBlocksCleared"}]:
            pass


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-events-replay", "tcp://*:1"], "need --kv-events ENDPOINT"),
        (["--kv-events-topic", "kv"], "need --kv-events ENDPOINT"),
        (["--kv-events", "tcp://*:5557"], "lets other machines read the tokens"),
        (
            ["--kv-events", "ipc:///tmp/x", "--kv-events-replay", "tcp://[::]:5557"],
            "lets other machines read the tokens",
        ),
    ],
)
def test_options_that_cannot_be_meant(arguments: list[str], message: str) -> None:
    with pytest.raises(BlockpoolError, match=message):
        kv_events_config(parse(["--model", "m", *arguments]))


def test_options_make_a_config() -> None:
    given = [
        "--kv-events",
        "tcp://*:1",
        "--kv-events-topic",
        "t",
        "--kv-events-form",
        "array",
        "--allow-remote",
    ]
    assert kv_events_config(parse(["--model", "m", *given])) == KVEventsConfig(
        "tcp://*:1", None, "t", as_arrays=True
    )
    assert kv_events_config(parse(["--model", "m"])) is None
    assert [
        is_bound(end) for end in ("tcp://*:1", "tcp://[::]:1", "ipc:///x", "tcp://router:1")
    ] == [True, True, True, False]


def test_an_endpoint_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(
        BlockpoolError,
        match=r"--kv-events: cannot publish on ipc:///no/folder/x: .* Choose another address",
    ):
        KVPublisher(KVEventsConfig("ipc:///no/folder/x"))


@pytest.mark.parametrize("package", ["zmq", "msgpack"])
def test_a_package_that_is_not_installed(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        BlockpoolError, match=r"not installed .* Run: pip install 'mlx-blockpool\[kv-events\]'"
    ):
        KVPublisher(KVEventsConfig("ipc:///tmp/x"))
