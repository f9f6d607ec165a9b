"""Whether the generation thread makes progress. Written by that thread, read by any."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Health:
    """`restarts`: how often the thread had to start anew, or to drop requests that went nowhere."""

    def __init__(self, stall_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.restarts = 0
        self.stall_seconds = stall_seconds
        self._clock = clock
        self._doing: str | None = None
        self._marked = clock()

    def doing(self, what: str) -> None:
        """There is work. To go from one thing to another is no progress by itself."""
        if self._doing is None:
            self.mark()
        self._doing = what

    def mark(self) -> None:
        """Something was computed, read or loaded."""
        self._marked = self._clock()

    def idle(self) -> None:
        """There is nothing to do."""
        self._doing = None
        self.mark()

    def seconds_stalled(self, waits: bool) -> float:
        """How long ago the last progress was, if there is work to do; `waits`: a request waits, whatever the thread says."""
        return self._clock() - self._marked if waits or self._doing is not None else 0.0

    def is_stalled(self, waits: bool) -> bool:
        return self.seconds_stalled(waits) > self.stall_seconds

    def report(self, alive: bool, waits: bool) -> tuple[int, dict[str, Any]]:
        """HTTP status and body: 503 where the thread is gone, or there is work and nothing was computed for too long."""
        status = "unavailable" if not alive else "stalled" if self.is_stalled(waits) else "ok"
        doing = self._doing
        body: dict[str, Any] = {"status": status, "doing": doing or "nothing", "restarts": self.restarts}
        if waits or doing is not None:
            body["seconds_since_progress"] = round(self.seconds_stalled(waits), 3)
        return (200 if status == "ok" else 503), body
