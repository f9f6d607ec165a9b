"""RequestWatch: what a request has done so far, counted and written into the log as it happens.

Begun on the socket's thread, then owned by the generation thread.
"""

from __future__ import annotations

import time
from typing import Any

from ...engine import request as engine
from ...prefix.lookup import Lookup
from ..request import RequestOptions
from .event_log import ModelEvents, who_of

# The least time between two events of the progress of one prompt.
PROGRESS_SECONDS = 0.25


class RequestWatch:
    """One request from its arrival at the generation thread to its end.

    `events`: the log, as its model appends to it.
    """

    def __init__(self, events: ModelEvents, options: RequestOptions, prompt_tokens: int) -> None:
        self._events, self._counts = events, events.counts
        self._who = who_of(options)
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = self._num_tokens = self._num_forced = 0
        self._begun = self._shown = time.monotonic()
        # When its first and its last token were generated.
        self._first: float | None = None
        self._last = 0.0
        self._is_running = self._has_started = self._has_ended = False
        self._counts.begin_request()
        self._log("request_begun", agent=self._who.agent, prompt_tokens=prompt_tokens)

    def follow(self, event: engine.Event) -> None:
        """Note an event of the engine that shows the client nothing."""
        match event:
            case engine.Swapped():
                self._swapped(event.is_in)
            case engine.RestoreBegun():
                self._log("restore_begun", tokens=event.tokens, bytes=event.n_bytes)
            case engine.RestoreEnded():
                self._counts.num_restores += 1
                self._counts.restored_tokens += event.tokens
                self._counts.restored_bytes += event.n_bytes
                self._log("restore_ended", tokens=event.tokens, bytes=event.n_bytes)

    def started(self, cached: int, lookup: Lookup | None) -> None:
        """Note that it has its caches; `cached` tokens of its prompt need not be computed, which
        `lookup` explains.

        `lookup` is None for mlx-lm's own caches.
        """
        self._run(True)
        if self._has_started:
            # A request whose model was unloaded meanwhile starts again.
            return
        self._has_started = True
        self._cached_tokens = cached
        counts, tokens = self._counts, self._prompt_tokens
        counts.queued.observe(time.monotonic() - self._begun)
        counts.prompt_tokens += tokens
        restored = 0 if lookup is None else min(lookup.restored, cached)
        counts.hits.update(disk=restored, memory=cached - restored)
        if cached < tokens - 1:
            cause = "unknown" if lookup is None else lookup.cause
            counts.misses[cause] += 1
            counts.missed_tokens[cause] += tokens - cached
        self._log("request_started", cached_tokens=cached)

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._shown >= PROGRESS_SECONDS:
            self._shown = now
            self._log("request_progress", done=done, total=total)

    def token(self, finish_reason: str | None = None, is_forced: bool = False) -> None:
        """Note a generated token.

        `finish_reason`: of the last one; `is_forced`: by a form, and not drawn.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._counts.first_token.observe(now - self._begun)
        else:
            self._counts.between_tokens.observe(now - self._last)
        self._last = now
        self._num_tokens += 1
        self._num_forced += is_forced
        self._counts.generated_tokens += 1
        self._counts.forced_tokens += is_forced
        if finish_reason is not None:
            self.ended(finish_reason)

    def suspended(self) -> None:
        """Note that its model is unloaded; the request continues once the model is loaded again."""
        if self._is_running:
            self._swapped(is_in=False)

    def ended(self, reason: str) -> None:
        """Note its end: stop, length, abort (the client is gone) or error.

        Only the first end counts.
        """
        if self._has_ended:
            return
        self._has_ended = True
        self._run(False)
        seconds, first = time.monotonic() - self._begun, self._first
        self._counts.num_ended += 1
        self._counts.ended[reason] += 1
        self._counts.whole.observe(seconds)
        self._log(
            "request_ended",
            reason=reason,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._num_tokens,
            forced_tokens=self._num_forced,
            # To the first token.
            ttft=None if first is None else round(first - self._begun, 4),
            seconds=round(seconds, 4),
        )

    def _swapped(self, is_in: bool) -> None:
        direction = "in" if is_in else "out"
        self._run(is_in)
        self._counts.swaps[direction] += 1
        self._log(f"swapped_{direction}")

    def _run(self, is_running: bool) -> None:
        """Note that it runs from now on, or waits."""
        self._counts.num_running += is_running - self._is_running
        self._is_running = is_running

    def _log(self, kind: str, **fields: Any) -> None:
        self._events.add(kind, fields, self._who)
