"""KVPublisher: the blocks of a server as vLLM publishes its own over ZeroMQ, for routers that send
prompts where their prefix is.

Three frames a message: topic, sequence number (8 bytes, big-endian), and msgpack of [time, events,
data-parallel rank]. A ROUTER socket sends past messages again from the sequence number that a
request names. Only what all requests may share is published, in whole blocks: a router counts in
blocks, and has no notion of salts. Runs on its own thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from ...config import KVEventsConfig, is_bound
from ...errors import BlockpoolError
from ...prefix.changes import DISK, MEMORY, AllCleared, BlocksRemoved, BlocksStored, Change
from ...prefix.salts import SHARED
from ...spec import BLOCK_TOKENS
from ...store.hashing import EDGE_BYTES, decode
from .event_log import EventLog, EventReader

log = logging.getLogger(__name__)

# vLLM's names of tiers; its GPU is the memory that the model computes with.
MEDIA = {MEMORY: "GPU", DISK: "DISK"}
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
# How often the thread checks for requests to send messages again, and how long events gather before
# they are sent.
CHECK_SECONDS, GATHER_SECONDS = 0.1, 0.02
# Of past messages: the requests that are read and the messages that are sent at a time, and how
# soon the next ones follow.
READ_AT_ONCE, SENT_AGAIN, NEXT_SECONDS = 10, 100, 0.01
# Milliseconds for which a closed socket still sends.
LINGER = 200

# An event by its fields in vLLM's order, the first of which is its tag.
Fields = dict[str, Any]
# What the models of a server hold, each by its id.
Contents = Callable[[], Iterable[tuple[str, BlocksStored]]]


class KVPublisher:
    """Publishes the block events of a log until that is closed.

    Raises BlockpoolError if it cannot.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        try:
            import msgpack
            import zmq
        except ImportError as error:
            raise BlockpoolError(
                f"--kv-events needs a package that is not installed ({error}). Run: pip install "
                "'mlx-blockpool[kv-events]'."
            ) from error
        self._config = config
        self._zmq: Any = zmq
        self._pack: Callable[[Any], bytes] = msgpack.packb
        self._context = zmq.Context()
        # The last messages, the number of the next one, and the bytes of those in `_past`.
        self._past: deque[bytes] = deque()
        self._count = self._past_bytes = 0
        # By client, what sends it the past messages that it has requested last.
        self._answering: dict[bytes, Iterator[bool]] = {}
        self._blocks: dict[str, PublishedBlocks] = {}
        self._router: Any = None
        try:
            self._pub = self._context.socket(zmq.PUB)
            # Messages wait for a slow client as long as it answers; by default a thousand wait, and
            # for ever.
            self._pub.set_hwm(config.queued)
            self._pub.heartbeat_timeout = int(config.silent_seconds * 1000)
            self._pub.heartbeat_ivl = self._pub.heartbeat_timeout // 4
            (self._pub.bind if is_bound(config.endpoint) else self._pub.connect)(config.endpoint)
            if config.replay is not None:
                self._router = self._context.socket(zmq.ROUTER)
                # No heartbeats: libzmq aborts if a client hangs up whose requests it has stopped
                # reading and then wants to ping.
                self._router.tcp_keepalive = 1
                # What a client does not read is sent later, and a client that is gone raises an
                # error.
                self._router.router_mandatory = True
                self._router.set_hwm(config.replay_queued)
                self._router.bind(config.replay)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            ends = " or ".join(end for end in (config.endpoint, config.replay) if end is not None)
            raise BlockpoolError(
                f"--kv-events: cannot publish on {ends}: {error}. Choose another address."
            ) from error

    def start(self, events: EventLog, contents: Contents) -> threading.Thread:
        """Begin with the log's first event.

        `contents` lists what is stored, for use after events were lost.
        """
        thread = threading.Thread(
            target=self._run, args=[events, contents], name="kv events", daemon=True
        )
        thread.start()
        return thread

    def _run(self, events: EventLog, contents: Contents) -> None:
        reader = EventReader(events, events.first - 1)
        while True:
            try:
                if reader.wait(NEXT_SECONDS if self._answering else CHECK_SECONDS):
                    time.sleep(GATHER_SECONDS)
                    lost, taken = reader.take()
                    if lost:
                        log.warning(
                            "KV events: %d events were lost; all blocks are published again", lost
                        )
                        reader.next = events.end
                        self._publish(
                            chain([(model, AllCleared()) for model in self._blocks], contents())
                        )
                    else:
                        self._publish(
                            (event.model, event.what)
                            for event in taken
                            if not isinstance(event.what, dict)
                        )
                elif events.is_closed:
                    break
                self._replay()
            except Exception:
                # The top of the thread: routers go on with the blocks that they have been sent.
                log.exception("KV events could not be published")
                time.sleep(CHECK_SECONDS)
        self._context.destroy(linger=LINGER)

    def _publish(self, changes: Iterable[tuple[str, Change]]) -> None:
        """Send the changes of models, those of one model that follow each other in one message
        unless they are too many.
        """
        batch: list[Fields] = []
        tokens = 0
        last: PublishedBlocks | None = None
        for model, change in changes:
            blocks = self._blocks_of(model)
            if last is not None and (blocks is not last or tokens >= self._config.message_tokens):
                self._send(last, batch)
                batch, tokens = [], 0
            last = blocks
            is_alone = not any(
                each.has_any
                for each in self._blocks.values()
                if each is not blocks and each.topic == blocks.topic
            )
            fields = blocks.fields_of(change, is_alone)
            tokens += sum(len(each.get("token_ids", ())) for each in fields)
            batch += fields
        if last is not None:
            self._send(last, batch)

    def _blocks_of(self, model: str) -> PublishedBlocks:
        return self._blocks.setdefault(
            model, PublishedBlocks(self._config.topic.replace("{model}", model))
        )

    def _send(self, blocks: PublishedBlocks, events: list[Fields]) -> None:
        if not events:
            return
        shaped = [list(event.values()) for event in events] if self._config.as_arrays else events
        payload, number = self._pack([time.time(), shaped, 0]), self._count
        self._count += 1
        self._past.append(payload)
        self._past_bytes += len(payload)
        while len(self._past) > self._config.kept or self._past_bytes > self._config.kept_bytes:
            self._past_bytes -= len(self._past.popleft())
        self._pub.send_multipart((blocks.topic.encode(), number.to_bytes(8, "big"), payload))

    # -- past messages -----------------------------------------------------------------------------

    def _replay(self) -> None:
        """Read some requests for past messages, and send some messages to each client in turn.

        A client's next request replaces the one that is being answered.
        """
        for _ in range(READ_AT_ONCE):
            if (
                self._router is None
                or len(self._answering) >= self._config.replay_clients
                or not self._router.poll(0)
            ):
                break
            frames = self._router.recv_multipart()
            if len(frames) != 3:
                log.warning(
                    "KV events: a replay request has %d frames; it needs an empty one and a "
                    "sequence number",
                    len(frames),
                )
                continue
            client, empty, first = frames
            self._answering[client] = self._answer(client, empty, int.from_bytes(first, "big"))
        count = SENT_AGAIN // max(1, len(self._answering))
        for client, answer in list(self._answering.items()):
            sent: bool | None = True
            for _ in range(count):
                sent = next(answer, None)
                if not sent:
                    break
            if sent is None:
                del self._answering[client]

    def _answer(self, client: bytes, empty: bytes, number: int) -> Iterator[bool]:
        """Send a client the past messages from `number` on. Yields after each whether it was sent,
        or has to wait.

        Ends when the client has all of them, is gone, or has read none for too long.
        """
        until = time.monotonic() + self._config.silent_seconds
        is_over = False
        while not is_over:
            oldest = self._count - len(self._past)
            number = max(number, oldest)
            is_over = number >= self._count
            past = (
                (END_OF_REPLAY, b"")
                if is_over
                else (number.to_bytes(8, "big"), self._past[number - oldest])
            )
            try:
                self._router.send_multipart((client, empty, *past), self._zmq.NOBLOCK)
            except self._zmq.Again:
                # It reads slower than messages are sent.
                is_over = time.monotonic() > until
                yield False
            except self._zmq.ZMQError as error:
                log.debug("KV events: a client that has requested past messages is gone: %s", error)
                return
            else:
                number, until = number + 1, time.monotonic() + self._config.silent_seconds
                yield True


class PublishedBlocks:
    """The blocks of one model that were published, by their hashes, and the events for what
    changes in them.
    """

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self._published: dict[str, set[bytes]] = {MEMORY: set(), DISK: set()}

    @property
    def has_any(self) -> bool:
        return any(self._published.values())

    def fields_of(self, change: Change, is_alone: bool = True) -> list[Fields]:
        """The events for a change. `is_alone`: no other model would be cleared with this one."""
        if isinstance(change, BlocksStored):
            return self._stored(change)
        if isinstance(change, BlocksRemoved):
            published = self._published[change.tier]
            removed = {change.tier: [digest for digest in change.hashes if digest in published]}
        else:
            removed = {tier: list(published) for tier, published in self._published.items()}
        for tier, hashes in removed.items():
            self._published[tier].difference_update(hashes)
        if is_alone and isinstance(change, AllCleared):
            return [{"type": "AllBlocksCleared"}]
        return [
            {
                "type": "BlockRemoved",
                "block_hashes": list(map(number_of, hashes)),
                "medium": MEDIA[tier],
            }
            for tier, hashes in removed.items()
            if hashes
        ]

    def _stored(self, change: BlocksStored) -> list[Fields]:
        whole = sum(len(edge) == EDGE_BYTES for edge in change.edges)
        if change.salt != SHARED or not whole:
            return []
        hashes = change.hashes[:whole]
        tokens = [token for edge in change.edges[:whole] for token in decode(edge)]
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


def number_of(digest: bytes) -> int:
    """A hash as vLLM publishes it by default: its last 64 bits."""
    return int.from_bytes(digest[-8:], "big")
