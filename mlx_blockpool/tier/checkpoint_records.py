"""StoredCheckpoints: which checkpoints are on disk, what of them is to be written, and where they can be resumed from.

The rings of a checkpoint are written in segments along the blocks of the trie, each once: whole blocks behind the next steps, the
one between the last block and the checkpoint once the conversation has rested, or at once where nothing near it could be resumed
otherwise. A state is one record and rests likewise. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from ..dtypes import safetensors_name
from ..errors import BadRecordError
from ..hashing import decode, encode
from ..kv.arena import KVArena
from ..kv.block_bytes import Content, array_in, as_bytes, contents
from ..prefix.changes import Digest
from ..prefix.checkpoints import CUT, WindowCheckpoint, WindowSegment
from ..prefix.eviction_order import is_superseded
from ..prefix.index import KVIndex
from ..prefix.residency import Checkpoint
from ..prefix.trie import Node
from ..spec import BLOCK_TOKENS, StateLayer
from ..store.fs import Into
from ..store.prompt_store import PromptStore
from ..store.reader import RecordData
from ..store.record import SALT, STATE, WINDOW, Expected, Key, Part, Record
from .ledger import Ledger

# A state is written at once where the keys and values since the last one are this many times as large.
MUCH = 10
# Which word of its hash a record is in a digest.
_WORD_OF = {WINDOW: 0, STATE: 1}
# Of a position that a file names.
MOST_DIGITS = 18
# A state may take this many times what the spec says: a model may compute in float32 what its spec counts in 16 bits.
STATE_SLACK = 2


@dataclass(frozen=True)
class CheckpointWrite:
    """One record of a checkpoint to write.

    segment:  the tokens that it covers.
    node:     the node that the checkpoint is in.
    """

    record: Record
    segment: WindowSegment
    node: Node
    checkpoint: Checkpoint


class StoredCheckpoints:
    """The checkpoints of `index` that `store` can bring back: every segment of their rings, and the state, is on disk.

    digest:  of the records that count as on disk.
    """

    def __init__(self, index: KVIndex, arena: KVArena, store: PromptStore, ledger: Ledger) -> None:
        self.index = index
        self.arena = arena
        self.rings = WindowCheckpoint(arena, store.config.bits)
        self.store = store
        self.ledger = ledger
        self.digest = Digest()
        # Bytes that a record may claim at most, whatever its header says.
        whole = parts_of(contents(arena, list(self.rings.sizes), BLOCK_TOKENS, store.config.bits))
        window_bytes = sum(part.nbytes for part in whole)
        self._max_bytes = {WINDOW: window_bytes, STATE: STATE_SLACK * arena.spec.fixed_bytes_per_agent()}
        self._pending: WeakKeyDictionary[Checkpoint, Node] = WeakKeyDictionary()
        # Those whose last segment waits for its time, by the clock.
        self._resting: WeakKeyDictionary[Checkpoint, tuple[Node, float]] = WeakKeyDictionary()
        self._places: dict[Key, tuple[Node, int]] = {}
        self._sources: dict[Key, tuple[Node, ref[Checkpoint]]] = {}

    @property
    def num_queued(self) -> tuple[int, int]:
        """Checkpoints with a record that may be written now, and those whose last record waits for its time."""
        return len(self._pending), len(self._resting)

    def place(self, record: Record, parent: Node | None) -> bool:
        """Note a record found on disk after `parent`. Returns whether it belongs to any node there."""
        node = None if parent is None else self.index.trie.child(parent, encode(record.tokens))
        cut = _cut_of(record)
        if node is None or node.start != record.start or (record.kind == WINDOW and cut is None):
            return False
        self._add(record.key, node, node.start + len(record.tokens), cut or 0)
        return True

    # -- writing -------------------------------------------------------------------------------------------------------

    def note(self, node: Node, checkpoint: Checkpoint) -> None:
        """Queue a checkpoint for writing."""
        checkpoint.noted = True
        if self.rings.can_be_cut:
            self._pending[checkpoint] = node

    def is_due(self, now: float) -> bool:
        """Return whether any has something to write at `now`."""
        return next(self._due(now), None) is not None

    def next_write(self, now: float) -> CheckpointWrite | None:
        """The next record to write at `now`; None: nothing is due any more. The same again until written() or give_up()."""
        while (found := next(self._due(now), None)) is not None:
            checkpoint, node = found[0], found[1].latest
            write = self._unwritten(node, checkpoint)
            if write is None:
                self.give_up(checkpoint)
            elif write.record.kind == WINDOW and write.segment.is_whole_block:
                return write
            elif not self._rests(write, now):
                if not is_superseded(node, checkpoint):
                    return write
                self.give_up(checkpoint)
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
        self._sources[key] = (write.node, ref(write.checkpoint))

    def give_up(self, checkpoint: Checkpoint) -> None:
        """Write no more of a checkpoint: all of it is on disk, or there is no room for it, or nothing leads to it."""
        self._pending.pop(checkpoint, None)
        self._resting.pop(checkpoint, None)

    def stop(self, key: Key) -> None:
        """give_up() the checkpoint that a record was written of."""
        source = self._sources.get(key)
        checkpoint = None if source is None else source[1]()
        if checkpoint is not None:
            self.give_up(checkpoint)

    def _due(self, now: float) -> Iterator[tuple[Checkpoint, Node]]:
        yield from self._pending.items()
        for checkpoint, (node, due) in self._resting.items():
            if due > now:
                return
            yield checkpoint, node

    def _rests(self, write: CheckpointWrite, now: float) -> bool:
        """Let a record wait for its time if disk has a position near it. Returns whether it waits."""
        checkpoint, node = write.checkpoint, write.node
        due = self._resting.get(checkpoint, (node, now + self.store.config.idle_seconds))[1]
        if due <= now or not self._is_near(node, checkpoint.position):
            return False
        self._pending.pop(checkpoint, None)
        self._resting[checkpoint] = (node, due)
        return True

    def _unwritten(self, node: Node, checkpoint: Checkpoint) -> CheckpointWrite | None:
        """The first record of a checkpoint, if the trie still has it, that is not on disk."""
        position = checkpoint.position
        if node.residency.checkpoints.get(position) is not checkpoint:
            return None
        for segment in reversed(self._segments(node, position)):
            if not self._has(segment, position):
                extra = {CUT: str(position), "kind": checkpoint.kind}
                record = record_of(self.store, WINDOW, *segment, self._parts(segment, position), extra)
                return CheckpointWrite(record, segment, node, checkpoint)
        if checkpoint.states and position not in node.residency.state_records:
            arrays = _by_name(checkpoint.states)
            parts = tuple(Part(name, safetensors_name(array.dtype), tuple(array.shape)) for name, array in arrays)
            record = record_of(self.store, STATE, node, position, parts, {"kind": checkpoint.kind})
            return CheckpointWrite(record, WindowSegment(node, position), node, checkpoint)
        return None

    def _is_near(self, node: Node, position: int) -> bool:
        """Return whether disk has a position to resume at that is near enough for this one to wait."""
        found = self.find(node.path(), position)
        at = 0 if found is None else found[1]
        if self.arena.state_leaves:
            spec = self.arena.spec
            since = (position - at) * sum(spec.bytes_per_block(group) for group in spec.groups)
            return since < MUCH * spec.fixed_bytes_per_agent() * BLOCK_TOKENS
        return at >= position // BLOCK_TOKENS * BLOCK_TOKENS > 0

    def _add(self, key: Key, node: Node, end: int, cut: int) -> None:
        if key.kind == WINDOW:
            node.residency.window_records[end] = cut
        else:
            node.residency.state_records.add(end)
        if key not in self._places:
            self.digest.count([key.hash], _WORD_OF[key.kind])
        self._places[key] = (node, end)

    def lose(self, key: Key, again: bool = False) -> None:
        """Follow a record that is not on disk any more. `again`: writing it has failed, and its checkpoint is queued again."""
        node, end = self._places.pop(key, (None, 0))
        if node is not None:
            self.digest.count([key.hash], _WORD_OF[key.kind], -1)
        while node is not None:
            for knows in self.index.with_superseded(node):
                if key.kind == WINDOW:
                    knows.residency.window_records.pop(end, None)
                else:
                    knows.residency.state_records.discard(end)
            node = node.merged_into
        source = self._sources.pop(key, None)
        checkpoint = source[1]() if source else None
        if again and source is not None and checkpoint is not None:
            self.note(source[0], checkpoint)

    # -- reading -------------------------------------------------------------------------------------------------------

    def find(self, path: Sequence[Node], at_most: int, more_than: int = 0) -> tuple[Node, int] | None:
        """The last of positions() that can be put back now."""
        found = self.positions(path, at_most, more_than)
        return next((each for each in found if not any(map(self.ledger.is_put_off, self.keys(*each)))), None)

    def positions(self, path: Sequence[Node], at_most: int, more_than: int = 0) -> Iterator[tuple[Node, int]]:
        """The positions in (more_than, at_most] on a path that are on disk, the last ones first, each with a node that has it."""
        for on_path in reversed(path):
            if on_path.end <= more_than:
                return
            near = ((node, min(at_most, alike)) for node, alike in on_path.near_siblings())
            ends = ((end, node) for node, limit in near for end in self._ends(node) if more_than < end <= limit)
            for end, node in sorted(ends, key=lambda found: -found[0]):
                if all(self._has(segment, end) for segment in self._segments(node, end)):
                    yield node, end

    def _ends(self, node: Node) -> Iterable[int]:
        return node.residency.state_records if self.arena.state_leaves else node.residency.window_records

    def records(self, node: Node, position: int) -> list[tuple[Key, WindowSegment]]:
        """The records that a position stands on, and their tokens: windows, the last ones first, then the state."""
        found = [(Key(WINDOW, segment.node.hash_at(segment.end)), segment) for segment in self._segments(node, position)]
        return found + ([(Key(STATE, node.hash_at(position)), WindowSegment(node, position))] if self.arena.state_leaves else [])

    def keys(self, node: Node, position: int) -> list[Key]:
        return [key for key, _ in self.records(node, position)]

    def read(self, key: Key, into: Into | None = None) -> Future[RecordData]:
        """A record as it is on disk now: another process may have cut it elsewhere. Larger ones than this model has are bad."""
        expected = Expected(self.store.namespace, key.kind, key.hash, max_bytes=self._max_bytes[key.kind])
        return self.store.read(expected, into)

    def put_back(self, segment: WindowSegment, found: RecordData, position: int, ids: dict[int, list[int]]) -> None:
        """Copy a record into held blocks. Raises BadRecordError if it is not what rings at `position` need."""
        record = found.record
        cut = _cut_of(record)
        if cut is None or not self.rings.covers(segment, cut, position) or record.parts != self._parts(segment, cut):
            raise BadRecordError(f"{record.file_name} was cut at {cut} and lacks tokens that windows hold at {position}.")
        self.rings.put_back(segment, cut, found.views, position, ids)

    def _segments(self, node: Node, position: int) -> list[WindowSegment]:
        """The tokens that windows hold at `position`, the last ones first; none for a model without windows."""
        return list(self.rings.segments(node, position)) if self.rings.sizes else []

    def _has(self, segment: WindowSegment, position: int) -> bool:
        cut = segment.node.residency.window_records.get(segment.end)
        return cut is not None and self.rings.covers(segment, cut, position)

    def _parts(self, segment: WindowSegment, cut: int) -> tuple[Part, ...]:
        return parts_of(self.rings.contents(segment, cut))


def parts_of(arrays: Iterable[Content]) -> tuple[Part, ...]:
    """The parts of a record that holds these arrays."""
    return tuple(Part(c.name, c.safetensors_dtype, c.shape) for c in arrays)


def record_of(store: PromptStore, kind: str, node: Node, end: int, parts: tuple[Part, ...], extra: Mapping[str, str]) -> Record:
    """The record of the tokens [node.start, end) of a node. The first record under a salt names it."""
    parent, tokens = node.parent, tuple(decode(node.tokens)[: end - node.start])
    assert parent is not None
    salt = {SALT: parent.salt.hex()} if parent.salt and parent.parent is None else {}
    return Record(kind, store.namespace, node.hash_at(end), parent.hash, node.start, tokens, parts, {**extra, **salt})


def _cut_of(record: Record) -> int | None:
    """The position at which a record of windows was cut; None: it names none."""
    text = record.extra.get(CUT, "")
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


def states_in(data: RecordData, arena: KVArena) -> dict[int, list[Any]]:
    """The states in a record, copied. Raises BadRecordError if they are not those of this model's layers."""
    record = data.record
    leaves = {i: arena.spec.leaves[i] for i in arena.state_leaves}
    found: dict[int, list[Any]] = {i: [None] * len(leaf.arrays) for i, leaf in leaves.items() if isinstance(leaf, StateLayer)}
    for part, view in zip(record.parts, data.views, strict=True):
        try:
            leaf, entry = map(int, part.name.removeprefix("states.").split("."))
            found[leaf][entry] = array_in(view, part.dtype, part.shape)
        except (KeyError, IndexError, ValueError) as error:
            raise BadRecordError(f"{record.file_name} holds {part}, which is no state of this model.") from error
    return found


def _by_name(states: Mapping[int, Sequence[Any]]) -> list[tuple[str, Any]]:
    """The arrays of states with the names of their parts, by leaf and entry; an entry without an array has none."""
    return [(f"states.{leaf}.{i}", a) for leaf in sorted(states) for i, a in enumerate(states[leaf]) if a is not None]
