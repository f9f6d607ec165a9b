"""Which known prefixes are on disk as well: writes them behind, brings them back. Owned by the generation thread.

Ties the trie to the prompt store. A node is written once its block is full and whole, parents first, so that what is on disk
can be reached from its beginning.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from ..cache.contents import as_bytes, contents, copy_in, copy_out
from ..cache.slabs import Slabs
from ..errors import BadRecordError, PoolExhaustedError
from ..store.record import Expected, Part, Record
from ..store.store import BLOCK, OVER_BUDGET, PromptStore
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
        self._used = math.inf
        self._pending: WeakKeyDictionary[Node, None] = WeakKeyDictionary()
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
                if record.start == node.end and self.known.trie.child(node, edge) is not None:
                    self.known.unreachable.append(record.hash)
                elif record.start == node.end:
                    child = self.known.add_stored(node, edge, record.extra.get("kind", "assistant"))
                    self._by_hash[child.hash] = child
                    nodes += [child] if child.is_full else []
        self._settle()
        self._lose(self.store.settle(self._by_need(records)))

    def _by_need(self, records: Sequence[Record]) -> Iterator[bytes]:
        """The hashes of records, given in the order of use: those used last first, and each after what it stands on."""
        seen: set[Node] = set()
        for record in reversed(records):
            node = self._by_hash.get(record.hash)
            path = [] if node is None else [n for n in node.path() if n not in seen]
            seen.update(path)
            yield from (n.hash for n in path)

    # -- writing -------------------------------------------------------------------------------------------------------

    def note(self, node: Node) -> None:
        """A known node that may be written when there is time."""
        self._used = time.monotonic()
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
                if written is None:
                    return
                left -= written
            del self._pending[node]

    def idle(self) -> None:
        """Nothing is computed now: write behind, and once that has lasted for idle_seconds, write the tails too."""
        self.write_behind()
        if time.monotonic() - self._used >= self.store.config.idle_seconds:
            self.write_tails()
            self._used = math.inf

    def write_tails(self) -> None:
        """Hand over all that is pending, and the partial blocks at the ends: for an idle server, or one that stops."""
        self.write_behind(1 << 62)
        for node in [node for node in self.known.trie if not (node.stored or node.is_full)]:
            if self._is_writable(node):
                self._write(node)

    def report(self) -> dict[str, Any]:
        """Figures of the store and of what was brought back from it; sizes in bytes."""
        own = {"pending": len(self._pending), "restored_tokens": self.num_restored, "unread": self.num_unread}
        return own | self.store.report()

    def close(self) -> bool:
        """Write what is left, within the store's time for it. Whether all is on disk."""
        until = time.monotonic() + self.store.config.flush_seconds
        left, before = self._num_unwritten(), -1
        # The queue takes a part at a time.
        while left not in (0, before) and time.monotonic() < until:
            self.write_tails()
            self.store.flush()
            left, before = self._num_unwritten(), left
        return self.store.close()

    def _num_unwritten(self) -> int:
        return sum(1 for node in self.known.trie if not node.stored)

    def _is_writable(self, node: Node) -> bool:
        parent = node.parent
        assert parent is not None
        return node.resident and not node.stored and (parent.parent is None or parent.stored) and node in parent.children

    def _write(self, node: Node) -> int | None:
        """Bytes handed over; None if the store does not take them now, 0 if the budget has no room for them."""
        assert node.parent is not None
        path, tokens, parts = [n.hash for n in node.path()], tuple(decode(node.tokens)), self._parts(node.end - node.start)
        extra = {"kind": node.kind, "bits": str(self.bits or 0)}
        record = Record(BLOCK, self.store.namespace, node.hash, node.parent.hash, node.start, tokens, parts, extra)
        put = self.store.put(record, lambda: self._copied(node), {*path, *(n.hash for n in self.arriving)})
        self._lose(put.dropped)
        if not put.taken:
            return 0 if put.refusal == OVER_BUDGET else None
        node.stored = True
        self._by_hash[node.hash] = node
        # What it stands on goes after it.
        self.store.touch(path)
        return record.nbytes

    def _copied(self, node: Node) -> list[memoryview]:
        return [as_bytes(a) for a in copy_out(self.slabs, self._places(node), 0, node.end - node.start, self.bits)]

    def _settle(self) -> None:
        """Take note of what could not be written, which is tried again, and of files that nothing leads to any more."""
        failed = self.store.poll()
        again = [self._by_hash[digest] for digest in failed if digest in self._by_hash]
        self._lose(failed)
        self._pending.update({node: None for node in again if node.resident and node.is_full})
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
        for index, table in enumerate(self._tables):
            pool.adopt(table, [node.blocks[index] for node in path if node.resident])
        try:
            room.promise(self._tables, [len(self._nodes)] * len(groups))
        except PoolExhaustedError:
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
        if self._nodes and (wait or self._reading[0].done()):
            # A step in flight still reads the slabs; writing now would copy them. Nobody is held up while nothing has come.
            mx.synchronize()
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
