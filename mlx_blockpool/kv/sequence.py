"""SequenceBlocks: the block tables of one sequence, and reading and writing through them. Owned by
the generation thread.

The engine's Sequence is a request that runs; SequenceBlocks is the memory of its layer caches,
which all share one. The blocks are released when the last of these caches is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..errors import ReleasedCacheError
from ..spec import BLOCK_TOKENS, blocks_for
from .arena import KVArena, Place
from .blocks import BlockTable
from .quantised import Rows, View, joined, tokens
from .slab import SlabRun

# What to do where pooled caches and mlx-lm's meet in one batch.
ALL_ALIKE = (
    "Insert sequences whose caches are all from mlx_blockpool.make_prompt_cache(), or all from "
    "mlx-lm's."
)


class SequenceBlocks:
    """Block tables of one sequence, one for each layer group.

    Where a step reads and writes is computed by the first layer of a group and remembered for the
    others.

    state_bytes: what its states count with. released_by: what released the blocks, after which
    every use raises ReleasedCacheError.
    """

    tables: list[BlockTable]

    def __init__(self, arena: KVArena, tables: list[BlockTable] | None = None) -> None:
        self.arena = arena
        self.pool = arena.pool
        self.tables = (
            [arena.pool.open_table(g) for g in range(len(arena.spec.groups))]
            if tables is None
            else tables
        )
        self.state_bytes = 0
        self.released_by: str | None = None
        arena.sequences.add(self)
        # Forks of what is in the blocks now; and of this one, if it is such a fork: the last leaf
        # that has a cache in it, and whether it is as it was made.
        self._forks: list[weakref.ref[SequenceBlocks]] = []
        self._last_leaf = -1
        self._is_new = True
        self._layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._masks: dict[tuple[int, ...], Any] = {}
        self._writes: dict[int, tuple[tuple[int, ...], list[SlabRun]]] = {}
        self._reads: dict[int, tuple[tuple[int, ...], list[SlabRun]]] = {}

    def __del__(self) -> None:
        if getattr(self, "released_by", "") is None:
            for table in self.tables:
                self.pool.release_deferred(table)

    def __getattr__(self, name: str) -> Any:
        # A released sequence has no tables. An attribute that is there does not come here, so that
        # steps do not pay for this.
        if name == "tables":
            self.need_blocks()
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def fork(self) -> SequenceBlocks:
        """A second sequence on the same blocks; the first write of either into a shared block
        copies that block.
        """
        copy = SequenceBlocks(self.arena, [self.pool.fork(table) for table in self.tables])
        copy.state_bytes = self.state_bytes
        return copy

    def fork_for(self, leaf: int) -> SequenceBlocks:
        """The fork that the layer cache of `leaf` continues in: that of the layers before it,
        unless one has been written since.

        mlx-lm merges, extracts and copies layer by layer; what it makes of one sequence in one pass
        belongs together.
        """
        forks = [fork for made in self._forks if (fork := made()) is not None]
        found = next((fork for fork in forks if fork.claim(leaf)), None)
        if found is None:
            found = self.fork()
            found._last_leaf = leaf
            forks.append(found)
        self._forks = list(map(weakref.ref, forks))
        return found

    def claim(self, leaf: int) -> bool:
        """Whether this fork is not written yet and has no layer cache from `leaf` on: that of
        `leaf` continues in it then.
        """
        if not self._is_new or self._last_leaf >= leaf:
            return False
        self._last_leaf = leaf
        return True

    def hand_over(self, group: int, heir: SequenceBlocks) -> None:
        """Pass the blocks of a group that are reserved for this sequence, or taken and still
        empty, on to its fork `heir`.
        """
        self.cut(group)
        self.pool.hand_over(self.tables[group], heir.tables[group])

    def add_layer(self, layer: Any) -> None:
        """A layer cache that reads these tables: they are not cut below what it needs."""
        self._layers.add(layer)

    def cut(self, group: int, size: int = 0) -> None:
        """Release the whole blocks of a group after what its layers hold. size: the tokens that
        one of them holds.
        """
        self.need_blocks()
        if blocks_for(size) >= len(self.tables[group]):
            return
        length = blocks_for(
            max(layer.size() for layer in self._layers if layer.place.group == group)
        )
        if length < len(self.tables[group]):
            self._is_new = False
            self.pool.cut(self.tables[group], length)

    def _changed(self) -> None:
        """Forks made before differ from this sequence now, and no further layer continues in it."""
        self._forks.clear()
        self._is_new = False

    def release(self, released_by: str = "release()") -> None:
        """Release all blocks now.

        Its caches raise ReleasedCacheError afterwards, which names `released_by`.
        """
        if self.released_by is not None:
            return
        self._changed()
        self._writes.clear()
        self._reads.clear()
        for table in self.tables:
            self.pool.release(table)
        self.arena.settle()
        self.state_bytes = 0
        self.released_by = released_by
        del self.tables

    def need_blocks(self) -> None:
        """Raises ReleasedCacheError after the blocks were released."""
        if self.released_by is not None:
            raise ReleasedCacheError(self.released_by)

    def write(self, place: Place, start: int, *rows: Rows) -> None:
        """Write rows [1, kv_heads, n, dim] of each array of a layer at tokens [start, start + n) of
        a table.

        Takes blocks as needed (PoolExhaustedError if there are none) and copies shared ones first.
        """
        pieces = self.writable(place.group, start, start + rows[0].shape[2])
        if len(pieces) == 1:
            pieces[0][0].write(place.index, pieces[0][1], *rows)
            return
        # Quantised once, not once a piece.
        rows, done = pieces[0][0].as_written(*rows), 0
        for slab, first, count in pieces:
            slab.write(place.index, first, *(tokens(given, done, done + count) for given in rows))
            done += count

    def read(self, place: Place, end: int) -> list[View]:
        """Views of tokens [0, end), one for each run."""
        return [
            slab.read(place.index, first, count)
            for slab, first, count in self.slab_runs(place.group, end)
        ]

    def slab_runs(self, group: int, end: int) -> list[SlabRun]:
        """Where tokens [0, end) lie: one entry for each run of neighbouring blocks."""
        key = (end, self.tables[group].version)
        if group not in self._reads or self._reads[group][0] != key:
            self._reads[group] = (key, self._locate(group, 0, end))
        return self._reads[group][1]

    def mask(self, key: tuple[int, ...], make: Callable[[], Any]) -> Any:
        """A mask that several layers of one step share."""
        if key not in self._masks:
            if len(self._masks) > 8:
                self._masks.clear()
            self._masks[key] = make()
        return self._masks[key]

    def missing_blocks(self, group: int, start: int, end: int) -> int:
        """How many blocks a write at tokens [start, end) of a table takes beyond those that are
        reserved for it.
        """
        table = self.tables[group]
        first, last = start // BLOCK_TOKENS, (end - 1) // BLOCK_TOKENS
        if last - first < table.reserved:
            return 0
        return max(0, self.num_taken(group, start, end) - table.reserved)

    def num_taken(self, group: int, start: int, end: int) -> int:
        """How many blocks a write at tokens [start, end) of a table takes, new ones and copies
        of shared ones.
        """
        table = self.tables[group]
        first, last = start // BLOCK_TOKENS, (end - 1) // BLOCK_TOKENS
        return sum(
            index >= len(table)
            or self.pool.is_shared(table, index, max(0, start - index * BLOCK_TOKENS))
            for index in range(first, last + 1)
        )

    def copy_on_write(self, group: int, index: int) -> None:
        """Replace a shared block by a copy, in all layers of the group."""
        self.arena.copy_block(group, *self.pool.take_own(self.tables[group], index))

    def make_own_run(self, group: int) -> None:
        """Copy all blocks of a group to neighbouring places, in one piece for attention that
        cannot read several.
        """
        old = self.pool.take_own_run(self.tables[group])
        for source, target in zip(old.ids, self.tables[group].ids, strict=True):
            self.arena.copy_block(group, source, target)
        self.pool.release(old)

    def writable(self, group: int, start: int, end: int) -> list[SlabRun]:
        """Where tokens [start, end) are to be written: blocks are taken as needed and shared
        ones copied.
        """
        table = self.tables[group]
        key = (start, end, table.version, self.pool.groups[group].share_epoch)
        if group in self._writes and self._writes[group][0] == key:
            return self._writes[group][1]
        self._changed()
        missing = blocks_for(end) - len(table)
        if missing > 0:
            self._make_room(group, missing)
            self.pool.extend(table, missing)
        for index in range(start // BLOCK_TOKENS, blocks_for(end)):
            if self.pool.is_shared(table, index, max(0, start - index * BLOCK_TOKENS)):
                self._make_room(group, 1)
                self.copy_on_write(group, index)
        pieces = self._locate(group, start, end)
        self._writes[group] = (
            (start, end, table.version, self.pool.groups[group].share_epoch),
            pieces,
        )
        return pieces

    def _make_room(self, group: int, blocks: int) -> None:
        """Evict for blocks that were not reserved, as a fork in one of mlx-lm's batches takes
        them.
        """
        missing = blocks - self.tables[group].reserved
        if missing > 0:
            self.arena.evict_for({group: missing})

    def _locate(self, group: int, start: int, end: int) -> list[SlabRun]:
        pieces = []
        base = 0
        for block, blocks in self.tables[group].runs:
            first, last = max(start, base), min(end, base + blocks * BLOCK_TOKENS)
            if first < last:
                slab, place = self.arena.locate(group, block)
                pieces.append((slab, place + first - base, last - first))
            base += blocks * BLOCK_TOKENS
        return pieces


class StandIn:
    """Base of pooled caches.

    Pickles and saves as the mlx-lm class `_stock`, as a pool cannot be saved.
    """

    _stock: Any
    state: Any

    @classmethod
    def from_state(cls, state: Any) -> Any:
        """mlx-lm's own cache with this content."""
        return cls._stock.from_state(state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._stock.from_state, (tuple(self.state),)


class SequenceCache(StandIn):
    """The cache of one leaf of a sequence, `layer`.

    Its copies are forks; those of all leaves together are one sequence.
    """

    sequence: SequenceBlocks
    layer: int

    def fork(self) -> Any:
        """A second cache with this content, which continues on its own."""
        return self._on(self.sequence.fork_for(self.layer))

    __copy__ = fork

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """fork(), in one sequence with all layers that a deepcopy() with this `memo` copies."""
        fork: SequenceBlocks | None = memo.get(id(self.sequence))
        if fork is None or not fork.claim(self.layer):
            fork = memo[id(self.sequence)] = self.sequence.fork_for(self.layer)
        return self._on(fork)

    def _on(self, sequence: SequenceBlocks) -> Any:
        copy = self.__class__.__new__(self.__class__)
        copy.__dict__.update(self.__dict__)
        copy.sequence = sequence
        return copy


def join(views: list[View]) -> View:
    """The rows of several runs in one piece: the view itself if there is one, else a copy."""
    return (
        views[0] if len(views) == 1 else tuple(joined(rows, 2) for rows in zip(*views, strict=True))
    )
