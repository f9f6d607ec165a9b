"""Measured throughput of prefill and of reading from disk, and which of the two is faster. Knows tokens, bytes and seconds.

Owned by the generation thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# Seconds after which a disk that was too slow is tried again: it may have been busy, or asleep.
RETRY_SECONDS = 300.0
# The share of earlier measurements that counts beside the next one.
MEMORY = 0.75


class Rate:
    """An amount per second: the last measurements count most, and of these the long ones."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            self._amount = self._amount * MEMORY + amount
            self._seconds = self._seconds * MEMORY + seconds

    @property
    def per_second(self) -> float | None:
        """None: nothing was measured."""
        return self._amount / self._seconds if self._seconds else None


class Busy:
    """The seconds in which any of several simultaneous jobs ran, and the amount that they got done."""

    def __init__(self) -> None:
        self.amount = 0
        self.seconds = 0.0
        self._until = 0.0

    def between(self, start: float, end: float, amount: int = 0) -> None:
        """A job ran from `start` to `end`. Time that an earlier call covers is not counted twice."""
        self.amount += amount
        self.seconds += max(0.0, end - max(start, self._until))
        self._until = max(self._until, end)


class Rates:
    """Tokens per second of prefill and bytes per second of restores, and which of the two is faster for a prefix."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prefill = Rate()
        self._restore = Rate()
        self._restored_at = clock()

    def computed(self, tokens: int, seconds: float) -> None:
        self._prefill.add(tokens, seconds)

    def restored(self, n_bytes: int, seconds: float) -> None:
        if self._is_old():
            self._restore = Rate()
        self._restore.add(n_bytes, seconds)
        self._restored_at = self._clock()

    def is_worth_reading(self, n_bytes: int, tokens: int) -> bool:
        """Return whether reading takes no longer than computing; True if either rate is unmeasured or too old."""
        prefill, restore = self._prefill.per_second, self._restore.per_second
        if prefill is None or restore is None or self._is_old():
            return True
        return n_bytes / restore <= tokens / prefill

    def _is_old(self) -> bool:
        return self._clock() - self._restored_at > RETRY_SECONDS

    def report(self) -> dict[str, Any]:
        """Figures, None where nothing was measured."""
        prefill, restore = self._prefill.per_second, self._restore.per_second
        return {
            "prefill_tokens_per_s": None if prefill is None else round(prefill, 1),
            "restore_bytes_per_s": None if restore is None else round(restore),
        }
