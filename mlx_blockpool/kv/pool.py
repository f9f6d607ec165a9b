"""Which blocks are free, held, evictable or pinned.

    open_table(group)          the blocks of one sequence in one layer group
    reserve(tables, counts)    set blocks aside for tables, all or none
    extend(table, count)       take blocks, the reserved ones first
    append_shared, fork        hold blocks that others hold or that are cached
    take_own, take_own_run     replace shared blocks before a write that others would see
    cut, release               give blocks back; cached ones become evictable
    make_room, evict           free evictable blocks, the least recently used first
    groups[i]                  the blocks of a layer group: what a trie caches, demotes and pins of them, see blocks.py

Knows block ids and their order of use. Does not know tokens, arrays or disk.
Owned by the generation thread, with two exceptions that any thread may call: release_deferred(), for finalizers, and counts().
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence

from ..config import PoolConfig
from ..errors import PoolExhaustedError
from ..spec import BLOCK_TOKENS, ModelCacheSpec, blocks_for
from .blocks import BlockCounts, BlockTable, GroupBlocks, by_group
from .budget import Budget

# Blocks of a sequence that nothing limits.
UNBOUNDED = 2**23


class BlockPool:
    """Blocks for every layer group of one model, under one hard byte budget.

    Memory is taken slab by slab; the owner of the arrays follows `layout_version` and the slabs of the `groups`.
    """

    def __init__(self, spec: ModelCacheSpec, pool_bytes: int, config: PoolConfig | None = None) -> None:
        """Raises PoolExhaustedError if the pool cannot hold one block of each group."""
        config = config or PoolConfig()
        sizes = [spec.bytes_per_block(group) for group in spec.groups]
        if pool_bytes < sum(sizes):
            hint = f"One block of each group takes {sum(sizes)} bytes. The pool has {pool_bytes} bytes. Raise --pool-bytes."
            raise PoolExhaustedError(len(sizes), 0, 0, spec.model_id, hint)
        self.spec = spec
        self.pool_bytes = pool_bytes
        self.groups: list[GroupBlocks] = []
        for index, (group, size) in enumerate(zip(spec.groups, sizes, strict=True)):
            slab_blocks = min(pool_bytes // config.slabs // size, config.slab_blocks)
            self.groups.append(GroupBlocks(index, group, size, pool_bytes // size, max(1, slab_blocks)))
        self._tables: weakref.WeakSet[BlockTable] = weakref.WeakSet()
        self._returned: deque[tuple[int, list[int], int]] = deque()
        self._budget = Budget(pool_bytes, self.groups)
        if config.preallocate:
            self._budget.grow_all(self._largest_sequence())

    # -- tables --------------------------------------------------------------------------------------------------------

    def open_table(self, group: int) -> BlockTable:
        blocks = self.groups[group]
        table = BlockTable(group, blocks.stride, blocks.group.layer.max_blocks)
        self._tables.add(table)
        return table

    def reserve(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> None:
        """Reserve counts[i] more blocks for tables[i]: all or nothing. Later extends of these tables cannot fail."""
        self._drain()
        self._budget.grow_for(by_group(tables, counts))
        for table, count in zip(tables, counts, strict=True):
            table.reserve(count)
            self.groups[table.group].reserved += count

    def extend(self, table: BlockTable, count: int) -> None:
        """Take `count` blocks to the end of a table, next to its last one where possible.

        Raises PoolExhaustedError, before anything is changed, if they are not available or the window is at its cap.
        """
        self._check_cap(table, count)
        if count > 1:
            self._drain()
            self._budget.make_run(table.group, count)
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
        """Replace ids[index] by a block that only this table holds. Returns (old, new) for the caller to copy."""
        after = table.ids[index - 1] if index else None
        old, (new,) = table.ids[index], self._take(table, 1, after)
        table.ids[index] = new
        self.groups[table.group].num_copied += 1
        self.groups[table.group].release([old])
        table.changed()
        return old, new

    def take_own_run(self, table: BlockTable) -> BlockTable:
        """Replace all blocks of a table by as many new ones, neighbours where possible. Returns a table of the old ones."""
        old = self.open_table(table.group)
        blocks = self._take(table, len(table), None)
        old.ids, table.ids = table.ids, blocks
        self.groups[table.group].num_copied += len(blocks)
        table.changed()
        return old

    def is_shared(self, table: BlockTable, index: int, token: int) -> bool:
        """Return whether writing from `token` (its place in the block, 0 to 255) on would change what another reader sees."""
        self._drain()
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
        """Release all blocks but the first `length`. Of its reserved capacity, what becomes free is reserved again."""
        blocks = self.groups[table.group]
        free = blocks.free.count
        blocks.release(reversed(table.ids[length:]))
        del table.ids[length:]
        table.changed()
        again = max(0, min(table.capacity - len(table) - table.reserved, blocks.free.count - free))
        table.reserved += again
        blocks.reserved += again

    def release(self, table: BlockTable) -> None:
        """Release all blocks of a table, the reserved ones too; its first block becomes the most recently used."""
        self.release_deferred(table)
        self._drain()

    def release_deferred(self, table: BlockTable) -> None:
        """release() for any thread and for finalizers: takes effect at the pool's next operation."""
        self._returned.append((table.group, table.ids, table.reserved))
        table.ids, table.reserved, table.capacity = [], 0, 0
        table.changed()

    # -- eviction -----------------------------------------------------------------------------------------------------

    def evict(self, group: int, count: int) -> list[tuple[int, int]]:
        """Free the first `count` blocks of eviction_order(), fewer if there are fewer. Returns (group, block) of each."""
        self._drain()
        return self.groups[group].evict(count)

    def eviction_order(self, group: int) -> list[int]:
        """The blocks that evict() would free, in order: evictable ones without a pin."""
        self._drain()
        return list(self.groups[group].eviction_order())

    def make_room(self, counts: Mapping[int, int]) -> list[tuple[int, int]]:
        """Evict what reserve() of these counts needs, or nothing if that would not be enough.

        Returns the victims, which the caller takes out of its trie.
        """
        self._drain()
        return self._budget.make_room(counts)

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs; never more than pool_bytes."""
        return self._budget.nbytes

    @property
    def layout_version(self) -> int:
        """Changes whenever a slab is added or given back."""
        return self._budget.layout_version

    def counts(self) -> list[BlockCounts]:
        """Figures of each group. From other threads a snapshot that may be one operation old."""
        return [g.counts() for g in list(self.groups)]

    def settle(self) -> list[BlockCounts]:
        """counts() after everything that was given back has taken effect. Generation thread only."""
        self._drain()
        return self.counts()

    def sequence_capacity(self) -> int:
        """The most tokens that one sequence can have in an otherwise empty pool."""
        growing = [g for g in self.groups if g.group.layer.max_blocks is None]
        if not growing and self._bytes_of_sequence(UNBOUNDED) <= self.pool_bytes:
            return UNBOUNDED * BLOCK_TOKENS
        most = self.pool_bytes // min(g.bytes_per_block for g in self.groups)
        fits = bisect_right(range(most + 1), self.pool_bytes, key=self._bytes_of_sequence) - 1
        return fits * BLOCK_TOKENS

    def _bytes_of_sequence(self, blocks: int) -> int:
        limits = ((g.bytes_per_block, g.group.layer.max_blocks) for g in self.groups)
        return sum(size * (blocks if limit is None else min(blocks, limit)) for size, limit in limits)

    def _largest_sequence(self) -> dict[int, int]:
        blocks = blocks_for(self.sequence_capacity())
        limits = [g.group.layer.max_blocks for g in self.groups]
        return {g: blocks if limit is None else min(blocks, limit) for g, limit in enumerate(limits)}

    def check(self) -> None:
        """The invariant, with figures. Raises AssertionError: a broken pool is our own bug."""
        self._drain()
        assert self.nbytes <= self.pool_bytes, f"{self.nbytes} bytes > {self.pool_bytes} allowed"
        for blocks in self.groups:
            blocks.check(t for t in self._tables if t.group == blocks.index)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_cap(self, table: BlockTable, count: int) -> None:
        if table.max_blocks is not None and len(table) + count > table.max_blocks:
            blocks = self.groups[table.group]
            hint = f"A window of this group is a ring in {table.max_blocks} blocks and holds {len(table)} already."
            raise PoolExhaustedError(count, blocks.available, len(blocks.evictable), blocks.group.name, hint)

    def _take(self, table: BlockTable, count: int, after: int | None) -> list[int]:
        self._drain()
        reserved = min(count, table.reserved)
        self._budget.grow_for({table.group: count - reserved})
        blocks = self.groups[table.group]
        blocks.reserved -= reserved
        table.reserved -= reserved
        return blocks.take(count, after)

    def _drain(self) -> None:
        while self._returned:
            group, ids, reserved = self._returned.popleft()
            self.groups[group].release(reversed(ids))
            self.groups[group].reserved -= reserved
