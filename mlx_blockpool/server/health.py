"""Health measures the progress of the generation thread; the watchdog ends a process whose thread
makes none for too long.

Health is written by the generation thread and read by any; the watchdog runs on its thread.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

# The status of a process whose generation thread hung: EX_SOFTWARE of sysexits.h.
HUNG = 70
LOOK_SECONDS = 1.0
# What the thread does while it takes steps of an engine.
STEPS = "prefill and decode"
# A stall lasts at least this many seconds.
PAUSE_SECONDS = 1.0


class Health:
    """The progress of the thread.

    restarts:  how often it was started again, or dropped requests that made no progress.
    stalls:    how often it made no progress for PAUSE_SECONDS and longer while there was work, and
               for how long in all.
    """

    def __init__(self, stall_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.restarts = self.stalls = 0
        self.stalled_seconds = 0.0
        self.stall_seconds = stall_seconds
        self._clock = clock
        self._doing: str | None = None
        self._marked = clock()

    def doing(self, what: str) -> None:
        """Note that there is work. A change of the activity alone is not progress."""
        if self._doing is None:
            self.mark()
        self._doing = what

    def mark(self) -> None:
        """Note that something was computed, read or loaded."""
        now = self._clock()
        if self._doing is not None and now - self._marked >= PAUSE_SECONDS:
            self.stalls += 1
            self.stalled_seconds += now - self._marked
        self._marked = now

    def idle(self) -> None:
        """Note that there is nothing to do."""
        self.mark()
        self._doing = None

    def seconds_stalled(self, waits: bool) -> float:
        """Seconds since the last progress, if there is work to do; `waits`: a request waits,
        whatever the thread reports.
        """
        return self._clock() - self._marked if waits or self._doing is not None else 0.0

    def is_stalled(self, waits: bool) -> bool:
        return self.seconds_stalled(waits) > self.stall_seconds

    def report(self, alive: bool, waits: bool) -> tuple[int, dict[str, Any]]:
        """HTTP status and body: 503 where the thread is gone, or there is work and nothing was
        computed for too long.

        The body of an idle server is mlx-lm's, which has the status alone, unless the thread was
        restarted.
        """
        status = "unavailable" if not alive else "stalled" if self.is_stalled(waits) else "ok"
        # With its last reply a client may have read that all is done before the thread has ended
        # the step.
        doing = None if self._doing == STEPS and not waits else self._doing
        body: dict[str, Any] = {"status": status}
        if waits or doing is not None:
            body |= {
                "doing": doing or "nothing",
                "seconds_since_progress": round(self.seconds_stalled(waits), 3),
            }
        if self.restarts:
            body["restarts"] = self.restarts
        return (200 if status == "ok" else 503), body


@dataclass
class Watchdog:
    """Ends the process once `seconds_stalled()` says that nothing was computed for `most`
    seconds while requests waited.
    """

    seconds_stalled: Callable[[], float]
    most: float
    end: Callable[[int], Any] = os._exit

    def start(self) -> None:
        """Check every second, until the process ends."""
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def look(self) -> None:
        """End the process if its time has come."""
        seconds = self.seconds_stalled()
        if seconds > self.most:
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            log.critical(
                "nothing was computed for %.0f seconds while requests waited; the process ends",
                seconds,
            )
            self.end(HUNG)

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_SECONDS):
            self.look()
