"""One sequence: its block tables, and reading and writing through them. Owned by the generation thread.

All layer caches of a sequence share one Sequence; the blocks go back to the pool when the last of them is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..spec import BLOCK_TOKENS, blocks_for
from .slabs import Place, Slabs, View


class Sequence:
    """Block tables of one sequence, one for each layer group."""

    def __init__(self, slabs: Slabs) -> None:
        self.slabs = slabs
        self.pool = slabs.pool
        self.tables = [self.pool.open_table(g) for g in range(len(slabs.spec.groups))]
        self._masks: dict[tuple[int, ...], Any] = {}

    def __del__(self) -> None:
        for table in getattr(self, "tables", ()):
            self.pool.give_back(table)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sequence:
        return self.fork()

    def fork(self) -> Sequence:
        """A second sequence on the same blocks; the first write of either into a shared block copies that block."""
        copy = Sequence.__new__(Sequence)
        copy.slabs, copy.pool, copy._masks = self.slabs, self.pool, {}
        copy.tables = [self.pool.fork(table) for table in self.tables]
        return copy

    def release(self) -> None:
        """Give all blocks back now. Its caches are empty shells afterwards."""
        for table in self.tables:
            self.pool.release(table)

    def write(self, place: Place, start: int, keys: mx.array, values: mx.array) -> None:
        """Write keys and values [1, kv_heads, n, dim] at tokens [start, start + n) of a table.

        Takes blocks as needed (PoolExhaustedError if there are none) and copies shared ones first.
        """
        table = self.tables[place.group]
        end = start + keys.shape[2]
        missing = blocks_for(end) - len(table)
        if missing > 0:
            self.pool.extend(table, missing)
        for index in range(start // BLOCK_TOKENS, blocks_for(end)):
            first = max(0, start - index * BLOCK_TOKENS)
            if self.pool.is_shared(table, index, first):
                self.own(place.group, index)
        done = 0
        for block, token, count in self._stretches(place.group, start, end):
            self.slabs.write(place, block, token, keys[..., done : done + count, :], values[..., done : done + count, :])
            done += count

    def read(self, place: Place, end: int) -> list[View]:
        """Views of tokens [0, end), one for each run."""
        return [self.slabs.read(place, block, token, count) for block, token, count in self._stretches(place.group, 0, end)]

    def mask(self, key: tuple[int, ...], make: Callable[[], Any]) -> Any:
        """A mask that several layers of one step share."""
        if key not in self._masks:
            if len(self._masks) > 8:
                self._masks.clear()
            self._masks[key] = make()
        return self._masks[key]

    def num_runs(self, group: int) -> int:
        return len(self.tables[group].runs)

    def own(self, group: int, index: int) -> None:
        """Copy-on-write of one block, with what all layers of the group have in it."""
        self.slabs.copy_block(group, *self.pool.own(self.tables[group], index))

    def make_own_run(self, group: int) -> None:
        """Copy all blocks of a group to neighbouring places of its own: one piece for attention that reads nothing else."""
        old = self.pool.replace(self.tables[group])
        for source, target in zip(old.ids, self.tables[group].ids, strict=True):
            self.slabs.copy_block(group, source, target)
        self.pool.release(old)

    def _stretches(self, group: int, start: int, end: int) -> list[tuple[int, int, int]]:
        """(block, token in it, tokens) of each stretch of [start, end) that lies in one piece."""
        stretches = []
        base = 0
        for block, blocks in self.tables[group].runs:
            first, last = max(start, base), min(end, base + blocks * BLOCK_TOKENS)
            if first < last:
                skip, token = divmod(first - base, BLOCK_TOKENS)
                stretches.append((block + skip, token, last - first))
            base += blocks * BLOCK_TOKENS
        return stretches


def join(views: list[View]) -> View:
    """One pair of arrays: the view itself where there is one, else a copy."""
    if len(views) == 1:
        return views[0]
    return mx.concatenate([k for k, _ in views], axis=2), mx.concatenate([v for _, v in views], axis=2)
