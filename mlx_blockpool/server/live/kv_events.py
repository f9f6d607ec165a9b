"""KVPublisher: the blocks of a server as vLLM publishes its own over ZeroMQ, for routers that send prompts where their prefix is.

Three frames a message: topic, sequence number (8 bytes, big-endian), and msgpack of [time, events, data-parallel rank]. A ROUTER
socket sends past messages again from the sequence number that a request names. Only what all requests may share is published, in
whole blocks: a router counts in blocks, and knows no salts. Runs on a thread of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...config import KVEventsConfig
from ...errors import BlockpoolError
from ...hashing import EDGE_BYTES, decode
from ...prefix.changes import DISK, MEMORY, AllCleared, BlocksRemoved, BlocksStored
from ...prefix.salts import SHARED
from ...spec import BLOCK_TOKENS
from .log import EventLog, Reader

log = logging.getLogger(__name__)

# vLLM's names of tiers; its GPU is the memory that the model computes with.
MEDIA = {MEMORY: "GPU", DISK: "DISK"}
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
# How often the thread looks for requests to send messages again, and how long events gather before they are sent.
LOOK_SECONDS, GATHER_SECONDS = 0.1, 0.02
# Of past messages: the requests that are read and the messages that are sent at a time, how soon the next ones follow, and how
# many clients are answered side by side.
ASKED, SENT_AGAIN, NEXT_SECONDS, CLIENTS = 10, 100, 0.01, 32
# Milliseconds for which a closed socket still sends.
LINGER = 200

# An event by its fields in vLLM's order, the first of which is its tag.
Fields = dict[str, Any]
# What the models of a server hold, each by its id.
Snapshot = Callable[[], Iterable[tuple[str, BlocksStored]]]


class KVPublisher:
    """Publishes the block events of `log` until that is closed. Raises BlockpoolError if it cannot."""

    def __init__(self, config: KVEventsConfig) -> None:
        try:
            import msgpack
            import zmq
        except ImportError as error:
            raise BlockpoolError(
                f"--kv-events needs a package that is not installed ({error}). Run: pip install 'mlx-blockpool[kv-events]'."
            ) from error
        self._config = config
        self._zmq: Any = zmq
        self._pack: Callable[[Any], bytes] = msgpack.packb
        self._context = zmq.Context()
        self._past: deque[tuple[int, bytes]] = deque()
        self._count = self._past_bytes = 0
        # For each client that is being answered the empty frame of its request, the number of its next past message, and when one
        # was last sent.
        self._answering: dict[bytes, tuple[bytes, int, float]] = {}
        self._pages: dict[str, Blocks] = {}
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._configure(self._pub)
            (self._pub.bind if is_bound(config.endpoint) else self._pub.connect)(config.endpoint)
            self._router: Any = None
            if config.replay is not None:
                self._router = self._context.socket(zmq.ROUTER)
                # No heartbeats: libzmq aborts if a client hangs up whose requests it has stopped reading and then wants to ping.
                self._router.tcp_keepalive = 1
                # What a client does not read is sent later, and one that is gone is found out.
                self._router.router_mandatory = True
                self._router.set_hwm(config.replay_queued)
                self._router.bind(config.replay)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            ends = " or ".join(end for end in (config.endpoint, config.replay) if end is not None)
            raise BlockpoolError(f"--kv-events: cannot publish on {ends}: {error}. Choose another address.") from error

    def _configure(self, socket: Any) -> None:
        """Let messages wait for a slow client as long as it answers; by default a thousand wait, and for ever."""
        silent = int(self._config.silent_seconds * 1000)
        socket.set_hwm(self._config.queued)
        socket.heartbeat_ivl = silent // 4
        socket.heartbeat_timeout = silent

    def start(self, events: EventLog, snapshot: Snapshot) -> threading.Thread:
        """Begin with the log's first event. `snapshot` lists what is stored, for use after events were lost."""
        thread = threading.Thread(target=self._run, args=[events, snapshot], name="kv events", daemon=True)
        thread.start()
        return thread

    def _run(self, events: EventLog, snapshot: Snapshot) -> None:
        reader = Reader(events, events.first - 1)
        while True:
            try:
                if reader.wait(NEXT_SECONDS if self._answering else LOOK_SECONDS):
                    time.sleep(GATHER_SECONDS)
                    self._publish(reader, snapshot)
                elif events.is_closed:
                    break
                self._replay()
            except Exception:
                # The top of the thread: routers keep the blocks that they know.
                log.exception("KV events could not be published")
                time.sleep(LOOK_SECONDS)
        self._context.destroy(linger=LINGER)

    def _publish(self, reader: Reader, snapshot: Snapshot) -> None:
        lost, events = reader.take()
        if lost:
            log.warning("KV events: %d events were lost; all blocks are published again", lost)
            reader.skip()
            for blocks in self._pages.values():
                self._send(blocks, blocks.cleared(self._is_alone(blocks)))
            for model, change in snapshot():
                blocks = self._blocks_of(model)
                self._send(blocks, blocks.stored(change))
            return
        batch: list[Fields] = []
        tokens = 0
        last: Blocks | None = None
        for event in events:
            if not isinstance(event.what, BlocksStored | BlocksRemoved | AllCleared):
                continue
            blocks = self._blocks_of(event.model)
            if last is not None and (blocks is not last or tokens >= self._config.message_tokens):
                self._send(last, batch)
                batch, tokens = [], 0
            last = blocks
            found = self._fields_of(blocks, event.what)
            tokens += sum(len(fields.get("token_ids", ())) for fields in found)
            batch += found
        if last is not None:
            self._send(last, batch)

    def _fields_of(self, blocks: Blocks, change: BlocksStored | BlocksRemoved | AllCleared) -> list[Fields]:
        if isinstance(change, BlocksStored):
            return blocks.stored(change)
        return blocks.removed(change) if isinstance(change, BlocksRemoved) else blocks.cleared(self._is_alone(blocks))

    def _blocks_of(self, model: str) -> Blocks:
        return self._pages.setdefault(model, Blocks(self._config.topic.replace("{model}", model)))

    def _is_alone(self, blocks: Blocks) -> bool:
        """Return whether no other model publishes under the same topic."""
        return not any(other.topic == blocks.topic and other.has_any for other in self._pages.values() if other is not blocks)

    def _send(self, blocks: Blocks, events: list[Fields]) -> None:
        if not events:
            return
        shaped = [list(event.values()) for event in events] if self._config.as_arrays else events
        payload, number = self._pack([time.time(), shaped, 0]), self._count
        self._count += 1
        self._past.append((number, payload))
        self._past_bytes += len(payload)
        while len(self._past) > self._config.kept or self._past_bytes > self._config.kept_bytes:
            self._past_bytes -= len(self._past.popleft()[1])
        self._pub.send_multipart((blocks.topic.encode(), number.to_bytes(8, "big"), payload))

    def _replay(self) -> None:
        """Read some requests for past messages, and send some messages to each client in turn.

        A client's next request replaces the one that is being answered.
        """
        for _ in range(ASKED):
            if self._router is None or len(self._answering) >= CLIENTS or not self._router.poll(0):
                break
            frames = self._router.recv_multipart()
            if len(frames) != 3:
                log.warning("KV events: a replay request has %d frames; it needs an empty one and a sequence number", len(frames))
                continue
            client, empty, first = frames
            self._answering[client] = empty, int.from_bytes(first, "big"), time.monotonic()
        for client in list(self._answering):
            if self._has_answered(client, SENT_AGAIN // len(self._answering)):
                del self._answering[client]

    def _has_answered(self, client: bytes, most: int) -> bool:
        """Send a client its next past messages, at most so many. Returns whether it has all, is gone or reads none."""
        empty, number, since = self._answering[client]
        oldest = self._past[0][0] if self._past else self._count
        number = max(number, oldest)
        try:
            for _ in range(most):
                is_over = number >= self._count
                past = (END_OF_REPLAY, b"") if is_over else (number.to_bytes(8, "big"), self._past[number - oldest][1])
                self._router.send_multipart((client, empty, *past), self._zmq.NOBLOCK)
                if is_over:
                    return True
                number, since = number + 1, time.monotonic()
        except self._zmq.Again:
            # It reads slower than messages are sent.
            if time.monotonic() - since > self._config.silent_seconds:
                return True
        except self._zmq.ZMQError as error:
            log.debug("KV events: a client that wanted past messages is gone: %s", error)
            return True
        self._answering[client] = empty, number, since
        return False


class Blocks:
    """The blocks of one model that were published, by their hashes, and the events for what changes in them."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self._published: dict[str, set[bytes]] = {MEMORY: set(), DISK: set()}

    @property
    def has_any(self) -> bool:
        return any(self._published.values())

    def stored(self, change: BlocksStored) -> list[Fields]:
        whole = sum(len(edge) == EDGE_BYTES for edge in change.edges)
        if change.salt != SHARED or not whole:
            return []
        hashes, tokens = change.hashes[:whole], [token for edge in change.edges[:whole] for token in decode(edge)]
        self._published[change.tier].update(hashes)
        return [
            {
                "type": "BlockStored",
                "block_hashes": list(map(number_of, hashes)),
                "parent_block_hash": None if change.parent is None else number_of(change.parent),
                "token_ids": tokens,
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": MEDIA[change.tier],
                "lora_name": None,
            }
        ]

    def removed(self, change: BlocksRemoved) -> list[Fields]:
        published = self._published[change.tier]
        hashes = [digest for digest in change.hashes if digest in published]
        published.difference_update(hashes)
        return list(_removed(hashes, change.tier))

    def cleared(self, is_alone: bool) -> list[Fields]:
        """`is_alone`: no other model would be cleared too."""
        published, self._published = self._published, {MEMORY: set(), DISK: set()}
        if is_alone:
            return [{"type": "AllBlocksCleared"}]
        return [fields for tier, hashes in published.items() for fields in _removed(list(hashes), tier)]


def _removed(hashes: list[bytes], tier: str) -> Iterator[Fields]:
    if hashes:
        yield {"type": "BlockRemoved", "block_hashes": list(map(number_of, hashes)), "medium": MEDIA[tier]}


def number_of(digest: bytes) -> int:
    """A hash as vLLM publishes it by default: its last 64 bits."""
    return int.from_bytes(digest[-8:], "big")


def is_bound(endpoint: str) -> bool:
    """Return whether subscribers connect to an endpoint; the publisher connects to others. vLLM's rule."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
