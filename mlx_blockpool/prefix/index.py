"""KVIndex: which cached prefix reads which block. Keeps trie and pool in step.

A block of a full layer group belongs to one node; a block of a window group to every checkpoint whose ring it is part of.
Knows tokens and block ids; no arrays. Owned by the generation thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

from ..hashing import edge_hash
from ..kv.pool import BlockPool
from ..spec import BLOCK_TOKENS
from ..store.record import BLOCK, STATE, WINDOW, Key
from .accounting import Accounting
from .changes import CHECKPOINT, DISK, MEMORY, PIN, AllCleared, BlocksRemoved, Change, Changes, Digest, removed, stored
from .eviction_order import EvictionOrder
from .residency import Checkpoint, Owned, Residency
from .trie import Node, PrefixRef, Trie

MAX_REMEMBERED_EVICTIONS = 100_000


@dataclass(eq=False)
class Pin:
    """A prefix that is to stay: the blocks of its edges and, of their checkpoints, the one at `position`, which `node` has.

    `until`: a time of the clock it is measured by, `seconds` after the last use. None: it stays until it is unpinned.
    """

    ref: PrefixRef
    node: Node | None = None
    position: int = 0
    seconds: float = 0.0
    until: float | None = None

    @property
    def name(self) -> bytes:
        """The hash of its tokens."""
        return self.ref.hashes[-1]

    @property
    def nodes(self) -> set[Node]:
        """The edges that it keeps, as they are in the trie now."""
        own = set() if self.node is None else {self.node.latest}
        return own.union(node.latest for node in self.ref.path)

    def is_in(self, nodes: set[Node], end: int) -> bool:
        """Return whether it is a beginning of `end` tokens in these nodes. Its last edge may be part of a longer one now."""
        return self.ref.tokens <= end and self.ref.path[-1].latest in nodes


class KVIndex:
    """The trie of one model and the blocks behind it.

    state_bytes:  bytes of the states of all checkpoints.
    num_merged:   how often a longer edge has taken the place of shorter ones.
    unreachable:  records that no cached prefix leads to any more; the tier removes their files.
    changes:      takes what is stored and removed; by default nothing is kept of it.
    digest:       of what is in memory and on disk, checkpoints in memory included; `pin_digest`: of what is pinned.
    """

    def __init__(self, pool: BlockPool, full_groups: list[int], namespace: str) -> None:
        self.pool = pool
        self.full_groups = full_groups
        self.trie = Trie(namespace)
        self.accounting = Accounting()
        self.state_bytes = self.num_merged = 0
        self.unreachable: list[Key] = []
        self.changes: Changes = deque[Change](maxlen=0)
        self.digest, self.pin_digest = Digest(), Digest()
        # In the order in which they came to read it: no decision may hang on addresses, which differ between processes.
        self._readers: dict[Owned, dict[Node, None]] = {}
        self._pins: dict[Node, set[Pin]] = {}
        # Of a node that is not on disk, the shorter edges whose records serve until it is.
        self._superseded: dict[Node, list[Node]] = {}
        self._order = EvictionOrder(pool, full_groups, self._readers)
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._sizes = [pool.spec.bytes_per_block(group) for group in pool.spec.groups]

    @property
    def nbytes(self) -> int:
        """Bytes of all cached blocks, each counted once, and of states."""
        return sum(self._sizes[group] for group, _ in self._readers) + self.state_bytes

    # -- adding --------------------------------------------------------------------------------------------------------

    def add(self, parent: Node, edge: bytes, blocks: tuple[int, ...], kind: str, owner: str | None = None) -> Node:
        """A new child edge in held blocks, one for each full group. Shorter edges that it contains are merged into it.

        A block that one of these has begun keeps its owner.
        """
        new, shorter = self.trie.add(parent, edge, Residency(blocks, kind=kind))
        self.num_merged += bool(shorter)
        self._cache_blocks(new, owner)
        self._note(*removed(shorter), stored([new], MEMORY))
        for old in shorter:
            for owned in old.residency.ring_blocks:
                self._readers[owned].pop(old, None)
                self._readers[owned][new] = None
            new.residency.take_over(old.residency)
            if pins := self._pins.pop(old, None):
                self._pins.setdefault(new, set()).update(pins)
            if superseded := [*self._superseded.pop(old, ()), *([old] if old.residency.on_disk else [])]:
                self._superseded.setdefault(new, []).extend(superseded)
            self._uncache(old, self._blocks(old), ())
        if new in self._pins:
            self._pin_blocks(new)
        return new

    def add_stored(self, parent: Node, edge: bytes, kind: str) -> Node:
        """A new child edge whose blocks are on disk only."""
        new, shorter = self.trie.add(parent, edge, Residency(in_memory=not self.full_groups, on_disk=True, kind=kind))
        self._note(*removed(shorter))
        self._note_stored(new)
        for old in shorter:
            new.residency.take_over(old.residency)
            self.unreachable.append(Key(BLOCK, old.hash))
        return new

    def written(self, node: Node) -> None:
        """A node is on disk now. The records of the shorter edges that it supersedes become unreachable."""
        if not node.residency.on_disk:
            node.residency.on_disk = True
            self._note(stored([node], DISK))
        self.unreachable += [Key(BLOCK, old.hash) for old in self._superseded.pop(node, ())]

    def lost(self, node: Node) -> None:
        """A node is not on disk any more: it leaves the trie unless it is in memory."""
        node.residency.on_disk = False
        if node.removed or node.merged_into is not None:
            return
        self._note(BlocksRemoved((node.hash,), DISK, node.salt))
        if not node.residency.in_memory:
            self.remove(node)

    def revive(self, node: Node, blocks: tuple[int, ...], owner: str | None = None) -> None:
        """A node whose blocks were on disk only has these held blocks now; computed by `owner`, or read from disk (None)."""
        node.residency.blocks, node.residency.in_memory = blocks, True
        self._note(stored([node], MEMORY))
        self._cache_blocks(node, node.residency.owner if owner is None else owner)
        self._pin_blocks(node)

    def add_checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        """A checkpoint whose rings are in held blocks."""
        if checkpoint.states and self.pool.spec.counted is not None:
            # Ranks have unlike states, and evict alike.
            checkpoint.nbytes = self.pool.spec.counted.state
        node.residency.checkpoints[checkpoint.position] = checkpoint
        self.digest.count([node.hash_at(checkpoint.position)], CHECKPOINT)
        self.state_bytes += checkpoint.nbytes
        self.accounting.charge(checkpoint, checkpoint.nbytes, checkpoint.owner)
        for owned in checkpoint.ring_blocks:
            self._cache(node, owned, BLOCK_TOKENS, checkpoint.owner)
        self._pin_blocks(node)
        self._order.add(node, checkpoint)

    def use(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was resumed: it is now the most recently used."""
        self.accounting.use(checkpoint)
        self._order.use(checkpoint)

    # -- pins ----------------------------------------------------------------------------------------------------------

    def pin(self, pin: Pin) -> None:
        """Keep the blocks of a pin, and its checkpoint, until unpin(), whatever becomes of its edges."""
        for node in pin.nodes:
            self._pins.setdefault(node, set()).add(pin)
            self._pin_blocks(node)
        self.pin_digest.count(pin.ref.hashes[-1:], PIN)

    def unpin(self, pin: Pin) -> None:
        self.pin_digest.count(pin.ref.hashes[-1:], PIN, -1)
        for node in pin.nodes:
            pins = self._pins.get(node, set())
            pins.discard(pin)
            if not pins:
                self._pins.pop(node, None)
            self._pin_blocks(node)

    def pins(self, node: Node) -> Collection[Pin]:
        """The pins that keep the blocks of a node."""
        return self._pins.get(node, ())

    def is_pinned(self, node: Node, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint of a node must stay."""
        return any(pin.position == checkpoint.position for pin in self.pins(node))

    def pinned_bytes(self, pins: Iterable[Pin]) -> tuple[int, int]:
        """Bytes of the blocks, and of the states, that these pins keep, each counted once."""
        blocks: set[Owned] = set()
        states: set[Checkpoint] = set()
        places = {(node, pin.position) for pin in pins for node in pin.nodes}
        for node in {node for node, _ in places}:
            blocks.update(self._blocks(node))
        for node, position in places:
            if (checkpoint := node.residency.checkpoints.get(position)) is not None:
                blocks.update(checkpoint.ring_blocks)
                states.add(checkpoint)
        return sum(self._sizes[group] for group, _ in blocks), sum(checkpoint.nbytes for checkpoint in states)

    # -- removing ------------------------------------------------------------------------------------------------------

    def uncache_blocks(self, victims: list[Owned]) -> None:
        """Remove blocks that the pool has evicted from the trie, and the nodes that cannot be reached without them."""
        gone = set(victims)
        for victim in victims:
            for node in list(self._readers.get(victim, ())):
                if victim[0] in self.full_groups:
                    parent = node.parent
                    self.evict(node, gone)
                    self._order.strand(parent)
                    continue
                for checkpoint in list(node.residency.checkpoints.values()):
                    if victim in checkpoint.ring_blocks:
                        self._remove_checkpoint(node, checkpoint, gone)
                self.prune(node)
                self._order.strand(node)

    def evict(self, node: Node, gone: Collection[Owned] = ()) -> None:
        """Take a node out of memory, and remove it where it is not on disk; `gone` blocks are free already."""
        if not node.residency.on_disk:
            self.remove(node, gone)
            return
        blocks = self._blocks(node)
        node.residency.blocks, node.residency.in_memory = (), False
        self._note(BlocksRemoved((node.hash,), MEMORY, node.salt))
        self._uncache(node, blocks, gone)

    def evict_state(self) -> bool:
        """Evict the first checkpoint with states that is not pinned. Returns whether there was one."""
        for node, checkpoint in self._order.states():
            if not self.is_pinned(node, checkpoint):
                self.remove_checkpoint(node, checkpoint)
                return True
        return False

    def remove_checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        self._remove_checkpoint(node, checkpoint, ())
        self.prune(node)
        self._order.strand(node)

    def remove(self, node: Node, gone: Collection[Owned] = ()) -> None:
        """Remove a node and all below it; `gone` blocks are free already. The longest edge that it superseded comes back."""
        superseded, was = self._superseded.pop(node, []), node.residency
        subtree = self.trie.remove(node)
        self._note(*removed(subtree))
        for below in subtree:
            self._evicted[below.hash] = None
            on_disk = [*self._superseded.pop(below, ()), *([below] if below.residency.on_disk else [])]
            self.unreachable += [Key(BLOCK, edge.hash) for edge in on_disk]
            self.unreachable += [] if below is node else _checkpoint_records(below, below.residency, 0)
            for checkpoint in list(below.residency.checkpoints.values()):
                self._remove_checkpoint(below, checkpoint, gone)
            self._uncache(below, self._blocks(below), gone)
            self._pins.pop(below, None)
            # References to the node remain, and its blocks are about to be reused.
            below.residency, below.children = Residency(in_memory=False), []
        self._bring_back(node, was, superseded)
        while len(self._evicted) > MAX_REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    def remove_for_good(self, node: Node) -> None:
        """remove(), and what the node superseded too."""
        self.unreachable += [Key(BLOCK, old.hash) for old in self._superseded.pop(node, ())]
        parent = node.parent
        self.remove(node)
        if parent is not None:
            self.prune(parent)

    def prune(self, node: Node) -> None:
        """Remove a node that holds nothing, as in a model without full layers, and the empty ones above it."""
        while node.parent is not None:
            residency = node.residency
            if residency.blocks or node.children or residency.checkpoints or residency.on_disk:
                return
            self._note(*removed(self.trie.remove(node)))
            self._pins.pop(node, None)
            self._bring_back(node, residency, self._superseded.pop(node, []))
            node = node.parent

    def clear(self) -> None:
        """Remove everything."""
        for root in self.trie.roots():
            while root.children:
                self.remove(root.children[0])
        self._note(AllCleared())

    def _bring_back(self, node: Node, was: Residency, superseded: list[Node]) -> None:
        """Of the edges that a removed node superseded, put the longest back, or merge it into another node that contains it."""
        if not superseded:
            self.unreachable += _checkpoint_records(node, was, 0)
            return
        superseded = [edge for edge in superseded if edge.residency.on_disk]
        longest = max(superseded, key=lambda edge: edge.end, default=None)
        last = 0 if longest is None else longest.end
        self.unreachable += _checkpoint_records(node, was, last)
        self.unreachable += [Key(BLOCK, edge.hash) for edge in superseded if edge is not longest]
        if longest is None or longest.parent is None:
            return
        residency = longest.residency
        residency.blocks, residency.in_memory = (), not self.full_groups
        residency.window_records = {end: cut for end, cut in was.window_records.items() if end <= last}
        residency.state_records = {end for end in was.state_records if end <= last}
        other = self.trie.child(longest.parent, longest.tokens)
        if other is None:
            self.trie.put_back(longest)
            self._note_stored(longest)
            return
        longest.merged_into = other
        other.residency.window_records = residency.window_records | other.residency.window_records
        other.residency.state_records |= residency.state_records
        self._superseded.setdefault(other, []).append(longest)
        if other.residency.on_disk:
            self.written(other)

    def _note_stored(self, node: Node) -> None:
        """Note a node that is on disk, and in memory if the model has nothing to hold there."""
        tiers = (DISK, MEMORY) if node.residency.in_memory else (DISK,)
        self._note(*(stored([node], tier) for tier in tiers))

    def _note(self, *changes: Change) -> None:
        for change in changes:
            self.changes.append(change)
            self.digest.note(change)

    # -- figures -------------------------------------------------------------------------------------------------------

    def was_evicted(self, parent: Node, edge: bytes) -> bool:
        """Return whether this edge was cached before and was removed."""
        return edge_hash(parent.hash, edge) in self._evicted

    def ends(self) -> list[Node]:
        """The nodes that have something in memory, and nothing in memory below them."""
        held = [node for node in self.trie if node.residency.blocks or node.residency.checkpoints]
        above: set[Node] = set()
        for node in held:
            parent = node.parent
            while parent is not None and parent not in above:
                above.add(parent)
                parent = parent.parent
        return [node for node in held if node not in above]

    def bytes_by_type(self) -> Counter[str]:
        """Bytes of blocks and of states by what ends where they were kept, each counted once."""
        found: Counter[str] = Counter()
        for (group, _), nodes in self._readers.items():
            found[min(nodes, key=lambda node: node.hash).residency.kind] += self._sizes[group]
        for _, checkpoint in self._order.states():
            found[checkpoint.kind] += checkpoint.nbytes
        return found

    def blocks_of(self, node: Node) -> list[Owned]:
        return [*self._blocks(node), *node.residency.ring_blocks]

    def node_of(self, owned: Owned) -> Node | None:
        """The node that a block of a full group belongs to."""
        return next(iter(self._readers.get(owned, ())), None)

    def with_superseded(self, node: Node) -> list[Node]:
        """A node, and the shorter edges whose records serve until it is on disk."""
        return [node, *self._superseded.get(node, ())]

    def check(self) -> None:
        """The invariants of trie, pool and the index between them. Raises AssertionError."""
        self.trie.check()
        self.pool.check()
        self.digest.check(self.trie)
        readers: dict[Owned, dict[Node, None]] = {}
        for node in self.trie:
            outside = [p for p in node.residency.checkpoints if not node.start < p <= node.end]
            assert not outside, f"checkpoints {outside} outside of ({node.start}, {node.end}]"
            for owned in self.blocks_of(node):
                readers.setdefault(owned, {})[node] = None
        assert readers == self._readers, f"{len(readers)} blocks in the trie != {len(self._readers)} in the index"
        states = {c for node in self.trie for c in node.residency.checkpoints.values() if c.states}
        self._order.check(states)
        assert self.state_bytes == sum(c.nbytes for c in states), f"{self.state_bytes} bytes of states"
        sizes: dict[Hashable, int] = {owned: self._sizes[owned[0]] for owned in readers}
        self.accounting.check(sizes | {c: c.nbytes for node in self.trie for c in node.residency.checkpoints.values()})
        for owned in readers:
            kept, pins = self._is_kept(owned), self.pool.groups[owned[0]].blocks[owned[1]].pins
            assert kept == bool(pins), f"block {owned} is pinned: {pins}; needed: {kept}"

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _blocks(self, node: Node) -> list[Owned]:
        return list(zip(self.full_groups, node.residency.blocks, strict=True)) if node.residency.in_memory else []

    def _is_kept(self, owned: Owned) -> bool:
        """Return whether a pin keeps a block: of a full group with its node, of a window with a checkpoint."""
        pinned = [node for node in self._readers.get(owned, ()) if node in self._pins]
        if not pinned or owned[0] in self.full_groups:
            return bool(pinned)
        checkpoints = ((node, c) for node in pinned for c in node.residency.checkpoints.values())
        return any(owned in c.ring_blocks and self.is_pinned(node, c) for node, c in checkpoints)

    def _pin_blocks(self, node: Node) -> None:
        for owned in self.blocks_of(node):
            self._pin_block(owned)

    def _pin_block(self, owned: Owned) -> None:
        blocks, block = self.pool.groups[owned[0]], owned[1]
        change = self._is_kept(owned) - bool(blocks.blocks[block].pins)
        if change:
            blocks.pin(block, change)

    def _cache_blocks(self, node: Node, owner: str | None) -> None:
        tokens = node.end - node.start
        for owned in self._blocks(node):
            node.residency.owner = self._cache(node, owned, tokens, owner)

    def _cache(self, node: Node, owned: Owned, tokens: int, owner: str | None) -> str | None:
        """Returns the block's owner."""
        self.pool.groups[owned[0]].cache(owned[1], tokens)
        self._readers.setdefault(owned, {})[node] = None
        return self.accounting.charge(owned, self._sizes[owned[0]], owner)

    def _uncache(self, node: Node, blocks: list[Owned], gone: Collection[Owned]) -> None:
        still = self.blocks_of(node) if node.residency.checkpoints else ()
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

    def _remove_checkpoint(self, node: Node, checkpoint: Checkpoint, gone: Collection[Owned]) -> None:
        del node.residency.checkpoints[checkpoint.position]
        self.digest.count([node.hash_at(checkpoint.position)], CHECKPOINT, -1)
        self.accounting.release(checkpoint)
        self._order.remove(checkpoint)
        self.state_bytes -= checkpoint.nbytes
        self._uncache(node, checkpoint.ring_blocks, gone)


def _checkpoint_records(node: Node, residency: Residency, last: int) -> list[Key]:
    """The records of checkpoints that end in a node, after `last`."""
    if not residency.window_records and not residency.state_records:
        return []
    windows = [Key(WINDOW, node.hash_at(end)) for end in residency.window_records if end > last]
    return windows + [Key(STATE, node.hash_at(end)) for end in residency.state_records if end > last]
