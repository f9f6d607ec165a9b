"""Restore: brings one path back from disk, and the rings at its end; read ahead of the copy into the pool.

Owned by the generation thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import BadRecordError, PoolExhaustedError
from ..prefix.checkpoints import Piece
from ..prefix.trie import Checkpoint, Node
from ..store.fs import Into
from ..store.reader import READERS, Found, Reading
from ..store.record import BLOCK, STATE, WINDOW, Key
from .throughput import Busy

if TYPE_CHECKING:
    from .write_behind import StoredPrefixes

# While nobody computes, so many records are on their way: one in each thread that reads, and one that is copied. More are no
# faster, for their memory is not in a cache of the processor.
AT_ONCE = READERS + 1
# Beside running replies, which take most of the time: so many bytes, but not more records than this.
AHEAD_BYTES = 64 << 20
MOST_AHEAD = 16


@dataclass(frozen=True)
class RestorePlan:
    """A path whose `missing` nodes are on disk only, and the position in `node` whose rings are; None: no rings are needed.

    `tokens`: how many need not be computed with it, behind the `have` that are in memory.
    """

    path: Sequence[Node]
    missing: Sequence[Node]
    have: int
    tokens: int
    node: Node | None = None
    position: int = 0

    @property
    def arriving(self) -> set[Node]:
        """What nobody else needs to bring back meanwhile."""
        return {*self.missing} | ({self.node} if self.node is not None else set())


@dataclass(frozen=True)
class _RestoreStep:
    """A record on its way: how to ask for it and what to do with it. `lay` raises BadRecordError."""

    key: Key
    ask: Callable[[Into], Reading]
    lay: Callable[[Found], None]


class _Scratch:
    """Memory that one record after the other is read into: to get new memory takes longer than to read."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, size: int) -> memoryview:
        if size > len(self._memory):
            self._memory = np.empty(size, np.uint8)
        return self._memory.data[:size]


class Restore:
    """Records on their way from disk into the pool, in order. Holds the blocks of the whole path until release()."""

    def __init__(self, stored: StoredPrefixes, wanted: RestorePlan) -> None:
        self._stored = stored
        self._wanted = wanted
        self._all: set[Node] = set()
        pool, groups = stored.slabs.pool, stored.known.full_groups
        rings = stored.placed.rings
        self._tables = [pool.open_table(group) for group in groups]
        self._states: dict[int, list[Any]] = {}
        self._ring_tables = [pool.open_table(group) for group in rings.sizes] if wanted.node is not None else []
        for index, table in enumerate(self._tables):
            pool.append_shared(table, [node.blocks[index] for node in wanted.path if node.resident])
        counts = [len(wanted.missing)] * len(groups) + (rings.counts(wanted.position) if self._ring_tables else [])
        first = [len(table) for table in self._tables]
        try:
            stored.room.need_states(stored.slabs.spec.fixed_bytes_per_agent())
            stored.room.reserve([*self._tables, *self._ring_tables], counts)
        except PoolExhaustedError:
            self.release()
            raise
        for table, count in zip([*self._tables, *self._ring_tables], counts, strict=True):
            pool.extend(table, count)
        ids = [table.ids[start:] for table, start in zip(self._tables, first, strict=True)]
        blocks = list(zip(*ids, strict=True)) if ids else [()] * len(wanted.missing)
        arrivals = [self._node(node, block) for node, block in zip(wanted.missing, blocks, strict=True)]
        if wanted.node is not None:
            arrivals += [self._piece(piece) for piece in stored.placed.pieces(wanted.node, wanted.position)]
            arrivals += [self._state(wanted.node)] if stored.slabs.state_leaves else []
        self._unasked: Iterator[_RestoreStep] = iter(arrivals)
        self._total = self._left = len(arrivals)
        self._reading: deque[tuple[_RestoreStep, Reading, _Scratch]] = deque()
        self._unused: list[_Scratch] = []
        block = sum(stored.slabs.spec.bytes_per_block(group) for group in stored.slabs.spec.groups)
        self._ahead = max(AT_ONCE, min(MOST_AHEAD, AHEAD_BYTES // max(1, block)))
        self._busy = Busy()
        self._all = wanted.arriving
        stored.arriving |= self._all
        stored.restoring.append(self)
        self._read_ahead(AT_ONCE)

    @property
    def have(self) -> int:
        """Tokens that are in memory without it."""
        return self._wanted.have

    @property
    def tokens(self) -> int:
        """What is brought back need not be computed."""
        return self._wanted.tokens

    @property
    def done(self) -> int:
        """How many of `tokens` are there."""
        return self.tokens * (self._total - self._left) // self._total

    @property
    def has_ended(self) -> bool:
        """Whether no more will come: all is there, or the rest could not be read."""
        return not self._left

    def advance(self, wait: float = 0.0, seconds: float = 0.0) -> bool:
        """Copy what has been read, for so many seconds. Returns whether no more will come.

        `wait`: so many seconds it may block for each record, as there is nothing to compute meanwhile. It never reads itself: a
        disk that hangs would take its thread along. One that gives nothing for the store's `answer_seconds` is given up.
        """
        until = time.perf_counter() + seconds
        while self._left and self._has_come(wait):
            self._take()
            self._read_ahead(AT_ONCE if wait else self._ahead)
            if time.perf_counter() >= until:
                break
        if self._left and self._stored.is_stuck and not self._reading[0][1].done():
            self._fail(self._reading[0][0].key, self._stored.disk_hangs())
        return not self._left

    def _has_come(self, wait: float) -> bool:
        reading = self._reading[0][1]
        if wait and not reading.done():
            futures.wait([reading], timeout=wait)
        return reading.done()

    def _fail(self, key: Key, error: Exception) -> None:
        self._stored.unread(key, error)
        self._reading.clear()
        self._left = 0

    def _take(self) -> None:
        """Put the next record where it belongs. One that cannot be read is the last."""
        self._stored.last_arrival = self._stored.clock()
        arrival, reading, scratch = self._reading.popleft()
        try:
            record, views = reading.result()
            self._busy.between(reading.begun, reading.ended)
            begun = time.perf_counter()
            arrival.lay((record, views))
            self._busy.between(begun, time.perf_counter(), record.nbytes)
        except (BadRecordError, OSError) as error:
            self._fail(arrival.key, error)
            return
        self._unused.append(scratch)
        self._left -= 1
        self._stored.num_arrived += 1
        if not self._left:
            self._place()
            self._stored.rates.restored(self._busy.amount, self._busy.seconds)

    def release(self) -> None:
        """Let the blocks go: from now on they are known like any others."""
        self._stored.arriving -= self._all
        self._stored.num_released += 1
        if self in self._stored.restoring:
            self._stored.restoring.remove(self)
        for table in [*self._tables, *self._ring_tables]:
            self._stored.slabs.pool.release(table)

    def _node(self, node: Node, block: tuple[int, ...]) -> _RestoreStep:
        return _RestoreStep(
            Key(BLOCK, node.hash),
            lambda into: self._stored.read(node, into),
            lambda found: self._stored.arrived(node, block, found[1]),
        )

    def _piece(self, piece: Piece) -> _RestoreStep:
        placed, position, ids = self._stored.placed, self._wanted.position, self._ring_ids()
        key = Key(WINDOW, piece.node.hash_at(piece.end))
        return _RestoreStep(key, lambda into: placed.read(key, into), lambda found: placed.lay(piece, found, position, ids))

    def _state(self, node: Node) -> _RestoreStep:
        placed, key = self._stored.placed, Key(STATE, node.hash_at(self._wanted.position))
        # In memory of their own: arrays may be made where the bytes are.
        return _RestoreStep(key, lambda _: placed.read(key), lambda found: self._states.update(placed.states(found)))

    def _place(self) -> None:
        """All that a position needs is there: it can be resumed from, unless it was forgotten or computed meanwhile."""
        node, position = self._wanted.node, self._wanted.position
        while node is not None and node.merged_into is not None:
            node = node.merged_into
        if node is None or node.parent is None or node not in node.parent.children or position in node.checkpoints:
            return
        with suppress(PoolExhaustedError):
            self._stored.room.need_states(self._stored.slabs.spec.fixed_bytes_per_agent())
            rings = self._stored.placed.rings.indices(position, self._ring_ids())
            self._stored.known.add_checkpoint(node, Checkpoint(position, rings, self._states, noted=True))

    def _ring_ids(self) -> dict[int, list[int]]:
        return {table.group: table.ids for table in self._ring_tables}

    def _read_ahead(self, most: int) -> None:
        while self._left and len(self._reading) < most and (arrival := next(self._unasked, None)) is not None:
            scratch = self._unused.pop() if self._unused else _Scratch()
            self._reading.append((arrival, arrival.ask(scratch.take), scratch))
