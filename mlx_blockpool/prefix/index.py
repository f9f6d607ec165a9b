"""KVIndex: which cached prefix reads which block. Updates trie and pool together.

A block of a full layer group belongs to one node; a block of a window group to every checkpoint
whose ring it is part of. Knows tokens and block ids; no arrays. Owned by the generation thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from zlib import crc32

from ..config import HistoryConfig
from ..kv.pool import BlockPool
from ..spec import BLOCK_TOKENS
from ..store.hashing import edge_hash
from ..store.record import BLOCK, Key
from .changes import DISK, MEMORY, AllCleared, BlocksRemoved, Change, Changes, removed, stored
from .eviction import EvictionOrder
from .trie import Checkpoint, Node, Owned, PinnedPrefix, Trie

# The owner of what all requests without an agent compute.
ANONYMOUS = "anonymous"


class Accounting:
    """The bytes of each cached block and checkpoint by the agent that computed it first, and in
    `total`.

    What came from disk has no owner: None.
    """

    def __init__(self) -> None:
        # In the order of use: (owner, bytes).
        self._charges: dict[Hashable, tuple[str | None, int]] = {}
        self._sums: Counter[str | None] = Counter()

    @property
    def total(self) -> int:
        return sum(self._sums.values())

    def charge(self, item: Hashable, n_bytes: int, owner: str | None) -> str | None:
        """Account for a new item; one that has an owner retains it. Returns the owner."""
        if item in self._charges:
            return self._charges[item][0]
        self._charges[item] = owner, n_bytes
        self._sums[owner] += n_bytes
        return owner

    def use(self, item: Hashable) -> None:
        """Make an item the most recently used of its owner."""
        if item in self._charges:
            self._charges[item] = self._charges.pop(item)

    def release(self, item: Hashable) -> None:
        """Stop accounting for an item that is no longer cached."""
        owner, n_bytes = self._charges.pop(item)
        self._sums[owner] -= n_bytes
        if not self._sums[owner]:
            del self._sums[owner]

    def owner_of(self, item: Hashable) -> str | None:
        """The owner, or None for an item that is not accounted for."""
        return self._charges.get(item, (None, 0))[0]

    def items_of(self, owner: str) -> Iterator[Hashable]:
        """The items of an owner, the least recently used first."""
        return (item for item, (found, _) in self._charges.items() if found == owner)

    def nbytes(self, owner: str) -> int:
        return self._sums[owner]

    def largest(self, count: int) -> dict[str, int]:
        """Bytes of the `count` owners that have most, the largest first."""
        named = ((owner, n_bytes) for owner, n_bytes in self._sums.items() if owner is not None)
        return dict(sorted(named, key=lambda item: (-item[1], item[0]))[:count])

    def check(self, sizes: Mapping[Hashable, int]) -> None:
        """Everything in `sizes` is accounted for, once. Raises AssertionError."""
        charged = {item: n_bytes for item, (_, n_bytes) in self._charges.items()}
        assert charged == dict(sizes), (
            f"{len(charged)} items are accounted for; {len(sizes)} are cached"
        )
        sums: Counter[str | None] = Counter()
        for owner, n_bytes in self._charges.values():
            sums[owner] += n_bytes
        assert +sums == +self._sums, (
            f"owners add up to {dict(sums)}; {dict(self._sums)} are counted"
        )


class KVIndex:
    """The trie of one model and the blocks of its edges.

    state_bytes:  bytes of the states of all checkpoints.
    num_ends:     the edges that have something in memory, and nothing in memory below them.
    num_merged:   how often a longer edge has taken the place of shorter ones.
    unreachable:  records that no cached prefix leads to any more; the tier removes their files.
    changes:      receives what is stored and removed; by default it is discarded.
    history:      a number of all that was stored, removed, pinned and unpinned until now: equal on
                  all ranks of a group.
    """

    def __init__(self, pool: BlockPool, full_groups: list[int], namespace: str) -> None:
        self.pool = pool
        self.full_groups = full_groups
        self.trie = Trie(namespace)
        self.accounting = Accounting()
        self.state_bytes = self.num_merged = self.num_ends = self.history = 0
        self.unreachable: list[Key] = []
        self.changes: Changes = deque[Change](maxlen=0)
        # In the order in which they came to read it: no decision may hang on addresses, which
        # differ between processes.
        self._readers: dict[Owned, dict[Node, None]] = {}
        self._order = EvictionOrder(pool, self._readers)
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._sizes = [pool.spec.bytes_per_block(group) for group in pool.spec.groups]

    @property
    def nbytes(self) -> int:
        """Bytes of all cached blocks, each counted once, and of states."""
        return self.accounting.total

    # -- adding ------------------------------------------------------------------------------------

    def add(
        self,
        parent: Node,
        edge: bytes,
        blocks: tuple[Owned, ...] | None,
        kind: str,
        owner: str | None = None,
    ) -> Node:
        """A new child edge in held blocks, one for each full group, or on disk only (None).

        Shorter edges that it contains are merged into it. A block that one of these has begun
        retains its owner. The record of one stays on disk until the new edge is there too.
        """
        is_on_disk = blocks is None
        new, merged = self.trie.add(parent, edge)
        new.blocks, new.on_disk, new.kind = blocks or (), is_on_disk, kind
        new.in_memory = not (is_on_disk and self.full_groups)
        self.num_merged += bool(merged and not is_on_disk)
        self._cache_blocks(new, owner)
        self._note(*removed(merged))
        self._note_stored(new)
        for old in merged:
            new.take_over(old)
            self._move_checkpoints(old, new, old.end)
            self._uncache(old, old.blocks, ())
            self._leave_ends(old)
        if is_on_disk:
            self.written(new)
        self._pin_blocks(new)
        self._count_ends(new)
        return new

    def written(self, node: Node) -> None:
        """A node is on disk now.

        The records of the shorter edges that were merged into it become unreachable.
        """
        if not node.on_disk:
            node.on_disk = True
            self._note(stored([node], DISK))
        self.unreachable += [Key(BLOCK, old.hash) for old in node.shorter]
        node.shorter = []

    def lost(self, node: Node) -> None:
        """A node is not on disk any more: it leaves the trie unless it is in memory."""
        node.on_disk = False
        if not node.is_in_trie:
            return
        self._note(BlocksRemoved((node.hash,), DISK, node.salt))
        if not node.in_memory:
            self.remove(node)

    def set_blocks(self, node: Node, blocks: tuple[Owned, ...], owner: str | None = None) -> None:
        """Give a node that was on disk only these held blocks, computed by `owner` or read from
        disk (None).
        """
        node.blocks, node.in_memory = blocks, True
        self._note(stored([node], MEMORY))
        self._cache_blocks(node, node.owner if owner is None else owner)
        self._pin_blocks(node)
        self._count_ends(node)

    def add_checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        """A checkpoint whose rings are in held blocks."""
        if checkpoint.states and self.pool.spec.counted is not None:
            # Ranks have unlike states, and evict alike.
            checkpoint.nbytes = self.pool.spec.counted.state
        node.checkpoints[checkpoint.position], checkpoint.node = checkpoint, node
        self.mark("checkpoint", node.hash_at(checkpoint.position))
        self.state_bytes += checkpoint.nbytes
        self.accounting.charge(checkpoint, checkpoint.nbytes, checkpoint.owner)
        for owned in checkpoint.ring_blocks:
            self._cache(node, owned, BLOCK_TOKENS, checkpoint.owner)
        self._pin_blocks(node)
        self._order.add(checkpoint)
        self._count_ends(node)

    def use(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was resumed: it is now the most recently used."""
        self.accounting.use(checkpoint)
        self._order.use(checkpoint)

    # -- pins --------------------------------------------------------------------------------------

    def pin(self, pin: PinnedPrefix) -> None:
        """Keep the blocks of a pin, and its checkpoint, until unpin(), whatever becomes of its
        edges.
        """
        self.mark("pin", *pin.ref.hashes[-1:])
        for node in pin.nodes:
            node.pins.add(pin)
            self._pin_blocks(node)

    def unpin(self, pin: PinnedPrefix) -> None:
        self.mark("unpin", *pin.ref.hashes[-1:])
        for node in pin.nodes:
            node.pins.discard(pin)
            self._pin_blocks(node)

    def is_pinned(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint must stay."""
        return any(pin.position == checkpoint.position for pin in checkpoint.node.pins)

    def pinned_bytes(self, pins: Iterable[PinnedPrefix]) -> tuple[int, int]:
        """Bytes of the blocks, and of the states, that these pins retain, each counted once."""
        places = {(node, pin.position) for pin in pins for node in pin.nodes}
        found = (node.checkpoints.get(position) for node, position in places)
        states = {checkpoint for checkpoint in found if checkpoint is not None}
        blocks = {owned for node, _ in places for owned in node.blocks}
        blocks.update(*(checkpoint.ring_blocks for checkpoint in states))
        return sum(self._sizes[group] for group, _ in blocks), sum(
            checkpoint.nbytes for checkpoint in states
        )

    # -- removing ----------------------------------------------------------------------------------

    def remove_evicted(self, blocks: list[Owned]) -> None:
        """Remove blocks that the pool has evicted from the trie, and the nodes that cannot be
        reached without them.
        """
        gone = set(blocks)
        for owned in blocks:
            for node in list(self._readers.get(owned, ())):
                if owned[0] in self.full_groups:
                    parent = node.parent
                    self.evict(node, gone)
                    self._order.demote_unreachable(parent)
                    continue
                for checkpoint in list(node.checkpoints.values()):
                    if owned in checkpoint.ring_blocks:
                        self.remove_checkpoint(checkpoint, gone)

    def evict(self, node: Node, gone: Collection[Owned] = ()) -> None:
        """Take a node out of memory, and remove it where it is not on disk; `gone` blocks are
        free already.
        """
        if not node.on_disk:
            self.remove(node, gone)
            return
        blocks = node.blocks
        node.blocks, node.in_memory = (), False
        self._note(BlocksRemoved((node.hash,), MEMORY, node.salt))
        self._uncache(node, blocks, gone)
        self._count_ends(node)

    def evict_state(self) -> bool:
        """Evict the first checkpoint with states that is not pinned.

        Returns whether there was one.
        """
        for checkpoint in self._order.states():
            if not self.is_pinned(checkpoint):
                self.remove_checkpoint(checkpoint)
                return True
        return False

    def remove_checkpoint(self, checkpoint: Checkpoint, gone: Collection[Owned] = ()) -> None:
        """Remove a checkpoint, and the edges that are empty without it; `gone` blocks are free
        already.
        """
        self._remove_checkpoint(checkpoint, gone)
        self.prune(checkpoint.node)
        self._order.demote_unreachable(checkpoint.node)

    def remove(self, node: Node, gone: Collection[Owned] = ()) -> None:
        """Remove a node and all below it; `gone` blocks are free already.

        The longest edge that it superseded comes back.
        """
        self._remove_checkpoints(node, 0, gone)
        subtree = self.trie.remove(node)
        self._note(*removed(subtree))
        for below in subtree:
            self._evicted[below.hash] = None
            if below is not node:
                self.unreachable += [Key(BLOCK, edge.hash) for edge in below.shorter]
                self.unreachable += _checkpoint_records(below, 0)
            self.unreachable += [Key(BLOCK, below.hash)] if below.on_disk else []
            self._uncache(below, below.blocks, gone)
            self._leave_ends(below)
        self._count_ends(node.parent)
        self._bring_back(node)
        for below in subtree:
            below.forget()
        while len(self._evicted) > HistoryConfig.evictions:
            self._evicted.popitem(last=False)

    def remove_for_good(self, node: Node) -> None:
        """remove(), and the shorter edges that were merged into the node too.

        Checkpoints go over to a sibling that begins with their tokens, as after a system prompt
        that ends inside a block.
        """
        self.unreachable += [Key(BLOCK, old.hash) for old in node.shorter]
        node.shorter, parent = [], node.parent
        siblings = [(alike, each) for each, alike in node.near_siblings() if each is not node]
        if siblings:
            alike, sibling = max(siblings, key=lambda found: found[0])
            self._remove_checkpoints(node, alike)
            self._move_checkpoints(node, sibling, alike)
        self.remove(node)
        if parent is not None:
            self.prune(parent)

    def prune(self, node: Node) -> None:
        """Remove a node that holds nothing, as in a model without full layers, and the empty
        ones above it.
        """
        while node.parent is not None:
            if node.blocks or node.children or node.checkpoints or node.on_disk:
                return
            self._note(*removed(self.trie.remove(node)))
            node.pins.clear()
            self._bring_back(node)
            node = node.parent

    def clear(self) -> None:
        """Remove everything."""
        for root in self.trie.roots():
            while root.children:
                self.remove(root.children[0])
        self._note(AllCleared())

    def _bring_back(self, node: Node) -> None:
        """Put the longest edge that was merged into a removed node back, or merge it into
        another node that contains it.
        """
        shorter = sorted((edge for edge in node.shorter if edge.on_disk), key=lambda edge: edge.end)
        longest = shorter.pop() if shorter else None
        last = 0 if longest is None else longest.end
        self.unreachable += _checkpoint_records(node, last)
        self.unreachable += [Key(BLOCK, edge.hash) for edge in shorter]
        if longest is None or longest.parent is None:
            return
        longest.blocks, longest.in_memory = (), not self.full_groups
        longest.records = {}
        longest.take_records(node, last)
        other = self.trie.child(longest.parent, longest.tokens)
        if other is None:
            self.trie.put_back(longest)
            self._note_stored(longest)
            self._count_ends(longest)
            return
        longest.merged_into = other
        other.take_over(longest)
        if other.on_disk:
            self.written(other)

    def _note_stored(self, node: Node) -> None:
        """Note the tiers that a new node is in."""
        if node.on_disk:
            self._note(stored([node], DISK))
        if node.in_memory:
            self._note(stored([node], MEMORY))

    def _note(self, *changes: Change) -> None:
        for change in changes:
            self.changes.append(change)
            self.mark(
                type(change).__name__, *(() if isinstance(change, AllCleared) else change.hashes)
            )

    def mark(self, what: str, *hashes: bytes) -> None:
        """Count a change in `history`."""
        self.history = crc32(what.encode() + b"".join(hashes), self.history)

    # -- figures -----------------------------------------------------------------------------------

    def was_evicted(self, parent: Node, edge: bytes) -> bool:
        """Return whether this edge was cached before and was removed."""
        return edge_hash(parent.hash, edge) in self._evicted

    def ends(self) -> list[Node]:
        """The nodes that have something in memory, and nothing in memory below them."""
        return [node for node in self.trie if node.is_end]

    def _count_ends(self, node: Node | None) -> None:
        """Count an edge whose blocks, checkpoints or children have changed, and the edges above
        it that this changes.
        """
        while node is not None and node.parent is not None:
            was_in_memory = node.is_above or node.is_end
            node.is_above = any(child.is_above or child.is_end for child in node.children)
            self.num_ends -= node.is_end
            node.is_end = node.is_held and not node.is_above
            self.num_ends += node.is_end
            if was_in_memory == (node.is_above or node.is_end):
                return
            node = node.parent

    def _leave_ends(self, node: Node) -> None:
        """Stop counting an edge that has left the trie."""
        self.num_ends -= node.is_end
        node.is_end = node.is_above = False

    def bytes_by_type(self) -> Counter[str]:
        """Bytes of blocks and of states by what ends at their edge, each counted once."""
        found: Counter[str] = Counter()
        for (group, _), nodes in self._readers.items():
            found[min(nodes, key=lambda node: node.hash).kind] += self._sizes[group]
        for checkpoint in self._order.states():
            found[checkpoint.kind] += checkpoint.nbytes
        return found

    def node_of(self, owned: Owned) -> Node | None:
        """The node that a block of a full group belongs to."""
        return next(iter(self._readers.get(owned, ())), None)

    def check(self) -> None:
        """The invariants of trie, pool and the index between them. Raises AssertionError."""
        self.trie.check()
        self.pool.check()
        readers: dict[Owned, dict[Node, None]] = {}
        for node in self.trie:
            outside = [p for p in node.checkpoints if not node.start < p <= node.end]
            assert not outside, f"checkpoints {outside} outside of ({node.start}, {node.end}]"
            for owned in node.owned:
                readers.setdefault(owned, {})[node] = None
        assert readers == self._readers, (
            f"{len(readers)} blocks in the trie != {len(self._readers)} in the index"
        )
        above = {
            each
            for node in self.trie
            if node.is_held and node.parent is not None
            for each in node.parent.path()
        }
        ends = {node for node in self.trie if node.is_held} - above
        assert ends == set(self.ends()), (
            f"{len(ends)} ends in the trie != {len(self.ends())} marked"
        )
        assert len(ends) == self.num_ends, (
            f"{len(ends)} ends in the trie != {self.num_ends} counted"
        )
        states = {c for node in self.trie for c in node.checkpoints.values() if c.states}
        self._order.check(states)
        assert self.state_bytes == sum(c.nbytes for c in states), (
            f"{self.state_bytes} bytes of states"
        )
        sizes: dict[Hashable, int] = {owned: self._sizes[owned[0]] for owned in readers}
        self.accounting.check(
            sizes | {c: c.nbytes for node in self.trie for c in node.checkpoints.values()}
        )
        for owned in readers:
            expected, pins = (
                self._is_pinned_block(owned),
                self.pool.groups[owned[0]].blocks[owned[1]].pins,
            )
            assert expected == bool(pins), f"block {owned} is pinned: {pins}; expected: {expected}"

    # -- blocks ------------------------------------------------------------------------------------

    def _is_pinned_block(self, owned: Owned) -> bool:
        """Return whether a pin retains a block: of a full group with its node, of a window with
        a checkpoint.
        """
        pinned = [node for node in self._readers.get(owned, ()) if node.pins]
        if not pinned or owned[0] in self.full_groups:
            return bool(pinned)
        checkpoints = (checkpoint for node in pinned for checkpoint in node.checkpoints.values())
        return any(
            owned in checkpoint.ring_blocks and self.is_pinned(checkpoint)
            for checkpoint in checkpoints
        )

    def _pin_blocks(self, node: Node) -> None:
        for owned in node.owned:
            self._pin_block(owned)

    def _pin_block(self, owned: Owned) -> None:
        blocks, block = self.pool.groups[owned[0]], owned[1]
        change = self._is_pinned_block(owned) - bool(blocks.blocks[block].pins)
        if change:
            blocks.pin(block, change)

    def _cache_blocks(self, node: Node, owner: str | None) -> None:
        tokens = node.end - node.start
        for owned in node.blocks:
            node.owner = self._cache(node, owned, tokens, owner)

    def _cache(self, node: Node, owned: Owned, tokens: int, owner: str | None) -> str | None:
        """Returns the block's owner."""
        self.pool.groups[owned[0]].cache(owned[1], tokens)
        if owned not in self._readers:
            self._readers[owned] = {}
        self._readers[owned][node] = None
        self.mark(owner or "")
        return self.accounting.charge(owned, self._sizes[owned[0]], owner)

    def _uncache(self, node: Node, blocks: Collection[Owned], gone: Collection[Owned]) -> None:
        still = node.owned if node.checkpoints else ()
        for owned in blocks:
            if owned not in gone:
                self.pool.groups[owned[0]].uncache(owned[1])
            if owned in self._readers and owned not in still:
                self._readers[owned].pop(node, None)
                if not self._readers[owned]:
                    del self._readers[owned]
                    self.accounting.release(owned)
                else:
                    self._pin_block(owned)

    def _remove_checkpoints(self, node: Node, after: int, gone: Collection[Owned] = ()) -> None:
        """Remove the checkpoints from position `after` on, of a node and all below it that are
        still connected.

        Ends first: the checkpoint before one may be the last of its conversation again.
        """
        for below in list(node.subtree())[::-1]:
            for position, checkpoint in sorted(below.checkpoints.items(), reverse=True):
                if position > after:
                    self._remove_checkpoint(checkpoint, gone)

    def _move_checkpoints(self, node: Node, sibling: Node, end: int) -> None:
        """Move the checkpoints up to `end`, in memory and on disk, to a sibling that has the
        same tokens up to there.
        """
        for position in [
            each for each in node.checkpoints if each <= end and each not in sibling.checkpoints
        ]:
            checkpoint = node.checkpoints.pop(position)
            sibling.checkpoints[position], checkpoint.node = checkpoint, sibling
            for owned in checkpoint.ring_blocks:
                if owned not in node.ring_blocks:
                    self._readers[owned].pop(node, None)
                self._readers[owned][sibling] = None
                self._pin_block(owned)
        sibling.take_records(node, end)
        self._count_ends(sibling)

    def _remove_checkpoint(self, checkpoint: Checkpoint, gone: Collection[Owned]) -> None:
        node = checkpoint.node
        del node.checkpoints[checkpoint.position]
        self.mark("checkpoint", node.hash_at(checkpoint.position))
        self.accounting.release(checkpoint)
        self._order.remove(checkpoint)
        self.state_bytes -= checkpoint.nbytes
        self._uncache(node, checkpoint.ring_blocks, gone)
        self._count_ends(node)


def _checkpoint_records(node: Node, last: int) -> list[Key]:
    """The records of checkpoints that end in a node, after `last`."""
    return [Key(kind, node.hash_at(end)) for kind, end in node.records if end > last]
