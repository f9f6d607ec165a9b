"""GET /metrics, and GET /v1/cache/events: the log of a server as server-sent events.

Runs on the socket's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ..access import ReaderPlace, reader_client
from ..bodies import StatusError
from ..routes import Route
from ..wire import has_hung_up
from .event_log import EventReader, EventView, packet
from .metrics import PATH as METRICS
from .metrics import exposition

EVENTS = "/v1/cache/events"
# How often a connection without events is checked.
CHECK_SECONDS = 1.0
# After an event its reader lets others gather, and sends them together.
GATHER_SECONDS = 0.05
# Parts of a snapshot that are sent together.
SENT = 32


class EventsEndpoint:
    """Streams events to the client of `handler` until it hangs up or the server stops."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._generator = handler.scope.generator
        self._access = self._generator.access
        self._view = EventView(handler.scope.owner, self._access.config.private_prefixes)

    def get(self) -> None:
        """Answer the request, which may name the last event that the client has seen, or want a
        snapshot first.
        """
        query = dict(parse_qsl(urlsplit(self._handler.path).query))
        given = self._handler.headers.get("Last-Event-ID") or query.get("last_event_id")
        if given is not None and not (given.isascii() and given.isdecimal() and len(given) < 20):
            raise StatusError(
                400,
                "Last-Event-ID: Input should be the id of an event, a number; found "
                f"{given[:50]!r}",
            )
        if self._handler.command == "HEAD":
            self._handler.start_stream("text/event-stream")
            return
        readers = self._access.event_readers
        place = readers.enter(
            reader_client(self._handler.scope.owner, self._handler.client_address[0])
        )
        if place is None:
            most = self._access.config.event_readers
            raise StatusError(
                503, f"{most} clients already read events. Try again when one of them has ended."
            )
        try:
            self._handler.start_stream("text/event-stream")
            reader = EventReader(
                self._generator.registry.log, None if given is None else int(given)
            )
            for data in self._stream(
                place, reader, is_on(query.get("snapshot")), is_on(query.get("follow", "1"))
            ):
                # The socket's time to send bounds a client that reads nothing.
                self._handler.wfile.write(data)
                self._handler.wfile.flush()
        finally:
            readers.leave(place)

    def _stream(
        self, place: ReaderPlace, reader: EventReader, wants_snapshot: bool, follows: bool
    ) -> Iterator[bytes]:
        """Yield what is sent at a time."""
        log, since = self._generator.registry.log, 0
        yield b": events of the server\n\n"
        if wants_snapshot:
            # Of the events before now, those of blocks are sent, which complete the snapshot.
            since, snapshot = log.end, self._generator.snapshots.take()
            reader = EventReader(log, snapshot.number)
            yield packet(snapshot.number, "all_cleared", {}, None, snapshot.time)
            parts = [data for salt, data in snapshot.parts if self._view.sees(salt)]
            for first in range(0, len(parts), SENT):
                yield b"".join(parts[first : first + SENT])
        end, comment_due = log.end, time.monotonic() + self._access.config.comment_seconds
        while follows or (reader.next < end and reader.wait(0)):
            if place.is_lost:
                yield (
                    ": a newer reader has this place\nretry: "
                    f"{1000 * self._access.config.reader_retry_seconds}\n\n"
                ).encode()
                return
            data = b""
            if reader.wait(CHECK_SECONDS):
                time.sleep(GATHER_SECONDS)
                data = b"".join(self._take(reader, since))
            elif log.is_closed:
                return
            # Events of others show this reader nothing.
            if not data and has_hung_up(self._handler.connection):
                return
            if not data and time.monotonic() >= comment_due:
                data = b": nothing new\n\n"
            if data:
                comment_due = time.monotonic() + self._access.config.comment_seconds
                yield data

    def _take(self, reader: EventReader, since: int) -> Iterator[bytes]:
        lost, events = reader.take()
        if lost:
            yield packet(reader.next - len(events) - 1, "gap", {"lost": lost}, None, time.time())
        for event in events:
            if event.number >= since or not isinstance(event.what, dict):
                yield self._view.packet(event)


def is_on(value: str | None) -> bool:
    return value in ("1", "true")


def answer_metrics(handler: Any) -> None:
    """Answer GET /metrics."""
    handler.send_body(200, *exposition(handler.scope.generator, handler.headers.get("Accept")))


ROUTES = (
    Route(METRICS, answer_metrics),
    Route(EVENTS, lambda handler: EventsEndpoint(handler).get()),
)
