"""The bytes that all layer groups share: adds slabs, gives empty ones back, and says what to evict for room.

Knows slabs and counts. Does not know tables or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import PoolExhaustedError
from .blocks import GroupBlocks

Victims = list[tuple[int, int]]


class Budget:
    """`groups` under the hard limit `pool_bytes`. `layout` counts the changes of slabs."""

    def __init__(self, pool_bytes: int, groups: list[GroupBlocks]) -> None:
        self.pool_bytes = pool_bytes
        self.groups = groups
        self.layout = 0

    @property
    def nbytes(self) -> int:
        return sum(len(g.blocks) * g.bytes_per_block for g in self.groups)

    def make_room(self, counts: Mapping[int, int]) -> Victims:
        """Evict what grow_for(counts) needs, or nothing if that would not be enough. Returns the victims."""
        if self._bytes_to_grow(counts) == 0 or not self._can_make_room(counts):
            return []
        victims: Victims = []
        left = self._bytes_left()
        for group, count in counts.items():
            blocks = self.groups[group]
            short = max(0, count - blocks.available)
            grown = min(short, left // blocks.bytes_per_block)
            left -= grown * blocks.bytes_per_block
            victims += evict(blocks, group, short - grown)
        if self._bytes_to_grow(counts) > self._bytes_left():
            victims += self._empty_slabs(counts)
        return victims

    def grow_for(self, counts: Mapping[int, int]) -> None:
        """Add the slabs that make counts[group] blocks available in each group, or raise and change nothing."""
        if all(count <= self.groups[g].available for g, count in counts.items()):
            return
        if self._bytes_to_grow(counts) > self._bytes_left():
            self._drop_empty_slabs(counts)
        if self._bytes_to_grow(counts) > self._bytes_left():
            group, count = max(counts.items(), key=lambda item: item[1] - self.groups[item[0]].available)
            blocks = self.groups[group]
            raise PoolExhaustedError(count, blocks.available, len(blocks.evictable), blocks.group.name)
        # What is left beyond the need is shared out, so that slabs are not smaller than they must be.
        spare = (self._bytes_left() - self._bytes_to_grow(counts)) // (2 * len(self.groups) - 1)
        for group, count in counts.items():
            blocks = self.groups[group]
            self._grow(blocks, count - blocks.available, spare // blocks.bytes_per_block)

    def make_run(self, group: int, count: int) -> None:
        """A slab for `count` neighbours and room to grow, where the free blocks are too scattered and the budget allows it."""
        blocks = self.groups[group]
        affordable = self._bytes_left() // blocks.bytes_per_block
        if blocks.free.longest < count <= affordable:
            blocks.add_slab(min(blocks.stride, affordable, count + blocks.share))
            self.layout += 1

    def grow_all(self, counts: Mapping[int, int]) -> None:
        """Take counts[group] blocks now, and no more."""
        for group, count in counts.items():
            self._grow(self.groups[group], count, 0)

    def _grow(self, blocks: GroupBlocks, short: int, spare: int) -> None:
        while short > 0:
            size = min(blocks.stride, short + spare, max(blocks.share, short))
            blocks.add_slab(size)
            self.layout += 1
            short -= size

    def _bytes_to_grow(self, counts: Mapping[int, int]) -> int:
        short = ((self.groups[g], max(0, n - self.groups[g].available)) for g, n in counts.items())
        return sum(count * blocks.bytes_per_block for blocks, count in short)

    def _bytes_left(self) -> int:
        return self.pool_bytes - self.nbytes

    def _drop_empty_slabs(self, counts: Mapping[int, int]) -> None:
        """Give back slabs without a block in use, as far as the promises of their group and `counts` allow."""
        for g, blocks in enumerate(self.groups):
            for index in sorted(blocks.slabs, key=lambda i: blocks.slabs[i]):
                ids = blocks.slab_ids(index)
                unused = all(blocks.blocks[i].ref_count == 0 and not blocks.blocks[i].known for i in ids)
                if unused and blocks.available - len(ids) >= counts.get(g, 0):
                    blocks.drop_slab(index)
                    self.layout += 1

    def _empty_slabs(self, counts: Mapping[int, int]) -> Victims:
        """Evict whole slabs of groups that have more than they need, until their bytes are enough for the others."""
        victims: Victims = []
        for g, blocks in enumerate(self.groups):
            for index in list(blocks.slabs):
                if self._bytes_to_grow(counts) <= self._bytes_left():
                    return victims
                ids = blocks.slab_ids(index)
                known = [i for i in ids if blocks.blocks[i].known]
                spare = blocks.available + len(known) - len(ids) >= counts.get(g, 0)
                if spare and blocks.is_idle(index):
                    for i in known:
                        blocks.evict(i)
                    victims += [(g, i) for i in known]
                    blocks.drop_slab(index)
                    self.layout += 1
        return victims

    def _can_make_room(self, counts: Mapping[int, int]) -> bool:
        needed = 0
        for group, count in counts.items():
            blocks = self.groups[group]
            evictable = sum(1 for _ in blocks.victims())
            needed += max(0, count - blocks.available - evictable) * blocks.bytes_per_block
        idle = sum(
            n * g.bytes_per_block
            for i, g in enumerate(self.groups)
            if i not in counts or not counts[i]
            for index, n in g.slabs.items()
            if g.is_idle(index)
        )
        return needed <= self._bytes_left() + idle


def evict(blocks: GroupBlocks, group: int, count: int) -> Victims:
    """Free the `count` least recently used blocks of a group that nobody holds or pins, fewer if there are fewer."""
    victims = [i for i, _ in zip(blocks.victims(), range(count))]  # noqa: B905
    for i in victims:
        blocks.evict(i)
    return [(group, i) for i in victims]
