"""The blocks of one layer group and the state of each. Knows no budget and no other group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from ..spec import LayerGroup
from .runs import FreeRuns


@dataclass(slots=True)
class Block:
    """ref_count: tables that hold it. known: trie entries that can read it. frozen: tokens of it that they read.

    Free: neither held nor known. Evictable: known, not held. `pins` keep it from eviction.
    """

    ref_count: int = 0
    known: int = 0
    frozen: int = 0
    pins: int = 0


@dataclass(frozen=True)
class BlockCounts:
    """Blocks of one layer group; free + held + evictable = total. `reserved` of the free ones are promised."""

    group: str
    total: int
    free: int
    held: int
    evictable: int
    pinned: int
    reserved: int
    bytes_per_block: int


class GroupBlocks:
    """Every block of one layer group.

    stride: the most blocks that a slab can have. share: those of an ordinary slab. sharing: counts what may have made a
    block shared.
    """

    def __init__(self, group: LayerGroup, bytes_per_block: int, stride: int, share: int) -> None:
        self.group = group
        self.bytes_per_block = bytes_per_block
        self.stride = stride
        self.share = share
        self.blocks: dict[int, Block] = {}
        self.free = FreeRuns(stride)
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.slabs: dict[int, int] = {}
        self.reserved = 0
        self.sharing = 0

    @property
    def available(self) -> int:
        return self.free.count - self.reserved

    def counts(self) -> BlockCounts:
        pinned = sum(1 for b in list(self.blocks.values()) if b.pins)
        held = len(self.blocks) - self.free.count - len(self.evictable)
        return BlockCounts(
            self.group.name,
            len(self.blocks),
            self.free.count,
            held,
            len(self.evictable),
            pinned,
            self.reserved,
            self.bytes_per_block,
        )

    def add_slab(self, blocks: int) -> None:
        index = next(i for i in range(len(self.slabs) + 1) if i not in self.slabs)
        self.slabs[index] = blocks
        start = index * self.stride
        self.blocks.update((block, Block()) for block in range(start, start + blocks))
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

    def hold(self, ids: Iterable[int]) -> None:
        for i in ids:
            block = self.blocks[i]
            block.ref_count += 1
            self.sharing += 1
            self.evictable.pop(i, None)

    def release(self, ids: Iterable[int]) -> None:
        """Drop one reference each; the last one released is the most recently used."""
        for i in ids:
            block = self.blocks[i]
            assert block.ref_count > 0, f"block {i} of {self.group.name} released with ref_count {block.ref_count}"
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.known:
                    self.evictable[i] = None
                else:
                    self._set_free(i)

    def know(self, i: int, tokens: int) -> None:
        block = self.blocks[i]
        assert block.ref_count > 0 or block.known > 0, f"block {i} of {self.group.name} is free and cannot be known"
        self.sharing += 1
        block.known += 1
        block.frozen = max(block.frozen, tokens)

    def forget(self, i: int) -> None:
        block = self.blocks[i]
        assert block.known > 0, f"block {i} of {self.group.name} forgotten but not known"
        block.known -= 1
        if block.known == 0:
            block.frozen = block.pins = 0
            if block.ref_count == 0:
                del self.evictable[i]
                self._set_free(i)

    def victims(self) -> Iterable[int]:
        return (i for i in self.evictable if not self.blocks[i].pins)

    def can_drop(self, index: int, evicting: bool) -> bool:
        """Whether no block of this slab is in use, or with `evicting` none that is held or pinned."""
        states = (self.blocks[i] for i in self.slab_ids(index))
        return all(s.ref_count == 0 and (s.known == 0 or (evicting and not s.pins)) for s in states)

    def evict(self, i: int) -> None:
        block = self.blocks[i]
        block.known = 1
        self.forget(i)

    def _set_free(self, i: int) -> None:
        self.blocks[i].pins = 0
        self.free.add(i, i + 1)
