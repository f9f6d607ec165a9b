"""EvictionOrder: what is evicted first of the cached prefixes.

1. checkpoints that are superseded: their conversation has a later one of the same kind
2. blocks from which, and after which, no checkpoint resumes any more
3. the least recently used, and of one path its end before what it stands on

A conversation is evicted from its end, and what is left of it needs a checkpoint too. So the last checkpoint in each octave of
its length is not superseded. Knows nodes, checkpoints and block ids; no tokens. Owned by the generation thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from itertools import chain

from ..kv.pool import BlockPool
from .residency import Checkpoint, Owned
from .trie import Node

# The first octave; each is twice as long as all before it together.
OCTAVE_TOKENS = 2048


class EvictionOrder:
    """The order of eviction in `pool`. `readers`: the nodes that read each block, kept by the index."""

    def __init__(self, pool: BlockPool, full_groups: list[int], readers: Mapping[Owned, Collection[Node]]) -> None:
        self._pool = pool
        self._full_groups = full_groups
        self._needs_checkpoints = pool.spec.needs_checkpoints
        self._readers = readers
        # Checkpoints with states, the least recently used first; of these, the superseded ones.
        self._states: OrderedDict[Checkpoint, Node] = OrderedDict()
        self._superseded: OrderedDict[Checkpoint, None] = OrderedDict()

    def states(self) -> Iterator[tuple[Node, Checkpoint]]:
        """All checkpoints with states in the order of their eviction, each with its node."""
        others = (checkpoint for checkpoint in self._states if not checkpoint.superseded)
        return ((self._states[checkpoint].latest, checkpoint) for checkpoint in chain(self._superseded, others))

    def add(self, node: Node, checkpoint: Checkpoint) -> None:
        """A new checkpoint, which may supersede the one before it."""
        if checkpoint.states:
            self._states[checkpoint] = node
        for group, block in checkpoint.ring_blocks:
            # Until now it may have been part of superseded ones alone.
            self._pool.groups[group].touch(block)
        earlier = left_behind(node, checkpoint)
        if earlier is not None and not earlier.superseded:
            self._supersede(earlier)

    def use(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was resumed: it is now the last to be evicted."""
        checkpoint.superseded = False
        self._superseded.pop(checkpoint, None)
        if checkpoint in self._states:
            self._states.move_to_end(checkpoint)

    def remove(self, checkpoint: Checkpoint) -> None:
        self._superseded.pop(checkpoint, None)
        self._states.pop(checkpoint, None)

    def _supersede(self, checkpoint: Checkpoint) -> None:
        checkpoint.superseded = True
        if checkpoint in self._states:
            self._superseded[checkpoint] = None
        for owned in checkpoint.ring_blocks:
            every = chain.from_iterable(node.residency.checkpoints.values() for node in self._readers[owned])
            if all(each.superseded for each in every if owned in each.ring_blocks):
                self._pool.groups[owned[0]].demote(owned[1])

    def strand(self, node: Node | None) -> None:
        """Something was evicted from `node`, or after it: demote the edges up from it which nothing resumes from any more."""
        if not self._needs_checkpoints:
            return
        while node is not None and node.residency.blocks and not _can_be_resumed(node) and not self._is_surplus(node):
            if not all(map(self._is_surplus, node.children)):
                return
            for group, block in zip(self._full_groups, node.residency.blocks, strict=True):
                self._pool.groups[group].demote(block)
            node = node.parent

    def _is_surplus(self, node: Node) -> bool:
        return any(self._pool.groups[g].blocks[i].surplus for g, i in zip(self._full_groups, node.residency.blocks, strict=False))

    def check(self, states: Collection[Checkpoint]) -> None:
        """The checkpoints with states are these. Raises AssertionError."""
        assert set(states) == set(self._states), f"{len(states)} checkpoints with states != {len(self._states)} in order"
        superseded = {checkpoint for checkpoint in states if checkpoint.superseded}
        assert superseded == set(self._superseded), f"{len(superseded)} of them superseded != {len(self._superseded)} in order"


def is_superseded(node: Node, checkpoint: Checkpoint) -> bool:
    """Return whether the conversation has gone on to a later checkpoint in place of this one, and no other has begun here."""
    if checkpoint.kind == "system":
        return False
    while not any(_replaces(later, checkpoint) for later in node.residency.checkpoints.values()):
        if len(node.children) != 1:
            return False
        node = node.children[0]
    return True


def left_behind(node: Node, later: Checkpoint) -> Checkpoint | None:
    """The checkpoint that a later one, in `node`, supersedes; None: there is none."""
    at: Node | None = node if later.kind != "system" else None
    # The first position of its octave, so that the edges of a long path are compared with a number.
    first = OCTAVE_TOKENS << octave(later.position) >> 1 if later.position >= OCTAVE_TOKENS else 0
    while at is not None and at.end >= first:
        if checkpoints := at.residency.checkpoints:
            earlier = (each for each in checkpoints.values() if _replaces(later, each))
            if (found := max(earlier, key=lambda each: each.position, default=None)) is not None:
                return found
        at = at.parent if at.parent is not None and len(at.parent.children) == 1 else None
    return None


def octave(position: int) -> int:
    return (position // OCTAVE_TOKENS).bit_length()


def _can_be_resumed(node: Node) -> bool:
    """Return whether a checkpoint of this edge is in memory or on disk."""
    residency = node.residency
    return bool(residency.checkpoints or residency.window_records or residency.state_records)


def _replaces(later: Checkpoint, earlier: Checkpoint) -> bool:
    same = later.kind == earlier.kind and octave(later.position) == octave(earlier.position)
    return same and later.position > earlier.position
