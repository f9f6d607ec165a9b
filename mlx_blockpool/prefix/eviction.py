"""What is evicted first of the cached prefixes. Only this file decides; the pool and the index
carry it out.

1. superseded checkpoints: their conversation has a later one of the same kind
2. blocks from which, and after which, no checkpoint can be resumed
3. the least recently used, and of one path its end before its beginning

A conversation is evicted from its end, and what remains needs a checkpoint too. So a checkpoint is
superseded only by one in the same range of lengths, [0, 2048), [2048, 4096), [4096, 8192)...

Knows nodes, checkpoints and block ids; no tokens. Owned by the generation thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, islice

from ..kv.blocks import DEMOTED, EVICTABLE, FREE, GroupBlocks
from ..kv.pool import BlockPool
from .trie import Checkpoint, Node, Owned

# The first range of lengths; each is twice as long as all before it together.
FIRST_RANGE_TOKENS = 2048


def eviction_order(pool: BlockPool, group: int) -> list[int]:
    """The evictable blocks of a layer group that are not pinned, in the order of their eviction."""
    pool.drain()
    return list(_order(pool.groups[group]))


def evict(pool: BlockPool, group: int, count: int) -> list[Owned]:
    """Free the first `count` blocks of eviction_order(), fewer if there are fewer. Returns them."""
    pool.drain()
    return _evict(pool.groups[group], count)


def evict_for(pool: BlockPool, counts: Mapping[int, int]) -> list[Owned]:
    """Evict what pool.reserve() of counts[group] blocks needs, or nothing if that would not be
    enough. Returns what was evicted.

    Demoted blocks go first: those of the groups in `counts`, then whole slabs of them in other
    groups. Then the least recently used blocks of the groups in `counts`, then slabs without a held
    block, then the rest.
    """
    pool.drain()
    if pool.bytes_to_grow(counts) <= pool.bytes_left or pool.missing(counts, EVICTABLE) > 0:
        return []
    evicted: list[Owned] = []
    for use in (DEMOTED, EVICTABLE):
        for group, count in counts.items():
            blocks = pool.groups[group]
            missing = max(0, pool.missing(counts, FREE))
            evicted += _evict(
                blocks, min(count - blocks.available, -(-missing // blocks.bytes_per_block)), use
            )
        for group, index in pool.droppable_slabs(use) if pool.missing(counts, FREE) > 0 else []:
            if pool.missing(counts, FREE) > 0:
                blocks = pool.groups[group]
                evicted += blocks.evict(
                    i for i in blocks.slab_ids(index) if blocks.blocks[i].cached_refs
                )
    for blocks in pool.groups:
        while pool.missing(counts, FREE) > 0 and (first := _evict(blocks, 1)):
            evicted += first
    return evicted


def _order(blocks: GroupBlocks, use: int = EVICTABLE) -> Iterator[int]:
    """The blocks of a group that are at most `use`."""
    others = (i for i in blocks.evictable if use == EVICTABLE and i not in blocks.demoted)
    return (i for i in chain(blocks.demoted, others) if not blocks.blocks[i].pins)


def _evict(blocks: GroupBlocks, count: int, use: int = EVICTABLE) -> list[Owned]:
    return blocks.evict(islice(_order(blocks, use), max(0, count)))


class EvictionOrder:
    """The use of checkpoints, and the blocks of `pool` that this demotes.

    `readers`: the nodes that read each block.
    """

    def __init__(self, pool: BlockPool, readers: Mapping[Owned, Collection[Node]]) -> None:
        self._pool = pool
        self._readers = readers
        # Checkpoints with states; last the one that was added, resumed or superseded last.
        self._states: OrderedDict[Checkpoint, None] = OrderedDict()

    def states(self) -> Iterator[Checkpoint]:
        """All checkpoints with states in the order of their eviction."""
        for superseded in (True, False):
            yield from (
                checkpoint for checkpoint in self._states if checkpoint.superseded == superseded
            )

    def add(self, checkpoint: Checkpoint) -> None:
        """A new checkpoint, which may supersede the one before it."""
        if checkpoint.states:
            self._states[checkpoint] = None
        self._touch(checkpoint)
        earlier = superseded_by(checkpoint)
        if earlier is not None and not earlier.superseded:
            self._supersede(earlier)

    def use(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was resumed: it is now the last to be evicted."""
        checkpoint.superseded = False
        if checkpoint in self._states:
            self._states.move_to_end(checkpoint)

    def remove(self, checkpoint: Checkpoint) -> None:
        """A checkpoint has gone: the one that it has superseded may be the last of its
        conversation again.
        """
        self._states.pop(checkpoint, None)
        if not checkpoint.superseded and (earlier := superseded_by(checkpoint)) is not None:
            earlier.superseded = False
            self._touch(earlier)

    def _touch(self, checkpoint: Checkpoint) -> None:
        """Its ring blocks are demoted no longer: until now only superseded checkpoints may have
        had them.
        """
        for group, block in checkpoint.ring_blocks:
            self._pool.groups[group].touch(block)

    def _supersede(self, checkpoint: Checkpoint) -> None:
        checkpoint.superseded = True
        if checkpoint in self._states:
            self._states.move_to_end(checkpoint)
        for owned in checkpoint.ring_blocks:
            every = chain.from_iterable(node.checkpoints.values() for node in self._readers[owned])
            if all(each.superseded for each in every if owned in each.ring_blocks):
                self._pool.groups[owned[0]].demote(owned[1])

    def demote_unreachable(self, node: Node | None) -> None:
        """After an eviction from `node` or after it: demote the blocks up from it that no
        checkpoint can resume any longer.
        """
        if not self._pool.spec.needs_checkpoints:
            return
        while (
            node is not None
            and node.blocks
            and not _can_be_resumed(node)
            and not self._is_demoted(node)
        ):
            if not all(map(self._is_demoted, node.children)):
                return
            for group, block in node.blocks:
                self._pool.groups[group].demote(block)
            node = node.parent

    def _is_demoted(self, node: Node) -> bool:
        return any(i in self._pool.groups[g].demoted for g, i in node.blocks)

    def check(self, states: Collection[Checkpoint]) -> None:
        """The checkpoints with states are these. Raises AssertionError."""
        assert set(states) == set(self._states), (
            f"{len(states)} checkpoints with states != {len(self._states)} in order"
        )


def superseded_by(later: Checkpoint) -> Checkpoint | None:
    """The checkpoint that a later one supersedes: the one before it, unless a branch lies
    between them.
    """
    at: Node | None = later.node if later.kind != "system" else None
    # The first position of its range, so that the edges of a long path are compared with a number.
    first = (
        FIRST_RANGE_TOKENS << length_range(later.position) >> 1
        if later.position >= FIRST_RANGE_TOKENS
        else 0
    )
    while at is not None and at.end >= first:
        if checkpoints := at.checkpoints:
            earlier = (each for each in checkpoints.values() if _replaces(later, each))
            if (found := max(earlier, key=lambda each: each.position, default=None)) is not None:
                return found
        at = at.parent if at.parent is not None and len(at.parent.children) == 1 else None
    return None


def length_range(position: int) -> int:
    """The number of the range of lengths that a position is in."""
    return (position // FIRST_RANGE_TOKENS).bit_length()


def _can_be_resumed(node: Node) -> bool:
    """Return whether a checkpoint of this edge is in memory or on disk."""
    return bool(node.checkpoints or node.records)


def _replaces(later: Checkpoint, earlier: Checkpoint) -> bool:
    same = later.kind == earlier.kind and length_range(later.position) == length_range(
        earlier.position
    )
    return same and later.position > earlier.position
