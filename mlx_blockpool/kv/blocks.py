"""The blocks of one layer group: the state of each, the free ones as runs of neighbours, and the
tables of sequences.

Ids are slab_index * stride + position; a run never crosses from one slab into the next. Knows no
budget and no other group.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

from ..spec import LayerGroup

# The uses of a block. DEMOTED and EVICTABLE blocks can be evicted; FIXED blocks are held or pinned.
FREE, DEMOTED, EVICTABLE, FIXED = range(4)


class FreeRuns:
    """Disjoint free runs [start, end) of `count` blocks, none touching another."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self.count = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(sorted(self._ends.items()))

    @property
    def longest(self) -> int:
        return max((end - start for start, end in self._ends.items()), default=0)

    def is_run(self, start: int, end: int) -> bool:
        """Return whether [start, end) is a whole run."""
        return self._ends.get(start) == end

    def add(self, start: int, end: int) -> None:
        """Make [start, end) of one slab free; it joins its neighbours there."""
        self.count += end - start
        if start % self.stride and start in self._starts:
            start = self._pop(self._starts[start])[0]
        if end % self.stride and end in self._ends:
            end = self._pop(end)[1]
        self._put(start, end)

    def remove(self, start: int, end: int) -> None:
        """Remove the whole run [start, end), a slab."""
        assert self.is_run(start, end), f"[{start}, {end}) is not one free run: {self._ends}"
        self._pop(start)
        self.count -= end - start

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` ids: those right after the block `after` if they are free, else in the longest
        runs.
        """
        assert count <= self.count, f"{count} wanted > {self.count} free"
        ids: list[int] = []
        if after is not None and (after + 1) % self.stride and after + 1 in self._ends:
            ids += self._cut(after + 1, after + 1, count)
        while len(ids) < count:
            start = max(self._ends, key=lambda s: (self._ends[s] - s, -s))
            spare = self._ends[start] - start - (count - len(ids))
            # After a block in use, half of the spare blocks stay free, so that the sequence before
            # can be extended in place.
            begin = start + spare // 2 if spare > 0 and start % self.stride else start
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
class BlockRefs:
    """What refers to one block of 256 tokens.

    ref_count:     block tables that hold it.
    cached_refs:   trie entries that point at it.
    cached_tokens: leading tokens that they may read; a write below needs a copy.
    pins:          while there are any, it is not evicted.

    A block is free when it is neither held nor cached, and evictable when it is cached and not
    held.
    """

    ref_count: int = 0
    cached_refs: int = 0
    cached_tokens: int = 0
    pins: int = 0


@dataclass(frozen=True)
class BlockCounts:
    """Blocks of one layer group; free + held + evictable = total. `reserved` of the free ones are
    set aside for tables.

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

    stride:       the most blocks that a slab can have.
    slabs:        slab index -> blocks in it.
    evictable:    the cached blocks that no table holds, pinned ones included; the least recently
                  used first.
    demoted:      those of them that are evicted before the others, the first demoted first: they
                  are unlikely to be read again.
    pinned:       the blocks that have pins.
    reserved:     how many free blocks tables have reserved.
    share_epoch:  counts what may have made a block shared.
    num_evicted, num_copied: as in BlockCounts.
    """

    def __init__(self, index: int, group: LayerGroup, bytes_per_block: int, stride: int) -> None:
        self.index = index
        self.group = group
        self.bytes_per_block = bytes_per_block
        self.stride = stride
        self.blocks: dict[int, BlockRefs] = {}
        self.free = FreeRuns(stride)
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.demoted: OrderedDict[int, None] = OrderedDict()
        self.pinned: set[int] = set()
        self.slabs: dict[int, int] = {}
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
        held = len(self.blocks) - self.free.count - len(self.evictable)
        figures = (
            len(self.blocks),
            self.free.count,
            held,
            len(self.evictable),
            len(self.pinned),
            self.reserved,
        )
        return BlockCounts(
            self.group.name, *figures, self.bytes_per_block, self.num_evicted, self.num_copied
        )

    # -- slabs -------------------------------------------------------------------------------------

    def add_slab(self, blocks: int) -> None:
        index = next(i for i in range(len(self.slabs) + 1) if i not in self.slabs)
        self.slabs[index] = blocks
        start = index * self.stride
        self.blocks.update((block, BlockRefs()) for block in range(start, start + blocks))
        self.free.add(start, start + blocks)

    def drop_slab(self, index: int) -> None:
        start = index * self.stride
        end = start + self.slabs.pop(index)
        self.free.remove(start, end)
        for block in range(start, end):
            del self.blocks[block]

    def slab_ids(self, index: int) -> range:
        start = index * self.stride
        return range(start, start + self.slabs[index])

    def use(self, i: int) -> int:
        """FREE, DEMOTED, EVICTABLE or FIXED."""
        block = self.blocks[i]
        if block.ref_count or block.pins:
            return FIXED
        if not block.cached_refs:
            return FREE
        return DEMOTED if i in self.demoted else EVICTABLE

    def can_drop(self, index: int, evicting: int) -> bool:
        """Return whether a slab can be released: no block in it is more than `evicting` (FREE,
        DEMOTED, EVICTABLE).
        """
        ids = self.slab_ids(index)
        return self.free.is_run(ids.start, ids.stop) or (
            evicting > FREE and all(self.use(i) <= evicting for i in ids)
        )

    def surplus_slab(self, count: int) -> int | None:
        """The largest empty slab that can be given back, where more than half of the blocks, and of
        one more, stay free once `count` are taken.
        """
        spare = self.available - count
        if 2 * spare <= len(self.blocks) + 1:
            return None
        empty = [i for i, size in self.slabs.items() if size <= spare and self.can_drop(i, FREE)]
        return max(empty, key=lambda i: self.slabs[i], default=None)

    # -- references --------------------------------------------------------------------------------

    def hold(self, ids: Iterable[int]) -> None:
        """One reference more each. A demoted block that is read again is not demoted any longer."""
        blocks, evictable, demoted = self.blocks, self.evictable, self.demoted
        for i in ids:
            block = blocks[i]
            if not block.ref_count:
                del evictable[i]
                demoted.pop(i, None)
            block.ref_count += 1
        self.share_epoch += 1

    def take(self, count: int, after: int | None) -> list[int]:
        """Free blocks, held once; see FreeRuns.take()."""
        ids = self.free.take(count, after)
        blocks = self.blocks
        for i in ids:
            blocks[i].ref_count = 1
        return ids

    def release(self, ids: Iterable[int]) -> None:
        """Drop one reference each; the last one released is the most recently used."""
        blocks = self.blocks
        # A run [start, end) of blocks to make free, which grows downwards: tables are released from
        # their ends.
        start = end = 0
        for i in ids:
            block = blocks[i]
            if left := block.ref_count - 1:
                assert left > 0, (
                    f"block {i} of {self.group.name} released with ref_count {block.ref_count}"
                )
                block.ref_count = left
                continue
            block.ref_count = 0
            if block.cached_refs:
                self.evictable[i] = None
                continue
            if block.pins:
                self.pin(i, -block.pins)
            if i + 1 != start or not start % self.stride:
                if start < end:
                    self.free.add(start, end)
                end = i + 1
            start = i
        if start < end:
            self.free.add(start, end)

    def cache(self, i: int, tokens: int) -> None:
        """A trie entry may read the first `tokens` tokens of a held block from now on."""
        block = self.blocks[i]
        assert block.ref_count > 0 or block.cached_refs > 0, (
            f"block {i} of {self.group.name} is free and cannot be cached"
        )
        self.share_epoch += 1
        block.cached_refs += 1
        block.cached_tokens = max(block.cached_tokens, tokens)

    def uncache(self, i: int) -> None:
        """A trie entry is gone; a block that is neither held nor cached is free."""
        block = self.blocks[i]
        assert block.cached_refs > 0, f"block {i} of {self.group.name} uncached but not cached"
        if block.cached_refs > 1:
            block.cached_refs -= 1
            return
        block.cached_refs = block.cached_tokens = 0
        self.pin(i, -block.pins)
        if block.ref_count == 0:
            del self.evictable[i]
            self.demoted.pop(i, None)
            self.free.add(i, i + 1)

    def touch(self, i: int) -> None:
        """Make an evictable block the most recently used one, and not demoted any longer."""
        self.demoted.pop(i, None)
        if i in self.evictable:
            self.evictable.move_to_end(i)

    def demote(self, i: int) -> None:
        """Have an evictable block evicted before those that are not demoted, until it is used
        again.
        """
        if i in self.evictable:
            self.demoted[i] = None

    def pin(self, i: int, change: int) -> None:
        """`change` pins more, or fewer."""
        block = self.blocks[i]
        block.pins = max(0, block.pins + change)
        if block.pins:
            self.pinned.add(i)
        else:
            self.pinned.discard(i)

    # -- eviction ----------------------------------------------------------------------------------

    def num_evictable(self) -> int:
        """How many blocks are DEMOTED or EVICTABLE."""
        return len(self.evictable) - len(self.evictable.keys() & self.pinned)

    def evict(self, ids: Iterable[int]) -> list[tuple[int, int]]:
        """Free these DEMOTED or EVICTABLE blocks. Returns (group, block) of each."""
        evicted = list(ids)
        for i in evicted:
            self.num_evicted += 1
            self.blocks[i].cached_refs = 1
            self.uncache(i)
        return [(self.index, i) for i in evicted]

    def check(self, tables: Iterable[BlockTable]) -> None:
        """The invariant, given every live table of the group.

        Raises AssertionError with the figures.
        """
        name, tables = self.group.name, list(tables)
        refs = Counter(block for table in tables for block in table.ids)
        free = {i for start, end in self.free for i in range(start, end)}
        assert len(free) == self.free.count, (
            f"{name}: {len(free)} blocks in free runs != {self.free.count} counted"
        )
        for i, state in self.blocks.items():
            assert state.ref_count == refs[i], (
                f"{name} block {i}: ref_count {state.ref_count} != {refs[i]} tables"
            )
            is_held, is_cached = state.ref_count > 0, state.cached_refs > 0
            assert (i in free) == (not is_held and not is_cached), (
                f"{name} block {i}: free={i in free}, {state}"
            )
            assert (i in self.evictable) == (not is_held and is_cached), (
                f"{name} block {i}: {state}"
            )
        pinned = {i for i, state in self.blocks.items() if state.pins}
        assert self.pinned == pinned, f"{name}: {self.pinned} pinned != {pinned} with pins"
        demoted = set(self.demoted) - set(self.evictable)
        assert not demoted, f"{name}: demoted blocks {demoted} are not evictable"
        reserved = sum(t.reserved for t in tables)
        assert self.reserved == reserved, (
            f"{name}: {self.reserved} reserved != {reserved} in tables"
        )
        assert self.available >= 0, f"{name}: {self.free.count} free < {self.reserved} reserved"


class BlockTable:
    """ids[i] holds the tokens [256 * i, 256 * (i + 1)) of the sequence, or of its ring where the
    group is a window.

    `reserved` free blocks are set aside for this table; `capacity` is the most that it has ever
    held and reserved together.
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
        self._digest: int | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def reserve(self, count: int) -> None:
        self.reserved += count
        self.capacity = max(self.capacity, len(self) + self.reserved)

    def changed(self) -> None:
        self.version += 1
        self._runs = self._digest = None

    @property
    def digest(self) -> int:
        """A number of the ids, of 32 bits; computed when they have changed."""
        if self._digest is None:
            self._digest = crc32(array("q", self.ids).tobytes())
        return self._digest

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(first id, blocks) of each stretch of neighbouring blocks in one slab, in order of the
        sequence.
        """
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
