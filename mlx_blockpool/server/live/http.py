"""GET /metrics, and GET /v1/cache/events: the log of a server as server-sent events. Runs on the socket's thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ...prefix.changes import Change
from ..replies import has_hung_up
from .events import KINDS, Sight, packet
from .log import Event, Reader
from .metrics import PATH as METRICS
from .metrics import exposition
from .snapshot import Snapshot

EVENTS = "/v1/cache/events"
PATHS = (METRICS, EVENTS)
# A comment after this long without an event keeps the connection.
COMMENT_SECONDS = 15.0
# How often a connection without events is checked.
LOOK_SECONDS = 1.0
# After an event its reader lets others gather, and sends them together.
GATHER_SECONDS = 0.05
# Parts of a snapshot that are sent together.
SENT = 32


def answer_live(handler: Any) -> None:
    """Answer a request to one of PATHS."""
    if handler.route == METRICS:
        handler.send_body(200, *exposition(handler.scope.generator, handler.headers.get("Accept")))
    else:
        EventsEndpoint(handler).get()


class EventsEndpoint:
    """Streams events to the client of `handler` until it hangs up or the server stops."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._generator = handler.scope.generator
        config = self._generator.access.config
        self._sight = Sight(handler.scope.owner, config.private_prefixes)
        # Of earlier events only those of blocks are sent, which complete a snapshot.
        self._since = 0
        self._comment_due = 0.0

    def get(self) -> None:
        """Answer the request, which may name the last event that the client has seen, or want a snapshot first."""
        query = dict(parse_qsl(urlsplit(self._handler.path).query))
        given = self._handler.headers.get("Last-Event-ID") or query.get("last_event_id")
        if given is not None and not (given.isascii() and given.isdecimal() and len(given) < 20):
            error = f"Last-Event-ID: Input should be the id of an event, a number; found {given[:50]!r}"
            self._handler.send_json(400, {"error": error})
            return
        readers = self._generator.access.event_readers
        if not readers.acquire(blocking=False):
            most = self._generator.access.config.event_readers
            self._handler.send_json(503, {"error": f"{most} clients already read events. Try again when one of them has ended."})
            return
        try:
            self._handler.start_stream("text/event-stream")
            if self._handler.command != "HEAD":
                self._stream(None if given is None else int(given), is_on(query.get("snapshot")), is_on(query.get("follow", "1")))
        finally:
            readers.release()

    def _stream(self, after: int | None, wants_snapshot: bool, follows: bool) -> None:
        log = self._generator.registry.log
        reader = Reader(log, after)
        self._send([b": events of the server\n\n"])
        if wants_snapshot:
            self._since, reader = log.end, Reader(log, self._send_snapshot())
        end = log.end
        while follows or (reader.next < end and reader.wait(0)):
            if reader.wait(LOOK_SECONDS):
                time.sleep(GATHER_SECONDS)
                self._send(self._taken(reader))
            elif log.is_closed or has_hung_up(self._handler.connection):
                return
            elif time.monotonic() >= self._comment_due:
                self._send([b": nothing new\n\n"])

    def _taken(self, reader: Reader) -> Iterator[bytes]:
        lost, events = reader.take()
        if lost:
            yield packet(reader.next - len(events) - 1, "gap", {"lost": lost}, None, time.time())
        for event in events:
            yield from self._packets(event)

    def _packets(self, event: Event) -> Iterator[bytes]:
        if event.number < self._since and not isinstance(event.what, Change):
            return
        data = self._sight.data(event.what)
        if data is not None:
            yield packet(event.number, KINDS[type(event.what)], data, event.model, event.time)

    def _send_snapshot(self) -> int:
        """Send what each model holds. Returns the number of the event before the first one that completes it."""
        snapshot: Snapshot = self._generator.snapshots.take()
        self._send([packet(snapshot.number, "all_cleared", {}, None, snapshot.time)])
        parts = snapshot.seen_by(self._sight)
        for first in range(0, len(parts), SENT):
            self._send(parts[first : first + SENT])
        return snapshot.number

    def _send(self, packets: Any) -> None:
        """Write packets as one; the socket's time to send bounds a client that reads nothing."""
        data = b"".join(packets)
        if data:
            self._comment_due = time.monotonic() + COMMENT_SECONDS
            self._handler.wfile.write(data)
            self._handler.wfile.flush()


def is_on(value: str | None) -> bool:
    return value in ("1", "true")
