"""StoredPrefixes: writes the prefixes of a trie behind to a prompt store. Owned by the generation thread.

A node is written once its block is full, parents first, so that every record on disk can be reached from the beginning.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ..kv.arena import KVArena
from ..kv.block_bytes import as_bytes, copy_out
from ..prefix.admission import Admission
from ..prefix.index import KVIndex
from ..prefix.retention import record_bytes
from ..prefix.trie import Node
from ..ranks.facts import Lost
from ..ranks.group import ALONE, Ranks
from ..store.prompt_store import PromptStore
from ..store.record import BLOCK, Key, Record
from .catalog import StoredNodes
from .checkpoint_records import CheckpointWrite, StoredCheckpoints, record_of
from .ledger import AgreedLedger, Ledger, OwnLedger
from .restore import Restores


class StoredPrefixes:
    """The prefixes of `index` that `store` has on disk.

    nodes, checkpoints   those that are on disk.
    restores             brings them back.
    num_cheaper          prompts that were computed because reading them would have taken longer.
    ledger               which records count as on disk. The ranks of a group all open their stores, or none does.
    clock                the time by which conversations rest.
    """

    def __init__(self, index: KVIndex, arena: KVArena, admission: Admission, store: PromptStore, ranks: Ranks = ALONE) -> None:
        self.index = index
        self.arena = arena
        self.store = store
        self.bits = store.config.bits
        self.clock = time.monotonic
        self.ledger: Ledger = OwnLedger(store) if ranks.size == 1 else AgreedLedger(store, ranks, record_bytes(index))
        self.checkpoints = StoredCheckpoints(index, arena, store, self.ledger)
        self.nodes = StoredNodes(index, self.checkpoints, store)
        self.restores = Restores(self.nodes, self.checkpoints, admission, ranks)
        self.num_cheaper = 0
        self._pending: WeakKeyDictionary[Node, None] = WeakKeyDictionary()
        # Partial blocks, in the order in which their time comes, by the clock.
        self._resting: WeakKeyDictionary[Node, float] = WeakKeyDictionary()
        records = self.ledger.open()
        self.nodes.load(records)
        self._settle()
        self.nodes.lose(self.ledger.lost(store.settle(self.nodes.by_need(records))))

    # -- writing -------------------------------------------------------------------------------------------------------

    def note(self, node: Node) -> None:
        """Queue a node for writing; a partial block waits until its conversation has rested for `idle_seconds`."""
        if node.residency.on_disk or not node.residency.in_memory:
            return
        if node.is_full:
            self._pending[node] = None
        else:
            self._resting.pop(node, None)
            self._resting[node] = self.clock() + self.store.config.idle_seconds

    def note_path(self, path: Sequence[Node], tokens: int) -> None:
        """Queue a path of `tokens` tokens for writing, and those of its checkpoints that are not queued yet."""
        for node in path:
            self.note(node)
            for checkpoint in list(node.residency.checkpoints.values()):
                if not checkpoint.noted and checkpoint.position <= tokens:
                    self.checkpoints.note(node, checkpoint)

    def write_behind(self, limit: int | None = None, at_once: bool = False) -> None:
        """Copy queued nodes out of the pool and pass them to the store's writer.

        `limit`: stop after this many bytes, at most one record later; None: the store's `step_bytes`. `at_once`: the ends of
        conversations do not wait for their time.
        """
        left = self.store.config.step_bytes if limit is None else limit
        self._settle()
        while left > 0 and (node := self._due(at_once)) is not None:
            if self._is_writable(node):
                written = self._write(node) if self.ledger.takes else None
                if written is None:
                    return
                left -= written
            self._pending.pop(node, None)
            self._resting.pop(node, None)
        self._write_checkpoints(left, math.inf if at_once else self.clock())

    def _write_checkpoints(self, limit: int, now: float) -> None:
        """write_behind() for the records of checkpoints that are due at `now`."""
        while limit > 0 and self.checkpoints.is_due(now) and self.ledger.takes:
            write = self.checkpoints.next_write(now)
            reached = write is not None and self._leads_on(write.segment.node)
            if write is None or reached is None:
                return
            written = self._put(write.record, write.segment.node, write) if reached else 0
            if written is None:
                return
            if written:
                self.checkpoints.written(write)
            else:
                self.checkpoints.give_up(write.checkpoint)
            limit -= written

    def write_tails(self) -> None:
        """Pass everything queued to the writer, ends of conversations too, as before a stop."""
        self.write_behind(1 << 62, at_once=True)

    def figures(self) -> list[int]:
        """Numbers of what counts as on disk and of restores, equal on all ranks of a group."""
        restores = self.restores
        begun = [restores.num_begun, len(restores.jobs), restores.num_restored, restores.num_released]
        return [self.ledger.takes, len(self.nodes.by_hash), self.checkpoints.digest.value, *begun]

    def report(self) -> dict[str, Any]:
        """Figures of the store and of restores; sizes in bytes."""
        pending, resting = self.checkpoints.num_queued
        restores = self.restores
        figures = {
            "pending": len(self._pending) + pending,
            "resting": len(self._resting) + resting,
            "restored_tokens": restores.num_restored,
            "unread": restores.num_unread,
            "cheaper_to_compute": self.num_cheaper,
            "restoring": [{"tokens": job.plan.tokens, "done": job.done} for job in restores.jobs],
        }
        return figures | restores.rates.report() | self.store.report()

    def forget(self, lost: Lost) -> None:
        """Forget records that a rank of the group lacks, on every rank: the others remove their files.

        `again`: they stay queued, and the files of the others serve.
        """
        keys = [Key(*key) for key in lost.keys]
        if lost.again:
            self._write_again(keys)
            return
        for key in keys:
            self.checkpoints.stop(key)
        self.nodes.lose(keys)
        self.store.remove(keys)

    def close(self) -> bool:
        """Write all that is queued within the store's `flush_seconds`, and close the store. Returns whether all is on disk.

        Nothing is agreed with other ranks any more.
        """
        lost, self.ledger = self.ledger.take_lost(), OwnLedger(self.store)
        for each in lost:
            self.forget(each)
        until = time.monotonic() + self.store.config.flush_seconds
        left, before = self._num_unwritten(), -1
        # The queue takes a part at a time, and nothing while it is full.
        while left not in (0, before) and time.monotonic() < until:
            self.store.flush(_seconds_until(until))
            self.write_tails()
            left, before = self._num_unwritten(), left
        self.store.flush(_seconds_until(until))
        # Remove files of nodes that left the trie since the last step, or that longer ones have just superseded.
        self._settle()
        return self.store.close(_seconds_until(until)) and left in (0, before)

    def _num_unwritten(self) -> int:
        return sum(not node.residency.on_disk for node in self.index.trie) + sum(self.checkpoints.num_queued)

    def _due(self, at_once: bool) -> Node | None:
        """The next queued node: a full block, or a partial one whose time has come."""
        node = next(iter(self._pending), None)
        if node is None and (first := next(iter(self._resting.items()), None)) is not None:
            return first[0] if at_once or first[1] <= self.clock() else None
        return node

    def _is_writable(self, node: Node) -> bool:
        parent = node.parent
        assert parent is not None
        return (
            node.residency.in_memory
            and not node.residency.on_disk
            and (parent.parent is None or parent.residency.on_disk)
            and node in parent.children
        )

    def _leads_on(self, node: Node) -> bool | None:
        """Write the partial block of a node if need be. Returns whether its checkpoint can be reached on disk; None: not now."""
        if self._is_writable(node) and self._write(node) is None:
            return None
        return node.residency.on_disk

    def _write(self, node: Node) -> int | None:
        """Write one node. Returns the bytes passed on; 0 if the budget has no room for them, None if the store is busy."""
        parts, extra = self.restores.parts(node.end - node.start), {"kind": node.residency.kind, "bits": str(self.bits or 0)}
        written = self._put(record_of(self.store, BLOCK, node, node.end, parts, extra), node)
        if written:
            self.index.written(node)
            self.nodes.by_hash[node.hash] = node
        return written

    def _put(self, record: Record, node: Node, checkpoint: CheckpointWrite | None = None) -> int | None:
        """_write() for any record of a node. Records of the blocks before it are not dropped for it, and outlive it."""
        path = [Key(BLOCK, n.hash) for n in node.path()]
        spared = {*path, *(Key(BLOCK, n.hash) for n in self.restores.arriving)}
        accepted = self.store.accept(record, spared, anew=record.kind != BLOCK)
        self.nodes.lose(self.ledger.lost(accepted.dropped))
        if accepted.refusal is not None:
            return self.ledger.refused(record, accepted.refusal)
        if accepted.is_new:
            self.store.write(record, self._copy(node) if checkpoint is None else self.checkpoints.copy(checkpoint))
        self.store.touch(path)
        return self.ledger.size(record)

    def _copy(self, node: Node) -> list[memoryview]:
        """The bytes of a block, out of the pool."""
        places = list(zip(self.index.full_groups, node.residency.blocks, strict=True))
        return [as_bytes(array) for array in copy_out(self.arena, places, 0, node.end - node.start, self.bits)]

    def _settle(self) -> None:
        """Queue failed writes again, remove files that nothing leads to, and follow what other processes did."""
        self._write_again(self.ledger.lost(self.store.poll(), again=True))
        changes = self.store.take_changes()
        self.nodes.lose(self.ledger.lost(changes.lost))
        self.nodes.remove_unreachable()
        self.nodes.follow(changes.found if self.ledger.follows else ())

    def _write_again(self, keys: Sequence[Key]) -> None:
        """Queue records that are not on disk after all."""
        nodes = [self.nodes.by_hash[key.hash] for key in keys if key.kind == BLOCK and key.hash in self.nodes.by_hash]
        self.nodes.lose(keys, again=True)
        for node in nodes:
            self.note(node)


def _seconds_until(until: float) -> float:
    return max(0.0, until - time.monotonic())
