"""The bytes that all layer groups share: adds slabs, gives empty ones back, and says what to evict for room.

Knows slabs and counts. Does not know tables or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import PoolExhaustedError
from .blocks import EVICTABLE, FREE, SURPLUS, GroupBlocks

Victims = list[tuple[int, int]]


class Budget:
    """`groups` under the hard limit `pool_bytes`. `layout_version` counts the changes of slabs."""

    def __init__(self, pool_bytes: int, groups: list[GroupBlocks]) -> None:
        self.pool_bytes = pool_bytes
        self.groups = groups
        self.layout_version = 0

    @property
    def nbytes(self) -> int:
        return sum(len(g.blocks) * g.bytes_per_block for g in self.groups)

    def make_room(self, counts: Mapping[int, int]) -> Victims:
        """Evict what grow_for(counts) needs, or nothing if that would not be enough. Returns the victims.

        Surplus blocks go first: of the groups that need some, then whole slabs of them in other groups. Then the least recently
        used blocks of the groups that need some, then slabs that nobody holds, then the rest.
        """
        if self._bytes_to_grow(counts) <= self._bytes_left() or self._missing(counts, EVICTABLE) > 0:
            return []
        victims: Victims = []
        for use in (SURPLUS, EVICTABLE):
            for group, count in counts.items():
                blocks = self.groups[group]
                missing = max(0, self._missing(counts, FREE))
                most = blocks.num_surplus if use == SURPLUS else count
                victims += blocks.evict(min(count - blocks.available, -(-missing // blocks.bytes_per_block), most))
            for group, index in self._slabs(use):
                if self._missing(counts, FREE) > 0:
                    victims += self.groups[group].evict_slab(index)
        for blocks in self.groups:
            while self._missing(counts, FREE) > 0 and (victim := blocks.evict(1)):
                victims += victim
        return victims

    def grow_for(self, counts: Mapping[int, int]) -> None:
        """Add the slabs that make counts[group] blocks available in each group, or raise and change nothing.

        Slabs without a block in use are given back where their bytes are needed.
        """
        if self._bytes_to_grow(counts) == 0:
            return
        if self._bytes_to_grow(counts) > self._bytes_left() and self._missing(counts, FREE) > 0:
            group, count = max(counts.items(), key=lambda item: item[1] - self.groups[item[0]].available)
            blocks = self.groups[group]
            raise PoolExhaustedError(count, blocks.available, len(blocks.evictable), blocks.group.name)
        for group, index in self._slabs(FREE):
            if self._bytes_to_grow(counts) > self._bytes_left():
                self.groups[group].drop_slab(index)
                self.layout_version += 1
        # What is left beyond the need is shared out, so that slabs are not smaller than they must be.
        spare = (self._bytes_left() - self._bytes_to_grow(counts)) // (2 * len(self.groups) - 1)
        for group, blocks in enumerate(self.groups):
            self._grow(blocks, counts.get(group, 0) - blocks.available, spare // blocks.bytes_per_block)

    def make_run(self, group: int, count: int) -> None:
        """A slab for `count` neighbours and room to grow, where the free blocks are too scattered and the budget allows it."""
        blocks = self.groups[group]
        affordable = self._bytes_left() // blocks.bytes_per_block
        if blocks.free.longest < count <= affordable:
            blocks.add_slab(min(blocks.stride, affordable, count + blocks.slab_blocks))
            self.layout_version += 1

    def grow_all(self, counts: Mapping[int, int]) -> None:
        """Take counts[group] blocks now, as far as the budget goes."""
        for group, count in counts.items():
            blocks = self.groups[group]
            self._grow(blocks, min(count, self._bytes_left() // blocks.bytes_per_block), 0)

    def _grow(self, blocks: GroupBlocks, short: int, spare: int) -> None:
        while short > 0:
            size = min(blocks.stride, short + spare, max(blocks.slab_blocks, short))
            blocks.add_slab(size)
            self.layout_version += 1
            short -= size

    def _bytes_to_grow(self, counts: Mapping[int, int]) -> int:
        """Also of groups that are not among `counts`: one whose slab was given back grows again for what it has reserved."""
        found = 0
        for group, blocks in enumerate(self.groups):
            short = counts.get(group, 0) - blocks.available
            if short > 0:
                found += short * blocks.bytes_per_block
        return found

    def _bytes_left(self) -> int:
        return self.pool_bytes - self.nbytes

    def _slabs(self, evicting: int) -> list[tuple[int, int]]:
        """(group, index) of the slabs that could be given back after eviction of what is at most `evicting` in them."""
        return [(g, i) for g, blocks in enumerate(self.groups) for i in blocks.slabs if blocks.can_drop(i, evicting)]

    def _missing(self, counts: Mapping[int, int], evicting: int) -> int:
        """Bytes that `counts` lack even if every slab of _slabs() were given back; 0 or less: there is room."""
        left, needed = self._bytes_left(), 0
        droppable = self._slabs(evicting)
        for group, blocks in enumerate(self.groups):
            dropped = sum(blocks.slabs[i] for g, i in droppable if g == group)
            usable = blocks.free.count - dropped + (blocks.num_victims if evicting == EVICTABLE else 0)
            left += dropped * blocks.bytes_per_block
            needed += max(0, counts.get(group, 0) + blocks.reserved - usable) * blocks.bytes_per_block
        return needed - left
