"""Which blocks are free, held, evictable or pinned.

    open_table(group)          the blocks of one sequence in one layer group
    reserve(tables, counts)    set blocks aside for tables, all or none
    extend(table, count)       take blocks, the reserved ones first
    append_shared, fork        hold blocks that others hold or that are cached
    take_own, take_own_run     replace shared blocks before a write that others would see
    cut, release               release blocks; cached ones become evictable
    groups[i]                  the blocks of a layer group: what a trie caches, demotes, pins and
                               evicts of them, see blocks.py

Knows block ids and their order of use. Does not know tokens, arrays or disk.
Owned by the generation thread, with two exceptions that any thread may call: release_deferred(),
for finalizers, and counts().
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence

from ..config import PoolConfig
from ..errors import PoolExhaustedError
from ..spec import BLOCK_TOKENS, ModelCacheSpec, blocks_for
from .blocks import EVICTABLE, FREE, BlockCounts, BlockTable, GroupBlocks, by_group

# Blocks of a sequence that nothing limits.
UNBOUNDED = 2**23
# A slab has at most this part of the budget, unless more blocks are needed at once.
LARGEST_PART = 4


def remedy(spec: ModelCacheSpec) -> str:
    """What to do where a pool is too small for a spec: it may be a plugin's that is wrong."""
    if spec.source is None:
        return "Raise --pool-bytes."
    return f"Raise --pool-bytes, or correct the spec of {spec.source}."


class BlockPool:
    """Blocks for every layer group of one model, under one hard byte budget.

    Memory is taken slab by slab: each brings its group to one block more than twice the blocks in
    use, those that are held, cached or reserved. An empty slab is given back by settle(), and when
    its group takes blocks, while more than half of the group is free. The owner of the arrays
    follows `layout_version` and the slabs of the `groups`.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        pool_bytes: int,
        config: PoolConfig | None = None,
        most_tokens: int = UNBOUNDED * BLOCK_TOKENS,
    ) -> None:
        """most_tokens: that a sequence can have for its states.

        Raises PoolExhaustedError if the pool cannot hold one block of each group.
        """
        config = config or PoolConfig()
        sizes = [spec.bytes_per_block(group) for group in spec.groups]
        if pool_bytes < sum(sizes):
            hint = (
                f"One block of each group takes {sum(sizes)} bytes. The pool has {pool_bytes} "
                f"bytes. {remedy(spec)}"
            )
            raise PoolExhaustedError(len(sizes), 0, 0, spec.model_id, hint)
        self.spec = spec
        self.pool_bytes = pool_bytes
        self._most_tokens = most_tokens
        self.groups = [
            GroupBlocks(index, group, size, pool_bytes // size)
            for index, (group, size) in enumerate(zip(spec.groups, sizes, strict=True))
        ]
        self._tables: weakref.WeakSet[BlockTable] = weakref.WeakSet()
        self._returned: deque[tuple[int, list[int], int]] = deque()
        # Changes whenever a slab is added or released.
        self.layout_version = 0
        self._is_preallocated = config.preallocate
        if config.preallocate:
            for index, count in self._largest_sequence().items():
                self._add_slab(self.groups[index], count)

    # -- tables ------------------------------------------------------------------------------------

    def open_table(self, group: int) -> BlockTable:
        blocks = self.groups[group]
        table = BlockTable(group, blocks.stride, blocks.group.layer.max_blocks)
        self._tables.add(table)
        return table

    def reserve(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> None:
        """Reserve counts[i] more blocks for tables[i]: all or nothing.

        Later extends of these tables cannot fail.
        """
        needed = by_group(tables, counts)
        self._give_back(needed)
        self._grow_for(needed)
        for table, count in zip(tables, counts, strict=True):
            table.reserve(count)
            self.groups[table.group].reserved += count

    def extend(self, table: BlockTable, count: int) -> None:
        """Take `count` blocks to the end of a table, next to its last one where possible.

        Raises PoolExhaustedError, before anything is changed, if they are not available or the
        window is at its cap.
        """
        self._check_cap(table, count)
        if count > 1:
            self._add_slab_for_run(table, count)
        table.ids += self._take(table, count, table.ids[-1] if table.ids else None)
        table.changed()

    def append_shared(self, table: BlockTable, ids: Sequence[int]) -> None:
        """Append blocks that are held or cached already, by reference."""
        self._check_cap(table, len(ids))
        self.groups[table.group].hold(ids)
        table.ids += ids
        table.changed()

    def replace_shared(self, table: BlockTable, index: int, block: int) -> None:
        """Hold `block` at ids[index] in place of the present one."""
        blocks = self.groups[table.group]
        blocks.hold([block])
        old, table.ids[index] = table.ids[index], block
        blocks.release([old])
        table.changed()

    def take_own(self, table: BlockTable, index: int) -> tuple[int, int]:
        """Replace ids[index] by a block that only this table holds.

        Returns (old, new) for the caller to copy.
        """
        after = table.ids[index - 1] if index else None
        old, (new,) = table.ids[index], self._take(table, 1, after)
        table.ids[index] = new
        self.groups[table.group].num_copied += 1
        self.groups[table.group].release([old])
        table.changed()
        return old, new

    def take_own_run(self, table: BlockTable) -> BlockTable:
        """Replace all blocks of a table by new ones, neighbours if possible.

        Returns a table of the old ones.
        """
        old = self.open_table(table.group)
        blocks = self._take(table, len(table), None)
        old.ids, table.ids = table.ids, blocks
        self.groups[table.group].num_copied += len(blocks)
        table.changed()
        return old

    def is_shared(self, table: BlockTable, index: int, token: int) -> bool:
        """Return whether writing from `token` (its place in the block, 0 to 255) on would change
        what another reader sees.
        """
        self.drain()
        block = self.groups[table.group].blocks[table.ids[index]]
        return block.ref_count > 1 or token < block.cached_tokens

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table of the same blocks."""
        copy = self.open_table(table.group)
        self.append_shared(copy, table.ids)
        return copy

    def hand_over(self, table: BlockTable, heir: BlockTable) -> None:
        """Pass what `table` has reserved on to `heir`."""
        heir.reserve(table.reserved)
        table.reserved = 0

    def cut(self, table: BlockTable, length: int) -> None:
        """Release all blocks but the first `length`.

        Of its reserved capacity, what becomes free is reserved again.
        """
        blocks = self.groups[table.group]
        free = blocks.free.count
        blocks.release(reversed(table.ids[length:]))
        del table.ids[length:]
        table.changed()
        again = max(0, min(table.capacity - len(table) - table.reserved, blocks.free.count - free))
        table.reserved += again
        blocks.reserved += again

    def release(self, table: BlockTable) -> None:
        """Release all blocks of a table, the reserved ones too; its first block becomes the most
        recently used.
        """
        self.release_deferred(table)
        self.drain()

    def release_deferred(self, table: BlockTable) -> None:
        """release() for any thread and for finalizers: takes effect at the pool's next
        operation.
        """
        self._returned.append((table.group, table.ids, table.reserved))
        table.ids, table.reserved, table.capacity = [], 0, 0
        table.changed()

    def drain(self) -> None:
        """Apply all deferred releases."""
        while self._returned:
            group, ids, reserved = self._returned.popleft()
            self.groups[group].release(reversed(ids))
            self.groups[group].reserved -= reserved

    def _give_back(self, counts: Mapping[int, int]) -> None:
        """drain(), and give back empty slabs of the groups in `counts` that are more than half
        free, once counts[group] more blocks are in use.
        """
        self.drain()
        for group, count in () if self._is_preallocated else counts.items():
            blocks = self.groups[group]
            while (index := blocks.surplus_slab(count)) is not None:
                self._drop_slab(blocks, index)

    # -- figures -----------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs; never more than pool_bytes."""
        return sum(len(g.blocks) * g.bytes_per_block for g in self.groups)

    def counts(self) -> list[BlockCounts]:
        """Figures of each group. From other threads a snapshot that may be one operation old."""
        return [g.counts() for g in list(self.groups)]

    def settle(self) -> list[BlockCounts]:
        """counts() after all deferred releases, with empty slabs given back. Generation thread
        only.
        """
        self._give_back(dict.fromkeys(range(len(self.groups)), 0))
        return self.counts()

    def sequence_capacity(self) -> int:
        """The most tokens that one sequence can have in an otherwise empty pool."""
        growing = [g for g in self.groups if g.group.layer.max_blocks is None]
        if not growing and self._bytes_of_sequence(UNBOUNDED) <= self.pool_bytes:
            return self._most_tokens
        most = self.pool_bytes // min(g.bytes_per_block for g in self.groups)
        fits = bisect_right(range(most + 1), self.pool_bytes, key=self._bytes_of_sequence) - 1
        return min(fits * BLOCK_TOKENS, self._most_tokens)

    def _bytes_of_sequence(self, blocks: int) -> int:
        limits = ((g.bytes_per_block, g.group.layer.max_blocks) for g in self.groups)
        return sum(
            size * (blocks if limit is None else min(blocks, limit)) for size, limit in limits
        )

    def _largest_sequence(self) -> dict[int, int]:
        blocks = blocks_for(self.sequence_capacity())
        limits = [g.group.layer.max_blocks for g in self.groups]
        return {
            g: blocks if limit is None else min(blocks, limit) for g, limit in enumerate(limits)
        }

    def check(self) -> None:
        """The invariant, with figures. Raises AssertionError: a broken pool is our own bug."""
        self.settle()
        assert self.nbytes <= self.pool_bytes, f"{self.nbytes} bytes > {self.pool_bytes} allowed"
        for blocks in self.groups:
            blocks.check(t for t in self._tables if t.group == blocks.index)

    # -- slabs within the budget -------------------------------------------------------------------

    def _grow_for(self, counts: Mapping[int, int]) -> None:
        """Add the slabs that make counts[group] blocks available in each group, or raise and change
        nothing.

        Slabs without a block in use are released if their bytes are needed.
        """
        if self.bytes_to_grow(counts) == 0:
            return
        if self.bytes_to_grow(counts) > self.bytes_left and self.missing(counts, FREE) > 0:
            group, count = max(
                counts.items(), key=lambda item: item[1] - self.groups[item[0]].available
            )
            blocks = self.groups[group]
            raise PoolExhaustedError(
                count, blocks.available, len(blocks.evictable), blocks.group.name
            )
        for group, index in self.droppable_slabs(FREE):
            if self.bytes_to_grow(counts) > self.bytes_left:
                self._drop_slab(self.groups[group], index)
        # Bytes beyond the need are divided between the groups, so that slabs are not smaller than
        # they must be.
        spare = (self.bytes_left - self.bytes_to_grow(counts)) // (2 * len(self.groups) - 1)
        for group, blocks in enumerate(self.groups):
            if (short := counts.get(group, 0) - blocks.available) > 0:
                used = len(blocks.blocks) + short
                more = min(spare // blocks.bytes_per_block, used + 1)
                # Of a small pool one group must not take what another will need.
                most = self.pool_bytes // LARGEST_PART // blocks.bytes_per_block
                self._add_slab(blocks, max(short, min(short + more, most)))

    def _add_slab_for_run(self, table: BlockTable, count: int) -> None:
        """Add a slab before it is needed, for `count` neighbouring blocks, if the free blocks are
        too scattered and it has half the size of all before it, so that slabs stay few.
        """
        blocks = self.groups[table.group]
        self.drain()
        total = len(blocks.blocks)
        size = min(
            self.bytes_left // blocks.bytes_per_block,
            total - 1 - 2 * (blocks.available - max(0, count - table.reserved)),
        )
        if blocks.free.longest < count <= size and total <= 2 * size:
            self._add_slab(blocks, size)

    def _add_slab(self, blocks: GroupBlocks, count: int) -> None:
        """Add a slab of `count` blocks, or of those that the budget has bytes for."""
        if (count := min(count, self.bytes_left // blocks.bytes_per_block)) > 0:
            blocks.add_slab(count)
            self.layout_version += 1

    def _drop_slab(self, blocks: GroupBlocks, index: int) -> None:
        blocks.drop_slab(index)
        self.layout_version += 1

    def bytes_to_grow(self, counts: Mapping[int, int]) -> int:
        """Bytes of new slabs for `counts`, and for other groups whose slabs were released and
        that have blocks reserved.
        """
        found = 0
        for group, blocks in enumerate(self.groups):
            short = counts.get(group, 0) - blocks.available
            if short > 0:
                found += short * blocks.bytes_per_block
        return found

    @property
    def bytes_left(self) -> int:
        return self.pool_bytes - self.nbytes

    def droppable_slabs(self, evicting: int) -> list[tuple[int, int]]:
        """(group, index) of the slabs that could be released after eviction of the blocks that
        are at most `evicting`.
        """
        return [
            (g, i)
            for g, blocks in enumerate(self.groups)
            for i in blocks.slabs
            if blocks.can_drop(i, evicting)
        ]

    def missing(self, counts: Mapping[int, int], evicting: int) -> int:
        """Bytes that `counts` lack even if all of droppable_slabs() were released; 0 or less if
        they fit.
        """
        if evicting and (missing := self._missing(counts, evicting, [])) <= 0:
            # Which slabs could be released makes no difference, and it takes long to find out.
            return missing
        return self._missing(counts, evicting, self.droppable_slabs(evicting))

    def _missing(
        self, counts: Mapping[int, int], evicting: int, droppable: list[tuple[int, int]]
    ) -> int:
        left, needed = self.bytes_left, 0
        for group, blocks in enumerate(self.groups):
            dropped = sum(blocks.slabs[i] for g, i in droppable if g == group)
            usable = (
                blocks.free.count
                - dropped
                + (blocks.num_evictable() if evicting == EVICTABLE else 0)
            )
            left += dropped * blocks.bytes_per_block
            needed += (
                max(0, counts.get(group, 0) + blocks.reserved - usable) * blocks.bytes_per_block
            )
        return needed - left

    # -- inside ------------------------------------------------------------------------------------

    def _check_cap(self, table: BlockTable, count: int) -> None:
        if table.max_blocks is not None and len(table) + count > table.max_blocks:
            blocks = self.groups[table.group]
            hint = (
                f"A window of this group is a ring in {table.max_blocks} blocks and holds "
                f"{len(table)} already."
            )
            raise PoolExhaustedError(
                count, blocks.available, len(blocks.evictable), blocks.group.name, hint
            )

    def _take(self, table: BlockTable, count: int, after: int | None) -> list[int]:
        reserved = min(count, table.reserved)
        self._give_back({table.group: count - reserved})
        self._grow_for({table.group: count - reserved})
        blocks = self.groups[table.group]
        blocks.reserved -= reserved
        table.reserved -= reserved
        return blocks.take(count, after)
