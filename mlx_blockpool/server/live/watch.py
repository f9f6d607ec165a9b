"""RequestWatch: what a request has done so far, written into the log as it happens.

Begun on the socket's thread, then owned by the generation thread.
"""

from __future__ import annotations

import time

from ...engine import request as engine
from ...prefix.lookup import Lookup
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
        self._events, self._tally = events, events.tally
        self._who = who_of(options)
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = self._num_tokens = self._num_forced = 0
        self._begun = self._shown = time.monotonic()
        self._first: float | None = None
        self._last = 0.0
        self._is_running = self._has_started = self._has_ended = False
        self._tally.begun()
        events.append(RequestBegun(self._who, prompt_tokens))

    def follow(self, event: engine.Event) -> None:
        """Note an event of the engine; that of a failure comes with the end."""
        match event:
            case engine.Token():
                self.token(event.finish_reason, is_forced=event.logprobs is None)
            case engine.Progress():
                self.progress(event.done, event.total)
            case engine.Started():
                self.started(event.cached, event.why)
            case engine.Swapped():
                self._swapped(event.is_in)
            case engine.RestoreBegun():
                self._events.append(RestoreBegun(self._who, event.tokens, event.n_bytes))
            case engine.RestoreEnded():
                self._tally.restored(event)
                self._events.append(RestoreEnded(self._who, event.tokens, event.n_bytes))

    def started(self, cached: int, lookup: Lookup | None) -> None:
        """Note that it has its caches; `cached` tokens of its prompt need not be computed, which `lookup` explains."""
        self._run(True)
        if self._has_started:
            # A request whose model was unloaded meanwhile starts again.
            return
        self._has_started = True
        self._cached_tokens = cached
        self._tally.queued.observe(time.monotonic() - self._begun)
        self._tally.looked_up(self._prompt_tokens, cached, lookup)
        self._events.append(RequestStarted(self._who, cached))

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._shown >= PROGRESS_SECONDS:
            self._shown = now
            self._events.append(RequestProgress(self._who, done, total))

    def token(self, finish_reason: str | None = None, is_forced: bool = False) -> None:
        """Note a generated token. `finish_reason`: of the last one; `is_forced`: by a form, and not drawn."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._tally.first_token.observe(now - self._begun)
        else:
            self._tally.between_tokens.observe(now - self._last)
        self._last = now
        self._num_tokens += 1
        self._tally.generated_tokens += 1
        if is_forced:
            self._num_forced += 1
            self._tally.forced_tokens += 1
        if finish_reason is not None:
            self.ended(finish_reason)

    def suspended(self) -> None:
        """Note that its model is unloaded; the request continues once the model is loaded again."""
        if self._is_running:
            self._swapped(is_in=False)

    def ended(self, reason: str) -> None:
        """Note its end: stop, length, abort (the client is gone) or error. Only the first end counts."""
        if self._has_ended:
            return
        self._has_ended = True
        self._run(False)
        now, first = time.monotonic(), self._first
        self._tally.num_ended += 1
        self._tally.ended[reason] += 1
        self._tally.whole.observe(now - self._begun)
        ttft = None if first is None else round(first - self._begun, 4)
        tokens = self._prompt_tokens, self._cached_tokens, self._num_tokens, self._num_forced
        self._events.append(RequestEnded(self._who, reason, *tokens, ttft, round(now - self._begun, 4)))

    def _swapped(self, is_in: bool) -> None:
        self._run(is_in)
        self._tally.swaps["in" if is_in else "out"] += 1
        self._events.append(SwappedIn(self._who) if is_in else SwappedOut(self._who))

    def _run(self, is_running: bool) -> None:
        """Note that it runs from now on, or waits."""
        self._tally.num_running += is_running - self._is_running
        self._is_running = is_running
