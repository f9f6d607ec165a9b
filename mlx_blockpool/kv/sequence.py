"""SequenceBlocks: the block tables of one sequence, and reading and writing through them. Owned by the generation thread.

The engine's Sequence is a request that runs; SequenceBlocks is the memory behind its layer caches, which all share one. The
blocks go back to the pool when the last of these caches is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ..errors import ReleasedCacheError
from ..spec import BLOCK_TOKENS, blocks_for
from .arena import KVArena, Place
from .blocks import BlockTable
from .rows import Rows, View, joined, tokens
from .slab import Slab

# (slab, first token in it, tokens): a stretch of a sequence that lies in one piece.
SlabRun = tuple[Slab, int, int]


class SequenceBlocks:
    """Block tables of one sequence, one for each layer group.

    Where a step reads and writes is worked out by the first layer of a group and remembered for the others. `released_by`:
    what gave the blocks back, from when on every use raises ReleasedCacheError.
    """

    tables: list[BlockTable]

    def __init__(self, arena: KVArena) -> None:
        self._set_up(arena, [arena.pool.open_table(g) for g in range(len(arena.spec.groups))])

    def _set_up(self, arena: KVArena, tables: list[BlockTable]) -> None:
        self.arena = arena
        self.pool = arena.pool
        self.tables = tables
        self.state_bytes = 0
        self.released_by: str | None = None
        # Forks of what is in the blocks now; and of this one, if it is such a fork: the leaves that have a cache in it, and
        # whether it is as it was made.
        self._forks: list[weakref.ref[SequenceBlocks]] = []
        self._last_leaf = 0
        self._claimed: set[int] = set()
        self._is_new = True
        self._layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._masks: dict[tuple[int, ...], Any] = {}
        self._writes: dict[int, tuple[tuple[int, ...], list[SlabRun]]] = {}
        self._reads: dict[int, tuple[tuple[int, ...], list[SlabRun]]] = {}

    def __del__(self) -> None:
        if getattr(self, "released_by", "") is None:
            for table in self.tables:
                self.pool.release_deferred(table)
        if getattr(self, "state_bytes", 0):
            # Finalizers run on any thread.
            self.arena.release_states_deferred(self.state_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceBlocks:
        return self.fork()

    def fork(self) -> SequenceBlocks:
        """A second sequence on the same blocks; the first write of either into a shared block copies that block."""
        copy = SequenceBlocks.__new__(SequenceBlocks)
        copy._set_up(self.arena, [self.pool.fork(table) for table in self.tables])
        copy.count_states(self.state_bytes)
        return copy

    def fork_for(self, leaf: int) -> SequenceBlocks:
        """The fork that the layer cache of `leaf` continues in: that of the layers before it, unless one has been written since.

        mlx-lm merges, extracts and copies layer by layer; what it makes of one sequence in one go belongs together. A leaf
        before the last one begins another go.
        """
        if leaf < self._last_leaf:
            self._forks.clear()
        self._last_leaf = leaf
        for made in self._forks:
            fork = made()
            if fork is not None and fork.claim(leaf):
                return fork
        fork = self.fork()
        fork.claim(leaf)
        self._forks = [made for made in self._forks if made() is not None] + [weakref.ref(fork)]
        return fork

    def hand_over(self, group: int, heir: SequenceBlocks) -> None:
        """Pass the blocks of a group that are reserved for this sequence, or taken and still empty, on to its fork `heir`."""
        self.cut(group)
        self.pool.hand_over(self.tables[group], heir.tables[group])

    def claim(self, leaf: int) -> bool:
        """Claim the cache of `leaf` in this fork. Returns False if it has one, or if the fork was written to."""
        if leaf in self._claimed or not self._is_new:
            return False
        self._claimed.add(leaf)
        return True

    def add_layer(self, layer: Any) -> None:
        """A layer cache that reads these tables: they are not cut below what it needs."""
        self._layers.add(layer)

    def cut(self, group: int, size: int = 0) -> None:
        """Give back the whole blocks of a group after what its layers hold; `size`: what one of them does, in tokens."""
        self.need_blocks()
        if blocks_for(size) >= len(self.tables[group]):
            return
        length = blocks_for(max(layer.size() for layer in self._layers if layer.place.group == group))
        if length < len(self.tables[group]):
            self._is_new = False
            self.pool.cut(self.tables[group], length)

    def _changed(self) -> None:
        """Forks made before differ from this sequence now, and no further layer continues in it."""
        self._forks.clear()
        self._is_new = False

    def count_states(self, n_bytes: int) -> None:
        """Count its states with this many bytes from now on."""
        self.arena.count_states(n_bytes - self.state_bytes)
        self.state_bytes = n_bytes

    def release(self, released_by: str = "release()") -> None:
        """Give all blocks back now. Its caches raise ReleasedCacheError afterwards, which names `released_by`."""
        if self.released_by is not None:
            return
        self._changed()
        self._writes.clear()
        self._reads.clear()
        for table in self.tables:
            self.pool.release(table)
        self.count_states(0)
        self.released_by = released_by
        self.tables = _Released(released_by)

    def need_blocks(self) -> None:
        """Raises ReleasedCacheError once the blocks were given back."""
        if self.released_by is not None:
            raise ReleasedCacheError(self.released_by)

    def write(self, place: Place, start: int, keys: Rows, values: Rows) -> None:
        """Write keys and values [1, kv_heads, n, dim] at tokens [start, start + n) of a table.

        Takes blocks as needed (PoolExhaustedError if there are none) and copies shared ones first.
        """
        pieces = self.writable(place.group, start, start + keys.shape[2])
        if len(pieces) == 1:
            pieces[0][0].write(place.index, pieces[0][1], keys, values)
            return
        # Quantised once, not once a piece.
        keys, values = pieces[0][0].as_written(keys, values)
        done = 0
        for slab, first, count in pieces:
            stop = done + count
            slab.write(place.index, first, tokens(keys, done, stop), tokens(values, done, stop))
            done = stop

    def read(self, place: Place, end: int) -> list[View]:
        """Views of tokens [0, end), one for each run."""
        return [slab.read(place.index, first, count) for slab, first, count in self.slab_runs(place.group, end)]

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
        """How many blocks a write at tokens [start, end) of a table takes beyond those that are reserved for it."""
        table = self.tables[group]
        first, last = start // BLOCK_TOKENS, (end - 1) // BLOCK_TOKENS
        if last - first < table.reserved:
            return 0
        return max(0, self.num_taken(group, start, end) - table.reserved)

    def num_taken(self, group: int, start: int, end: int) -> int:
        """How many blocks a write at tokens [start, end) of a table takes, new ones and copies of shared ones."""
        table = self.tables[group]
        first, last = start // BLOCK_TOKENS, (end - 1) // BLOCK_TOKENS
        return sum(
            index >= len(table) or self.pool.is_shared(table, index, max(0, start - index * BLOCK_TOKENS))
            for index in range(first, last + 1)
        )

    def copy_on_write(self, group: int, index: int) -> None:
        """Replace a shared block by a copy of its own, in all layers of the group."""
        self.arena.copy_block(group, *self.pool.take_own(self.tables[group], index))

    def make_own_run(self, group: int) -> None:
        """Copy all blocks of a group to neighbouring places of its own: one piece for attention that reads nothing else."""
        old = self.pool.take_own_run(self.tables[group])
        for source, target in zip(old.ids, self.tables[group].ids, strict=True):
            self.arena.copy_block(group, source, target)
        self.pool.release(old)

    def writable(self, group: int, start: int, end: int) -> list[SlabRun]:
        """Where tokens [start, end) are to be written: blocks are taken as needed and shared ones copied."""
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
        self._writes[group] = ((start, end, table.version, self.pool.groups[group].share_epoch), pieces)
        return pieces

    def _make_room(self, group: int, blocks: int) -> None:
        """Evict for blocks that were not reserved, as a fork in one of mlx-lm's batches takes them."""
        missing = blocks - self.tables[group].reserved
        if missing > 0:
            self.arena.make_room({group: missing})

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


class _Released(list[BlockTable]):
    """In place of the tables of a sequence whose blocks were given back: every use of them raises."""

    def __init__(self, released_by: str) -> None:
        super().__init__()
        self._released_by = released_by

    def __getitem__(self, index: Any) -> NoReturn:
        raise ReleasedCacheError(self._released_by)

    def __iter__(self) -> Iterator[BlockTable]:
        raise ReleasedCacheError(self._released_by)

    def __len__(self) -> NoReturn:
        raise ReleasedCacheError(self._released_by)


class StandIn:
    """A cache in the place of one of mlx-lm's class `_stock`. A pool cannot be saved: saved and pickled it is mlx-lm's own."""

    _stock: Any
    state: Any

    @classmethod
    def from_state(cls, state: Any) -> Any:
        """mlx-lm's own cache with this content."""
        return cls._stock.from_state(state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._stock.from_state, (tuple(self.state),)


class SequenceCache(StandIn):
    """The cache of one leaf of a sequence, `layer`. Its copies are forks; those of all leaves together are one sequence."""

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
    """Keys and values in one piece: the view itself where there is one, else a copy."""
    if len(views) == 1:
        return views[0]
    return joined([keys for keys, _ in views], 2), joined([values for _, values in views], 2)
