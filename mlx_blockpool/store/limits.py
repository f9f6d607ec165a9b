"""What may be written now: as much as the writer's queue holds, so much a day, and nothing for a while after the disk failed.

Knows sizes and the time; no records. Owned by the generation thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from ..config import StoreConfig
from .record import Key

log = logging.getLogger(__name__)

DAY_SECONDS = 86400
OVER_BUDGET = "over budget"


@dataclass(frozen=True)
class Put:
    """Why a record was not taken, and the keys of those of the same model that had to go for it."""

    refusal: str | None
    dropped: list[Key]

    @property
    def taken(self) -> bool:
        return self.refusal is None


class WriteLimits:
    """`problem`: why the disk is left alone at present. `is_away`: it could not be seen at all yet, and is not written before."""

    def __init__(self, config: StoreConfig) -> None:
        self.problem: str | None = None
        self.is_away = False
        self._config = config
        self._retry_at = 0.0
        self._day = (0, 0)
        # Bytes of the write that was refused last, until it would be accepted.
        self.refused: int | None = None
        self._has_told = False

    def refusal(self, size: int, queue_takes: bool) -> str | None:
        """Why `size` bytes cannot be written now; None: they can. `queue_takes`: whether the writer's queue has room for them."""
        found = self._refusal(size, queue_takes)
        self.refused = size if found is not None else None
        return found

    def over_budget(self, pinned: int) -> str:
        """The refusal where dropping records makes too little room. If `pinned` bytes are the reason, a warning says so once."""
        if pinned and not self._has_told:
            self._has_told = True
            budget = self._config.own_bytes
            log.warning(
                "prompt store: what has to stay takes %d of %d bytes, and no more fits. Raise --store-bytes.", pinned, budget
            )
        return OVER_BUDGET

    def still(self, queue_takes: bool) -> str | None:
        """Why the last rejected write would still be rejected, or None."""
        return None if self.refused is None else self.refusal(self.refused, queue_takes)

    def charge(self, size: int) -> None:
        """Count bytes that will be written. After a failure one record is let through to try the disk."""
        self._day = (self._date(), self._today() + size)
        if self.problem is not None:
            self.wait()

    def suspend(self, error: OSError) -> None:
        """Stop writing for `retry_seconds` after the disk failed."""
        if self.problem is None:
            log.warning("prompt store: %s; nothing is written for %s seconds", error, self._config.retry_seconds)
        self.problem = str(error)
        self.refused = self.refused or 0
        self.wait()

    def wait(self) -> None:
        """Write nothing for `retry_seconds`."""
        self._retry_at = time.monotonic() + self._config.retry_seconds

    def may_retry(self) -> bool:
        """Whether `retry_seconds` have passed since wait()."""
        return time.monotonic() >= self._retry_at

    def come_back(self) -> None:
        """The folder can be read again: the next record tries whether it can be written too."""
        if self.is_away:
            self.is_away, self._retry_at = False, 0.0

    def _refusal(self, size: int, queue_takes: bool) -> str | None:
        limit = self._config.daily_bytes
        if limit is not None and self._today() + size > limit:
            return "daily limit"
        if not queue_takes:
            return "queue full"
        if self.is_away or (self.problem is not None and not self.may_retry()):
            return "disk failed"
        return None

    def _today(self) -> int:
        return self._day[1] if self._day[0] == self._date() else 0

    def _date(self) -> int:
        return int(time.time() // DAY_SECONDS)
