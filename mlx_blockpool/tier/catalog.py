"""RecordScanner: builds the stored part of a trie from headers: of all records at start, later of those of other processes.

Owned by the generation thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from ..prefix.index import KVIndex
from ..prefix.trie import Node, encode
from ..store.prompt_store import PromptStore
from ..store.record import BLOCK, SALT, Key, Record
from .checkpoint_records import StoredCheckpoints

# Records added between two steps; a disk that was away may show thousands at once.
LEARN_AT_ONCE = 64


class RecordScanner:
    """Adds records to `index` and `checkpoints`. `nodes`: the nodes that are on disk, by hash; kept up to date here."""

    def __init__(self, index: KVIndex, checkpoints: StoredCheckpoints, store: PromptStore, nodes: dict[bytes, Node]) -> None:
        self._index = index
        self._checkpoints = checkpoints
        self._store = store
        self._nodes = nodes
        self._waiting: deque[Record] = deque()

    # -- at start ------------------------------------------------------------------------------------------------------

    def load(self, records: Sequence[Record]) -> None:
        """Rebuild the trie from headers. Records that no chain of parents leads to are left out."""
        children: dict[bytes, list[Record]] = {}
        for record in (r for r in records if r.kind == BLOCK):
            children.setdefault(record.parent, []).append(record)
        nodes = deque(self._roots(records))
        while nodes:
            node = nodes.popleft()
            for record in children.get(node.hash, []):
                edge = encode(record.tokens)
                if record.start == node.end and self._index.trie.child(node, edge) is not None:
                    self._index.unreachable.append(record.key)
                elif record.start == node.end:
                    child = self._index.add_stored(node, edge, record.extra.get("kind", "assistant"))
                    self._nodes[child.hash] = child
                    nodes += [child] if child.is_full else []
        self._checkpoints.load((r for r in records if r.kind != BLOCK), self._nodes)

    def _roots(self, records: Sequence[Record]) -> list[Node]:
        """The shared root, and those of the salts that records name."""
        begin_of = self._index.trie.begin_of
        salted = {begin_of(record.parent, record.extra[SALT]) for record in records if SALT in record.extra}
        return [self._index.trie.root, *(root for root in salted if root is not None)]

    def by_need(self, records: Sequence[Record]) -> Iterator[Key]:
        """The keys of records, given in the order of use: those used last first, and each after what it stands on."""
        seen: set[Node] = set()
        for record in reversed(records):
            if record.kind != BLOCK:
                yield record.key
                continue
            path: list[Node] = []
            node = self._nodes.get(record.hash)
            while node is not None and node.parent is not None and node not in seen:
                # What comes before one that was seen was seen too.
                seen.add(node)
                path.append(node)
                node = node.parent
            yield from (Key(BLOCK, n.hash) for n in reversed(path))

    # -- later ---------------------------------------------------------------------------------------------------------

    def expect(self, records: Iterable[Record]) -> None:
        """Queue records that other processes wrote: blocks first, parents before their children."""
        self._waiting.extend(sorted(records, key=lambda record: (record.kind != BLOCK, record.start)))

    def learn(self) -> None:
        """Add up to LEARN_AT_ONCE queued records that continue nodes on disk.

        Nodes of this process are not replaced by them, and no file is removed: another process may need it.
        """
        for _ in range(min(LEARN_AT_ONCE, len(self._waiting))):
            record = self._waiting.popleft()
            if record.key not in self._store:
                continue
            if record.kind == BLOCK:
                self._add(record)
            else:
                self._checkpoints.place(record, self._nodes)

    def _add(self, record: Record) -> None:
        first = self._index.trie.begin_of(record.parent, record.extra.get(SALT)) if record.start == 0 else None
        parent = first or self._nodes.get(record.parent)
        if parent is None or parent.end != record.start or not (parent.residency.on_disk or parent.parent is None):
            return
        edge = encode(record.tokens)
        child = self._index.trie.child(parent, edge)
        if child is None and not any(edge.startswith(other.tokens) for other in parent.children):
            # A shorter edge here is the end of a conversation that goes on in this process.
            child = self._index.add_stored(parent, edge, record.extra.get("kind", "assistant"))
        elif child is None or child.hash != record.hash:
            return
        self._index.written(child)
        self._nodes[child.hash] = child
