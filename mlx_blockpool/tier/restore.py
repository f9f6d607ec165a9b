"""Restores: what to read back from disk, and reading it step by step. Knows nodes, records and held
blocks; no requests.

Owned by the generation thread.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from typing import Any
from weakref import WeakSet

import numpy as np

from ..config import StoreConfig
from ..errors import BadRecordError, PoolExhaustedError
from ..kv.block_bytes import contents, copy_in
from ..prefix.admission import Admission
from ..prefix.cache import in_memory, resumable
from ..prefix.trie import Checkpoint, Node, Owned, PrefixRef
from ..store.fs import Into
from ..store.reader import READERS, RecordData
from ..store.record import BLOCK, STATE, WINDOW, Key
from .checkpoints import (
    StoredRecords,
    WindowSegment,
    parts_of,
    states_in,
)

# While nothing is computed, this many records are in flight: one in each thread that reads, and one
# that is copied. More are no faster, for their memory is not in a cache of the processor.
AT_ONCE = READERS + 1
# run() checks this often whether the disk hangs, in seconds.
WAIT_SECONDS = 0.1
# A state may take this many times what the spec says: a model may compute in float32 what its spec
# counts in 16 bits.
STATE_SLACK = 2
# The weight of earlier measurements relative to the next one.
MEMORY = 0.75


@dataclass(frozen=True)
class RestorePlan:
    """A path to restore.

    missing          nodes of it that are on disk only.
    have             tokens that can be resumed from memory; `tokens` more can be once the plan is
                     carried out.
    node, position   where it ends; `node` has the checkpoint there, or is None if the model needs
                     none.
    """

    path: Sequence[Node]
    missing: Sequence[Node]
    have: int
    tokens: int
    node: Node | None = None
    position: int = 0

    @property
    def arriving(self) -> set[Node]:
        """Nodes that no other restore needs to read meanwhile."""
        return {*self.missing} | ({self.node} if self.node is not None else set())

    def cut(self, tokens: int) -> RestorePlan | None:
        """The plan for the first `tokens` of its tokens.

        Returns None if nothing can be resumed there.
        """
        if tokens >= self.tokens:
            return self
        end = self.have + tokens
        missing = [node for node in self.missing if node.start < end]
        if self.node is not None or not missing:
            return None
        return RestorePlan(
            [node for node in self.path if node.start < end], missing, self.have, tokens
        )


@dataclass(frozen=True)
class RestoreStep:
    """A record to restore: a block for a node, a segment of what windows held, or a state.

    block      the held blocks that it goes into, one of each full group.
    segment    the tokens that a record of windows covers.
    """

    key: Key
    node: Node
    block: tuple[Owned, ...] = ()
    segment: WindowSegment | None = None


class _Scratch:
    """Memory that one record after the other is read into: allocating takes longer than reading."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, size: int) -> memoryview:
        if size > len(self._memory):
            self._memory = np.empty(size, np.uint8)
        return self._memory.data[:size]


class RestoreJob:
    """Reads the records of a plan from disk into the pool, in order: `n_bytes` of files.

    Holds the whole path's blocks until release(). In a group the records wait in their blocks until
    every rank has them.

    number      its place in the order of all restores, from 1 on.
    proven      how many records are in their blocks, the first ones in the order of the plan.
    shared      how many of these commit() has shared.
    total       how many the plan has.
    has_failed  whether the next one could not be read.
    is_shared   whether what was read is shared, and nothing else will be.
    """

    def __init__(self, restores: Restores, number: int, plan: RestorePlan) -> None:
        """Raises PoolExhaustedError if the blocks do not fit, and holds nothing then."""
        self.number = number
        self.plan = plan
        self.n_bytes = restores.size_of(plan)
        # Ids of the blocks of each window group, and the states that were read.
        self.rings: dict[int, list[int]] = {}
        self.states: dict[int, list[Any]] = {}
        self._restores = restores
        self._pool = restores.admission.pool
        blocks = self._hold_blocks()
        self._steps = [
            RestoreStep(Key(BLOCK, node.hash), node, block)
            for node, block in zip(plan.missing, blocks, strict=True)
        ]
        if plan.node is not None:
            self._steps += [
                RestoreStep(key, segment.node, segment=segment if key.kind == WINDOW else None)
                for key, segment in restores.records.records_at(plan.node, plan.position)
            ]
        self._to_read = iter(self._steps)
        self.total, self.proven, self.shared = len(self._steps), 0, 0
        self.has_failed = self.is_shared = False
        self._reading: deque[tuple[RestoreStep, futures.Future[RecordData], _Scratch]] = deque()
        self._unused: list[_Scratch] = []
        spec = restores.arena.spec
        block = sum(spec.bytes_per_block(group) for group in spec.groups)
        config = restores.store.config
        self._ahead = max(AT_ONCE, min(config.ahead_records, config.ahead_bytes // max(1, block)))
        self._busy = Busy()

    def _hold_blocks(self) -> list[tuple[Owned, ...]]:
        """Hold the blocks of the whole path, in memory or to be filled. Returns those of each
        missing node.
        """
        plan, pool, admission = self.plan, self._pool, self._restores.admission
        windows, groups = self._restores.records.rings, self._restores.index.full_groups
        full = [pool.open_table(group) for group in groups]
        rings = [pool.open_table(group) for group in windows.sizes if plan.node is not None]
        self._tables = [*full, *rings]
        cached = [node.blocks for node in plan.path if node.in_memory]
        for index, table in enumerate(full):
            pool.append_shared(table, [blocks[index][1] for blocks in cached])
        counts = [len(plan.missing)] * len(full) + (windows.counts(plan.position) if rings else [])
        try:
            admission.ensure_states(admission.arena.spec.state_bytes(plan.position))
            admission.reserve(self._tables, counts)
        except PoolExhaustedError:
            self._release_blocks()
            raise
        for table, count in zip(self._tables, counts, strict=True):
            pool.extend(table, count)
        self.rings = {table.group: table.ids for table in rings}
        return [
            tuple((table.group, table.ids[len(cached) + number]) for table in full)
            for number in range(len(plan.missing))
        ]

    def _release_blocks(self) -> None:
        for table in self._tables:
            self._pool.release(table)

    @property
    def done(self) -> int:
        """How many of the plan's tokens are in memory, by the share of records."""
        return self.plan.tokens * (self.total if self.has_ended else self.proven) // self.total

    @property
    def has_ended(self) -> bool:
        """True if it has read all that it can: every record is in its blocks, or one could not
        be read.
        """
        return self.is_shared or self.has_failed or self.proven == self.total

    @property
    def is_partial(self) -> bool:
        """True if a rank of the group could not read all, so that no rank shares all."""
        return self._restores.votes and self.is_shared and self.shared < self.total

    def advance(self, wait: float = 0.0, seconds: float = 0.0) -> bool:
        """Copy what has been read, for this many seconds. Returns is_shared.

        `wait`: this many seconds it may block for each record, as there is nothing to compute
        meanwhile. It never reads itself: a disk that hangs would take its thread along. One that
        gives nothing for the store's `answer_seconds` is given up.
        """
        until = time.perf_counter() + seconds
        while not self.has_ended and self._wait_for_next(wait):
            self._take()
            self.read_ahead(AT_ONCE if wait else self._ahead)
            if time.perf_counter() >= until:
                break
        if not self.has_ended and not self._reading[0][1].done() and self._restores.hangs:
            self._restores.pause()
            answer = self._restores.store.config.answer_seconds
            self._fail(
                self._reading[0][0].key,
                TimeoutError(f"the disk has given nothing for {answer:g} seconds"),
            )
        return self.is_shared

    def _wait_for_next(self, wait: float) -> bool:
        reading = self._reading[0][1]
        if wait and not reading.done():
            futures.wait([reading], timeout=wait)
        return reading.done()

    def _fail(self, key: Key, error: Exception) -> None:
        self._restores.note_unread(key, error)
        self._reading.clear()
        self.has_failed = True
        self._share_proven()

    def _take(self) -> None:
        """Copy the next record into its blocks. One that cannot be read is the last."""
        self._restores.last_arrival = self._restores.clock()
        step, reading, scratch = self._reading.popleft()
        try:
            found = reading.result()
            self._busy.between(found.begun, found.ended)
            begun = time.perf_counter()
            self._restores.copy_into_pool(step, found, self)
            self._busy.between(begun, time.perf_counter(), found.record.nbytes)
        except (BadRecordError, OSError, MemoryError, futures.CancelledError) as error:
            self._fail(step.key, error)
            return
        self._unused.append(scratch)
        self.proven += 1
        self._share_proven()

    def _share_proven(self) -> None:
        """Share what was read, unless all ranks of a group have to read it first."""
        if not self._restores.votes:
            self.commit(self.proven, self.has_ended)

    def commit(self, records: int, is_last: bool) -> None:
        """Share the first `records` records, which all ranks have proven; `is_last`: and read no
        more.
        """
        assert records <= self.proven, f"{records} records to share > {self.proven} proven"
        for step in self._steps[self.shared : records]:
            self._restores.share(step)
        self.shared, self.is_shared = records, is_last
        if is_last:
            self._reading.clear()
        if records == self.total:
            self._restores.complete(self, self._busy)

    def let_go(self) -> None:
        """Release the blocks of a restore that no request waits for.

        In a group commit() does, on all ranks alike.
        """
        if not self._restores.votes:
            self.release()

    def release(self) -> None:
        """Release the blocks: from now on they are evictable like any others."""
        self._release_blocks()
        self._restores.arriving -= self.plan.arriving
        self._restores.num_released += 1
        if self in self._restores.jobs:
            self._restores.jobs.remove(self)

    def read_ahead(self, most: int = AT_ONCE) -> None:
        """Have records read until `most` are on their way."""
        while (
            not self.has_ended
            and len(self._reading) < most
            and (step := next(self._to_read, None)) is not None
        ):
            scratch = self._unused.pop() if self._unused else _Scratch()
            self._reading.append(
                (step, self._restores.read(step, self.plan, scratch.take), scratch)
            )


class NoRestores:
    """The restores of a cache without a store: there is nothing to read.

    votes          whether the ranks of a group vote on each plan: agree() is a collective.
    jobs           restores under way; `arriving` are the nodes that they restore.
    num_arrived    records read and put into the pool.
    num_released   restores that released their blocks: requests that wait for blocks are tried
                   again when it changes.
    is_stuck       whether restores wait for a disk that hangs.
    """

    votes = False
    jobs: Sequence[RestoreJob] = ()
    arriving: Collection[Node] = ()
    num_arrived = num_released = 0

    @property
    def is_stuck(self) -> bool:
        return False

    def plan(self, match: PrefixRef, at_most: int, at_any_cost: bool = False) -> RestorePlan | None:
        """The restore that a match is worth waiting for, to resume `at_most` tokens of it at most.

        Returns None if disk adds nothing that can be read now, or if computing it takes less time
        and not `at_any_cost`. In a group the furthest one, whatever it costs: all ranks plan the
        same, and agree() says what becomes of it.
        """
        return None

    def agree(
        self, match: PrefixRef, at_most: int, at_any_cost: bool = False
    ) -> RestorePlan | None:
        """plan(), as far as all ranks of a group can carry it out."""
        return self.plan(match, at_most, at_any_cost)

    def use(self, path: Sequence[Node]) -> None:
        """A match was acquired: its path is used now, and counted if it is computed because that
        is faster.
        """

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Note the speed of prefill, which reading has to beat."""

    def begin(self, plan: RestorePlan) -> RestoreJob:
        """Begin to restore a plan's records.

        Raises PoolExhaustedError if they do not fit in the pool.
        """
        raise NotImplementedError

    def run(self, plan: RestorePlan) -> Iterator[int]:
        """begin(), and wait for the end. Yields the numbers of tokens as they arrive."""
        job, done = self.begin(plan), 0
        try:
            while not job.has_ended:
                job.advance(wait=WAIT_SECONDS, seconds=math.inf)
                yield job.done - done
                done = job.done
            self.finish(job)
        finally:
            job.release()

    def finish(self, job: RestoreJob) -> None:
        """run() has read all of a job: in a group all ranks share what each of them has read."""

    def attend(self, job: RestoreJob) -> None:
        """In a group: have keep_up() read on for a job that no request waits for."""

    def keep_up(self, seconds: float) -> None:
        """Between two steps: read on for each job that was given to attend(), for this many
        seconds.
        """


class Restores(NoRestores):
    """Reads `records` back into the pool.

    rates          how fast prompts are computed and records read, as measured here.
    num_begun      restores begun.                 num_restored   tokens restored.
    num_unread     records that could not be read.
    num_cheaper    prompts that were computed because reading them would have taken longer.
    """

    def __init__(self, records: StoredRecords, admission: Admission) -> None:
        self.records = records
        self.store, self.index, self.arena = records.store, records.index, records.arena
        self.admission = admission
        self.rates = Rates(slow_seconds=self.store.config.slow_seconds)
        self.jobs: list[RestoreJob] = []
        self.arriving: set[Node] = set()
        self.num_begun = self.num_restored = self.num_unread = self.num_arrived = (
            self.num_released
        ) = self.num_cheaper = 0
        self.clock = time.monotonic
        # The last completed read, while others are under way; no reads before the other time.
        self.last_arrival = self._paused_until = self.clock()
        # Ends of matches that are faster to compute than to read, as planned last.
        self._cheaper: WeakSet[Node] = WeakSet()
        # The arrays of a block of this many tokens, and the parts of its record.
        self.contents = arrays = cache(partial(contents, self.arena, self.index.full_groups))
        self.parts = cache(lambda tokens: parts_of(arrays(tokens)))

    # -- planning ----------------------------------------------------------------------------------

    def plan(self, match: PrefixRef, at_most: int, at_any_cost: bool = False) -> RestorePlan | None:
        self._cheaper.difference_update(match.path[-1:])
        if not match.path or self.clock() < self._paused_until:
            return None
        plan = next(filter(None, map(self.readable_part, self.candidates(match, at_most))), None)
        if plan is None or at_any_cost or self.is_worth_reading(plan):
            return plan
        self._cheaper.add(match.path[-1])
        return None

    def is_worth_reading(self, plan: RestorePlan) -> bool:
        """Return whether reading it takes less time than computing its tokens, as far as both
        were measured.
        """
        return self.rates.is_worth_reading(self.size_of(plan), plan.tokens)

    def size_of(self, plan: RestorePlan) -> int:
        """Bytes of the files that a plan reads."""
        return sum(map(self.store.size, self._keys(plan)))

    def candidates(self, match: PrefixRef, at_most: int) -> Iterator[RestorePlan]:
        """The plans for a match by what is on disk and not in memory, that of the most tokens
        first.
        """
        most, have = min(match.tokens, at_most), resumable(self.arena, in_memory(match), at_most)[0]
        ends: Iterable[tuple[Node | None, int]] = [(None, most)]
        if self.arena.spec.needs_checkpoints:
            ends = self.records.positions(match.path, most, have)
        for node, end in ends:
            path = [each for each in match.path if each.start < end]
            cached = list(takewhile(_is_cached, path))
            if node is None and cached:
                end = min(end, cached[-1].end)
            elif len(cached) < len(path):
                continue
            missing = [each for each in cached if not each.in_memory]
            if end > have and (missing or node is not None):
                yield RestorePlan(cached, missing, have, end - have, node, end)

    def readable_part(self, plan: RestorePlan) -> RestorePlan | None:
        """The part of a plan that can be read now."""
        keys = self._keys(plan)
        count = sum(1 for _ in takewhile(self.is_readable, keys))
        if count == len(keys):
            return plan
        return None if plan.node is not None else plan.cut(plan.missing[count].start - plan.have)

    def is_readable(self, key: Key) -> bool:
        """Return whether a record can be read now."""
        return not self.store.is_put_off(key)

    def _keys(self, plan: RestorePlan) -> list[Key]:
        keys = [Key(BLOCK, node.hash) for node in plan.missing]
        return keys if plan.node is None else [*keys, *self.records.keys(plan.node, plan.position)]

    def use(self, path: Sequence[Node]) -> None:
        if path:
            self.num_cheaper += path[-1] in self._cheaper
            self._cheaper.discard(path[-1])
            self.touch(path)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        self.rates.computed(tokens, seconds)

    def touch(self, path: Sequence[Node]) -> None:
        """Note a path as used now: the budget drops records that were used longer ago first."""
        keys = [Key(BLOCK, node.hash) for node in path if node.on_disk]
        if path and self.arena.spec.needs_checkpoints:
            found = self.records.find(path, path[-1].end)
            keys += [] if found is None else self.records.keys(*found)
        self.store.touch(keys)

    # -- reading -----------------------------------------------------------------------------------

    def begin(self, plan: RestorePlan) -> RestoreJob:
        self.touch(plan.path)
        if not self._is_waiting:
            # The disk's time to answer begins now.
            self.last_arrival = self.clock()
        job = RestoreJob(self, self.num_begun + 1, plan)
        self.num_begun += 1
        self.arriving |= plan.arriving
        self.jobs.append(job)
        job.read_ahead()
        return job

    @property
    def is_stuck(self) -> bool:
        return self.hangs

    @property
    def hangs(self) -> bool:
        """True if restores wait for records and none has arrived for the store's
        `answer_seconds`.
        """
        return (
            self._is_waiting and self.clock() - self.last_arrival > self.store.config.answer_seconds
        )

    @property
    def _is_waiting(self) -> bool:
        """True if any restore waits for records.

        One that has ended only holds its blocks until its request starts.
        """
        return not all(job.has_ended for job in self.jobs)

    def pause(self) -> None:
        """Plan nothing for the store's `retry_seconds`."""
        self._paused_until = self.clock() + self.store.config.retry_seconds

    def read(self, step: RestoreStep, plan: RestorePlan, into: Into) -> futures.Future[RecordData]:
        """Have a thread read the record of a step into what `into` gives.

        Another process may have cut a record of windows elsewhere. Larger records than this model
        has are bad.
        """
        kind, parts, most = step.key.kind, None, self.records.window_bytes
        if kind == BLOCK:
            parts = self.parts(step.node.end - step.node.start)
        elif kind == STATE:
            most = STATE_SLACK * self.arena.spec.state_bytes(plan.position)
        # States stay where they are read: arrays may be made where the bytes are.
        return self.store.read(step.key, parts, most, None if kind == STATE else into)

    def copy_into_pool(self, step: RestoreStep, found: RecordData, job: RestoreJob) -> None:
        """Put a step's record into the blocks that a job holds.

        Raises BadRecordError if it is not what its plan needs.
        """
        node = step.node
        if step.segment is not None:
            self.records.put_back(step.segment, found, job.plan.position, job.rings)
        elif step.key.kind == STATE:
            job.states.update(states_in(found, self.arena))
        else:
            arrays = [
                c.array(v)
                for c, v in zip(self.contents(node.end - node.start), found.views, strict=True)
            ]
            copy_in(self.arena, list(step.block), 0, arrays)
        self.num_arrived += 1

    def share(self, step: RestoreStep) -> None:
        """Let all share a block that copy_into_pool() has filled, unless it was dropped or
        computed meanwhile.
        """
        is_missing = step.node.is_in_trie and not step.node.in_memory
        if step.key.kind == BLOCK and is_missing:
            self.index.set_blocks(step.node, step.block)
            self.num_restored += step.node.end - step.node.start

    def note_unread(self, key: Key, error: Exception) -> None:
        """A record that could not be read is a miss, and so are those after it; a file that can
        be read later stays.
        """
        self.num_unread += 1
        if isinstance(error, BadRecordError | FileNotFoundError):
            self.store.gone(key)
            self.records.lost([key])
        else:
            self.store.put_off(key)

    def complete(self, job: RestoreJob, busy: Busy) -> None:
        """All records of a job are in memory: its position can be resumed, unless it was
        dropped or computed meanwhile.
        """
        self.rates.restored(busy.amount, busy.seconds)
        node, position = job.plan.node and job.plan.node.latest, job.plan.position
        if node is None or not node.is_in_trie or position in node.checkpoints:
            return
        with suppress(PoolExhaustedError):
            self.admission.ensure_states(self.arena.spec.state_bytes(position))
            rings = self.records.rings.indices(position, job.rings)
            self.index.add_checkpoint(node, Checkpoint(position, rings, job.states, is_queued=True))


def _is_cached(node: Node) -> bool:
    return node.in_memory or node.on_disk


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
        """None if nothing was measured."""
        return self._amount / self._seconds if self._seconds else None


class Busy:
    """The seconds in which any of several simultaneous jobs ran, and the amount that they got
    done.
    """

    def __init__(self) -> None:
        self.amount = 0
        self.seconds = 0.0
        self._until = 0.0

    def between(self, start: float, end: float, amount: int = 0) -> None:
        """A job ran from `start` to `end`.

        Time that an earlier call covers is not counted twice.
        """
        self.amount += amount
        self.seconds += max(0.0, end - max(start, self._until))
        self._until = max(self._until, end)


class Rates:
    """Tokens per second of prefill and bytes per second of restores, and which of the two is
    faster for a prefix.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        slow_seconds: float = StoreConfig.slow_seconds,
    ) -> None:
        self._clock = clock
        self._slow_seconds = slow_seconds
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
        """Return whether reading takes no longer than computing; True if either rate is
        unmeasured or too old.
        """
        prefill, restore = self._prefill.per_second, self._restore.per_second
        if prefill is None or restore is None or self._is_old():
            return True
        return n_bytes / restore <= tokens / prefill

    def _is_old(self) -> bool:
        return self._clock() - self._restored_at > self._slow_seconds

    def report(self) -> dict[str, Any]:
        """Figures, None where nothing was measured."""
        prefill, restore = self._prefill.per_second, self._restore.per_second
        return {
            "prefill_tokens_per_s": None if prefill is None else round(prefill, 1),
            "restore_bytes_per_s": None if restore is None else round(restore),
        }
