"""The blocks of one layer group: the state of each, the free ones as runs of neighbours, and the tables of sequences.

Ids are slab_index * stride + position; a run never crosses from one slab into the next. Knows no budget and no other group.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from ..spec import LayerGroup

# What a block is to evict(), which takes the surplus ones first. FIXED blocks are held or pinned.
FREE, SURPLUS, EVICTABLE, FIXED = range(4)


class FreeRuns:
    """Disjoint free runs [start, end), none touching another."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self.count = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(sorted(self._ends.items()))

    def __contains__(self, block: int) -> bool:
        return any(start <= block < end for start, end in self._ends.items())

    @property
    def longest(self) -> int:
        return max((end - start for start, end in self._ends.items()), default=0)

    def add(self, start: int, end: int) -> None:
        """Make [start, end) free; it joins its neighbours in the same slab."""
        self.count += end - start
        if start % self.stride and start in self._starts:
            start = self._pop(self._starts[start])[0]
        if end % self.stride and end in self._ends:
            end = self._pop(end)[1]
        self._put(start, end)

    def remove(self, start: int, end: int) -> None:
        """Take the whole run [start, end) away: its slab is given back."""
        assert self._ends.get(start) == end, f"[{start}, {end}) is not one free run: {self._ends}"
        self._pop(start)
        self.count -= end - start

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` ids: those right after the block `after` where they are free, else where there is most room to grow."""
        assert count <= self.count, f"{count} wanted > {self.count} free"
        ids: list[int] = []
        if after is not None and (after + 1) % self.stride and after + 1 in self._ends:
            ids += self._cut(after + 1, after + 1, count)
        while len(ids) < count:
            start = max(self._ends, key=lambda s: (self._ends[s] - s, -s))
            room = self._ends[start] - start - (count - len(ids))
            # A run that starts after a block in use leaves that neighbour half of the room.
            begin = start + room // 2 if room > 0 and start % self.stride else start
            ids += self._cut(start, begin, count - len(ids))
        return ids

    def _cut(self, start: int, begin: int, count: int) -> list[int]:
        start, end = self._pop(start)
        stop = min(begin + count, end)
        if start < begin:
            self._put(start, begin)
        if stop < end:
            self._put(stop, end)
        self.count -= stop - begin
        return list(range(begin, stop))

    def _put(self, start: int, end: int) -> None:
        self._ends[start] = end
        self._starts[end] = start

    def _pop(self, start: int) -> tuple[int, int]:
        end = self._ends.pop(start)
        del self._starts[end]
        return start, end


@dataclass(slots=True)
class Block:
    """One block of 256 tokens.

    ref_count:     block tables that hold it.
    cached_refs:   trie entries that point at it.
    cached_tokens: leading tokens that they may read; a write below needs a copy.
    pins:          while there are any, evict() skips it.
    surplus:       evict() takes it before any that is not: what it holds is unlikely to be read again.

    A block is free when it is neither held nor cached, and evictable when it is cached and not held.
    """

    ref_count: int = 0
    cached_refs: int = 0
    cached_tokens: int = 0
    pins: int = 0
    surplus: bool = False

    @property
    def use(self) -> int:
        """FREE, SURPLUS, EVICTABLE or FIXED."""
        if self.ref_count or self.pins:
            return FIXED
        if not self.cached_refs:
            return FREE
        return SURPLUS if self.surplus else EVICTABLE


@dataclass(frozen=True)
class BlockCounts:
    """Blocks of one layer group; free + held + evictable = total. `reserved` of the free ones are set aside for tables.

    evicted, copied: how many have been evicted, and replaced by copies before a write, until now.
    """

    group: str
    total: int
    free: int
    held: int
    evictable: int
    pinned: int
    reserved: int
    bytes_per_block: int
    evicted: int = 0
    copied: int = 0


class GroupBlocks:
    """Every block of one layer group, the `index`-th of its model.

    stride:       the most blocks that a slab can have; `slab_blocks`: those of an ordinary one.
    slabs:        slab index -> blocks in it.
    evictable:    the cached blocks that no table holds, pinned ones included; the least recently used first.
    surplus:      those of them that are surplus, the one that became it first.
    uses:         of each slab, how many of its blocks are FREE, SURPLUS, EVICTABLE and FIXED; `total`: of all slabs.
    reserved:     how many free blocks tables have reserved.
    share_epoch:  counts what may have made a block shared.
    num_evicted, num_copied: as in BlockCounts.
    """

    def __init__(self, index: int, group: LayerGroup, bytes_per_block: int, stride: int, slab_blocks: int) -> None:
        self.index = index
        self.group = group
        self.bytes_per_block = bytes_per_block
        self.stride = stride
        self.slab_blocks = slab_blocks
        self.blocks: dict[int, Block] = {}
        self.free = FreeRuns(stride)
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.surplus: OrderedDict[int, None] = OrderedDict()
        self.slabs: dict[int, int] = {}
        self.uses: dict[int, list[int]] = {}
        self.total = [0] * 4
        self.reserved = 0
        self.share_epoch = self.num_evicted = self.num_copied = 0

    @property
    def available(self) -> int:
        return self.free.count - self.reserved

    @property
    def fragmentation(self) -> float:
        """0.0 where all free blocks are one run, towards 1.0 where they are scattered."""
        return 1.0 - self.free.longest / self.free.count if self.free.count else 0.0

    def counts(self) -> BlockCounts:
        pinned = sum(1 for b in list(self.blocks.values()) if b.pins)
        held = len(self.blocks) - self.free.count - len(self.evictable)
        figures = len(self.blocks), self.free.count, held, len(self.evictable), pinned, self.reserved
        return BlockCounts(self.group.name, *figures, self.bytes_per_block, self.num_evicted, self.num_copied)

    # -- slabs ---------------------------------------------------------------------------------------------------------

    def add_slab(self, blocks: int) -> None:
        index = next(i for i in range(len(self.slabs) + 1) if i not in self.slabs)
        self.slabs[index] = blocks
        start = index * self.stride
        self.blocks.update((block, Block()) for block in range(start, start + blocks))
        self.uses[index] = [blocks, 0, 0, 0]
        self.total[FREE] += blocks
        self.free.add(start, start + blocks)

    def drop_slab(self, index: int) -> None:
        start = index * self.stride
        end = start + self.slabs.pop(index)
        self.total = [all_slabs - one for all_slabs, one in zip(self.total, self.uses.pop(index), strict=True)]
        self.free.remove(start, end)
        for block in range(start, end):
            del self.blocks[block]

    def slab_ids(self, index: int) -> range:
        start = index * self.stride
        return range(start, start + self.slabs[index])

    def can_drop(self, index: int, evicting: int) -> bool:
        """Whether a slab can be given back: none of its blocks is FIXED, or more than `evicting` (FREE, SURPLUS, EVICTABLE)."""
        return not any(self.uses[index][evicting + 1 :])

    # -- references ----------------------------------------------------------------------------------------------------

    def hold(self, ids: Iterable[int]) -> None:
        """One reference more each. What is read again is no surplus any more."""
        for i in ids:
            block = self.blocks[i]
            block.ref_count += 1
            if block.ref_count == 1:
                if not block.pins:
                    self._count([i], SURPLUS if block.surplus else EVICTABLE, FIXED)
                block.surplus = False
                del self.evictable[i]
                self.surplus.pop(i, None)
        self.share_epoch += 1

    def take(self, count: int, after: int | None) -> list[int]:
        """Free blocks, held once; see FreeRuns.take()."""
        ids = self.free.take(count, after)
        for i in ids:
            self.blocks[i].ref_count = 1
        self._count(ids, FREE, FIXED)
        return ids

    def release(self, ids: Iterable[int]) -> None:
        """Drop one reference each; the last one released is the most recently used."""
        free: list[int] = []
        evictable: list[int] = []
        for i in ids:
            block = self.blocks[i]
            assert block.ref_count > 0, f"block {i} of {self.group.name} released with ref_count {block.ref_count}"
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.cached_refs:
                self.evictable[i] = None
                if not block.pins:
                    evictable.append(i)
            else:
                self._set_free(i)
                free.append(i)
        self._count(evictable, FIXED, EVICTABLE)
        self._count(free, FIXED, FREE)

    def cache(self, i: int, tokens: int) -> None:
        block = self.blocks[i]
        assert block.ref_count > 0 or block.cached_refs > 0, f"block {i} of {self.group.name} is free and cannot be cached"
        self.share_epoch += 1
        block.cached_refs += 1
        block.cached_tokens = max(block.cached_tokens, tokens)

    def uncache(self, i: int) -> None:
        block = self.blocks[i]
        assert block.cached_refs > 0, f"block {i} of {self.group.name} uncached but not cached"
        before = block.use
        block.cached_refs -= 1
        if block.cached_refs == 0:
            block.cached_tokens = block.pins = 0
            block.surplus = False
            if block.ref_count == 0:
                del self.evictable[i]
                self.surplus.pop(i, None)
                self._set_free(i)
        self._count([i], before, block.use)

    def touch(self, i: int) -> None:
        """Make an evictable block the most recently used one, and no surplus any more."""
        block = self.blocks[i]
        before = block.use
        block.surplus = False
        self.surplus.pop(i, None)
        if i in self.evictable:
            self.evictable.move_to_end(i)
        self._count([i], before, block.use)

    def demote(self, i: int) -> None:
        """Make an evictable block surplus until it is used again."""
        if i in self.evictable:
            block = self.blocks[i]
            before = block.use
            block.surplus = True
            self.surplus[i] = None
            self._count([i], before, block.use)

    def pin(self, i: int, change: int) -> None:
        """`change` pins more, or fewer."""
        block = self.blocks[i]
        before = block.use
        block.pins = max(0, block.pins + change)
        self._count([i], before, block.use)

    def _set_free(self, i: int) -> None:
        self.blocks[i].pins = 0
        self.free.add(i, i + 1)

    def _count(self, ids: Sequence[int], before: int, now: int) -> None:
        """Count blocks that were `before` and are something else now."""
        if not ids or now == before:
            return
        self.total[before] -= len(ids)
        self.total[now] += len(ids)
        first, last = min(ids) // self.stride, max(ids) // self.stride
        for index, count in ((first, len(ids)),) if first == last else Counter(i // self.stride for i in ids).items():
            uses = self.uses[index]
            uses[before] -= count
            uses[now] += count

    # -- eviction ------------------------------------------------------------------------------------------------------

    def eviction_order(self) -> Iterator[int]:
        """The blocks that evict() would free, in order: surplus ones, then other evictable ones; none that is pinned."""
        others = (i for i in self.evictable if not self.blocks[i].surplus)
        return (i for i in chain(self.surplus, others) if not self.blocks[i].pins)

    @property
    def num_victims(self) -> int:
        """The length of eviction_order()."""
        return self.total[SURPLUS] + self.total[EVICTABLE]

    def evict(self, count: int) -> list[tuple[int, int]]:
        """Free the first `count` blocks of eviction_order(), fewer if there are fewer. Returns (group, block) of each."""
        return [self._evict(i) for i in list(islice(self.eviction_order(), max(0, count)))]

    def evict_slab(self, index: int) -> list[tuple[int, int]]:
        """Free the cached blocks of a slab that nobody holds or pins."""
        return [self._evict(i) for i in self.slab_ids(index) if self.blocks[i].cached_refs]

    def _evict(self, i: int) -> tuple[int, int]:
        self.num_evicted += 1
        self.blocks[i].cached_refs = 1
        self.uncache(i)
        return self.index, i

    def check(self, tables: Iterable[BlockTable]) -> None:
        """The invariant, given every live table of the group. Raises AssertionError with the figures."""
        name, tables = self.group.name, list(tables)
        refs = Counter(block for table in tables for block in table.ids)
        free = {i for start, end in self.free for i in range(start, end)}
        assert len(free) == self.free.count, f"{name}: {len(free)} blocks in free runs != {self.free.count} counted"
        for i, state in self.blocks.items():
            assert state.ref_count == refs[i], f"{name} block {i}: ref_count {state.ref_count} != {refs[i]} tables"
            is_held, is_cached = state.ref_count > 0, state.cached_refs > 0
            assert (i in free) == (not is_held and not is_cached), f"{name} block {i}: free={i in free}, {state}"
            assert (i in self.evictable) == (not is_held and is_cached), f"{name} block {i}: {state}"
        for index, uses in self.uses.items():
            found = Counter(self.blocks[i].use for i in self.slab_ids(index))
            assert [found[use] for use in range(4)] == uses, f"{name} slab {index}: {uses} != {found}"
        assert [sum(uses) for uses in zip([0] * 4, *self.uses.values(), strict=True)] == self.total, f"{name}: {self.total}"
        surplus = {i for i in self.evictable if self.blocks[i].surplus}
        assert surplus == set(self.surplus), f"{name}: {len(surplus)} surplus blocks != {len(self.surplus)} to go first"
        reserved = sum(t.reserved for t in tables)
        assert self.reserved == reserved, f"{name}: {self.reserved} reserved != {reserved} in tables"
        assert self.available >= 0, f"{name}: {self.free.count} free < {self.reserved} reserved"


class BlockTable:
    """ids[i] holds the tokens [256 * i, 256 * (i + 1)) of the sequence, or of its ring where the group is a window.

    `reserved` free blocks are set aside for this table; `capacity` is the most that it has ever held and reserved together.
    """

    def __init__(self, group: int, stride: int, max_blocks: int | None) -> None:
        self.group = group
        self.max_blocks = max_blocks
        self.ids: list[int] = []
        self.reserved = 0
        self.capacity = 0
        self._stride = stride
        self.version = 0
        self._runs: list[tuple[int, int]] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def reserve(self, count: int) -> None:
        self.reserved += count
        self.capacity = max(self.capacity, len(self) + self.reserved)

    def changed(self) -> None:
        self.version += 1
        self._runs = None

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(first id, blocks) of each stretch of neighbouring blocks in one slab, in order of the sequence."""
        if self._runs is None:
            runs: list[tuple[int, int]] = []
            for block in self.ids:
                if runs and block == sum(runs[-1]) and block % self._stride:
                    runs[-1] = (runs[-1][0], runs[-1][1] + 1)
                else:
                    runs.append((block, 1))
            self._runs = runs
        return self._runs


def by_group(tables: Sequence[BlockTable], counts: Sequence[int]) -> Counter[int]:
    """counts[i] blocks for tables[i], summed by layer group."""
    needed: Counter[int] = Counter()
    for table, count in zip(tables, counts, strict=True):
        needed[table.group] += count
    return needed
