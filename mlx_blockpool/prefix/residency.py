"""Which cached prefix reads which block: keeps trie and pool in step.

A block of a full layer group belongs to one node; a block of a window group to every checkpoint whose ring it is part of.
Knows tokens and block ids; no arrays. Owned by the generation thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterable

from ..kv.pool import BlockPool
from ..spec import BLOCK_TOKENS
from ..store.record import BLOCK, STATE, WINDOW, Key
from .accounting import Accounting
from .trie import Checkpoint, Node, Pin, Trie

Owned = tuple[int, int]  # (layer group, block)


def is_pinned(node: Node, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint of a node must stay."""
    return any(pin.position == checkpoint.position for pin in node.pins)


def is_superseded(node: Node, checkpoint: Checkpoint) -> bool:
    """Whether the conversation has gone on to a later checkpoint of the same kind, and no other has begun here."""
    if checkpoint.kind == "system":
        return False
    while not any(c.kind == checkpoint.kind and c.position > checkpoint.position for c in node.checkpoints.values()):
        if len(node.children) != 1:
            return False
        node = node.children[0]
    return True


def keeps(node: Node, owned: Owned, full: bool) -> bool:
    """Whether a pin on this node keeps one of its blocks, which is of a full group or of a window."""
    if full or not node.pins:
        return bool(node.pins)
    return any(owned in rings_of([c]) for c in node.checkpoints.values() if is_pinned(node, c))


def records_at(node: Node, last: int) -> list[Key]:
    """The records of checkpoints that end in this node, behind `last`."""
    windows = [Key(WINDOW, node.hash_at(end)) for end in node.window_records if end > last]
    return windows + [Key(STATE, node.hash_at(end)) for end in node.state_records if end > last]


def rings_of(checkpoints: Iterable[Checkpoint]) -> list[Owned]:
    """Every ring block, once for each checkpoint."""
    return [(group, block) for c in checkpoints for group, (ids, _) in c.rings.items() for block in ids]


MAX_REMEMBERED_EVICTIONS = 100_000


class KVIndex:
    """The trie of one model and the blocks behind it."""

    def __init__(self, pool: BlockPool, full_groups: list[int], namespace: str) -> None:
        self.pool = pool
        self.full_groups = full_groups
        self.trie = Trie(namespace)
        self._owners: dict[Owned, set[Node]] = {}
        self.accounting = Accounting()
        self._sizes = [pool.spec.bytes_per_block(group) for group in pool.spec.groups]
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        # Checkpoints with states, the one used longest ago first.
        self._states: OrderedDict[Checkpoint, Node] = OrderedDict()
        self.state_bytes = 0
        # How often a longer edge has taken the place of shorter ones.
        self.num_merged = 0
        # Records that nothing leads to any more: the tier removes their files.
        self.unreachable: list[Key] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all cached blocks, each counted once, and of states."""
        return sum(self._sizes[group] for group, _ in self._owners) + self.state_bytes

    def add(self, node: Node, edge: bytes, blocks: tuple[int, ...], kind: str, account: str | None = None) -> Node:
        """A new child edge in held blocks, one for each full group. Shorter edges that it contains are merged into it.

        A block that one of these has begun keeps its owner.
        """
        new, shorter = self.trie.add(node, edge, blocks, kind)
        self.num_merged += bool(shorter)
        self._take_in(new, account)
        for old in shorter:
            for owned in rings_of(old.checkpoints.values()):
                self._owners[owned] = self._owners[owned] - {old} | {new}
            old.checkpoints = {}
            self._disown(old, self._blocks(old), ())
            new.superseded += [*old.superseded, *([old] if old.stored else [])]
        self._pin_blocks(new)
        return new

    def add_stored(self, node: Node, edge: bytes, kind: str) -> Node:
        """A new child edge whose blocks are on disk only."""
        new, shorter = self.trie.add(node, edge, (), kind)
        new.resident, new.stored = not self.full_groups, True
        self.unreachable += [Key(BLOCK, old.hash) for old in shorter]
        return new

    def written(self, node: Node) -> None:
        """A node is on disk: the shorter edges that it supersedes need not be any more."""
        node.stored = True
        self.unreachable += [Key(BLOCK, old.hash) for old in node.superseded]
        node.superseded = []

    def revive(self, node: Node, blocks: tuple[int, ...], account: str | None = None) -> None:
        """A node whose blocks were on disk only has these held blocks now; computed by `account`, or read from disk (None)."""
        node.blocks, node.resident = blocks, True
        self._take_in(node, node.owner if account is None else account)
        self._pin_blocks(node)

    def _take_in(self, node: Node, account: str | None) -> None:
        for owned in self._blocks(node):
            self._own(node, owned, node.end - node.start, account)
            node.owner = self.accounting.owner_of(owned)

    def add_checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        """A checkpoint whose rings are in held blocks."""
        node.checkpoints[checkpoint.position] = checkpoint
        if checkpoint.states:
            self._states[checkpoint] = node
            self.state_bytes += checkpoint.nbytes
        self.accounting.bear(checkpoint, checkpoint.nbytes, checkpoint.owner)
        for owned in rings_of([checkpoint]):
            self._own(node, owned, BLOCK_TOKENS, checkpoint.owner)
        self._pin_blocks(node)

    def use(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was resumed: it is now the last to be evicted."""
        self.accounting.use(checkpoint)
        if checkpoint in self._states:
            self._states.move_to_end(checkpoint)

    def evict_state(self) -> bool:
        """Evict the checkpoint with states that was used longest ago. Returns whether there was one that is not pinned."""
        for checkpoint, node in self._states.items():
            if not is_pinned(node.latest, checkpoint):
                self.drop_checkpoint(node.latest, checkpoint)
                return True
        return False

    def drop_checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        """Uncache one checkpoint of a node."""
        self._drop_checkpoint(node, checkpoint, ())
        self.prune(node)

    def pin(self, pin: Pin) -> None:
        """Keep the blocks of a pin, and its checkpoint, until unpin(), whatever becomes of its edges."""
        for node in pin.nodes:
            node.pins |= {pin}
            self._pin_blocks(node)

    def unpin(self, pin: Pin) -> None:
        for node in pin.nodes:
            node.pins -= {pin}
            self._pin_blocks(node)

    def pinned_bytes(self, pins: Iterable[Pin]) -> tuple[int, int]:
        """Bytes of the blocks, and of the states, that these pins keep, each counted once."""
        blocks: set[Owned] = set()
        states: set[Checkpoint] = set()
        places = {(node, pin.position) for pin in pins for node in pin.nodes}
        for node in {node for node, _ in places}:
            blocks.update(self._blocks(node))
        for node, position in places:
            if (checkpoint := node.checkpoints.get(position)) is not None:
                blocks.update(rings_of([checkpoint]))
                states.add(checkpoint)
        return sum(self._sizes[group] for group, _ in blocks), sum(checkpoint.nbytes for checkpoint in states)

    def forget(self, victims: list[Owned]) -> None:
        """Take evicted blocks out of the trie, and what cannot be reached without them."""
        gone = set(victims)
        for victim in victims:
            for node in list(self._owners.get(victim, ())):
                if victim[0] in self.full_groups:
                    self.let_go(node, gone)
                else:
                    self._drop_checkpoints(node, victim, gone)

    def let_go(self, node: Node, gone: Collection[Owned] = ()) -> None:
        """Take a node out of memory, and if it is not on disk uncache it and all below it; `gone` blocks are free already."""
        if not node.stored:
            self.drop(node, gone)
            return
        owned = self._blocks(node)
        node.blocks, node.resident = (), False
        self._disown(node, owned, gone)

    def drop(self, node: Node, gone: Collection[Owned] = ()) -> None:
        """Uncache a node and all below it; `gone` blocks are free already. What it superseded is cached again."""
        covers, cuts, saved = node.superseded, node.window_records, node.state_records
        node.superseded, node.window_records, node.state_records = [], {}, set()
        for old in self.trie.remove(node):
            self._evicted[old.hash] = None
            self.unreachable += [Key(BLOCK, record.hash) for record in (*old.superseded, *([old] if old.stored else []))]
            self.unreachable += records_at(old, 0)
            for checkpoint in list(old.checkpoints.values()):
                self._drop_checkpoint(old, checkpoint, gone)
            self._disown(old, self._blocks(old), gone)
            # References to the node remain, and its blocks are about to be reused.
            old.blocks, old.resident, old.stored, old.children = (), False, False, []
            old.window_records, old.state_records, old.superseded, old.pins = {}, set(), [], frozenset()
        node.window_records, node.state_records = cuts, saved
        self._uncover(node, covers)
        node.window_records, node.state_records = {}, set()
        while len(self._evicted) > MAX_REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    def prune(self, node: Node) -> None:
        """Remove a node that holds nothing, as in a model without full layers, and the empty ones above it."""
        while node.parent is not None and not (node.blocks or node.children or node.checkpoints or node.stored):
            self.trie.remove(node)
            self._uncover(node, node.superseded)
            node = node.parent

    def _uncover(self, node: Node, covers: list[Node]) -> None:
        """Cache the longest edge that a removed node superseded again, or merge it into another node, if it is on disk."""
        covers = [covered for covered in covers if covered.stored]
        longest = max(covers, key=lambda covered: covered.end, default=None)
        last = 0 if longest is None else longest.end
        self.unreachable += records_at(node, last)
        self.unreachable += [Key(BLOCK, covered.hash) for covered in covers if covered is not longest]
        if longest is None or longest.parent is None:
            return
        longest.blocks, longest.resident = (), not self.full_groups
        longest.window_records = {end: cut for end, cut in node.window_records.items() if end <= last}
        longest.state_records = {end for end in node.state_records if end <= last}
        other = self.trie.child(longest.parent, longest.tokens)
        if other is None:
            self.trie.put_back(longest)
            return
        longest.merged_into = other
        other.window_records = longest.window_records | other.window_records
        other.state_records |= longest.state_records
        other.superseded += [longest]
        if other.stored:
            self.written(other)

    def clear(self) -> None:
        """Uncache everything."""
        for root in self.trie.roots():
            while root.children:
                self.drop(root.children[0])

    def was_evicted(self, parent: Node, edge: bytes) -> bool:
        """Whether this edge was cached before and was evicted."""
        return Node.name(parent, edge) in self._evicted

    def ends(self) -> list[Node]:
        """The nodes that have something in memory, and nothing in memory below them."""
        held = [node for node in self.trie if node.blocks or node.checkpoints]
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
        for (group, _), nodes in self._owners.items():
            found[min(nodes, key=lambda node: node.hash).kind] += self._sizes[group]
        for checkpoint in self._states:
            found[checkpoint.kind] += checkpoint.nbytes
        return found

    def blocks_of(self, node: Node) -> list[Owned]:
        return [*self._blocks(node), *rings_of(node.checkpoints.values())]

    def owner_of(self, owned: Owned) -> Node | None:
        """The node that a block of a full group belongs to."""
        return next(iter(self._owners.get(owned, ())), None)

    def check(self) -> None:
        """The invariants of trie, pool and the index between them. Raises AssertionError."""
        self.trie.check()
        self.pool.check()
        owners: dict[Owned, set[Node]] = {}
        for node in self.trie:
            for owned in self.blocks_of(node):
                owners.setdefault(owned, set()).add(node)
        assert owners == self._owners, f"{len(owners)} blocks in the trie != {len(self._owners)} in the index"
        states = {c for node in self.trie for c in node.checkpoints.values() if c.states}
        assert states == set(self._states), f"{len(states)} checkpoints with states != {len(self._states)} in the index"
        assert self.state_bytes == sum(c.nbytes for c in states), f"{self.state_bytes} bytes of states"
        sizes: dict[Hashable, int] = {owned: self._sizes[owned[0]] for owned in owners}
        self.accounting.check(sizes | {c: c.nbytes for node in self.trie for c in node.checkpoints.values()})
        for owned, nodes in owners.items():
            kept = any(keeps(node, owned, owned[0] in self.full_groups) for node in nodes)
            assert kept == bool(self.pool.pins(*owned)), f"block {owned} is pinned: {self.pool.pins(*owned)}; needed: {kept}"

    def _blocks(self, node: Node) -> list[Owned]:
        if not node.resident:
            return []
        return list(zip(self.full_groups, node.blocks, strict=True))

    def _pin_blocks(self, node: Node) -> None:
        for owned in self.blocks_of(node):
            self._pin_block(owned)

    def _pin_block(self, owned: Owned) -> None:
        pinned = any(keeps(owner, owned, owned[0] in self.full_groups) for owner in self._owners.get(owned, ()))
        if pinned and not self.pool.pins(*owned):
            self.pool.pin(*owned)
        elif not pinned and self.pool.pins(*owned):
            self.pool.unpin(*owned)

    def _own(self, node: Node, owned: Owned, tokens: int, account: str | None) -> None:
        self.pool.cache(*owned, tokens)
        self.accounting.bear(owned, self._sizes[owned[0]], account)
        self._owners.setdefault(owned, set()).add(node)

    def _disown(self, node: Node, blocks: list[Owned], gone: Collection[Owned]) -> None:
        still = self.blocks_of(node) if node.checkpoints else ()
        for owned in blocks:
            if owned not in gone:
                self.pool.uncache(*owned)
            if owned in self._owners and owned not in still:
                self._owners[owned].discard(node)
                if not self._owners[owned]:
                    del self._owners[owned]
                    self.accounting.drop(owned)
                else:
                    self._pin_block(owned)

    def _drop_checkpoints(self, node: Node, victim: Owned, gone: Collection[Owned]) -> None:
        for checkpoint in list(node.checkpoints.values()):
            if victim in rings_of([checkpoint]):
                self._drop_checkpoint(node, checkpoint, gone)
        self.prune(node)

    def _drop_checkpoint(self, node: Node, checkpoint: Checkpoint, gone: Collection[Owned]) -> None:
        del node.checkpoints[checkpoint.position]
        self.accounting.drop(checkpoint)
        if self._states.pop(checkpoint, None) is not None:
            self.state_bytes -= checkpoint.nbytes
        self._disown(node, rings_of([checkpoint]), gone)
