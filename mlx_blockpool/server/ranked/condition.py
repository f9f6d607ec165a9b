"""Condition: what the ranks of a group say of themselves in their heads, for GET /health and the metrics.

Written by the generation thread of rank 0, and read by any; what others read is replaced as a whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...ranks.head import Head
from ...store.prompt_store import PromptStore
from ...system import memory_bytes

MB = 1 << 20


@dataclass(frozen=True)
class RankCondition:
    """One rank as its last head has it. `problem`: the error of its disk, as of errno; 0: none."""

    rank: int
    takes: bool
    problem: int
    free_bytes: int
    is_restoring: bool

    @staticmethod
    def of(rank: int, head: Head) -> RankCondition:
        return RankCondition(rank, head.takes, head.problem, head.free_mb * MB, head.restore != 0)

    @property
    def store(self) -> str:
        """Its store in words."""
        return os.strerror(self.problem) if self.problem else "ok" if self.takes else "takes nothing now"

    def as_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "store": self.store,
            "free_memory_bytes": self.free_bytes,
            "restoring": self.is_restoring,
        }


class Condition:
    """The ranks after the last exchange; none where one rank serves alone. `num_exchanges`: how many there were."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ranks: tuple[RankCondition, ...] = ()
        self.num_exchanges = 0
        self._clock = clock
        self._exchanged = clock()

    def note(self, heads: Sequence[Head]) -> None:
        """An exchange has ended."""
        self.ranks = tuple(RankCondition.of(rank, head) for rank, head in enumerate(heads))
        self.num_exchanges += 1
        self._exchanged = self._clock()

    @property
    def seconds_since_exchange(self) -> float:
        return self._clock() - self._exchanged

    def report(self) -> dict[str, Any]:
        """For GET /health; empty where one rank serves alone."""
        if not self.ranks:
            return {}
        seconds = round(self.seconds_since_exchange, 3)
        return {"ranks": [each.as_dict() for each in self.ranks], "seconds_since_exchange": seconds}


def problem_of(stores: Iterable[PromptStore]) -> int:
    """The error of the disk that has kept one of these stores from writing, as a head has it; 0: none."""
    return next((store.error_number for store in stores if store.error_number), 0)


def free_mb() -> int:
    """The memory that mlx has left, in MB."""
    return max(0, memory_bytes() - mx.get_active_memory()) // MB
