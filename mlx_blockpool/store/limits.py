"""When the store may write, and when it scans its folder again. Knows sizes and the time; no
records.

Owned by the generation thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import StoreConfig
from .problems import StoreProblems
from .record import Key

log = logging.getLogger(__name__)

DAY_SECONDS = 86400
OVER_BUDGET = "over budget"
# A use of the folder, as StoreProblems names it.
RECORDS = "records"


@dataclass(frozen=True)
class WriteDecision:
    """Says whether the store has a record now, or will have it.

    refusal:  why it does not take it, or None.
    dropped:  the keys of the records of the same model that were removed for it.
    """

    refusal: str | None = None
    dropped: Sequence[Key] = ()


class WriteLimits:
    """`is_away`: the folder could not be read yet, and is not written before.

    `refused`: bytes of the write that was refused last, until it would be accepted.
    """

    def __init__(self, config: StoreConfig, problems: StoreProblems) -> None:
        self.is_away = False
        self._problems = problems
        self._config = config
        self._retry_at = 0.0
        self._day = (0, 0)
        self.refused: int | None = None
        self._has_warned = False

    @property
    def failure(self) -> Exception | None:
        """Why the disk is left alone at present."""
        return self._problems.error_of(RECORDS)

    def refusal(self, size: int, queue_takes: bool) -> str | None:
        """Why `size` bytes cannot be written now, or None.

        `queue_takes`: whether the writer's queue takes them.
        """
        limit, found = self._config.daily_bytes, None
        if limit is not None and self._today() + size > limit:
            found = "daily limit"
        elif not queue_takes:
            found = "queue full"
        elif self.is_away or (self.failure is not None and not self.may_retry()):
            found = "disk failed"
        self.refused = None if found is None else size
        return found

    def over_budget(self, pinned: int) -> str:
        """The refusal if dropping records frees too little.

        If `pinned` bytes are the reason, a warning says so once.
        """
        if pinned and not self._has_warned:
            self._has_warned = True
            budget = self._config.store_bytes
            log.warning(
                "prompt store: pinned records take %d of %d bytes; no more fits. Raise "
                "--store-bytes.",
                pinned,
                budget,
            )
        return OVER_BUDGET

    def still(self, queue_takes: bool) -> str | None:
        """Why the last rejected write would still be rejected, or None."""
        return None if self.refused is None else self.refusal(self.refused, queue_takes)

    def charge(self, size: int) -> None:
        """Count bytes that will be written. After a failure one record tries the disk."""
        self._day = (self._date(), self._today() + size)
        if self.failure is not None:
            self.wait()

    def suspend(self, error: OSError) -> None:
        """Stop writing for `retry_seconds` after the disk failed."""
        self._problems.report_failure(
            RECORDS, error, f"nothing is written for {self._config.retry_seconds:g} seconds"
        )
        self.refused = self.refused or 0
        self.wait()

    def resume(self) -> None:
        """Write again: the disk has taken a record."""
        self._problems.report_success(RECORDS)

    def wait(self) -> None:
        """Write nothing for `retry_seconds`."""
        self._retry_at = time.monotonic() + self._config.retry_seconds

    def may_retry(self) -> bool:
        """Return whether `retry_seconds` have passed since wait()."""
        return time.monotonic() >= self._retry_at

    def come_back(self) -> None:
        """The folder can be read again: the next record tries whether it can be written too."""
        if self.is_away:
            self.is_away, self._retry_at = False, 0.0

    def _today(self) -> int:
        return self._day[1] if self._day[0] == self._date() else 0

    def _date(self) -> int:
        return int(time.time() // DAY_SECONDS)


class FolderWatcher:
    """Decides when the folder is scanned again.

    A scan is due once `look_bytes` were passed to the writer since the last one, or `seconds` after
    anything was written or used. While one is under way, at most `look_bytes` are passed on.
    """

    def __init__(self, look_bytes: int, seconds: float) -> None:
        self.look_bytes = look_bytes
        self.seconds = seconds
        self.is_looking = False
        self._passed = 0
        self._begun_at = time.monotonic()

    def add(self, size: int) -> None:
        """Count bytes that were passed to the writer."""
        self._passed += size

    def allows(self, size: int) -> bool:
        return not self.is_looking or not self._passed or self._passed + size <= self.look_bytes

    def is_due(self, has_used: bool, at_once: bool) -> bool:
        """Return whether to scan now.

        `has_used`: files were used here since; `at_once`: the folder was never read yet.
        """
        waited = time.monotonic() - self._begun_at >= self.seconds
        wrote = 0 < self._passed >= self.look_bytes
        return not self.is_looking and (
            at_once or wrote or (waited and (has_used or self._passed > 0))
        )

    def begin(self) -> None:
        """Count again for a scan that begins now."""
        self.is_looking, self._passed, self._begun_at = True, 0, time.monotonic()
