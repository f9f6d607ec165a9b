"""Restores: what to bring back from disk, the blocks that it goes into, and reading it step by step.

Owned by the generation thread.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from typing import Any

import numpy as np

from ..errors import BadRecordError, PoolExhaustedError
from ..kv.block_bytes import contents, copy_in
from ..prefix.admission import Admission
from ..prefix.checkpoints import WindowCheckpoint, WindowSegment
from ..prefix.residency import Checkpoint
from ..prefix.trie import Node, PrefixRef
from ..store.fs import Into
from ..store.reader import READERS, RecordData
from ..store.record import BLOCK, STATE, WINDOW, Expected, Key
from .catalog import StoredNodes
from .checkpoint_records import StoredCheckpoints, parts_of, states_in
from .throughput import Busy, Rates

# While nothing is computed, this many records are in flight: one in each thread that reads, and one that is copied. More are no
# faster, for their memory is not in a cache of the processor.
AT_ONCE = READERS + 1
# Beside running replies, which take most of the time: this many bytes, but not more records than this.
AHEAD_BYTES = 64 << 20
MOST_AHEAD = 16
# run() checks this often whether the disk hangs, in seconds.
WAIT_SECONDS = 0.1


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
    """A record to bring back: a block for a node, a segment of what windows held, or a state.

    block      ids of the held blocks that it goes into, one for each full group.
    segment    the tokens that a record of windows covers.
    """

    key: Key
    node: Node
    block: tuple[int, ...] = ()
    segment: WindowSegment | None = None


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


class Restores:
    """Brings the records of `nodes` and `checkpoints` back into the pool.

    rates          how fast prompts are computed and records read, as measured here.
    jobs           restores under way; `arriving` are the nodes that they bring back.
    num_restored   tokens brought back.            num_unread     records that could not be read.
    num_arrived    records read and put into the pool.
    num_released   restores that released their blocks: requests that wait for room are tried again when it changes.
    """

    def __init__(self, nodes: StoredNodes, checkpoints: StoredCheckpoints, admission: Admission) -> None:
        self.checkpoints = checkpoints
        self.store, self.index, self.arena = checkpoints.store, checkpoints.index, checkpoints.arena
        self.admission = admission
        self.rates = Rates()
        self.jobs: list[RestoreJob] = []
        self.arriving: set[Node] = set()
        self.num_restored = self.num_unread = self.num_arrived = self.num_released = 0
        self.clock = time.monotonic
        # When the disk gave something last, while something is on its way; until when it is left alone.
        self.last_arrival = self._left_alone_until = self.clock()
        self._nodes = nodes
        # The arrays of a block of this many tokens, and the parts of its record.
        self.contents = arrays = cache(partial(contents, self.arena, self.index.full_groups, bits=self.store.config.bits))
        self.parts = cache(lambda tokens: parts_of(arrays(tokens)))

    # -- planning ------------------------------------------------------------------------------------------------------

    def plan(self, match: PrefixRef, at_most: int, have: int) -> RestorePlan | None:
        """What to bring back to resume a match beyond `have` tokens, at `at_most` at most; None: disk has nothing for it."""
        if self.clock() < self._left_alone_until:
            return None
        if self.arena.spec.needs_checkpoints:
            found = self.checkpoints.find(match.path, min(match.tokens, at_most), have)
            if found is None:
                return None
            node, position = found
            path = [n for n in match.path if n.start < position]
            missing = [n for n in path if not n.residency.in_memory]
            whole = all(map(self._is_at_hand, path))
            return RestorePlan(path, missing, have, position - have, node, position) if whole else None
        path = list(takewhile(self._is_at_hand, match.path))
        missing = [n for n in path if not n.residency.in_memory]
        return RestorePlan(match.path, missing, have, min(path[-1].end, match.tokens, at_most) - have) if missing else None

    def is_worth_reading(self, plan: RestorePlan) -> bool:
        """Return whether reading it takes less time than computing its tokens, as far as both were measured."""
        return self.rates.is_worth_reading(self.size_of(plan), plan.tokens)

    def size_of(self, plan: RestorePlan) -> int:
        """Bytes of the files that a plan reads."""
        keys = [Key(BLOCK, node.hash) for node in plan.missing]
        keys += [] if plan.node is None else self.checkpoints.keys(plan.node, plan.position)
        return sum(map(self.store.size, keys))

    def _is_at_hand(self, node: Node) -> bool:
        return node.residency.in_memory or (node.residency.on_disk and not self.store.is_put_off(Key(BLOCK, node.hash)))

    def touch(self, path: Sequence[Node]) -> None:
        """Note a path as used now: the budget drops records that were used longer ago first."""
        keys = [Key(BLOCK, node.hash) for node in path if node.residency.on_disk]
        checkpoints = path and self.arena.spec.needs_checkpoints
        found = self.checkpoints.find(path, path[-1].end) if checkpoints else None
        self.store.touch(keys if found is None else [*keys, *self.checkpoints.keys(*found)])

    # -- reading -------------------------------------------------------------------------------------------------------

    def begin(self, plan: RestorePlan) -> RestoreJob:
        """Begin to bring a plan's records back. Raises PoolExhaustedError if the pool has no room for them."""
        self.touch(plan.path)
        if not self._is_waiting:
            # The disk's time to answer begins now.
            self.last_arrival = self.clock()
        job = RestoreJob(self, plan, HeldBlocks(self.admission, self.index.full_groups, self.checkpoints.rings, plan))
        self.arriving |= plan.arriving
        self.jobs.append(job)
        job.read_ahead()
        return job

    def run(self, plan: RestorePlan) -> Iterator[int]:
        """begin(), and wait for the end. Yields the tokens that have come, part by part."""
        job, done, has_ended = self.begin(plan), 0, False
        try:
            while not has_ended:
                has_ended = job.advance(wait=WAIT_SECONDS, seconds=math.inf)
                yield job.done - done
                done = job.done
        finally:
            job.release()

    @property
    def is_stuck(self) -> bool:
        """True if restores wait for records and none has arrived for the store's `answer_seconds`."""
        return self._is_waiting and self.clock() - self.last_arrival > self.store.config.answer_seconds

    @property
    def _is_waiting(self) -> bool:
        """True if any restore waits for records. One that has ended only holds its blocks until its request starts."""
        return not all(job.has_ended for job in self.jobs)

    def leave_alone(self) -> None:
        """Plan nothing for the store's `retry_seconds`."""
        self._left_alone_until = self.clock() + self.store.config.retry_seconds

    def read(self, step: RestoreStep, into: Into) -> futures.Future[RecordData]:
        """Have a thread read the record of a step into what `into` gives."""
        if step.key.kind == BLOCK:
            parts = self.parts(step.node.end - step.node.start)
            return self.store.read(Expected(self.store.namespace, BLOCK, step.node.hash, parts), into)
        # States stay where they are read: arrays may be made where the bytes are.
        return self.checkpoints.read(step.key, into if step.key.kind == WINDOW else None)

    def put_in(self, step: RestoreStep, found: RecordData, plan: RestorePlan, held: HeldBlocks) -> None:
        """Put a step's record where it belongs. Raises BadRecordError if it is not what the plan needs."""
        node = step.node
        if step.segment is not None:
            self.checkpoints.put_back(step.segment, found, plan.position, held.rings)
        elif step.key.kind == STATE:
            held.states.update(states_in(found, self.arena))
        elif not node.residency.in_memory and node.parent is not None and node in node.parent.children:
            # It was not computed meanwhile: all may share it.
            arrays = [c.array(v) for c, v in zip(self.contents(node.end - node.start), found.views, strict=True)]
            places = list(zip(self.index.full_groups, step.block, strict=True))
            copy_in(self.arena, places, 0, arrays, self.store.config.bits)
            self.index.revive(node, step.block)
            self.num_restored += node.end - node.start
        self.num_arrived += 1

    def lose(self, key: Key, error: Exception) -> None:
        """A record that could not be read is a miss, and all after it; a file that can be read later stays."""
        self.num_unread += 1
        if isinstance(error, BadRecordError | FileNotFoundError):
            self.store.gone(key)
            self._nodes.lose([key])
        else:
            self.store.put_off(key)

    def end(self, plan: RestorePlan, held: HeldBlocks, busy: Busy) -> None:
        """All records of a plan are in memory: its position can be resumed, unless it was dropped or computed meanwhile."""
        self.rates.restored(busy.amount, busy.seconds)
        node, position = plan.node and plan.node.latest, plan.position
        if node is None or node.parent is None or node not in node.parent.children or position in node.residency.checkpoints:
            return
        with suppress(PoolExhaustedError):
            self.admission.need_states(self.arena.spec.fixed_bytes_per_agent())
            rings = self.checkpoints.rings.indices(position, held.rings)
            self.index.add_checkpoint(node, Checkpoint(position, rings, held.states, noted=True))


class RestoreJob:
    """The records of a plan on their way from disk into the pool, in order: `n_bytes` of files.

    Holds the whole path's blocks until release().
    """

    def __init__(self, restores: Restores, plan: RestorePlan, held: HeldBlocks) -> None:
        self.plan = plan
        self.n_bytes = restores.size_of(plan)
        self._restores = restores
        self._held = held
        steps = [RestoreStep(Key(BLOCK, n.hash), n, block=b) for n, b in zip(plan.missing, held.blocks, strict=True)]
        if plan.node is not None:
            records = restores.checkpoints.records(plan.node, plan.position)
            steps += [RestoreStep(key, segment.node, segment=segment if key.kind == WINDOW else None) for key, segment in records]
        self._to_read: Iterator[RestoreStep] = iter(steps)
        self._total = self._left = len(steps)
        self._reading: deque[tuple[RestoreStep, futures.Future[RecordData], _Scratch]] = deque()
        self._unused: list[_Scratch] = []
        spec = restores.arena.spec
        block = sum(spec.bytes_per_block(group) for group in spec.groups)
        self._ahead = max(AT_ONCE, min(MOST_AHEAD, AHEAD_BYTES // max(1, block)))
        self._busy = Busy()

    @property
    def done(self) -> int:
        """How many of the plan's tokens are in memory, by the share of records."""
        return self.plan.tokens * (self._total - self._left) // self._total

    @property
    def has_ended(self) -> bool:
        """True if every record is in memory, or one could not be read."""
        return not self._left

    def advance(self, wait: float = 0.0, seconds: float = 0.0) -> bool:
        """Copy what has been read, for this many seconds. Returns whether no more will come.

        `wait`: this many seconds it may block for each record, as there is nothing to compute meanwhile. It never reads itself: a
        disk that hangs would take its thread along. One that gives nothing for the store's `answer_seconds` is given up.
        """
        until = time.perf_counter() + seconds
        while self._left and self._has_come(wait):
            self._take()
            self.read_ahead(AT_ONCE if wait else self._ahead)
            if time.perf_counter() >= until:
                break
        if self._left and not self._reading[0][1].done() and self._restores.is_stuck:
            self._restores.leave_alone()
            answer = self._restores.store.config.answer_seconds
            self._fail(self._reading[0][0].key, TimeoutError(f"the disk has given nothing for {answer:g} seconds"))
        return not self._left

    def _has_come(self, wait: float) -> bool:
        reading = self._reading[0][1]
        if wait and not reading.done():
            futures.wait([reading], timeout=wait)
        return reading.done()

    def _fail(self, key: Key, error: Exception) -> None:
        self._restores.lose(key, error)
        self._reading.clear()
        self._left = 0

    def _take(self) -> None:
        """Put the next record where it belongs. One that cannot be read is the last."""
        self._restores.last_arrival = self._restores.clock()
        step, reading, scratch = self._reading.popleft()
        try:
            found = reading.result()
            self._busy.between(found.begun, found.ended)
            begun = time.perf_counter()
            self._restores.put_in(step, found, self.plan, self._held)
            self._busy.between(begun, time.perf_counter(), found.record.nbytes)
        except (BadRecordError, OSError, MemoryError, futures.CancelledError) as error:
            self._fail(step.key, error)
            return
        self._unused.append(scratch)
        self._left -= 1
        if not self._left:
            self._restores.end(self.plan, self._held, self._busy)

    def release(self) -> None:
        """Release the blocks: from now on they are evictable like any others."""
        self._held.release()
        self._restores.arriving -= self.plan.arriving
        self._restores.num_released += 1
        if self in self._restores.jobs:
            self._restores.jobs.remove(self)

    def read_ahead(self, most: int = AT_ONCE) -> None:
        """Have records read until `most` are on their way."""
        while self._left and len(self._reading) < most and (step := next(self._to_read, None)) is not None:
            scratch = self._unused.pop() if self._unused else _Scratch()
            self._reading.append((step, self._restores.read(step, scratch.take), scratch))
