"""Which known prefix reads which block: keeps trie and pool in step.

A block of a full layer group belongs to one node; a block of a window group to every checkpoint whose ring it is part of.
Knows tokens and block ids; no arrays. Owned by the generation thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from ..pool import BlockPool
from ..spec import BLOCK_TOKENS
from .trie import Checkpoint, Node, Trie

Owned = tuple[int, int]  # (layer group, block)

MAX_REMEMBERED_EVICTIONS = 100_000


class KnownBlocks:
    """The trie of one model and the blocks behind it."""

    def __init__(self, pool: BlockPool, full_groups: list[int], namespace: str) -> None:
        self.pool = pool
        self.full_groups = full_groups
        self.trie = Trie(namespace)
        self._owners: dict[Owned, set[Node]] = {}
        self._pins: dict[tuple[int, ...], list[list[Node]]] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        # Hashes of nodes that were stored and cannot be reached any more; whoever has their files takes them.
        self.unreachable: list[bytes] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all known blocks, each counted once."""
        sizes = [self.pool.spec.bytes_per_block(g) for g in self.pool.spec.groups]
        return sum(sizes[group] for group, _ in self._owners)

    def add(self, node: Node, edge: bytes, blocks: tuple[int, ...], kind: str) -> Node:
        """A new child edge in held blocks, one for each full group. Shorter edges that it contains are merged into it."""
        new, shorter = self.trie.add(node, edge, blocks, kind)
        for owned in self._blocks(new):
            self._own(new, owned, new.end - new.start)
        for old in shorter:
            for owned in _rings(old.checkpoints.values()):
                self._owners[owned] = self._owners[owned] - {old} | {new}
            old.checkpoints = {}
            self._disown(old, self._blocks(old), ())
            self.unreachable += [old.hash] if old.stored else []
        self._pin_blocks(new)
        return new

    def add_stored(self, node: Node, edge: bytes, kind: str) -> Node:
        """A new child edge whose blocks are on disk only."""
        new, shorter = self.trie.add(node, edge, (), kind)
        new.resident, new.stored = False, True
        self.unreachable += [old.hash for old in shorter]
        return new

    def revive(self, node: Node, blocks: tuple[int, ...]) -> None:
        """A node whose blocks were on disk only has these held blocks now."""
        node.blocks, node.resident = blocks, True
        for owned in self._blocks(node):
            self._own(node, owned, node.end - node.start)
        self._pin_blocks(node)

    def add_checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        """The rings of a checkpoint, in held blocks."""
        node.checkpoints[checkpoint.position] = checkpoint
        for owned in _rings([checkpoint]):
            self._own(node, owned, BLOCK_TOKENS)
        self._pin_blocks(node)

    def pin(self, tokens: Sequence[int]) -> int:
        """Nothing that the known part of `tokens` stands on can be evicted any more. Returns its length."""
        match = self.trie.match(tokens)
        nodes = [node for node in [*match.nodes, match.partial] if node is not None]
        self._pins.setdefault(tuple(tokens), []).append(nodes)
        self._change_pins(nodes, 1)
        return match.tokens

    def unpin(self, tokens: Sequence[int]) -> int:
        """Take back one pin() of these tokens, whatever has become of the nodes since. Returns how many are known."""
        records = self._pins.get(tuple(tokens), [])
        if records:
            self._change_pins(records.pop(), -1)
        if not records:
            self._pins.pop(tuple(tokens), None)
        return self.trie.match(tokens).tokens

    def forget(self, victims: list[Owned]) -> None:
        """Take evicted blocks out of the trie, and what cannot be reached without them."""
        gone = set(victims)
        for victim in victims:
            for node in list(self._owners.get(victim, ())):
                if victim[0] in self.full_groups and node.stored:
                    self._leave_memory(node, gone)
                elif victim[0] in self.full_groups:
                    self.drop(node, gone)
                else:
                    self._drop_checkpoints(node, victim, gone)

    def drop(self, node: Node, gone: Collection[Owned] = ()) -> None:
        """Forget a node and all below it; `gone` blocks are free already."""
        for old in self.trie.remove(node):
            self._evicted[old.hash] = None
            self.unreachable += [old.hash] if old.stored else []
            owned = [*self._blocks(old), *_rings(old.checkpoints.values())]
            old.checkpoints = {}
            self._disown(old, owned, gone)
            # Whoever still refers to it must not read its blocks, which are somebody else's soon.
            old.blocks, old.resident, old.stored, old.children = (), False, False, []
        while len(self._evicted) > MAX_REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    def prune(self, node: Node) -> None:
        """Take a node out that has nothing to give, as in a model without full layers, and the likes of it above."""
        while node.parent is not None and not (node.blocks or node.children or node.checkpoints or node.stored):
            node.parent.children.remove(node)
            node = node.parent

    def clear(self) -> None:
        """Forget everything, pins too."""
        self._pins.clear()
        for child in list(self.trie.root.children):
            self.drop(child)

    def was_evicted(self, parent: Node, edge: bytes) -> bool:
        """Whether this edge was known before and had to go."""
        return Node.name(parent, edge) in self._evicted

    def blocks_of(self, node: Node) -> list[Owned]:
        return [*self._blocks(node), *_rings(node.checkpoints.values())]

    def check(self) -> None:
        """The invariants of trie, pool and the index between them. Raises AssertionError."""
        self.trie.check()
        self.pool.check()
        owners: dict[Owned, set[Node]] = {}
        for node in self.trie:
            for owned in self.blocks_of(node):
                owners.setdefault(owned, set()).add(node)
        assert owners == self._owners, f"{len(owners)} blocks in the trie != {len(self._owners)} in the index"

    def _leave_memory(self, node: Node, gone: Collection[Owned]) -> None:
        owned = self._blocks(node)
        node.blocks, node.resident = (), False
        self._disown(node, owned, gone)

    def _blocks(self, node: Node) -> list[Owned]:
        if not node.resident:
            return []
        return list(zip(self.full_groups, node.blocks, strict=True))

    def _change_pins(self, nodes: list[Node], by: int) -> None:
        for node in nodes:
            while node.merged_into is not None:
                node = node.merged_into
            node.pins += by
            self._pin_blocks(node)

    def _pin_blocks(self, node: Node) -> None:
        for group, block in self.blocks_of(node):
            pinned = any(owner.pins for owner in self._owners.get((group, block), ()))
            if pinned and not self.pool.pins(group, block):
                self.pool.pin(group, block)
            elif not pinned and self.pool.pins(group, block):
                self.pool.unpin(group, block)

    def _own(self, node: Node, owned: Owned, tokens: int) -> None:
        self.pool.know(*owned, tokens)
        self._owners.setdefault(owned, set()).add(node)

    def _disown(self, node: Node, blocks: list[Owned], gone: Collection[Owned]) -> None:
        still = self.blocks_of(node) if node.checkpoints else ()
        for owned in blocks:
            if owned not in gone:
                self.pool.forget(*owned)
            if owned in self._owners and owned not in still:
                self._owners[owned].discard(node)
                if not self._owners[owned]:
                    del self._owners[owned]

    def _drop_checkpoints(self, node: Node, victim: Owned, gone: Collection[Owned]) -> None:
        for checkpoint in list(node.checkpoints.values()):
            if victim in _rings([checkpoint]):
                del node.checkpoints[checkpoint.position]
                self._disown(node, _rings([checkpoint]), gone)
        self.prune(node)


def _rings(checkpoints: Iterable[Checkpoint]) -> list[Owned]:
    """Every ring block, once for each checkpoint."""
    return [(group, block) for c in checkpoints for group, (ids, _) in c.rings.items() for block in ids]
