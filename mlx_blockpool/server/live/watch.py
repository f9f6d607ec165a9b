"""RequestWatch: what a request has done so far, written into the log as it happens.

Begun on the socket's thread, then owned by the generation thread.
"""

from __future__ import annotations

import time

from ...engine import request as engine
from ..request import RequestOptions
from .events import (
    RequestBegun,
    RequestEnded,
    RequestProgress,
    RequestStarted,
    RestoreBegun,
    RestoreEnded,
    SwappedIn,
    SwappedOut,
    who_of,
)
from .log import ModelEvents

# The least time between two events of the progress of one prompt.
PROGRESS_SECONDS = 0.25


class RequestWatch:
    """One request from its arrival at the generation thread to its end. `events`: the log, as its model appends to it."""

    def __init__(self, events: ModelEvents, options: RequestOptions, prompt_tokens: int) -> None:
        self._events = events
        self._who = who_of(options)
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = self._num_tokens = 0
        self._begun = self._told = time.monotonic()
        self._ttft: float | None = None
        self._has_ended = False
        events.append(RequestBegun(self._who, prompt_tokens))

    def follow(self, event: engine.Event) -> None:
        """Note an event of the engine; that of a failure comes with the end."""
        match event:
            case engine.Token():
                self.token()
                if event.finish_reason is not None:
                    self.ended(event.finish_reason)
            case engine.Progress():
                self.progress(event.done, event.total)
            case engine.Started():
                self.started(event.cached)
            case engine.Swapped():
                self._events.append(SwappedIn(self._who) if event.is_in else SwappedOut(self._who))
            case engine.RestoreBegun():
                self._events.append(RestoreBegun(self._who, event.tokens, event.n_bytes))
            case engine.RestoreEnded():
                self._events.append(RestoreEnded(self._who, event.tokens, event.n_bytes))

    def started(self, cached: int) -> None:
        """It has its caches; `cached` tokens of its prompt need not be computed."""
        self._cached_tokens = cached
        self._events.append(RequestStarted(self._who, cached))

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._told >= PROGRESS_SECONDS:
            self._told = now
            self._events.append(RequestProgress(self._who, done, total))

    def token(self) -> None:
        """A token was generated."""
        if self._ttft is None:
            self._ttft = time.monotonic() - self._begun
        self._num_tokens += 1

    def ended(self, reason: str) -> None:
        """It has ended: stop, length, abort (the client is gone) or error. Only the first end counts."""
        if self._has_ended:
            return
        self._has_ended = True
        seconds, ttft = time.monotonic() - self._begun, self._ttft
        self._events.append(
            RequestEnded(
                self._who,
                reason,
                self._prompt_tokens,
                self._cached_tokens,
                self._num_tokens,
                None if ttft is None else round(ttft, 4),
                round(seconds, 4),
            )
        )
