"""Which nodes and checkpoints of a trie are on disk, what is still to be written of a checkpoint,
and where it can be resumed.

The rings of a checkpoint at position P have the last tokens before P. Cut into segments along the
blocks of the trie, each of which is one record, neighbouring checkpoints share records. Segments of
whole blocks are written after the next steps, the one between the last block and the checkpoint
once the conversation has rested, or at once where nothing near it could be resumed otherwise. A
state is one record and rests likewise. Owned by the generation thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import mlx.core as mx

from ..errors import BadRecordError
from ..kv.arena import KVArena
from ..kv.block_bytes import Content, array_in, as_bytes, contents, copy_in, copy_out
from ..kv.quantised import concatenated
from ..prefix.index import KVIndex
from ..prefix.trie import Checkpoint, Node, positions
from ..spec import BLOCK_TOKENS, StateLayer, WindowLayer, blocks_for, safetensors_name
from ..store.hashing import TOKEN_BYTES
from ..store.limits import OVER_BUDGET
from ..store.prompt_store import PromptStore
from ..store.reader import RecordData
from ..store.record import BLOCK, SALT, STATE, WINDOW, Key, Part, Record

# The key of a record of windows that has the position at which it was cut.
CUT = "cut"
# Of a position that a file names.
MOST_DIGITS = 18
# Records that are added between two steps; a disk that was away may show thousands at once.
FOLLOW_AT_ONCE = 64


class Ledger:
    """Decides which records of a store count as on disk: those that its disk has.

    A record that counts is in the trie, and so it steers what is evicted and written next.

    follows:  whether records that other processes write are added to the trie.
    """

    follows = True

    def __init__(self, store: PromptStore) -> None:
        self._store = store

    @property
    def takes(self) -> bool:
        """Whether records may be written now."""
        return self._store.takes()

    def open(self) -> list[Record]:
        """Open the store. Returns the records that count as on disk, in the order of use."""
        return self._store.open()

    def is_put_off(self, key: Key) -> bool:
        """Return whether plans leave out a record on disk because it could not be read lately."""
        return self._store.is_put_off(key)

    def size(self, record: Record) -> int:
        """Bytes that a written record counts, at least 1."""
        return max(1, record.nbytes)

    def refused(self, record: Record, refusal: str) -> int | None:
        """The store has refused a record. Returns its size() if it counts as written all the same,
        until lost() is agreed.

        Returns 0 if it is not written, and None if it waits, and so do all others.
        """
        return 0 if refusal == OVER_BUDGET else None

    def lost(self, keys: Iterable[Key], again: bool = False) -> Sequence[Key]:
        """Records that counted are not on this disk. Returns those that the trie has to forget now.

        `again`: they are to be written again.
        """
        return list(keys)


Queued = TypeVar("Queued")


class WriteQueue(Generic[Queued]):
    """What is to be written, held weakly: what may be written now, then what rests until its
    time comes, in that order.
    """

    def __init__(self) -> None:
        self.pending: WeakKeyDictionary[Queued, None] = WeakKeyDictionary()
        self.resting: WeakKeyDictionary[Queued, float] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self.pending) + len(self.resting)

    def first_due(self, now: float) -> Queued | None:
        """The first item that may be written at `now`."""
        return next(
            chain(self.pending, (item for item, due in self.resting.items() if due <= now)), None
        )

    def rest(self, item: Queued, due: float) -> None:
        """Let an item wait for this time, which is not before those of others."""
        self.discard(item)
        self.resting[item] = due

    def discard(self, item: Queued) -> None:
        self.pending.pop(item, None)
        self.resting.pop(item, None)


class WindowSegment(NamedTuple):
    """The tokens [node.start, end) of a node."""

    node: Node
    end: int

    @property
    def is_whole_block(self) -> bool:
        """True if it is a block of 256 tokens: no longer segment will take its place."""
        return self.node.is_full and self.end == self.node.end


class WindowCheckpoint:
    """The window layers of one model.

    A record that was cut from the rings at `cut` has what they still held then.
    """

    def __init__(self, arena: KVArena) -> None:
        self.arena = arena
        layers = [(g, arena.spec.groups[g].layer) for g in arena.window_groups]
        self.sizes = {g: layer.max_size for g, layer in layers if isinstance(layer, WindowLayer)}
        self.widest = max(self.sizes.values(), default=0)
        # A ring that always retains its first tokens does not consist of the last ones alone.
        self.can_be_cut = not any(
            layer.keep for _, layer in layers if isinstance(layer, WindowLayer)
        )

    def segments(self, node: Node, position: int) -> list[WindowSegment]:
        """Where the tokens lie that the rings at `position`, which is in `node`, hold: the last
        segment first. None for a model without windows.
        """
        found: list[WindowSegment] = []
        end = position
        while node.parent is not None and end > position - self.widest:
            found.append(WindowSegment(node, end))
            node, end = node.parent, node.start
        return found

    def covers(self, segment: WindowSegment, cut: int, position: int) -> bool:
        """Return whether a record of `segment` that was cut at `cut` has all that the rings at
        `position` hold of it.
        """
        return all(
            max(segment.node.start, cut - size) <= max(segment.node.start, position - size)
            for size in self.sizes.values()
        )

    def contents(self, segment: WindowSegment, cut: int) -> list[Content]:
        """What a record of `segment` holds, array by array."""
        found = []
        for group, start in self._starts(segment, cut):
            found += contents(self.arena, [group], segment.end - start)
        return found

    def cut(self, segment: WindowSegment, checkpoint: Checkpoint) -> list[memoryview]:
        """The bytes of `segment` out of the rings of a checkpoint, in the order of contents()."""
        found: list[mx.array] = []
        for group, start in self._starts(segment, checkpoint.position):
            ids, index = checkpoint.rings[group]
            places = self._places(group, index - (checkpoint.position - start), segment.end - start)
            parts = [
                copy_out(self.arena, [(group, ids[block])], first, end)
                for block, first, end in places
            ]
            found += [concatenated(same, 1) for same in zip(*parts, strict=True)]
        mx.eval(found)
        return [as_bytes(array) for array in found]

    def counts(self, position: int) -> list[int]:
        """Blocks of each ring at `position`."""
        return [blocks_for(min(position, size)) for size in self.sizes.values()]

    def put_back(
        self,
        segment: WindowSegment,
        cut: int,
        views: Sequence[memoryview],
        position: int,
        ids: dict[int, list[int]],
    ) -> None:
        """Lay what a record has of `segment` into held blocks, where rings at `position` in
        temporal order have it.
        """
        arrays = iter(
            [c.array(view) for c, view in zip(self.contents(segment, cut), views, strict=True)]
        )
        for group, start in self._starts(segment, cut):
            size = self.sizes[group]
            mine = [next(arrays) for _ in contents(self.arena, [group], 1)]
            first = max(start, position - size)
            done = first - start
            for block, begin, end in self._places(
                group, first - max(0, position - size), segment.end - first
            ):
                part = [array[:, done : done + end - begin] for array in mine]
                copy_in(self.arena, [(group, ids[group][block])], begin, part)
                done += end - begin

    def indices(
        self, position: int, ids: dict[int, list[int]]
    ) -> dict[int, tuple[tuple[int, ...], int]]:
        """The rings of a checkpoint as put_back() has laid them out."""
        return {g: (tuple(ids[g]), min(position, size)) for g, size in self.sizes.items()}

    def _starts(self, segment: WindowSegment, cut: int) -> Iterator[tuple[int, int]]:
        """(group, first token) where the rings at `cut` still hold any token of a segment."""
        for group, size in self.sizes.items():
            start = max(segment.node.start, cut - size)
            if start < segment.end:
                yield group, start

    def _places(self, group: int, place: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Where `count` tokens from `place` in the ring on lie: blocks of the ring, by their
        number, and tokens [start, end) of each.
        """
        size = self.sizes[group]
        while count > 0:
            place %= size
            block, start = divmod(place, BLOCK_TOKENS)
            taken = min(count, size - place, BLOCK_TOKENS - start)
            yield block, start, start + taken
            place, count = place + taken, count - taken


@dataclass(frozen=True)
class CheckpointWrite:
    """One record of a checkpoint to write. `segment`: the tokens that it covers."""

    record: Record
    segment: WindowSegment
    checkpoint: Checkpoint


class StoredRecords:
    """The nodes of `index` that `store` has on disk, and the checkpoints that it can restore: every
    segment of their rings, and the state, is on disk.
    """

    def __init__(self, index: KVIndex, arena: KVArena, store: PromptStore, ledger: Ledger) -> None:
        self.index = index
        self.arena = arena
        self.rings = WindowCheckpoint(arena)
        self.store = store
        self.ledger = ledger
        # Bytes that a record of windows may claim at most, whatever its header says.
        whole = parts_of(contents(arena, list(self.rings.sizes), BLOCK_TOKENS))
        self.window_bytes = sum(part.nbytes for part in whole)
        # A checkpoint rests once only its last segment is to be written.
        self.queue = WriteQueue[Checkpoint]()
        self._places: dict[Key, tuple[Node, int]] = {}
        # What each record was written of.
        self._sources: dict[Key, ref[Checkpoint]] = {}
        # Records that other processes wrote, and that follow() has not added yet.
        self._waiting: deque[Record] = deque()

    # -- what is on disk ---------------------------------------------------------------------------

    def load(self, records: Sequence[Record]) -> None:
        """Rebuild the trie from headers. Records that no chain of parents leads to are left out."""
        for record in sorted(records, key=_parents_first):
            if record.kind == BLOCK:
                self._add_block(record, at_start=True)
            elif not self._add_checkpoint_record(record):
                self.index.unreachable.append(record.key)

    def by_need(self, records: Sequence[Record]) -> Iterator[Key]:
        """The keys of records, given in the order of use: those used last first, and each after
        its parents.
        """
        seen: set[Node] = set()
        for record in reversed(records):
            if record.kind != BLOCK:
                yield record.key
                continue
            path: list[Node] = []
            node = self.index.trie.node(record.hash)
            while node is not None and node.parent is not None and node not in seen:
                # The parents of a node that was seen were seen too.
                seen.add(node)
                path.append(node)
                node = node.parent
            yield from (Key(BLOCK, n.hash) for n in reversed(path))

    def follow(self, records: Iterable[Record]) -> None:
        """Queue records that other processes wrote, and add up to FOLLOW_AT_ONCE queued ones that
        continue nodes on disk.

        Nodes of this process are not replaced by them, and no file is removed: another process may
        need it.
        """
        self._waiting.extend(sorted(records, key=_parents_first))
        for _ in range(min(FOLLOW_AT_ONCE, len(self._waiting))):
            record = self._waiting.popleft()
            if record.key in self.store and record.kind == BLOCK:
                self._add_block(record)
            elif record.key in self.store:
                self._add_checkpoint_record(record)

    def forget(self, keys: Iterable[Key], again: bool = False) -> None:
        """Follow records that are not on disk any more: nodes that are not in memory either leave
        the trie.

        `again`: writing them has failed, and their checkpoints are queued again.
        """
        for key in keys:
            if key.kind != BLOCK:
                self._forget_checkpoint_record(key, again)
            elif (node := self.index.trie.node(key.hash)) is not None and node.on_disk:
                self.index.lost(node)

    def lost(self, keys: Iterable[Key]) -> None:
        """forget() records that are not on this disk, once they do not count any more."""
        self.forget(self.ledger.lost(keys))

    def remove_unreachable(self) -> None:
        """Remove the files of records that nothing in the trie leads to."""
        keys, self.index.unreachable = self.index.unreachable, []
        for key in keys:
            if key.kind != BLOCK:
                self._forget_checkpoint_record(key)
        self.store.remove(keys)

    def _parent_of(self, record: Record) -> Node | None:
        if (
            record.start == 0
            and (root := self.index.trie.root_named(record.parent, record.extra.get(SALT)))
            is not None
        ):
            return root
        node = self.index.trie.node(record.parent)
        return node if node is not None and node.on_disk else None

    def _add_block(self, record: Record, at_start: bool = False) -> None:
        """Add a block whose parent is on disk.

        A second block with the same tokens is unreachable at start, and ignored later.
        """
        parent = self._parent_of(record)
        if (
            parent is None
            or parent.end != record.start
            or not (parent.parent is None or parent.is_full)
        ):
            return
        child = self.index.trie.child(parent, record.tokens)
        # Later, a shorter edge is the end of a conversation that continues in this process.
        if child is None and (
            at_start or not any(record.tokens.startswith(other.tokens) for other in parent.children)
        ):
            child = self.index.add(
                parent, record.tokens, None, record.extra.get("kind", "assistant")
            )
        elif at_start:
            self.index.unreachable.append(record.key)
            return
        elif child is None or child.hash != record.hash:
            return
        if not at_start:
            self.index.written(child)

    def _add_checkpoint_record(self, record: Record) -> bool:
        """Note a record of windows or a state found on disk.

        Returns whether it belongs to any node on disk.
        """
        parent = self._parent_of(record)
        node = None if parent is None else self.index.trie.child(parent, record.tokens)
        cut = _cut_of(record)
        if node is None or node.start != record.start or (record.kind == WINDOW and cut is None):
            return False
        self._add(record.key, node, record.end, record.end if cut is None else cut)
        return True

    # -- writing -----------------------------------------------------------------------------------

    def enqueue(self, checkpoint: Checkpoint) -> None:
        """Queue a checkpoint for writing."""
        checkpoint.is_queued = True
        if self.rings.can_be_cut:
            self.queue.pending[checkpoint] = None

    def next_write(self, now: float) -> CheckpointWrite | None:
        """The next record to write at `now`, if any: the same until written(), or until its
        checkpoint has left the queue.
        """
        while (checkpoint := self.queue.first_due(now)) is not None:
            write = self._unwritten(checkpoint)
            if write is None:
                self.queue.discard(checkpoint)
            elif write.record.kind == WINDOW and write.segment.is_whole_block:
                return write
            elif not self._postpones(write, now):
                if not checkpoint.superseded:
                    return write
                self.queue.discard(checkpoint)
        return None

    def copy(self, write: CheckpointWrite) -> list[memoryview]:
        """The bytes of a record, out of the pool."""
        if write.record.kind == WINDOW:
            return self.rings.cut(write.segment, write.checkpoint)
        return [as_bytes(array) for _, array in _by_name(write.checkpoint.states)]

    def written(self, write: CheckpointWrite) -> None:
        """The store has accepted this record."""
        key, segment = write.record.key, write.segment
        self._add(key, segment.node, segment.end, write.checkpoint.position)
        self._sources[key] = ref(write.checkpoint)

    def dequeue_source(self, key: Key) -> None:
        """Stop writing the checkpoint that a record was written of."""
        source = self._sources.get(key)
        checkpoint = None if source is None else source()
        if checkpoint is not None:
            self.queue.discard(checkpoint)

    def _postpones(self, write: CheckpointWrite, now: float) -> bool:
        """Let a record wait for its time if disk has a position near it.

        Returns whether it waits.
        """
        checkpoint = write.checkpoint
        due = self.queue.resting.get(checkpoint, now + self.store.config.idle_seconds)
        if due <= now or not self._is_near(checkpoint.node, checkpoint.position):
            return False
        self.queue.rest(checkpoint, due)
        return True

    def _unwritten(self, checkpoint: Checkpoint) -> CheckpointWrite | None:
        """The first record of a checkpoint, if the trie still has it, that is not on disk."""
        node, position = checkpoint.node, checkpoint.position
        if node.checkpoints.get(position) is not checkpoint:
            return None
        for segment in reversed(self.rings.segments(node, position)):
            if not self._has(segment, position):
                extra = {CUT: str(position), "kind": checkpoint.kind}
                record = record_of(
                    self.store, WINDOW, *segment, self._parts(segment, position), extra
                )
                return CheckpointWrite(record, segment, checkpoint)
        if checkpoint.states and (STATE, position) not in node.records:
            arrays = _by_name(checkpoint.states)
            parts = tuple(
                Part(name, safetensors_name(array.dtype), tuple(array.shape))
                for name, array in arrays
            )
            record = record_of(self.store, STATE, node, position, parts, {"kind": checkpoint.kind})
            return CheckpointWrite(record, WindowSegment(node, position), checkpoint)
        return None

    def _is_near(self, node: Node, position: int) -> bool:
        """Return whether disk has a position to resume at that is near enough for this one to
        wait.
        """
        found = self.find(node.path(), position)
        at = 0 if found is None else found[1]
        if self.arena.state_leaves:
            spec = self.arena.spec
            if not spec.groups:
                # States that grow are written each time that they have grown by a quarter.
                least = max(self.store.config.state_tokens, spec.state_growth and position // 4)
                return at > 0 and position - at < least
            since = (position - at) * sum(spec.bytes_per_block(group) for group in spec.groups)
            return since < self.store.config.state_ratio * spec.state_bytes(position) * BLOCK_TOKENS
        return at >= position // BLOCK_TOKENS * BLOCK_TOKENS > 0

    def _add(self, key: Key, node: Node, end: int, cut: int) -> None:
        node.records[key.kind, end] = cut
        if key not in self._places:
            self.index.mark(key.kind, key.hash)
        self._places[key] = (node, end)

    def _forget_checkpoint_record(self, key: Key, again: bool = False) -> None:
        node, end = self._places.pop(key, (None, 0))
        if node is not None:
            self.index.mark(key.kind, key.hash)
            for each in self._may_have(node, end):
                each.records.pop((key.kind, end), None)
        source = self._sources.pop(key, None)
        checkpoint = None if source is None else source()
        if again and checkpoint is not None:
            self.enqueue(checkpoint)

    def _may_have(self, node: Node, end: int) -> Iterator[Node]:
        """The edges that a record may be noted at: its node, those merged with it, and siblings
        that begin with its tokens.
        """
        if node.parent is not None:
            yield from self.index.trie.children_with(
                node.parent, node.tokens[: (end - node.start) * TOKEN_BYTES]
            )
        merged: Node | None = node
        while merged is not None:
            yield from merged.with_merged
            merged = merged.merged_into

    # -- reading -----------------------------------------------------------------------------------

    def find(
        self, path: Sequence[Node], at_most: int, more_than: int = 0
    ) -> tuple[Node, int] | None:
        """The last of positions() that can be put back now."""
        found = self.positions(path, at_most, more_than)
        return next(
            (each for each in found if not any(map(self.ledger.is_put_off, self.keys(*each)))), None
        )

    def positions(
        self, path: Sequence[Node], at_most: int, more_than: int = 0
    ) -> Iterator[tuple[Node, int]]:
        """The positions in (more_than, at_most] on a path that are on disk, the last ones first,
        each with a node that has it.
        """
        found = positions(path, at_most, self._ends, more_than)
        return (
            (node, end)
            for node, end in found
            if all(self._has(segment, end) for segment in self.rings.segments(node, end))
        )

    def _ends(self, node: Node) -> Iterable[int]:
        last = STATE if self.arena.state_leaves else WINDOW
        return (end for kind, end in node.records if kind == last)

    def records_at(self, node: Node, position: int) -> list[tuple[Key, WindowSegment]]:
        """The records that a position stands on, and their tokens: windows, the last ones first,
        then the state.
        """
        found = [
            (Key(WINDOW, segment.node.hash_at(segment.end)), segment)
            for segment in self.rings.segments(node, position)
        ]
        return found + (
            [(Key(STATE, node.hash_at(position)), WindowSegment(node, position))]
            if self.arena.state_leaves
            else []
        )

    def keys(self, node: Node, position: int) -> list[Key]:
        return [key for key, _ in self.records_at(node, position)]

    def put_back(
        self, segment: WindowSegment, found: RecordData, position: int, ids: dict[int, list[int]]
    ) -> None:
        """Copy a record into held blocks.

        Raises BadRecordError if it is not what rings at `position` need.
        """
        record = found.record
        cut = _cut_of(record)
        if (
            cut is None
            or not self.rings.covers(segment, cut, position)
            or record.parts != self._parts(segment, cut)
        ):
            raise BadRecordError(
                f"{record.file_name} was cut at {cut} and lacks tokens that windows hold at "
                f"{position}."
            )
        self.rings.put_back(segment, cut, found.views, position, ids)

    def _has(self, segment: WindowSegment, position: int) -> bool:
        cut = segment.node.records.get((WINDOW, segment.end))
        return cut is not None and self.rings.covers(segment, cut, position)

    def _parts(self, segment: WindowSegment, cut: int) -> tuple[Part, ...]:
        return parts_of(self.rings.contents(segment, cut))


def parts_of(arrays: Iterable[Content]) -> tuple[Part, ...]:
    """The parts of a record that holds these arrays."""
    return tuple(Part(c.name, c.safetensors_dtype, c.shape) for c in arrays)


def record_of(
    store: PromptStore,
    kind: str,
    node: Node,
    end: int,
    parts: tuple[Part, ...],
    extra: Mapping[str, str],
) -> Record:
    """The record of the tokens [node.start, end) of a node.

    The first record under a salt names it.
    """
    parent, tokens = node.parent, node.tokens[: (end - node.start) * TOKEN_BYTES]
    assert parent is not None
    salt = {SALT: parent.salt.hex()} if parent.salt and parent.parent is None else {}
    return Record(
        kind,
        store.namespace,
        node.hash_at(end),
        parent.hash,
        node.start,
        tokens,
        parts,
        {**extra, **salt},
    )


def _cut_of(record: Record) -> int | None:
    """The position at which a record of windows was cut. Returns None if its header has none."""
    text = record.extra.get(CUT, "")
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


def states_in(data: RecordData, arena: KVArena) -> dict[int, list[Any]]:
    """The states in a record, copied.

    Raises BadRecordError if they are not those of this model's layers.
    """
    record = data.record
    leaves = {i: arena.spec.leaves[i] for i in arena.state_leaves}
    found: dict[int, list[Any]] = {
        # How many arrays a state of another class has is not known before.
        i: [None] * len(record.parts if leaf.own else leaf.arrays)
        for i, leaf in leaves.items()
        if isinstance(leaf, StateLayer)
    }
    for part, view in zip(record.parts, data.views, strict=True):
        try:
            leaf, entry = map(int, part.name.removeprefix("states.").split("."))
            found[leaf][entry] = array_in(view, part.dtype, part.shape)
        except (KeyError, IndexError, ValueError) as error:
            raise BadRecordError(
                f"{record.file_name} holds {part}, which is not a state of this model."
            ) from error
    return found


def _by_name(states: Mapping[int, Sequence[Any]]) -> list[tuple[str, Any]]:
    """The arrays of states with the names of their parts, by leaf and entry; an entry without an
    array has none.
    """
    return [
        (f"states.{leaf}.{i}", a)
        for leaf in sorted(states)
        for i, a in enumerate(states[leaf])
        if a is not None
    ]


def _parents_first(record: Record) -> tuple[bool, int]:
    """Sorts blocks before the rest, and parents before their children."""
    return record.kind != BLOCK, record.start
