"""Head: what a rank sends to all before a turn, in 16 words. TurnClock: the time that ranks count
by. Condition: the last heads.

Knows integers; no mail, no arrays. Any thread may read a Condition, which the generation thread of
rank 0 writes.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import Any

MB = 1 << 20
# 32-bit integers of a packed head; the time takes two of them.
WORDS = 16
_WORDS = struct.Struct(f"<{WORDS}i")
_FIELDS = struct.Struct("<iqiiiiiIiiiiiii")


class Act(IntEnum):
    """What the ranks do after an exchange. Only that of rank 0 counts."""

    IDLE = 0  # apply the mail, take no step
    STEP = 1  # apply the mail, then take `turns` steps of the engine of `model`
    STOP = 2  # close, in order


@dataclass(frozen=True)
class Head:
    """What a rank sends before a turn.

    From rank 0, for all:

    act:          what follows the exchange.
    now_us:       the time, in microseconds; each rank's clock starts anywhere, and that of rank 0
                  counts.
    step_us:      how long a step takes, by which the clock advances within the turn.
    turns:        the most steps of the engine until the next exchange.
    nap_ms:       how long every rank sleeps before the next exchange.
    model:        the model that takes the steps, by its number in the order of loads; -1: none.

    From every rank, of itself:

    mail_bytes:   the length of its mail; exchange() fills it in.
    fingerprint:  of its engines: those of all ranks are equal, or the ranks disagree.
    takes:        its disk takes records.
    restore:      the number of the restore whose records it reads; 0: none.
    restored:     how many of these records are read and verified, the first ones in the order of
                  the plan.
    failed:       the next record could not be read.
    wants_stop:   it was asked to stop.
    problem:      the error number (errno) that stops its disk from writing; 0: none.
    free_mb:      the memory that mlx has left there, in MB.
    """

    act: Act = Act.IDLE
    now_us: int = 0
    step_us: int = 0
    turns: int = 0
    nap_ms: int = 0
    model: int = -1
    mail_bytes: int = 0
    fingerprint: int = 0
    takes: bool = True
    restore: int = 0
    restored: int = 0
    failed: bool = False
    wants_stop: bool = False
    problem: int = 0
    free_mb: int = 0

    @property
    def free_bytes(self) -> int:
        return self.free_mb * MB

    def pack(self) -> list[int]:
        """The head as WORDS signed 32-bit integers."""
        return list(_WORDS.unpack(_FIELDS.pack(*astuple(self))))

    @staticmethod
    def unpack(words: Sequence[int]) -> Head:
        """The head that pack() made these words of."""
        values = _FIELDS.unpack(_WORDS.pack(*words))
        return Head(
            *(
                type(getattr(Head, field.name))(value)
                for field, value in zip(fields(Head), values, strict=True)
            )
        )


class TurnClock:
    """The time of a group, in seconds: equal on all ranks at the same step, and in place of
    time.monotonic() in decisions.

    step_seconds: how long a step counts, by rank 0's measurement of the last turn.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.step_seconds = 0.0

    def begin(self, head: Head) -> None:
        """A turn begins: `head` is that of rank 0. The time never goes back, however long its
        last steps took.
        """
        self.now = max(self.now, head.now_us / 1e6)
        self.step_seconds = head.step_us / 1e6

    def step(self) -> None:
        """A step of the turn has ended."""
        self.now += self.step_seconds

    def __call__(self) -> float:
        return self.now


class Condition:
    """The heads of the last exchange, for GET /health and the metrics; none on a single machine.

    What other threads read is replaced as a whole. `num_exchanges`: how many exchanges there were.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.heads: tuple[Head, ...] = ()
        self.num_exchanges = 0
        self._clock = clock
        self._exchanged = clock()

    def note(self, heads: Sequence[Head]) -> None:
        """An exchange has ended."""
        self.heads = tuple(heads)
        self.num_exchanges += 1
        self._exchanged = self._clock()

    @property
    def seconds_since_exchange(self) -> float:
        return self._clock() - self._exchanged

    def report(self) -> dict[str, Any]:
        """For GET /health; empty on a single machine."""
        if not self.heads:
            return {}
        ranks = [
            {
                "rank": rank,
                "store": os.strerror(head.problem)
                if head.problem
                else "ok"
                if head.takes
                else "takes nothing now",
                "free_memory_bytes": head.free_bytes,
                "restoring": head.restore != 0,
            }
            for rank, head in enumerate(self.heads)
        ]
        return {"ranks": ranks, "seconds_since_exchange": round(self.seconds_since_exchange, 3)}
