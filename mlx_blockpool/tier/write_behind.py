"""Which known prefixes are on disk as well: writes them behind, brings them back. Owned by the generation thread.

Ties the trie to the prompt store. A node is written once its block is full and whole, parents first, so that what is on disk
can be reached from its beginning.
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
from ..kv.block_bytes import Content, as_bytes, contents, copy_in, copy_out
from ..kv.slabs import KVArena
from ..prefix.admission import Admission
from ..prefix.residency import KVIndex
from ..prefix.trie import Checkpoint, Node, PrefixRef, decode
from ..store.fs import Into
from ..store.limits import OVER_BUDGET
from ..store.prompt_store import PromptStore
from ..store.reader import Reading, RecordData
from ..store.record import BLOCK, STATE, WINDOW, Expected, Key, Part, Record
from .catalog import RecordScanner
from .checkpoint_records import StoredCheckpoints, salted
from .restore import HeldBlocks, RestoreJob, RestorePlan, RestoreStep
from .throughput import Rates

# A restore that somebody waits for looks this often whether the disk hangs.
WAIT_SECONDS = 0.1


class StoredPrefixes:
    """The nodes of `known` that `store` has, and in `placed` the checkpoints.

    `num_restored` counts tokens brought back, `num_unread` records that could not be, `num_cheaper` prompts that were rather
    computed, by what `rates` has measured. `restoring`: what is on its way. `num_arrived` counts records that came, and
    `num_released` restores that let their blocks go, whoever began them: what waits for one of them looks again then.
    """

    def __init__(self, known: KVIndex, slabs: KVArena, room: Admission, store: PromptStore) -> None:
        self.known = known
        self.slabs = slabs
        self.room = room
        self.store = store
        self.bits = store.config.bits
        self.placed = StoredCheckpoints(known, slabs, store)
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
        self._scanner = RecordScanner(known, self.placed, store, self._by_hash)
        # The nodes that a RestoreJob is bringing back.
        self.arriving: set[Node] = set()
        records = store.open()
        self._scanner.load(records)
        self._settle()
        self._lose(store.settle(self._scanner.by_need(records)))

    # -- writing -------------------------------------------------------------------------------------------------------

    def note(self, node: Node) -> None:
        """A known node that may be written when there is time; a partial block once its conversation has rested."""
        if node.stored or not node.resident:
            return
        if node.is_full:
            self._pending[node] = None
        else:
            self._resting.pop(node, None)
            self._resting[node] = time.monotonic() + self.store.config.idle_seconds

    def note_path(self, path: Sequence[Node], tokens: int) -> None:
        """A path of `tokens` that may be written when there is time, and those of its checkpoints that nobody noted."""
        for node in path:
            self.note(node)
            for checkpoint in list(node.checkpoints.values()):
                if not checkpoint.noted and checkpoint.position <= tokens:
                    self.placed.note(node, checkpoint)

    def write_behind(self, limit: int | None = None, at_once: bool = False) -> None:
        """Copy what is pending out of the pool for the writer, `limit` bytes (None: step_bytes) and at most a block more.

        `at_once`: the ends of conversations too.
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
        while limit > 0 and self.placed.is_due(now) and self.store.takes():
            write = self.placed.next_write(now)
            reached = write is not None and self._leads_on(write.of)
            if write is None or reached is None:
                return
            written = self._put(write.record, write.copy, write.of) if reached else 0
            if written is None:
                return
            if written:
                self.placed.written(write)
            else:
                self.placed.give_up(write)
            limit -= written

    def write_tails(self) -> None:
        """Hand over all that is pending, and the ends of conversations: for a server that stops."""
        self.write_behind(1 << 62, at_once=True)

    def report(self) -> dict[str, Any]:
        """Figures of the store and of what was brought back from it; sizes in bytes."""
        pending = {
            "pending": len(self._pending) + self.placed.num_pending,
            "resting": len(self._resting) + self.placed.num_resting,
        }
        restored = {"restored_tokens": self.num_restored, "unread": self.num_unread, "cheaper_to_compute": self.num_cheaper}
        restoring = [{"tokens": restore.tokens, "done": restore.done} for restore in self.restoring]
        return pending | restored | {"restoring": restoring} | self.rates.report() | self.store.report()

    def close(self) -> bool:
        """Write what is left, within the store's time for it. Whether all is on disk."""
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
        unwritten = sum(1 for node in self.known.trie if not node.stored)
        return unwritten + self.placed.num_pending + self.placed.num_resting

    def _due(self, at_once: bool) -> Node | None:
        """A full block, or a partial one whose time has come."""
        node = next(iter(self._pending), None)
        if node is None and (first := next(iter(self._resting.items()), None)) is not None:
            return first[0] if at_once or first[1] <= time.monotonic() else None
        return node

    def _is_writable(self, node: Node) -> bool:
        parent = node.parent
        assert parent is not None
        return node.resident and not node.stored and (parent.parent is None or parent.stored) and node in parent.children

    def _leads_on(self, node: Node) -> bool | None:
        """Whether a checkpoint in this node could be reached on disk; a partial block is written now for it. None: not now."""
        if self._is_writable(node) and self._write(node) is None:
            return None
        return node.stored

    def _write(self, node: Node) -> int | None:
        """Bytes handed over; None if the store does not take them now, 0 if the budget has no room for them."""
        assert node.parent is not None
        tokens, parts = tuple(decode(node.tokens)), self._parts(node.end - node.start)
        extra = {"kind": node.kind, "bits": str(self.bits or 0)} | salted(node)
        record = Record(BLOCK, self.store.namespace, node.hash, node.parent.hash, node.start, tokens, parts, extra)
        written = self._put(record, lambda: self._copied(node), node)
        if written:
            self.known.written(node)
            self._by_hash[node.hash] = node
        return written

    def _put(self, record: Record, copy: Callable[[], list[memoryview]], node: Node) -> int | None:
        """_write() for any record of a node: what the node stands on does not make room for it, and outlives it."""
        path = [Key(BLOCK, n.hash) for n in node.path()]
        spared = {*path, *(Key(BLOCK, n.hash) for n in self.arriving)}
        put = self.store.put(record, copy, spared, anew=record.kind != BLOCK)
        self._lose(put.dropped)
        if not put.taken:
            return 0 if put.refusal == OVER_BUDGET else None
        self.store.touch(path)
        return max(1, record.nbytes)

    def _copied(self, node: Node) -> list[memoryview]:
        return [as_bytes(a) for a in copy_out(self.slabs, self._places(node), 0, node.end - node.start, self.bits)]

    def _settle(self) -> None:
        """Take note of what could not be written, and try it again; of files that nothing leads to; of what others did."""
        failed = self.store.poll()
        again = [self._by_hash[key.hash] for key in failed if key.kind == BLOCK and key.hash in self._by_hash]
        self._lose(failed, again=True)
        for node in again:
            self.note(node)
        news = self.store.news()
        self._lose(news.lost)
        self._scanner.expect(news.found)
        gone, self.known.unreachable = self.known.unreachable, []
        for key in gone:
            if key.kind == BLOCK:
                self._by_hash.pop(key.hash, None)
            else:
                self.placed.lose(key)
        self.store.forget(gone)
        self._scanner.learn()

    def _lose(self, keys: Sequence[Key], again: bool = False) -> None:
        """These are not on disk any more: what is not in memory either is forgotten."""
        for key in keys:
            if key.kind != BLOCK:
                self.placed.lose(key, again)
                continue
            node = self._by_hash.pop(key.hash, None)
            if node is None:
                continue
            node.stored = False
            if not node.resident and node.parent is not None and node in node.parent.children:
                self.known.drop(node)

    # -- reading -------------------------------------------------------------------------------------------------------

    def wanted(self, match: PrefixRef, at_most: int, have: int) -> RestorePlan | None:
        """What would have to be brought back to resume at more than `have` tokens of a match; None: nothing of it is here."""
        if self.clock() < self._left_alone_until:
            return None
        if self.slabs.spec.needs_checkpoints:
            found = self.placed.find(match.path, min(match.tokens, at_most), have)
            if found is None:
                return None
            node, position = found
            path = [n for n in match.path if n.start < position]
            missing = [n for n in path if not n.resident]
            whole = all(map(self._is_at_hand, path))
            return RestorePlan(path, missing, have, position - have, node, position) if whole else None
        path = list(takewhile(self._is_at_hand, match.path))
        missing = [n for n in path if not n.resident]
        return RestorePlan(match.path, missing, have, min(path[-1].end, match.tokens, at_most) - have) if missing else None

    def is_worth_reading(self, wanted: RestorePlan) -> bool:
        """Whether it comes back before it would be computed."""
        keys = [Key(BLOCK, node.hash) for node in wanted.missing]
        keys += [] if wanted.node is None else self.placed.keys(wanted.node, wanted.position)
        return self.rates.is_worth_reading(sum(map(self.store.size, keys)), wanted.tokens)

    def _is_at_hand(self, node: Node) -> bool:
        return node.resident or (node.stored and not self.store.is_put_off(Key(BLOCK, node.hash)))

    def touch(self, path: Sequence[Node]) -> None:
        """A path was used: its records outlive those that were not."""
        keys = [Key(BLOCK, node.hash) for node in path if node.stored]
        checkpoints = path and self.slabs.spec.needs_checkpoints
        found = self.placed.find(path, path[-1].end) if checkpoints else None
        self.store.touch(keys if found is None else [*keys, *self.placed.keys(*found)])

    def restore(self, wanted: RestorePlan) -> RestoreJob:
        """Begin to bring it back. Raises PoolExhaustedError if there is no room for it."""
        self.touch(wanted.path)
        if not self._is_waiting:
            # From now on the disk is expected to answer.
            self.last_arrival = self.clock()
        held = HeldBlocks(self.room, self.known.full_groups, self.placed.rings, wanted)
        block = sum(self.slabs.spec.bytes_per_block(group) for group in self.slabs.spec.groups)
        restore = RestoreJob(self, wanted, held, self._steps(wanted, held), max(1, block))
        self.arriving |= wanted.arriving
        self.restoring.append(restore)
        restore.read_ahead()
        return restore

    def _steps(self, wanted: RestorePlan, held: HeldBlocks) -> list[RestoreStep]:
        """The records of a plan, in the order in which they are of use."""
        steps = [RestoreStep(Key(BLOCK, n.hash), n, block=b) for n, b in zip(wanted.missing, held.blocks, strict=True)]
        if wanted.node is not None:
            pieces = self.placed.pieces(wanted.node, wanted.position)
            steps += [RestoreStep(Key(WINDOW, p.node.hash_at(p.end)), p.node, segment=p) for p in pieces]
            if self.slabs.state_leaves:
                steps += [RestoreStep(Key(STATE, wanted.node.hash_at(wanted.position)), wanted.node)]
        return steps

    def restore_now(self, wanted: RestorePlan) -> None:
        """restore(), and wait for it."""
        restore = self.restore(wanted)
        while not restore.advance(wait=WAIT_SECONDS, seconds=math.inf):
            pass
        restore.release()

    @property
    def is_stuck(self) -> bool:
        """Whether something is on its way, and nothing has arrived for longer than a disk may take to answer."""
        return self._is_waiting and self.clock() - self.last_arrival > self.store.config.answer_seconds

    @property
    def _is_waiting(self) -> bool:
        """Whether the disk has something to give: a restore that has ended holds its blocks until its request starts."""
        return not all(restore.has_ended for restore in self.restoring)

    def disk_hangs(self) -> TimeoutError:
        """Leave the disk alone for a while: what is on it is computed until then. Returns the reason."""
        self._left_alone_until = self.clock() + self.store.config.retry_seconds
        return TimeoutError(f"the disk has given nothing for {self.store.config.answer_seconds:g} seconds")

    def begin_read(self, step: RestoreStep, into: Into) -> Reading:
        """Have a thread read the record of a step into what `into` gives."""
        if step.key.kind == BLOCK:
            node = step.node
            return self.store.read(Expected(self.store.namespace, BLOCK, node.hash, self._parts(node.end - node.start)), into)
        # States stay where they are read: arrays may be made where the bytes are.
        return self.placed.read(step.key, into if step.key.kind == WINDOW else None)

    def put_in(self, step: RestoreStep, found: RecordData, plan: RestorePlan, held: HeldBlocks) -> None:
        """Put what was read for a step where it belongs. Raises BadRecordError if it is not what the plan needs."""
        if step.segment is not None:
            self.placed.lay(step.segment, found, plan.position, held.rings)
        elif step.key.kind == STATE:
            held.states.update(self.placed.states(found))
        else:
            self._put_block_in(step.node, step.block, found[1])
        self.num_arrived += 1

    def _put_block_in(self, node: Node, block: tuple[int, ...], views: list[memoryview]) -> None:
        """Put what was read into held blocks, and let everybody share it, unless it was computed meanwhile."""
        if node.resident or node.parent is None or node not in node.parent.children:
            return
        arrays = [c.array(v) for c, v in zip(self._contents(node.end - node.start), views, strict=True)]
        copy_in(self.slabs, list(zip(self.known.full_groups, block, strict=True)), 0, arrays, self.bits)
        self.known.revive(node, block)
        self.num_restored += node.end - node.start

    def unread(self, key: Key, error: Exception) -> None:
        """A record that could not be read is a miss, and all behind it; what can be read later stays where it is."""
        self.num_unread += 1
        if isinstance(error, OSError | MemoryError) and not isinstance(error, FileNotFoundError):
            self.store.put_off(key)
            return
        self.store.gone(key)
        self._lose([key])

    def restored(self, plan: RestorePlan, held: HeldBlocks) -> None:
        """All records of a plan are in memory: its position can be resumed, unless it was forgotten or computed meanwhile."""
        node, position = plan.node, plan.position
        while node is not None and node.merged_into is not None:
            node = node.merged_into
        if node is None or node.parent is None or node not in node.parent.children or position in node.checkpoints:
            return
        with suppress(PoolExhaustedError):
            self.room.need_states(self.slabs.spec.fixed_bytes_per_agent())
            rings = self.placed.rings.indices(position, held.rings)
            self.known.add_checkpoint(node, Checkpoint(position, rings, held.states, noted=True))

    def released(self, restore: RestoreJob) -> None:
        """A restore has let its blocks go."""
        self.arriving -= restore.plan.arriving
        self.num_released += 1
        if restore in self.restoring:
            self.restoring.remove(restore)

    def _places(self, node: Node) -> list[tuple[int, int]]:
        return list(zip(self.known.full_groups, node.blocks, strict=True))

    def _parts(self, tokens: int) -> tuple[Part, ...]:
        if tokens not in self._known_parts:
            self._known_parts[tokens] = tuple(Part(c.name, c.safetensors_dtype, c.shape) for c in self._contents(tokens))
        return self._known_parts[tokens]

    def _contents(self, tokens: int) -> list[Content]:
        if tokens not in self._known_contents:
            self._known_contents[tokens] = contents(self.slabs, self.known.full_groups, tokens, self.bits)
        return self._known_contents[tokens]


def _seconds_until(until: float) -> float:
    return max(0.0, until - time.monotonic())
