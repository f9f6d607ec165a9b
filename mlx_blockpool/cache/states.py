"""PooledArraysCache: the state of a sequence in one layer, and the batch of several. A state has no blocks: it is one whole.

Owned by the generation thread.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .sequence import Sequence


class PooledArraysCache(ArraysCache):  # type: ignore[misc]
    """Stands in for ArraysCache: `size` arrays that each step replaces. Knows the sequence that it belongs to."""

    def __init__(self, sequence: Sequence, size: int) -> None:
        super().__init__(size)
        self.cache: list[Any] = [None] * size
        self.sequence = sequence

    def __deepcopy__(self, memo: dict[int, Any]) -> PooledArraysCache:
        if id(self.sequence) not in memo:
            memo[id(self.sequence)] = self.sequence.fork()
        copy = PooledArraysCache(memo[id(self.sequence)], 0)
        copy.cache = list(self.cache)
        return copy

    @classmethod
    def from_state(cls, state: tuple[Any, ...]) -> ArraysCache:
        """mlx-lm's own cache with this content: a saved state has no pool to go back to."""
        return ArraysCache.from_state(state)

    @classmethod
    def merge(cls, caches: list[Any]) -> StateBatch:
        return StateBatch(caches)


class StateBatch(ArraysCache):  # type: ignore[misc]
    """The states of several sequences, one row each. Rows are decoded side by side and never padded."""

    def __init__(self, members: list[PooledArraysCache]) -> None:
        super().__init__(len(members[0].cache))
        self.cache: list[Any] = [None] * len(members[0].cache)
        self.members = list(members)
        for entry in range(len(self.cache)):
            rows = [member.cache[entry] for member in members]
            if len(rows) > 1 and any(row is None for row in rows):
                raise ValueError("Found a sequence without a state; needed a prompt computed of each before they go together.")
            self.cache[entry] = rows[0] if len(rows) == 1 else mx.concatenate([row for row in rows if row is not None])

    def __deepcopy__(self, memo: dict[int, Any]) -> StateBatch:
        # As PooledBatchCache: each sequence stays with one of the two.
        return StateBatch([self.extract(i) for i in range(len(self.members))])

    def extract(self, idx: int) -> PooledArraysCache:
        """The cache of one member itself, with its row."""
        member = self.members[idx]
        alone = len(self.members) == 1
        member.cache = [c if alone or c is None else mx.contiguous(c[idx : idx + 1]) for c in self.cache]
        return member

    def filter(self, batch_indices: Any) -> None:
        keep = [int(i) for i in batch_indices]
        self.members = [self.members[i] for i in keep]
        rows = mx.array(keep, mx.int32)
        self.cache = [None if c is None or not keep else c[rows] for c in self.cache]

    def extend(self, other: StateBatch) -> None:
        self.members = self.members + other.members
        self.cache = [mx.concatenate([mine, theirs]) for mine, theirs in zip(self.cache, other.cache, strict=True)]

    def prepare(self, lengths: Any = None, right_padding: Any = None, **_: Any) -> None:
        """Raises ValueError where a prompt is padded: a state would take the padding in."""
        if right_padding is not None and max(right_padding) > 0:
            raise ValueError("Found prompts of several lengths in one batch of states; needed one at a time.")

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.cache if c is not None)


def copied(arrays: list[Any]) -> list[Any]:
    """State arrays for a checkpoint, evaluated and in buffers of their own: one that is a view holds all that it is a view of."""
    copies = [None if array is None else _copy(array) for array in arrays]
    mx.eval([copy for copy in copies if copy is not None])
    return copies


def _copy(array: mx.array) -> mx.array:
    # An expression of its own: mx.contiguous() hands on a buffer of which an array is one contiguous part.
    return mx.where(mx.array(True), array, mx.zeros((), array.dtype))
