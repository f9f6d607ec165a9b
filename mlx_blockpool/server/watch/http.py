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


def answer_events(handler: Any) -> None:
    """Stream events to the client of `handler` until it hangs up or the server stops.

    The request may name the last event that the client has seen, or want a snapshot first.
    """
    query = dict(parse_qsl(urlsplit(handler.path).query))
    given = handler.headers.get("Last-Event-ID") or query.get("last_event_id")
    if given is not None and not (given.isascii() and given.isdecimal() and len(given) < 20):
        raise StatusError(
            400,
            f"Last-Event-ID: Input should be the id of an event, a number; found {given[:50]!r}",
        )
    if handler.command == "HEAD":
        handler.start_stream("text/event-stream")
        return
    owner, access = handler.scope.owner, handler.scope.generator.access
    place = access.event_readers.enter(reader_client(owner, handler.client_address[0]))
    if place is None:
        most = access.config.event_readers
        raise StatusError(
            503, f"{most} clients already read events. Try again when one of them has ended."
        )
    try:
        handler.start_stream("text/event-stream")
        for data in _stream(handler, place, None if given is None else int(given), query):
            # The socket's time to send bounds a client that reads nothing.
            handler.wfile.write(data)
            handler.wfile.flush()
    finally:
        access.event_readers.leave(place)


def _stream(
    handler: Any, place: ReaderPlace, after: int | None, query: dict[str, str]
) -> Iterator[bytes]:
    """Yield what is sent at a time. `after`: the number of the event that was read last."""
    generator = handler.scope.generator
    config, log, since = generator.access.config, generator.registry.log, 0
    view, reader = EventView(handler.scope.owner, config.private_prefixes), EventReader(log, after)
    yield b": events of the server\n\n"
    if is_on(query.get("snapshot")):
        # Of the events before now, those of blocks are sent, which complete the snapshot.
        since, snapshot = log.end, generator.snapshots.take()
        reader = EventReader(log, snapshot.number)
        yield packet(snapshot.number, "all_cleared", {}, None, snapshot.time)
        parts = [data for salt, data in snapshot.parts if view.sees(salt)]
        for first in range(0, len(parts), SENT):
            yield b"".join(parts[first : first + SENT])
    follows = is_on(query.get("follow", "1"))
    end, comment_due = log.end, time.monotonic() + config.comment_seconds
    while follows or (reader.next < end and reader.wait(0)):
        if place.is_lost:
            retry = 1000 * config.reader_retry_seconds
            yield f": a newer reader has this place\nretry: {retry}\n\n".encode()
            return
        data = b""
        if reader.wait(CHECK_SECONDS):
            time.sleep(GATHER_SECONDS)
            lost, events = reader.take()
            if lost:
                before = reader.next - len(events) - 1
                data = packet(before, "gap", {"lost": lost}, None, time.time())
            for event in events:
                if event.number >= since or not isinstance(event.what, dict):
                    data += view.packet(event)
        elif log.is_closed:
            return
        # Events of others show this reader nothing.
        if not data and has_hung_up(handler.connection):
            return
        if not data and time.monotonic() >= comment_due:
            data = b": nothing new\n\n"
        if data:
            comment_due = time.monotonic() + config.comment_seconds
            yield data


def is_on(value: str | None) -> bool:
    return value in ("1", "true")


def answer_metrics(handler: Any) -> None:
    """Answer GET /metrics."""
    handler.send_body(200, *exposition(handler.scope.generator, handler.headers.get("Accept")))


ROUTES = (
    Route(METRICS, answer_metrics),
    Route(EVENTS, answer_events),
)
