"""Restores: what to bring back from disk, and reading it step by step.

Owned by the generation thread.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent import futures
from contextlib import suppress
from functools import cache, partial
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np

from ..errors import BadRecordError, PoolExhaustedError
from ..kv.block_bytes import contents, copy_in
from ..prefix.admission import Admission
from ..prefix.residency import Checkpoint
from ..prefix.trie import Node, PrefixRef
from ..ranks.group import ALONE, Ranks
from ..ranks.head import Head
from ..store.fs import Into
from ..store.reader import READERS, RecordData
from ..store.record import BLOCK, STATE, WINDOW, Expected, Key
from .catalog import StoredNodes
from .checkpoint_records import StoredCheckpoints, parts_of, states_in
from .restore_plan import HeldBlocks, RestorePlan, RestoreStep
from .throughput import Busy, Rates

# While nothing is computed, this many records are in flight: one in each thread that reads, and one that is copied. More are no
# faster, for their memory is not in a cache of the processor.
AT_ONCE = READERS + 1
# Beside running replies, which take most of the time: this many bytes, but not more records than this.
AHEAD_BYTES = 64 << 20
MOST_AHEAD = 16
# A group votes on the plans that reach furthest, as many as this.
CANDIDATES = 8
# run() checks this often whether the disk hangs, in seconds.
WAIT_SECONDS = 0.1


class _Scratch:
    """Memory that one record after the other is read into: to get new memory takes longer than to read."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, size: int) -> memoryview:
        if size > len(self._memory):
            self._memory = np.empty(size, np.uint8)
        return self._memory.data[:size]


class Restored(NamedTuple):
    """Of the restore with this number so many records are read, the first ones; whether the next one could not be."""

    number: int
    records: int
    has_failed: bool


class Restores:
    """Brings the records of `nodes` and `checkpoints` back into the pool.

    ranks          those of a group plan alike, by what all have on disk; they agree() on what each one's disk can do.
    rates          how fast prompts are computed and records read, as measured here.
    jobs           restores under way; `arriving` are the nodes that they bring back.
    num_begun      restores begun.                 num_restored   tokens brought back.
    num_arrived    records read and put into the pool.            num_unread     records that could not be read.
    num_released   restores that released their blocks: requests that wait for room are tried again when it changes.
    """

    def __init__(self, nodes: StoredNodes, checkpoints: StoredCheckpoints, admission: Admission, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.checkpoints = checkpoints
        self.store, self.index, self.arena = checkpoints.store, checkpoints.index, checkpoints.arena
        self.ledger = checkpoints.ledger
        self.admission = admission
        self.rates = Rates()
        self.jobs: list[RestoreJob] = []
        self.arriving: set[Node] = set()
        self.num_begun = self.num_restored = self.num_unread = self.num_arrived = self.num_released = 0
        self.clock = time.monotonic
        # When the disk gave something last, while something is on its way; until when it is left alone.
        self.last_arrival = self._left_alone_until = self.clock()
        self._nodes = nodes
        # In a group, those that no request waits for.
        self._attended: list[RestoreJob] = []
        # The arrays of a block of this many tokens, and the parts of its record.
        self.contents = arrays = cache(partial(contents, self.arena, self.index.full_groups, bits=self.store.config.bits))
        self.parts = cache(lambda tokens: parts_of(arrays(tokens)))

    # -- planning ------------------------------------------------------------------------------------------------------

    def plan(self, match: PrefixRef, at_most: int, have: int) -> RestorePlan | None:
        """What to bring back to resume a match beyond `have` tokens, at `at_most` at most; None: disk has nothing for it.

        In a group all ranks have it on disk; whether all can read it, agree() finds out.
        """
        if self.ranks.size > 1:
            return next(self._candidates(match, at_most, have), None)
        if self.clock() < self._left_alone_until:
            return None
        return next(filter(None, map(self._readable, self._candidates(match, at_most, have))), None)

    def agree(self, match: PrefixRef, at_most: int, have: int, verdict: Callable[[RestorePlan], int]) -> RestorePlan | None:
        """plan(), as far as no rank is against it: a collective. `verdict`: how many of a plan's tokens this rank is for."""
        plans = list(islice(self._candidates(match, at_most, have), CANDIDATES))
        least = self.ranks.least([verdict(plan) for plan in plans])
        agreed = (plan.cut(tokens) for plan, tokens in zip(plans, least, strict=True))
        return next(filter(None, agreed), None)

    def can_read(self, plan: RestorePlan) -> int:
        """How many of a plan's tokens this rank can read."""
        readable = None if self.clock() < self._left_alone_until else self._readable(plan)
        return 0 if readable is None else readable.tokens

    def wants_to_read(self, plan: RestorePlan) -> int:
        """can_read() if that takes less time than to compute them."""
        cut = plan.cut(self.can_read(plan))
        return 0 if cut is None or not self.is_worth_reading(cut) else cut.tokens

    def is_worth_reading(self, plan: RestorePlan) -> bool:
        """Return whether reading it takes less time than computing its tokens, as far as both were measured."""
        return self.rates.is_worth_reading(self.size_of(plan), plan.tokens)

    def size_of(self, plan: RestorePlan) -> int:
        """Bytes of the files that a plan reads."""
        return sum(map(self.store.size, self._keys(plan)))

    def _candidates(self, match: PrefixRef, at_most: int, have: int) -> Iterator[RestorePlan]:
        """The plans for a match by what is on disk, that of the most tokens first."""
        most = min(match.tokens, at_most)
        if not self.arena.spec.needs_checkpoints:
            path = list(takewhile(lambda node: node.start < most and _is_cached(node), match.path))
            missing = [node for node in path if not node.residency.in_memory]
            tokens = min(path[-1].end, most) - have if missing else 0
            if tokens > 0:
                yield RestorePlan(path, missing, have, tokens)
            return
        for node, position in self.checkpoints.positions(match.path, most, have):
            path = [n for n in match.path if n.start < position]
            if all(map(_is_cached, path)):
                missing = [n for n in path if not n.residency.in_memory]
                yield RestorePlan(path, missing, have, position - have, node, position)

    def _readable(self, plan: RestorePlan) -> RestorePlan | None:
        """As much of a plan as this rank's disk can be asked for now."""
        count = sum(1 for _ in takewhile(self._is_at_hand, self._keys(plan)))
        if plan.node is not None:
            return plan if count == len(self._keys(plan)) else None
        return plan if count == len(plan.missing) else plan.cut(plan.missing[count].start - plan.have)

    def _is_at_hand(self, key: Key) -> bool:
        # A rank of a group may have lost a record that the others do not miss yet.
        return not self.store.is_put_off(key) and (self.ranks.size == 1 or key in self.store)

    def _keys(self, plan: RestorePlan) -> list[Key]:
        keys = [Key(BLOCK, node.hash) for node in plan.missing]
        return keys if plan.node is None else [*keys, *self.checkpoints.keys(plan.node, plan.position)]

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
        held = HeldBlocks(self.admission, self.index.full_groups, self.checkpoints.rings, plan)
        self.num_begun += 1
        job = RestoreJob(self, self.num_begun, plan, held)
        self.arriving |= plan.arriving
        self.jobs.append(job)
        job.read_ahead()
        return job

    def run(self, plan: RestorePlan) -> Iterator[int]:
        """begin(), and wait for the end. Yields the tokens that have come, part by part."""
        job, done = self.begin(plan), 0
        try:
            while not job.has_ended:
                job.advance(wait=WAIT_SECONDS, seconds=math.inf)
                yield job.done - done
                done = job.done
            if self.ranks.size > 1:
                job.commit(*self.ranks.least([job.proven]))
        finally:
            job.release()

    def attend(self, job: RestoreJob) -> None:
        """Have keep_up() read on for a job of a group that no request waits for, and commit() release it."""
        self._attended.append(job)

    def keep_up(self, seconds: float) -> None:
        """Between two steps: read on for each job that was given to attend(), for this many seconds."""
        for job in self._attended:
            job.advance(seconds=seconds)

    def restored(self) -> Restored:
        """How far this rank has come with the restore that all ranks of a group share next, for its head. Number 0: none."""
        job = self._unshared
        return Restored(0, 0, False) if job is None else Restored(job.number, job.proven, job.has_failed)

    def commit(self, heads: Collection[Head]) -> None:
        """Share what was read for it if every rank has read as much, or one cannot: `heads` are those of all ranks."""
        job = self._unshared
        if job is None or any(head.restore != job.number for head in heads):
            return
        records = min([job.total, *(head.restored for head in heads if head.failed)])
        if all(head.restored >= records for head in heads):
            job.commit(records)
            if job in self._attended:
                self._attended.remove(job)
                job.release()

    @property
    def _unshared(self) -> RestoreJob | None:
        """The oldest job that all ranks have to finish: the same on all."""
        return next((job for job in self.jobs if not job.is_shared), None)

    @property
    def is_stuck(self) -> bool:
        """True if restores wait for a disk that hangs. Not in a group: there the rank whose disk hangs gives up, and says so."""
        return self.ranks.size == 1 and self.hangs

    @property
    def hangs(self) -> bool:
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
        """Put a step's record into held blocks. Raises BadRecordError if it is not what the plan needs."""
        node = step.node
        if step.segment is not None:
            self.checkpoints.put_back(step.segment, found, plan.position, held.rings)
        elif step.key.kind == STATE:
            held.states.update(states_in(found, self.arena))
        elif self.ranks.size > 1 or _is_missing(node):
            # A group does not know yet whether it will be missing when all ranks have it.
            arrays = [c.array(v) for c, v in zip(self.contents(node.end - node.start), found.views, strict=True)]
            places = list(zip(self.index.full_groups, step.block, strict=True))
            copy_in(self.arena, places, 0, arrays, self.store.config.bits)
        self.num_arrived += 1

    def share(self, step: RestoreStep) -> None:
        """Let all share a block that put_in() has filled, unless it was dropped or computed meanwhile."""
        if step.key.kind == BLOCK and _is_missing(step.node):
            self.index.revive(step.node, step.block)
            self.num_restored += step.node.end - step.node.start

    def lose(self, key: Key, error: Exception) -> None:
        """A record that could not be read is a miss, and all after it; a file that can be read later stays."""
        self.num_unread += 1
        if isinstance(error, BadRecordError | FileNotFoundError):
            self.store.gone(key)
            self._nodes.lose(self.ledger.lost([key]))
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


def _is_cached(node: Node) -> bool:
    return node.residency.in_memory or node.residency.on_disk


def _is_missing(node: Node) -> bool:
    """Return whether a node is in the trie, and not in memory."""
    return not node.residency.in_memory and node.parent is not None and node in node.parent.children


class RestoreJob:
    """The records of a plan on their way from disk into the pool, in order: `n_bytes` of files.

    One rank shares each record as it comes. In a group the records wait in their blocks until all ranks share as many of them.
    Holds the whole path's blocks until release().

    number      its place in the order of all restores, from 1 on.
    proven      how many records are in their blocks, the first ones in the order of the plan.
    total       how many the plan has.
    has_failed  whether the next one could not be read.
    """

    def __init__(self, restores: Restores, number: int, plan: RestorePlan, held: HeldBlocks) -> None:
        self.number = number
        self.plan = plan
        self.n_bytes = restores.size_of(plan)
        self._restores = restores
        self._held = held
        steps = [RestoreStep(Key(BLOCK, n.hash), n, block=b) for n, b in zip(plan.missing, held.blocks, strict=True)]
        if plan.node is not None:
            records = restores.checkpoints.records(plan.node, plan.position)
            steps += [RestoreStep(key, segment.node, segment=segment if key.kind == WINDOW else None) for key, segment in records]
        self._steps = steps
        self._to_read: Iterator[RestoreStep] = iter(steps)
        self.total, self.proven, self.has_failed = len(steps), 0, False
        # In a group: how many records all ranks share.
        self._agreed: int | None = None
        self._reading: deque[tuple[RestoreStep, futures.Future[RecordData], _Scratch]] = deque()
        self._unused: list[_Scratch] = []
        spec = restores.arena.spec
        block = sum(spec.bytes_per_block(group) for group in spec.groups)
        self._ahead = max(AT_ONCE, min(MOST_AHEAD, AHEAD_BYTES // max(1, block)))
        self._busy = Busy()

    @property
    def done(self) -> int:
        """How many of the plan's tokens are in memory, by the share of records."""
        return self.plan.tokens * (self.total if self.has_ended else self.proven) // self.total

    @property
    def has_ended(self) -> bool:
        """True if this rank reads no more: every record is in its blocks, or one could not be read."""
        return self.has_failed or self._agreed is not None or self.proven == self.total

    @property
    def is_shared(self) -> bool:
        """True if what was read is shared, and no more will be: in a group on all ranks."""
        return self.has_ended if self._restores.ranks.size == 1 else self._agreed is not None

    @property
    def is_partial(self) -> bool:
        """True if a rank of the group could not read all, so that no rank shares all."""
        return self._agreed is not None and self._agreed < self.total

    def advance(self, wait: float = 0.0, seconds: float = 0.0) -> bool:
        """Copy what has been read, for this many seconds. Returns is_shared.

        `wait`: this many seconds it may block for each record, as there is nothing to compute meanwhile. It never reads itself: a
        disk that hangs would take its thread along. One that gives nothing for the store's `answer_seconds` is given up.
        """
        until = time.perf_counter() + seconds
        while not self.has_ended and self._has_come(wait):
            self._take()
            self.read_ahead(AT_ONCE if wait else self._ahead)
            if time.perf_counter() >= until:
                break
        if not self.has_ended and not self._reading[0][1].done() and self._restores.hangs:
            self._restores.leave_alone()
            answer = self._restores.store.config.answer_seconds
            self._fail(self._reading[0][0].key, TimeoutError(f"the disk has given nothing for {answer:g} seconds"))
        return self.is_shared

    def commit(self, records: int) -> None:
        """Share the first `records` records, which all ranks of the group have proven, and read no more."""
        assert records <= self.proven, f"{records} records to share > {self.proven} proven"
        for step in self._steps[:records]:
            self._restores.share(step)
        if records == self.total:
            self._restores.end(self.plan, self._held, self._busy)
        self._agreed = records
        self._reading.clear()

    def _has_come(self, wait: float) -> bool:
        reading = self._reading[0][1]
        if wait and not reading.done():
            futures.wait([reading], timeout=wait)
        return reading.done()

    def _fail(self, key: Key, error: Exception) -> None:
        self._restores.lose(key, error)
        self._reading.clear()
        self.has_failed = True

    def _take(self) -> None:
        """Put the next record where it belongs. One that cannot be read is the last."""
        self._restores.last_arrival = self._restores.clock()
        step, reading, scratch = self._reading.popleft()
        try:
            found = reading.result()
            self._busy.between(found.begun, found.ended)
            begun = time.perf_counter()
            self._restores.put_in(step, found, self.plan, self._held)
            is_alone = self._restores.ranks.size == 1
            if is_alone:
                self._restores.share(step)
            self._busy.between(begun, time.perf_counter(), found.record.nbytes)
        except (BadRecordError, OSError, MemoryError, futures.CancelledError) as error:
            self._fail(step.key, error)
            return
        self._unused.append(scratch)
        self.proven += 1
        if is_alone and self.proven == self.total:
            self._restores.end(self.plan, self._held, self._busy)

    def let_go(self) -> None:
        """release(); in a group all ranks release it once they share what was read."""
        if self._restores.ranks.size == 1:
            self.release()

    def release(self) -> None:
        """Release the blocks: from now on they are evictable like any others."""
        self._held.release()
        self._restores.arriving -= self.plan.arriving
        self._restores.num_released += 1
        if self in self._restores.jobs:
            self._restores.jobs.remove(self)

    def read_ahead(self, most: int = AT_ONCE) -> None:
        """Have records read until `most` are on their way."""
        while not self.has_ended and len(self._reading) < most and (step := next(self._to_read, None)) is not None:
            scratch = self._unused.pop() if self._unused else _Scratch()
            self._reading.append((step, self._restores.read(step, scratch.take), scratch))
