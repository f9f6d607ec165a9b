"""Head: what each rank sends to all before a turn, in 16 words; TurnClock: the time that all ranks count by.

Knows integers; no mail, no arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from enum import IntEnum

# 32-bit integers of a packed head; the time takes two of them.
WORDS = 16
_WORDS = struct.Struct(f"<{WORDS}i")
_FIELDS = struct.Struct("<iqiiiiiIiiiiiii")


class Act(IntEnum):
    """What the ranks do behind an exchange. Only that of rank 0 counts."""

    IDLE = 0  # apply the mail, take no step
    STEP = 1  # apply the mail, then take `turns` steps of the engine of `model`
    STOP = 2  # close, in order


@dataclass(frozen=True)
class Head:
    """What a rank sends before a turn.

    From rank 0, for all:

    act:          what comes behind the exchange.
    now_us:       the time, in microseconds; each rank's clock starts anywhere, and that of rank 0 counts.
    step_us:      how long a step takes, by which the clock goes on within the turn.
    turns:        the most steps of the engine until the next exchange.
    nap_ms:       how long every rank sleeps before the next exchange.
    model:        the model that takes the steps, by its number in the order of loads; -1: none.

    From every rank, of itself:

    mail_bytes:   the length of its mail; exchange() fills it in.
    fingerprint:  of its engines: those of all ranks are equal, or the ranks disagree.
    takes:        its disk takes records.
    restore:      the number of the restore whose records it reads; 0: none.
    restored:     as many of these records are read and proven, the first ones in the order of the plan.
    failed:       the next record could not be read.
    wants_stop:   it was asked to stop.
    problem:      what keeps its disk from writing, as a number that the server has a name for; 0: nothing.
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

    def pack(self) -> list[int]:
        """The head as WORDS signed 32-bit integers."""
        return list(_WORDS.unpack(_FIELDS.pack(*astuple(self))))

    @staticmethod
    def unpack(words: Sequence[int]) -> Head:
        """The head that pack() made these words of."""
        values = _FIELDS.unpack(_WORDS.pack(*words))
        return Head(*(type(getattr(Head, field.name))(value) for field, value in zip(fields(Head), values, strict=True)))


class TurnClock:
    """The time of a group, in seconds: equal on all ranks at the same step, and in place of time.monotonic() in decisions."""

    def __init__(self) -> None:
        self.now = 0.0
        self._step = 0.0

    def begin(self, head: Head) -> None:
        """A turn begins: `head` is that of rank 0. The time never goes back, however long its last steps took."""
        self.now = max(self.now, head.now_us / 1e6)
        self._step = head.step_us / 1e6

    def step(self) -> None:
        """A step of the turn has ended."""
        self.now += self._step

    def __call__(self) -> float:
        return self.now
