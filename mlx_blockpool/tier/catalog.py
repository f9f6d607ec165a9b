"""StoredNodes: the nodes of a trie that are on disk, from the headers of all records at start and of other processes' later.

Owned by the generation thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from ..hashing import encode
from ..prefix.index import KVIndex
from ..prefix.trie import Node
from ..store.prompt_store import PromptStore
from ..store.record import BLOCK, SALT, Key, Record
from .checkpoint_records import StoredCheckpoints

# Records added between two steps; a disk that was away may show thousands at once.
LEARN_AT_ONCE = 64


class StoredNodes:
    """The nodes of `index` that `store` has on disk, by their hashes; `checkpoints` are the checkpoints that it has."""

    def __init__(self, index: KVIndex, checkpoints: StoredCheckpoints, store: PromptStore) -> None:
        self.by_hash: dict[bytes, Node] = {}
        self._index = index
        self._checkpoints = checkpoints
        self._store = store
        self._waiting: deque[Record] = deque()

    def load(self, records: Sequence[Record]) -> None:
        """Rebuild the trie from headers. Records that no chain of parents leads to are left out."""
        for record in sorted(records, key=_parents_first):
            if record.kind == BLOCK:
                self._add(record, at_start=True)
            elif not self._checkpoints.place(record, self._parent_of(record)):
                self._index.unreachable.append(record.key)

    def by_need(self, records: Sequence[Record]) -> Iterator[Key]:
        """The keys of records, given in the order of use: those used last first, and each after its parents."""
        seen: set[Node] = set()
        for record in reversed(records):
            if record.kind != BLOCK:
                yield record.key
                continue
            path: list[Node] = []
            node = self.by_hash.get(record.hash)
            while node is not None and node.parent is not None and node not in seen:
                # The parents of a node that was seen were seen too.
                seen.add(node)
                path.append(node)
                node = node.parent
            yield from (Key(BLOCK, n.hash) for n in reversed(path))

    def follow(self, records: Iterable[Record]) -> None:
        """Queue records that other processes wrote, and add up to LEARN_AT_ONCE queued ones that continue nodes on disk.

        Nodes of this process are not replaced by them, and no file is removed: another process may need it.
        """
        self._waiting.extend(sorted(records, key=_parents_first))
        for _ in range(min(LEARN_AT_ONCE, len(self._waiting))):
            record = self._waiting.popleft()
            if record.key in self._store and record.kind == BLOCK:
                self._add(record)
            elif record.key in self._store:
                self._checkpoints.place(record, self._parent_of(record))

    def lose(self, keys: Iterable[Key], again: bool = False) -> None:
        """Follow records that are not on disk any more: nodes that are not in memory either leave the trie.

        `again`: writing them has failed, and their checkpoints are queued again.
        """
        for key in keys:
            if key.kind != BLOCK:
                self._checkpoints.lose(key, again)
            elif (node := self.by_hash.pop(key.hash, None)) is not None:
                self._index.lost(node)

    def remove_unreachable(self) -> None:
        """Remove the files of records that nothing in the trie leads to."""
        keys, self._index.unreachable = self._index.unreachable, []
        for key in keys:
            if key.kind == BLOCK:
                self.by_hash.pop(key.hash, None)
            else:
                self._checkpoints.lose(key)
        self._store.remove(keys)

    def _parent_of(self, record: Record) -> Node | None:
        first = self._index.trie.root_named(record.parent, record.extra.get(SALT)) if record.start == 0 else None
        return first or self.by_hash.get(record.parent)

    def _add(self, record: Record, at_start: bool = False) -> None:
        """Add a block whose parent is on disk. A second block with the same tokens is unreachable at start, and no news later."""
        parent = self._parent_of(record)
        if (
            parent is None
            or parent.end != record.start
            or not (parent.parent is None or (parent.residency.on_disk and parent.is_full))
        ):
            return
        edge = encode(record.tokens)
        child = self._index.trie.child(parent, edge)
        # Later, a shorter edge is the end of a conversation that continues in this process.
        if child is None and (at_start or not any(edge.startswith(other.tokens) for other in parent.children)):
            child = self._index.add_stored(parent, edge, record.extra.get("kind", "assistant"))
        elif at_start:
            self._index.unreachable.append(record.key)
            return
        elif child is None or child.hash != record.hash:
            return
        if not at_start:
            self._index.written(child)
        self.by_hash[child.hash] = child


def _parents_first(record: Record) -> tuple[bool, int]:
    """Sorts blocks before the rest, and parents before their children."""
    return record.kind != BLOCK, record.start
