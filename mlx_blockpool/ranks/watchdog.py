"""TurnWatchdog: notices that a turn of the group does not end, as one that waits for a rank that
hangs never does.

A collective whose peer hangs waits for ever and raises nothing, but other threads run: the watchdog
has one. Knows times; no ranks and no requests. The thread that takes the turns calls begin() and
rest().
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import GroupLostError

# How often the thread checks.
CHECK_SECONDS = 0.25


class TurnWatchdog:
    """Calls `lost` once a turn has taken longer than `seconds`, on its own thread: it ends the
    process.
    """

    def __init__(
        self,
        seconds: float,
        lost: Callable[[GroupLostError], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self._lost = lost
        self._clock = clock
        # What began, how long it may take, and until when. None if nothing is awaited.
        self._turn: tuple[str, float, float] | None = None

    def begin(self, what: str, seconds: float | None = None) -> None:
        """Begin a part of a turn; the part before has ended.

        `seconds`: how long it may take, if not as long as others.
        """
        most = self.seconds if seconds is None else seconds
        self._turn = (what, most, self._clock() + most)

    def rest(self) -> None:
        """The turn has ended, and nothing is awaited until the next one begins."""
        self._turn = None

    def start(self) -> None:
        """Check from now on, until a turn is late or the process ends."""
        threading.Thread(target=self._run, name="turn watchdog", daemon=True).start()

    def check_turn(self) -> bool:
        """Return whether the turn is late; then `lost` was called."""
        turn = self._turn
        if turn is None or self._clock() <= turn[2]:
            return False
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        self._lost(GroupLostError(None, f"{turn[0]} has taken more than {turn[1]:g} seconds"))
        return True

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(CHECK_SECONDS) and not self.check_turn():
            pass
