"""Restores as data and as a job: what to bring back from disk, the blocks that it goes into, and reading it step by step.

Owned by the generation thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import BadRecordError, PoolExhaustedError
from ..prefix.admission import Admission
from ..prefix.checkpoints import WindowCheckpoint, WindowSegment
from ..prefix.trie import Node
from ..store.fs import Into
from ..store.reader import READERS, Reading, RecordData
from ..store.record import Key
from .throughput import Busy

# While nobody computes, so many records are on their way: one in each thread that reads, and one that is copied. More are no
# faster, for their memory is not in a cache of the processor.
AT_ONCE = READERS + 1
# Beside running replies, which take most of the time: so many bytes, but not more records than this.
AHEAD_BYTES = 64 << 20
MOST_AHEAD = 16


@dataclass(frozen=True)
class RestorePlan:
    """A path to bring back.

    missing          nodes of it that are on disk only.
    have             tokens that can be resumed from memory; `tokens` more can be once the plan is carried out.
    node, position   where a checkpoint is brought back too; None: the model needs none.
    """

    path: Sequence[Node]
    missing: Sequence[Node]
    have: int
    tokens: int
    node: Node | None = None
    position: int = 0

    @property
    def arriving(self) -> set[Node]:
        """Nodes that no other restore needs to bring back meanwhile."""
        return {*self.missing} | ({self.node} if self.node is not None else set())


@dataclass(frozen=True)
class RestoreStep:
    """A record to bring back: a block for a node, a segment of what windows held, or a state where it is neither.

    block      ids of the held blocks that it goes into, one for each full group.
    segment    the tokens that a record of windows covers.
    """

    key: Key
    node: Node
    block: tuple[int, ...] = ()
    segment: WindowSegment | None = None


class RestoreOwner(Protocol):
    """What a RestoreJob needs of the one that planned it."""

    def begin_read(self, step: RestoreStep, into: Into) -> Reading:
        """Have a thread read the record of a step into what `into` gives."""

    def put_in(self, step: RestoreStep, found: RecordData, plan: RestorePlan, held: HeldBlocks) -> None:
        """Put what was read for a step where it belongs. Raises BadRecordError if it is not what the plan needs."""

    def answered(self) -> None:
        """The disk has given a record, or an error, just now."""

    def hang(self) -> TimeoutError | None:
        """The error to report if the disk has not answered for too long."""

    def unread(self, key: Key, error: Exception) -> None:
        """A record could not be read."""

    def restored(self, plan: RestorePlan, held: HeldBlocks, busy: Busy) -> None:
        """All records of a plan are in memory. `busy`: bytes, and the seconds that reading and copying them took."""

    def released(self, restore: RestoreJob) -> None:
        """A restore has released its blocks."""


class HeldBlocks:
    """The blocks of a whole path, in memory or to be filled, held until release(); states beside them in `states`.

    blocks   for each missing node of the plan, the ids of its blocks to be.
    rings    ids of the blocks of each window group.
    """

    def __init__(self, admission: Admission, full_groups: Sequence[int], windows: WindowCheckpoint, plan: RestorePlan) -> None:
        """Raises PoolExhaustedError if there is no room, and holds nothing then."""
        self._pool = pool = admission.pool
        self._tables = [pool.open_table(group) for group in full_groups]
        self._ring_tables = [pool.open_table(group) for group in windows.sizes] if plan.node is not None else []
        self.states: dict[int, list[Any]] = {}
        for index, table in enumerate(self._tables):
            pool.append_shared(table, [node.residency.blocks[index] for node in plan.path if node.residency.in_memory])
        counts = [len(plan.missing)] * len(full_groups) + (windows.counts(plan.position) if self._ring_tables else [])
        first = [len(table) for table in self._tables]
        try:
            admission.need_states(admission.arena.spec.fixed_bytes_per_agent())
            admission.reserve([*self._tables, *self._ring_tables], counts)
        except PoolExhaustedError:
            self.release()
            raise
        for table, count in zip([*self._tables, *self._ring_tables], counts, strict=True):
            pool.extend(table, count)
        ids = [table.ids[start:] for table, start in zip(self._tables, first, strict=True)]
        self.blocks: list[tuple[int, ...]] = list(zip(*ids, strict=True)) if ids else [()] * len(plan.missing)

    @property
    def rings(self) -> dict[int, list[int]]:
        return {table.group: table.ids for table in self._ring_tables}

    def release(self) -> None:
        for table in [*self._tables, *self._ring_tables]:
            self._pool.release(table)


class _Scratch:
    """Memory that one record after the other is read into: to get new memory takes longer than to read."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, size: int) -> memoryview:
        if size > len(self._memory):
            self._memory = np.empty(size, np.uint8)
        return self._memory.data[:size]


class RestoreJob:
    """The records of a plan on their way from disk into the pool, in order. Holds the blocks of the whole path until release().

    `block_bytes`: of one block of every group, which says how many records may be on their way beside running replies.
    """

    def __init__(
        self, owner: RestoreOwner, plan: RestorePlan, held: HeldBlocks, steps: Sequence[RestoreStep], block_bytes: int
    ) -> None:
        self.plan = plan
        self._owner = owner
        self._held = held
        self._unasked: Iterator[RestoreStep] = iter(steps)
        self._total = self._left = len(steps)
        self._reading: deque[tuple[RestoreStep, Reading, _Scratch]] = deque()
        self._unused: list[_Scratch] = []
        self._ahead = max(AT_ONCE, min(MOST_AHEAD, AHEAD_BYTES // block_bytes))
        self._busy = Busy()

    @property
    def have(self) -> int:
        """Tokens that could be resumed without it."""
        return self.plan.have

    @property
    def tokens(self) -> int:
        """Tokens that need not be computed once all records are in memory."""
        return self.plan.tokens

    @property
    def done(self) -> int:
        """How many of `tokens` are in memory, by the share of records."""
        return self.tokens * (self._total - self._left) // self._total

    @property
    def has_ended(self) -> bool:
        """Whether every record is in memory, or one could not be read."""
        return not self._left

    def advance(self, wait: float = 0.0, seconds: float = 0.0) -> bool:
        """Copy what has been read, for so many seconds. Returns whether no more will come.

        `wait`: so many seconds it may block for each record, as there is nothing to compute meanwhile. It never reads itself: a
        disk that hangs would take its thread along. One that gives nothing for the store's `answer_seconds` is given up.
        """
        until = time.perf_counter() + seconds
        while self._left and self._has_come(wait):
            self._take()
            self.read_ahead(AT_ONCE if wait else self._ahead)
            if time.perf_counter() >= until:
                break
        if self._left and not self._reading[0][1].done() and (error := self._owner.hang()) is not None:
            self._fail(self._reading[0][0].key, error)
        return not self._left

    def _has_come(self, wait: float) -> bool:
        reading = self._reading[0][1]
        if wait and not reading.done():
            futures.wait([reading], timeout=wait)
        return reading.done()

    def _fail(self, key: Key, error: Exception) -> None:
        self._owner.unread(key, error)
        self._reading.clear()
        self._left = 0

    def _take(self) -> None:
        """Put the next record where it belongs. One that cannot be read is the last."""
        self._owner.answered()
        step, reading, scratch = self._reading.popleft()
        try:
            found = reading.result()
            self._busy.between(reading.begun, reading.ended)
            begun = time.perf_counter()
            self._owner.put_in(step, found, self.plan, self._held)
            self._busy.between(begun, time.perf_counter(), found[0].nbytes)
        except (BadRecordError, OSError, MemoryError) as error:
            self._fail(step.key, error)
            return
        self._unused.append(scratch)
        self._left -= 1
        if not self._left:
            self._owner.restored(self.plan, self._held, self._busy)

    def release(self) -> None:
        """Release the blocks: from now on they are evictable like any others."""
        self._held.release()
        self._owner.released(self)

    def read_ahead(self, most: int = AT_ONCE) -> None:
        """Have records read until `most` are on their way."""
        while self._left and len(self._reading) < most and (step := next(self._unasked, None)) is not None:
            scratch = self._unused.pop() if self._unused else _Scratch()
            self._reading.append((step, self._owner.begin_read(step, scratch.take), scratch))
