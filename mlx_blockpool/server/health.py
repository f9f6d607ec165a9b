"""Whether the generation thread makes progress. Written by that thread, read by any."""

from __future__ import annotations

import time
from typing import Any


class Health:
    """`restarts`: how often the thread had to start anew."""

    def __init__(self, stall_seconds: float) -> None:
        self.restarts = 0
        self._stall_seconds = stall_seconds
        self._doing: str | None = None
        self._marked = time.monotonic()

    def doing(self, what: str) -> None:
        """There is work from now on."""
        if self._doing != what:
            self._doing = what
            self.mark()

    def mark(self) -> None:
        """Something was computed."""
        self._marked = time.monotonic()

    def idle(self) -> None:
        self._doing = None

    def report(self, alive: bool) -> tuple[int, dict[str, Any]]:
        """HTTP status and body: 503 where the thread is gone, or has computed nothing for too long."""
        doing, seconds = self._doing, time.monotonic() - self._marked
        stalled = doing not in (None, "loading a model") and seconds > self._stall_seconds
        status = "unavailable" if not alive else "stalled" if stalled else "ok"
        body: dict[str, Any] = {"status": status, "doing": doing or "nothing", "restarts": self.restarts}
        if doing is not None:
            body["seconds_since_progress"] = round(seconds, 3)
        return (200 if status == "ok" else 503), body
