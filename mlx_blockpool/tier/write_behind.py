"""StoredPrefixes: writes the prefixes of a trie to a prompt store in the background. Owned by the
generation thread.

A node is written once its block is full, parents first, so that every record on disk can be reached
from the beginning.
"""

from __future__ import annotations

import math
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

from ..kv.block_bytes import as_bytes, copy_out
from ..prefix.retention import Retention
from ..prefix.trie import Node, PrefixRef, records_of
from ..store.paths import FOLDERS
from ..store.record import BLOCK, Key, Record
from .checkpoints import (
    CheckpointWrite,
    StoredRecords,
    WriteQueue,
    record_of,
)
from .restore import NoRestores, Restores

# The longest time between two steps for records that no request waits for.
ATTENDED_SECONDS = 0.005


class DiskTier:
    """What of the prefixes is on disk; this base class is for a cache without a store: nothing is,
    and nothing is written.

    restores   reads back what is on disk.
    clock      the time by which conversations rest.
    """

    restores = NoRestores()
    clock: Callable[[], float] = time.monotonic

    @property
    def is_writing(self) -> bool:
        """True while records wait for the store's writer."""
        return False

    def enqueue_path(self, path: PrefixRef, whole: bool = False) -> None:
        """Queue a path for writing, and those of its checkpoints that are not queued yet;
        `whole`: those after its end too.
        """

    def write_behind(self, limit: int | None = None, at_once: bool = False) -> None:
        """Copy queued nodes out of the pool and pass them to the store's writer.

        `limit`: stop after this many bytes, at most one record later, by default the store's
        `step_bytes`. `at_once`: the ends of conversations do not wait for their time.
        """

    def write_out(self) -> Iterator[None]:
        """write_behind() of all that is queued, a part at a time, within the store's time to
        flush.
        """
        yield from ()

    def keep_up(self, retention: Retention) -> None:
        """Between two steps: pass on what must stay on disk, and read on for restores that no
        request waits for. Cheap.
        """

    def remove(self, keys: Iterable[Key]) -> None:
        """Remove the files of these records."""

    def spare(self, hashes: Iterable[bytes]) -> None:
        """Exclude the records of these hashes from the store's budget, and no others."""

    def resumes_at(self, path: Sequence[Node], at_most: int) -> int:
        """How many of the first `at_most` tokens of a path a restart could continue from."""
        return 0

    def size(self, node: Node) -> int:
        """Bytes of the records of a node."""
        return 0

    def figures(self) -> list[int]:
        """Numbers of what counts as on disk and of restores, equal on all ranks of a group."""
        return []

    def report(self) -> dict[str, Any] | None:
        """Figures of the store and of restores; sizes in bytes."""
        return None

    def close(self) -> bool:
        """Write all that is queued within the store's `flush_seconds`, and close the store.

        Returns whether all is on disk.
        """
        return True


class StoredPrefixes(DiskTier):
    """The prefixes of `index` that `store` has on disk.

    records   those that are on disk.
    ledger    which records count as on disk.
    """

    restores: Restores

    def __init__(self, records: StoredRecords, restores: Restores) -> None:
        self.records, self.restores, self.ledger = records, restores, records.ledger
        self.index, self.arena, self.store = records.index, records.arena, records.store
        self._path = WrittenPath()
        # Partial blocks rest.
        self.queue = WriteQueue[Node]()
        found = self.ledger.open()
        self.records.load(found)
        self._settle()
        self.records.lost(self.store.settle(self.records.by_need(found)))

    @property
    def is_writing(self) -> bool:
        return self.store.is_writing

    # -- writing -----------------------------------------------------------------------------------

    def enqueue(self, node: Node) -> None:
        """Queue a node for writing; a partial block waits until its conversation has rested for
        `idle_seconds`.
        """
        if node.on_disk or not node.in_memory:
            return
        if node.is_full:
            self.queue.pending[node] = None
        else:
            self.queue.rest(node, self.clock() + self.store.config.idle_seconds)

    def enqueue_path(self, path: PrefixRef, whole: bool = False) -> None:
        for node in path.path:
            self.enqueue(node)
            for checkpoint in list(node.checkpoints.values()):
                if whole or (not checkpoint.is_queued and checkpoint.position <= path.tokens):
                    self.records.enqueue(checkpoint)

    def write_behind(self, limit: int | None = None, at_once: bool = False) -> None:
        self._settle()
        now = math.inf if at_once else self.clock()
        self._write_queued(self.store.config.step_bytes if limit is None else limit, now)
        if not self.queue.pending:
            self._touch_path()

    def _write_queued(self, left: int, now: float) -> None:
        while left > 0 and (node := self.queue.first_due(now)) is not None:
            if self._is_writable(node):
                written = self._write(node) if self.ledger.takes else None
                if written is None:
                    return
                left -= written
            self.queue.discard(node)
        self._write_checkpoints(left, now)

    def _write_checkpoints(self, limit: int, now: float) -> None:
        """write_behind() for the records of checkpoints that are due at `now`."""
        while limit > 0 and self.records.queue.first_due(now) is not None and self.ledger.takes:
            write = self.records.next_write(now)
            reached = write is not None and self._ensure_on_disk(write)
            if write is None or reached is None:
                return
            written = self._put(write.record, write.segment.node, write) if reached else 0
            if written is None:
                return
            if written:
                self.records.written(write)
            else:
                self.records.queue.discard(write.checkpoint)
            limit -= written

    def write_tails(self) -> None:
        """Pass everything queued to the writer, ends of conversations too, as before a stop."""
        self.write_behind(1 << 62, at_once=True)

    def write_out(self) -> Iterator[None]:
        until = time.monotonic() + self.store.config.flush_seconds
        while (
            (self.queue or self.records.queue or self.is_writing)
            and self.store.problem is None
            and time.monotonic() < until
        ):
            self.write_behind(at_once=True)
            yield

    def keep_up(self, retention: Retention) -> None:
        retention.pass_to(self.store)
        self.restores.keep_up(ATTENDED_SECONDS)

    def remove(self, keys: Iterable[Key]) -> None:
        self.store.remove(keys)

    def spare(self, hashes: Iterable[bytes]) -> None:
        self.store.pinned = {Key(kind, digest) for digest in hashes for kind in FOLDERS}

    # -- figures -----------------------------------------------------------------------------------

    def resumes_at(self, path: Sequence[Node], at_most: int) -> int:
        tokens = min(at_most, path[-1].end) if path else 0
        if not self.arena.spec.needs_checkpoints:
            return tokens
        found = self.records.find(path, tokens)
        return 0 if found is None else found[1]

    def size(self, node: Node) -> int:
        return sum(map(self.store.size, records_of(node)))

    def figures(self) -> list[int]:
        restores = self.restores
        begun = [
            restores.num_begun,
            len(restores.jobs),
            restores.num_restored,
            restores.num_released,
        ]
        return [self.ledger.takes, *begun]

    def report(self) -> dict[str, Any]:
        restores, queues = self.restores, (self.queue, self.records.queue)
        figures = {
            "pending": sum(len(queue.pending) for queue in queues),
            "resting": sum(len(queue.resting) for queue in queues),
            "restored_tokens": restores.num_restored,
            "unread": restores.num_unread,
            "cheaper_to_compute": restores.num_cheaper,
            "restoring": [{"tokens": job.plan.tokens, "done": job.done} for job in restores.jobs],
        }
        return figures | restores.rates.report() | self.store.report()

    def close(self) -> bool:
        until = time.monotonic() + self.store.config.flush_seconds
        left, before = self._num_unwritten(), -1
        # The queue takes a part at a time, and nothing while it is full.
        while left not in (0, before) and time.monotonic() < until:
            self.store.flush(_seconds_until(until))
            self.write_tails()
            left, before = self._num_unwritten(), left
        self.store.flush(_seconds_until(until))
        # Remove files of nodes that left the trie since the last step, or that longer ones have
        # just superseded.
        self._settle()
        return self.store.close(_seconds_until(until)) and left in (0, before)

    def _num_unwritten(self) -> int:
        nodes = sum(not node.on_disk for node in self.index.trie)
        return nodes + len(self.records.queue)

    def _is_writable(self, node: Node) -> bool:
        parent = node.parent
        assert parent is not None
        return (
            node.in_memory
            and not node.on_disk
            and (parent.parent is None or parent.on_disk)
            and node.is_in_trie
        )

    def _ensure_on_disk(self, write: CheckpointWrite) -> bool | None:
        """Write the partial block that a checkpoint's record is of, if need be.

        Returns whether disk has it, or None if the store is busy.
        """
        node = write.segment.node
        if self._is_writable(node) and self._write(node, write) is None:
            return None
        return node.on_disk

    def _write(self, node: Node, checkpoint: CheckpointWrite | None = None) -> int | None:
        """Write one node.

        Returns the bytes passed on; 0 if they are over the budget, None if the store is busy.
        """
        parts, extra = self.restores.parts(node.end - node.start), {"kind": node.kind}
        record = record_of(self.store, BLOCK, node, node.end, parts, extra)
        written = self._put(record, node, checkpoint)
        if written:
            self.index.written(node)
        return written

    def _put(
        self, record: Record, node: Node, checkpoint: CheckpointWrite | None = None
    ) -> int | None:
        """_write() for any record of a node.

        Records of the blocks before it are not dropped for it, nor before it; for a checkpoint
        none of those that it stands on, so that its records cannot displace each other forever.
        """
        spared = {Key(BLOCK, n.hash): None for n in self.restores.arriving}
        end = node
        if checkpoint is not None:
            end, position = checkpoint.checkpoint.node, checkpoint.checkpoint.position
            spared.update(dict.fromkeys(self.records.keys(end, position)))
        if not self._path.extend_to(end):
            self._touch_path()
            self._path.begin(end)
            # Its beginning is not among the first that room_for() looks at, for each of the blocks
            # that follow.
            self.store.touch(self._path.keys)
        copy = (
            partial(self._copy, node)
            if checkpoint is None or record.kind == BLOCK
            else partial(self.records.copy, checkpoint)
        )
        decision = self.store.write(
            record, copy, ChainMap(self._path.keys, spared), anew=record.kind != BLOCK
        )
        self.records.lost(decision.dropped)
        if decision.refusal is not None:
            return self.ledger.refused(record, decision.refusal)
        self._path.is_touched = False
        return self.ledger.size(record)

    def _touch_path(self) -> None:
        """Make the records of the path that was written last the most recently used ones, its
        beginning last.
        """
        if not self._path.is_touched:
            self._path.is_touched = True
            self.store.touch(self._path.keys)

    def _copy(self, node: Node) -> list[memoryview]:
        """The bytes of a block, out of the pool."""
        return [
            as_bytes(array)
            for array in copy_out(self.arena, list(node.blocks), 0, node.end - node.start)
        ]

    def _settle(self) -> None:
        """Queue failed writes again, remove files that cannot be reached, and follow what other
        processes did.
        """
        self.write_again(self.ledger.lost(self.store.poll(), again=True))
        changes = self.store.take_changes()
        self.records.lost(changes.lost)
        self.records.remove_unreachable()
        self.records.follow(changes.found if self.ledger.follows else ())

    def write_again(self, keys: Sequence[Key]) -> None:
        """Queue records that are not on disk after all."""
        nodes = [self.index.trie.node(key.hash) for key in keys if key.kind == BLOCK]
        self.records.forget(keys, again=True)
        for node in nodes:
            if node is not None:
                self.enqueue(node)


class WrittenPath:
    """The keys of the blocks from the first one of a prompt to the one that was written last.

    Blocks are written along their paths, so that each one adds a key in place of a walk over the
    whole path.
    """

    def __init__(self) -> None:
        self.keys: dict[Key, None] = {}
        self.is_touched = True
        self._end: ReferenceType[Node] | None = None

    def extend_to(self, node: Node) -> bool:
        """Continue to a node if it is the last one, or follows it. Returns whether it does."""
        last = None if self._end is None else self._end()
        if last is None or (node is not last and node.parent is not last):
            return False
        self.keys[Key(BLOCK, node.hash)] = None
        self._end = ref(node)
        return True

    def begin(self, node: Node) -> None:
        """Follow the path to another node."""
        self.keys = {Key(BLOCK, each.hash): None for each in node.path()}
        self._end = ref(node)


def _seconds_until(until: float) -> float:
    return max(0.0, until - time.monotonic())
