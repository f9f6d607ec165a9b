"""Which known prefixes are on disk as well: writes them behind, brings them back. Owned by the generation thread.

Ties the trie to the prompt store. A node is written once its block is full and whole, parents first, so that what is on disk
can be reached from its beginning.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from ..cache.contents import as_bytes, contents, copy_in, copy_out
from ..cache.slabs import Slabs
from ..errors import BadRecordError
from ..store.record import Expected, Part, Record
from ..store.store import BLOCK, PromptStore
from .known import KnownBlocks
from .room import Room
from .trie import Node, decode, encode, name_of

# Records that are read ahead of the copy into the pool.
READ_AHEAD = 4
Reading = Future[tuple[Record, list[memoryview]]]


class StoredPrefixes:
    """The nodes of `known` that `store` has. Only models whose layers are all full can be resumed from it.

    `num_restored` counts tokens brought back, `num_unread` nodes that could not be.
    """

    def __init__(self, known: KnownBlocks, slabs: Slabs, room: Room, store: PromptStore) -> None:
        self.known = known
        self.slabs = slabs
        self.room = room
        self.store = store
        self.bits = store.config.bits
        self.num_restored = self.num_unread = 0
        self._pending: OrderedDict[Node, None] = OrderedDict()
        self._by_hash: dict[bytes, Node] = {}
        # The nodes that a Restore is bringing back.
        self.arriving: set[Node] = set()
        self._load(store.open())

    # -- at start ------------------------------------------------------------------------------------------------------

    def _load(self, records: Sequence[Record]) -> None:
        """Rebuild the trie from what the headers say. What has no beginning is of no use before that is computed again."""
        children: dict[bytes, list[Record]] = {}
        for record in records:
            children.setdefault(record.parent, []).append(record)
        nodes = deque([self.known.trie.root])
        while nodes:
            node = nodes.popleft()
            for record in children.get(node.hash, []):
                edge = encode(record.tokens)
                if record.start == node.end and self.known.trie.child(node, edge) is None:
                    child = self.known.add_stored(node, edge, record.extra.get("kind", "assistant"))
                    self._by_hash[child.hash] = child
                    nodes += [child] if child.is_full else []
        self._settle()

    # -- writing -------------------------------------------------------------------------------------------------------

    def note(self, node: Node) -> None:
        """A known node that may be written when there is time."""
        if not node.stored and node.resident and node.is_full:
            self._pending[node] = None

    def write_behind(self, limit: int | None = None) -> None:
        """Copy pending blocks out of the pool for the writer, `limit` bytes (None: step_bytes) and at most a block more."""
        left = self.store.config.step_bytes if limit is None else limit
        self._settle()
        while self._pending and left > 0:
            node = next(iter(self._pending))
            if self._is_writable(node):
                written = self._write(node)
                if written == 0:
                    return
                left -= written
            del self._pending[node]

    def write_tails(self) -> None:
        """Hand over all that is pending, and the partial blocks at the ends: for an idle server, or one that stops."""
        self.write_behind(1 << 62)
        for node in [node for node in self.known.trie if not (node.stored or node.is_full)]:
            if self._is_writable(node):
                self._write(node)

    def close(self) -> bool:
        """Write what is left, within the store's time for it. Whether all is on disk."""
        self.write_tails()
        return self.store.close()

    def _is_writable(self, node: Node) -> bool:
        parent = node.parent
        assert parent is not None
        return node.resident and not node.stored and (parent.parent is None or parent.stored) and node in parent.children

    def _write(self, node: Node) -> int:
        """Bytes handed over; 0 if the store did not take them."""
        assert node.parent is not None
        tokens = node.end - node.start
        arrays = copy_out(self.slabs, self._places(node), 0, tokens, self.bits)
        record = Record(
            kind=BLOCK,
            namespace=self.store.namespace,
            hash=node.hash,
            parent=node.parent.hash,
            start=node.start,
            tokens=tuple(decode(node.tokens)),
            parts=self._parts(tokens),
            extra={"kind": node.kind, "bits": str(self.bits or 0)},
        )
        put = self.store.put(record, [as_bytes(array) for array in arrays], {n.hash for n in node.path()})
        self._lose(put.dropped)
        if put.taken:
            node.stored = True
            self._by_hash[node.hash] = node
        return record.nbytes if put.taken else 0

    def _settle(self) -> None:
        """Take note of what could not be written, and of files that nothing leads to any more."""
        self._lose(self.store.poll())
        gone, self.known.unreachable = self.known.unreachable, []
        for digest in gone:
            self._by_hash.pop(digest, None)
        self.store.forget(gone)

    def _lose(self, hashes: Sequence[bytes]) -> None:
        """These are not on disk any more: what is not in memory either is forgotten."""
        for digest in hashes:
            node = self._by_hash.pop(digest, None)
            if node is None:
                continue
            node.stored = False
            if not node.resident and node.parent is not None and node in node.parent.children:
                self.known.drop(node)

    # -- reading -------------------------------------------------------------------------------------------------------

    def missing(self, path: Sequence[Node]) -> list[Node]:
        """The nodes of a path that would have to be brought back, as far as they lead on."""
        found = []
        for node in path:
            if not node.resident and not node.stored:
                break
            found += [] if node.resident else [node]
        return found

    def touch(self, path: Sequence[Node]) -> None:
        """A path was used: its records outlive those that were not."""
        self.store.touch([node.hash for node in path if node.stored])

    def restore(self, path: Sequence[Node]) -> Restore:
        """Begin to bring the missing nodes of a path back. Raises PoolExhaustedError if there is no room for them."""
        return Restore(self, path)

    def restore_now(self, path: Sequence[Node]) -> None:
        """restore(), and wait for it."""
        restore = self.restore(path)
        while not restore.advance(wait=True):
            pass
        restore.release()

    def read(self, node: Node) -> Reading:
        expected = Expected(self.store.namespace, BLOCK, node.hash, self._parts(node.end - node.start))
        return self.store.read(expected)

    def arrived(self, node: Node, block: tuple[int, ...], views: list[memoryview]) -> None:
        """Put what was read into held blocks, and let everybody share it, unless it was computed meanwhile."""
        if node.resident or node.parent is None or node not in node.parent.children:
            return
        groups = self.known.full_groups
        arrays = [c.array(v) for c, v in zip(contents(self.slabs, groups, node.end - node.start, self.bits), views, strict=True)]
        copy_in(self.slabs, list(zip(groups, block, strict=True)), 0, arrays, self.bits)
        self.known.revive(node, block)
        self.num_restored += node.end - node.start

    def unread(self, node: Node, error: Exception) -> None:
        """A node that could not be read is a miss, and all behind it."""
        self.num_unread += 1
        self.store.gone(node.hash)
        self._lose([node.hash])

    def _places(self, node: Node) -> list[tuple[int, int]]:
        return list(zip(self.known.full_groups, node.blocks, strict=True))

    def _parts(self, tokens: int) -> tuple[Part, ...]:
        found = contents(self.slabs, self.known.full_groups, tokens, self.bits)
        return tuple(Part(c.name, c.safetensors_dtype, c.shape) for c in found)


class Restore:
    """Nodes on their way from disk into the pool, in order. Holds the blocks of the whole path until release()."""

    def __init__(self, stored: StoredPrefixes, path: Sequence[Node]) -> None:
        self._stored = stored
        self._nodes = deque(stored.missing(path))
        self._reading: deque[Reading] = deque()
        self._all: set[Node] = set()
        room, pool = stored.room, stored.slabs.pool
        groups = stored.known.full_groups
        self._tables = [pool.open_table(group) for group in groups]
        for table, index in zip(self._tables, range(len(groups)), strict=True):
            pool.adopt(table, [node.blocks[index] for node in path if node.resident])
        try:
            room.promise(self._tables, [len(self._nodes)] * len(groups))
        except Exception:
            self.release()
            raise
        first = [len(table) for table in self._tables]
        for table in self._tables:
            pool.extend(table, len(self._nodes))
        ids = [table.ids[start:] for table, start in zip(self._tables, first, strict=True)]
        self._blocks = deque(zip(*ids, strict=True))
        self._unread: Iterator[Node] = iter(list(self._nodes))
        self._all = set(self._nodes)
        stored.arriving |= self._all
        self._read_ahead()

    def advance(self, wait: bool = False, seconds: float = 0.0) -> bool:
        """Copy what has been read, with `wait` at least one record, for so many seconds. Whether no more will come."""
        until = time.perf_counter() + seconds
        while self._nodes and (wait or self._reading[0].done()):
            node, block, reading = self._nodes.popleft(), self._blocks.popleft(), self._reading.popleft()
            try:
                _, views = reading.result()
            except (BadRecordError, OSError) as error:
                self._stored.unread(node, error)
                self._nodes.clear()
                break
            self._stored.arrived(node, block, views)
            self._read_ahead()
            if time.perf_counter() >= until:
                break
        return not self._nodes

    def release(self) -> None:
        """Let the blocks go: from now on they are known like any others."""
        self._stored.arriving -= self._all
        for table in self._tables:
            self._stored.slabs.pool.release(table)

    def _read_ahead(self) -> None:
        while len(self._reading) < READ_AHEAD and (node := next(self._unread, None)) is not None:
            self._reading.append(self._stored.read(node))


def naming(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """The trie's rule for the hash of a prefix, for whoever checks records."""
    return name_of(parent, encode(tokens))
