"""StoredPrefixes: writes the prefixes of a trie behind to a prompt store, and brings them back. Owned by the generation thread.

A node is written once its block is full, parents first, so that every record on disk can be reached from the beginning.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import PoolExhaustedError
from ..kv.arena import KVArena
from ..kv.block_bytes import Content, as_bytes, contents, copy_in, copy_out
from ..prefix.admission import Admission
from ..prefix.index import KVIndex
from ..prefix.residency import Checkpoint
from ..prefix.trie import Node, PrefixRef, decode
from ..store.fs import Into
from ..store.limits import OVER_BUDGET
from ..store.prompt_store import PromptStore
from ..store.reader import Reading, RecordData
from ..store.record import BLOCK, STATE, WINDOW, Expected, Key, Part, Record
from .catalog import RecordScanner
from .checkpoint_records import StoredCheckpoints, salted
from .restore import HeldBlocks, RestoreJob, RestorePlan, RestoreStep
from .throughput import Busy, Rates

# restore_now() checks this often whether the disk hangs, in seconds.
WAIT_SECONDS = 0.1


class StoredPrefixes:
    """The nodes of `index` that `store` has on disk; `checkpoints` are the checkpoints that it has.

    rates          how fast prompts are computed and records read, as measured here.
    restoring      restores under way; `arriving` are the nodes that they bring back.
    num_restored   tokens brought back.            num_unread     records that could not be read.
    num_cheaper    prompts that were computed because reading them would have taken longer.
    num_arrived    records read and put into the pool.
    num_released   restores that released their blocks: requests that wait for room are tried again when it changes.
    """

    def __init__(self, index: KVIndex, arena: KVArena, admission: Admission, store: PromptStore) -> None:
        self.index = index
        self.arena = arena
        self.admission = admission
        self.store = store
        self.bits = store.config.bits
        self.checkpoints = StoredCheckpoints(index, arena, store)
        self.num_restored = self.num_unread = self.num_cheaper = 0
        self.rates = Rates()
        self.restoring: list[RestoreJob] = []
        self.num_arrived = self.num_released = 0
        self.clock = time.monotonic
        # When the disk gave something last, while something is on its way; until when it is left alone.
        self.last_arrival = self._left_alone_until = self.clock()
        # By tokens of a block.
        self._known_parts: dict[int, tuple[Part, ...]] = {}
        self._known_contents: dict[int, list[Content]] = {}
        self._pending: WeakKeyDictionary[Node, None] = WeakKeyDictionary()
        # Partial blocks, in the order in which their time comes, in seconds of time.monotonic().
        self._resting: WeakKeyDictionary[Node, float] = WeakKeyDictionary()
        self._by_hash: dict[bytes, Node] = {}
        self._scanner = RecordScanner(index, self.checkpoints, store, self._by_hash)
        # The nodes that a RestoreJob is bringing back.
        self.arriving: set[Node] = set()
        records = store.open()
        self._scanner.load(records)
        self._settle()
        self._lose(store.settle(self._scanner.by_need(records)))

    # -- writing -------------------------------------------------------------------------------------------------------

    def note(self, node: Node) -> None:
        """Queue a node for writing; a partial block waits until its conversation has rested for `idle_seconds`."""
        if node.residency.on_disk or not node.residency.in_memory:
            return
        if node.is_full:
            self._pending[node] = None
        else:
            self._resting.pop(node, None)
            self._resting[node] = time.monotonic() + self.store.config.idle_seconds

    def note_path(self, path: Sequence[Node], tokens: int) -> None:
        """Queue a path of `tokens` tokens for writing, and those of its checkpoints that are not queued yet."""
        for node in path:
            self.note(node)
            for checkpoint in list(node.residency.checkpoints.values()):
                if not checkpoint.noted and checkpoint.position <= tokens:
                    self.checkpoints.note(node, checkpoint)

    def write_behind(self, limit: int | None = None, at_once: bool = False) -> None:
        """Copy queued nodes out of the pool and pass them to the store's writer.

        `limit`: stop after so many bytes, at most one record later; None: the store's `step_bytes`. `at_once`: the ends of
        conversations do not wait for their time.
        """
        left = self.store.config.step_bytes if limit is None else limit
        self._settle()
        while left > 0 and (node := self._due(at_once)) is not None:
            if self._is_writable(node):
                written = self._write(node) if self.store.takes() else None
                if written is None:
                    return
                left -= written
            self._pending.pop(node, None)
            self._resting.pop(node, None)
        self._write_checkpoints(left, math.inf if at_once else time.monotonic())

    def _write_checkpoints(self, limit: int, now: float) -> None:
        """write_behind() for the records of checkpoints that are due at `now`."""
        while limit > 0 and self.checkpoints.is_due(now) and self.store.takes():
            write = self.checkpoints.next_write(now)
            reached = write is not None and self._leads_on(write.of)
            if write is None or reached is None:
                return
            written = self._put(write.record, write.copy, write.of) if reached else 0
            if written is None:
                return
            if written:
                self.checkpoints.written(write)
            else:
                self.checkpoints.give_up(write)
            limit -= written

    def write_tails(self) -> None:
        """Pass everything queued to the writer, ends of conversations too, as a server does that stops."""
        self.write_behind(1 << 62, at_once=True)

    def report(self) -> dict[str, Any]:
        """Figures of the store and of what was brought back from it; sizes in bytes."""
        pending = {
            "pending": len(self._pending) + self.checkpoints.num_pending,
            "resting": len(self._resting) + self.checkpoints.num_resting,
        }
        restored = {"restored_tokens": self.num_restored, "unread": self.num_unread, "cheaper_to_compute": self.num_cheaper}
        restoring = [{"tokens": restore.tokens, "done": restore.done} for restore in self.restoring]
        return pending | restored | {"restoring": restoring} | self.rates.report() | self.store.report()

    def close(self) -> bool:
        """Write what is queued, within the store's `flush_seconds`, and close the store. Returns whether all of it is on disk."""
        until = time.monotonic() + self.store.config.flush_seconds
        left, before = self._num_unwritten(), -1
        # The queue takes a part at a time.
        while left not in (0, before) and time.monotonic() < until:
            self.write_tails()
            self.store.flush(_seconds_until(until))
            left, before = self._num_unwritten(), left
        # Files of what was forgotten since the last step, or is covered by what was just written.
        self._settle()
        return self.store.close(_seconds_until(until))

    def _num_unwritten(self) -> int:
        unwritten = sum(1 for node in self.index.trie if not node.residency.on_disk)
        return unwritten + self.checkpoints.num_pending + self.checkpoints.num_resting

    def _due(self, at_once: bool) -> Node | None:
        """The next queued node: a full block, or a partial one whose time has come."""
        node = next(iter(self._pending), None)
        if node is None and (first := next(iter(self._resting.items()), None)) is not None:
            return first[0] if at_once or first[1] <= time.monotonic() else None
        return node

    def _is_writable(self, node: Node) -> bool:
        parent = node.parent
        assert parent is not None
        is_reachable = parent.parent is None or parent.residency.on_disk
        return node.residency.in_memory and not node.residency.on_disk and is_reachable and node in parent.children

    def _leads_on(self, node: Node) -> bool | None:
        """Whether a checkpoint in this node can be reached on disk, writing its partial block if need be. None: not now."""
        if self._is_writable(node) and self._write(node) is None:
            return None
        return node.residency.on_disk

    def _write(self, node: Node) -> int | None:
        """Write one node. Returns the bytes passed on; 0 if the budget has no room for them, None if the store is busy."""
        assert node.parent is not None
        tokens, parts = tuple(decode(node.tokens)), self._parts(node.end - node.start)
        extra = {"kind": node.residency.kind, "bits": str(self.bits or 0)} | salted(node)
        record = Record(BLOCK, self.store.namespace, node.hash, node.parent.hash, node.start, tokens, parts, extra)
        written = self._put(record, lambda: self._copied(node), node)
        if written:
            self.index.written(node)
            self._by_hash[node.hash] = node
        return written

    def _put(self, record: Record, copy: Callable[[], list[memoryview]], node: Node) -> int | None:
        """_write() for any record of a node. Records of the blocks before it are not dropped for it, and outlive it."""
        path = [Key(BLOCK, n.hash) for n in node.path()]
        spared = {*path, *(Key(BLOCK, n.hash) for n in self.arriving)}
        put = self.store.put(record, copy, spared, anew=record.kind != BLOCK)
        self._lose(put.dropped)
        if not put.taken:
            return 0 if put.refusal == OVER_BUDGET else None
        self.store.touch(path)
        return max(1, record.nbytes)

    def _copied(self, node: Node) -> list[memoryview]:
        return [as_bytes(a) for a in copy_out(self.arena, self._places(node), 0, node.end - node.start, self.bits)]

    def _settle(self) -> None:
        """Queue failed writes again, remove files that nothing leads to, and follow what other processes did."""
        failed = self.store.poll()
        again = [self._by_hash[key.hash] for key in failed if key.kind == BLOCK and key.hash in self._by_hash]
        self._lose(failed, again=True)
        for node in again:
            self.note(node)
        news = self.store.news()
        self._lose(news.lost)
        self._scanner.expect(news.found)
        gone, self.index.unreachable = self.index.unreachable, []
        for key in gone:
            if key.kind == BLOCK:
                self._by_hash.pop(key.hash, None)
            else:
                self.checkpoints.lose(key)
        self.store.forget(gone)
        self._scanner.learn()

    def _lose(self, keys: Sequence[Key], again: bool = False) -> None:
        """Follow records that are not on disk any more: nodes that are not in memory either are forgotten."""
        for key in keys:
            if key.kind != BLOCK:
                self.checkpoints.lose(key, again)
                continue
            node = self._by_hash.pop(key.hash, None)
            if node is None:
                continue
            node.residency.on_disk = False
            if not node.residency.in_memory and node.parent is not None and node in node.parent.children:
                self.index.remove(node)

    # -- reading -------------------------------------------------------------------------------------------------------

    def plan_restore(self, match: PrefixRef, at_most: int, have: int) -> RestorePlan | None:
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
        """Whether reading it takes less time than computing its tokens, as far as both were measured."""
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

    def restore(self, plan: RestorePlan) -> RestoreJob:
        """Begin to bring a plan's records back. Raises PoolExhaustedError if the pool has no room for them."""
        self.touch(plan.path)
        if not self._is_waiting:
            # The disk's time to answer begins now.
            self.last_arrival = self.clock()
        held = HeldBlocks(self.admission, self.index.full_groups, self.checkpoints.rings, plan)
        block = sum(self.arena.spec.bytes_per_block(group) for group in self.arena.spec.groups)
        restore = RestoreJob(self, plan, held, self._steps(plan, held), max(1, block))
        self.arriving |= plan.arriving
        self.restoring.append(restore)
        restore.read_ahead()
        return restore

    def _steps(self, plan: RestorePlan, held: HeldBlocks) -> list[RestoreStep]:
        """The records of a plan, in the order in which they are of use."""
        steps = [RestoreStep(Key(BLOCK, n.hash), n, block=b) for n, b in zip(plan.missing, held.blocks, strict=True)]
        if plan.node is not None:
            segments = self.checkpoints.segments(plan.node, plan.position)
            steps += [RestoreStep(Key(WINDOW, p.node.hash_at(p.end)), p.node, segment=p) for p in segments]
            if self.arena.state_leaves:
                steps += [RestoreStep(Key(STATE, plan.node.hash_at(plan.position)), plan.node)]
        return steps

    def restore_now(self, plan: RestorePlan) -> None:
        """restore(), and wait for it."""
        restore = self.restore(plan)
        while not restore.advance(wait=WAIT_SECONDS, seconds=math.inf):
            pass
        restore.release()

    @property
    def is_stuck(self) -> bool:
        """Whether restores wait for records and none has arrived for the store's `answer_seconds`."""
        return self._is_waiting and self.clock() - self.last_arrival > self.store.config.answer_seconds

    @property
    def _is_waiting(self) -> bool:
        """Whether any restore waits for records. One that has ended only holds its blocks until its request starts."""
        return not all(restore.has_ended for restore in self.restoring)

    def answered(self) -> None:
        """The disk has given a record, or an error, just now."""
        self.last_arrival = self.clock()

    def hang(self) -> TimeoutError | None:
        """The error to report if the disk is stuck: then nothing is planned for the store's `retry_seconds`."""
        if not self.is_stuck:
            return None
        self._left_alone_until = self.clock() + self.store.config.retry_seconds
        return TimeoutError(f"the disk has given nothing for {self.store.config.answer_seconds:g} seconds")

    def begin_read(self, step: RestoreStep, into: Into) -> Reading:
        """Have a thread read the record of a step into what `into` gives."""
        if step.key.kind == BLOCK:
            node = step.node
            return self.store.read(Expected(self.store.namespace, BLOCK, node.hash, self._parts(node.end - node.start)), into)
        # States stay where they are read: arrays may be made where the bytes are.
        return self.checkpoints.read(step.key, into if step.key.kind == WINDOW else None)

    def put_in(self, step: RestoreStep, found: RecordData, plan: RestorePlan, held: HeldBlocks) -> None:
        """Put what was read for a step where it belongs. Raises BadRecordError if it is not what the plan needs."""
        if step.segment is not None:
            self.checkpoints.lay(step.segment, found, plan.position, held.rings)
        elif step.key.kind == STATE:
            held.states.update(self.checkpoints.states(found))
        else:
            self._put_block_in(step.node, step.block, found[1])
        self.num_arrived += 1

    def _put_block_in(self, node: Node, block: tuple[int, ...], views: list[memoryview]) -> None:
        """Put what was read into held blocks, and let everybody share it, unless it was computed meanwhile."""
        if node.residency.in_memory or node.parent is None or node not in node.parent.children:
            return
        arrays = [c.array(v) for c, v in zip(self._contents(node.end - node.start), views, strict=True)]
        copy_in(self.arena, list(zip(self.index.full_groups, block, strict=True)), 0, arrays, self.bits)
        self.index.revive(node, block)
        self.num_restored += node.end - node.start

    def unread(self, key: Key, error: Exception) -> None:
        """A record that could not be read is a miss, and all behind it; what can be read later stays where it is."""
        self.num_unread += 1
        if isinstance(error, OSError | MemoryError) and not isinstance(error, FileNotFoundError):
            self.store.put_off(key)
            return
        self.store.gone(key)
        self._lose([key])

    def restored(self, plan: RestorePlan, held: HeldBlocks, busy: Busy) -> None:
        """All records of a plan are in memory: its position can be resumed, unless it was forgotten or computed meanwhile."""
        self.rates.restored(busy.amount, busy.seconds)
        node, position = plan.node and plan.node.latest, plan.position
        if node is None or node.parent is None or node not in node.parent.children or position in node.residency.checkpoints:
            return
        with suppress(PoolExhaustedError):
            self.admission.need_states(self.arena.spec.fixed_bytes_per_agent())
            rings = self.checkpoints.rings.indices(position, held.rings)
            self.index.add_checkpoint(node, Checkpoint(position, rings, held.states, noted=True))

    def released(self, restore: RestoreJob) -> None:
        """A restore has let its blocks go."""
        self.arriving -= restore.plan.arriving
        self.num_released += 1
        if restore in self.restoring:
            self.restoring.remove(restore)

    def _places(self, node: Node) -> list[tuple[int, int]]:
        return list(zip(self.index.full_groups, node.residency.blocks, strict=True))

    def _parts(self, tokens: int) -> tuple[Part, ...]:
        if tokens not in self._known_parts:
            self._known_parts[tokens] = tuple(Part(c.name, c.safetensors_dtype, c.shape) for c in self._contents(tokens))
        return self._known_parts[tokens]

    def _contents(self, tokens: int) -> list[Content]:
        if tokens not in self._known_contents:
            self._known_contents[tokens] = contents(self.arena, self.index.full_groups, tokens, self.bits)
        return self._known_contents[tokens]


def _seconds_until(until: float) -> float:
    return max(0.0, until - time.monotonic())
