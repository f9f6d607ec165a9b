"""PooledArraysCache: the state of a sequence in one layer, and the batch of several. A state has no blocks: it is one whole.

Owned by the generation thread.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ..mlx_lm_compat import saved_as
from .rows import own_copy
from .sequence import SequenceBlocks, SequenceCache, StandIn


@saved_as(ArraysCache)
class PooledArraysCache(SequenceCache, ArraysCache):  # type: ignore[misc]
    """Stands in for ArraysCache: `size` arrays that each step replaces."""

    _stock = ArraysCache

    def __init__(self, sequence: SequenceBlocks, size: int, layer: int = 0) -> None:
        super().__init__(size)
        self.cache: list[Any] = [None] * size
        self.sequence = sequence
        self.layer = layer

    def __getitem__(self, idx: int) -> Any:
        self.sequence.need_blocks()
        return self.cache[idx]

    def __setitem__(self, idx: int, value: Any) -> None:
        self.sequence.need_blocks()
        self.cache[idx] = value

    def _on(self, sequence: SequenceBlocks) -> Any:
        copy = super()._on(sequence)
        copy.cache = list(self.cache)
        return copy

    @property
    def state(self) -> tuple[Any, ...]:
        self.sequence.need_blocks()
        return list(self.cache), self.left_padding, self.lengths

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.sequence.need_blocks()
        cache, self.left_padding, self.lengths = state
        self.cache = list(cache)

    @classmethod
    def merge(cls, caches: list[Any]) -> ArraysCache:
        """The states of several sequences, which stay as they are; mlx-lm's own batch where some are not pooled."""
        if not all(isinstance(c, PooledArraysCache) for c in caches):
            return ArraysCache.merge(caches)
        if all(c.sequence.arena.ragged for c in caches):
            return StateBatch([c.fork() for c in caches])
        # The other layers are in mlx-lm's padded batches, and nothing continues with these.
        return StateBatch([c._on(c.sequence.fork()) for c in caches])

    @classmethod
    def join(cls, caches: list[Any]) -> ArraysCache:
        """merge() of caches that their owner gives up; mlx-lm's own batch beside mlx-lm's padded ones, which hold no blocks."""
        return StateBatch(caches) if all(c.sequence.arena.ragged for c in caches) else ArraysCache.merge(caches)


@saved_as(ArraysCache)
class StateBatch(StandIn, ArraysCache):  # type: ignore[misc]
    """The states of several sequences, one row each.

    As in mlx-lm's own, a sequence without a state has zeros beside those that have one.
    """

    _stock = ArraysCache

    def __init__(self, members: list[PooledArraysCache]) -> None:
        super().__init__(len(members[0].cache))
        self.members = list(members)
        self._need_members()
        for member in members:
            if member.batch_size != 1:
                raise ValueError(
                    f"A pooled cache holds one sequence, and this one has the states of {member.batch_size}. "
                    "Make one cache for each sequence and merge() them, as batch_generate does."
                )
        self.cache: list[Any] = [_rows([m.cache[entry] for m in members]) for entry in range(len(members[0].cache))]

    def __deepcopy__(self, memo: dict[int, Any]) -> StateBatch:
        copy = StateBatch.__new__(StateBatch)
        copy.__dict__.update(self.__dict__)
        copy.cache = list(self.cache)
        copy.members = [member.__deepcopy__(memo) for member in self.members]
        return copy

    def __copy__(self) -> StateBatch:
        return self.__deepcopy__({})

    def __getitem__(self, idx: int) -> Any:
        self._need_members()
        return self.cache[idx]

    def __setitem__(self, idx: int, value: Any) -> None:
        self._need_members()
        self.cache[idx] = value

    def _need_members(self) -> None:
        for member in self.members:
            member.sequence.need_blocks()

    @property
    def batch_size(self) -> int:
        return len(self.members)

    def extract(self, idx: int) -> PooledArraysCache:
        """A cache with the row of one member, which continues on its own."""
        return self._with_row(self.members[idx].fork(), idx)

    def member(self, idx: int) -> PooledArraysCache:
        """The cache of one member itself, with its row, for the owner of a sequence that leaves the batch."""
        return self._with_row(self.members[idx], idx)

    def _with_row(self, member: PooledArraysCache, idx: int) -> PooledArraysCache:
        alone = len(self.members) == 1
        member.cache = [c if alone or c is None else mx.contiguous(c[idx : idx + 1]) for c in self.cache]
        return member

    def filter(self, batch_indices: Any) -> None:
        keep = [int(i) for i in batch_indices]
        self.members = [self.members[i] for i in keep]
        if keep:
            super().filter(mx.array(keep, mx.int32))
        else:
            self.cache = [None] * len(self.cache)

    def extend(self, other: Any) -> None:
        if not isinstance(other, StateBatch):
            raise ValueError(
                f"A batch of pooled states cannot take in a {type(other).__name__}. Insert sequences whose caches are all from "
                "mlx_blockpool.make_prompt_cache(), or all from mlx-lm's."
            )
        super().extend(other)
        self.members = self.members + other.members

    def prepare(self, lengths: Any = None, right_padding: Any = None, **_: Any) -> None:
        """Raises ValueError where padding would reach the states of a model that does not leave it out."""
        padded = right_padding is not None and max(right_padding) > 0
        if padded and not all(member.sequence.arena.pads_states for member in self.members):
            raise ValueError(
                "Prompts of several lengths in one batch are padded, and this model takes padding into its states. "
                "Compute them one at a time: prefill_batch_size=1."
            )
        super().prepare(lengths=lengths)

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.cache if c is not None)


def _rows(rows: list[Any]) -> mx.array | None:
    """One array of the rows [1, ..] of several sequences, zeros for those that have none; None: none has one."""
    found = next((row for row in rows if row is not None), None)
    if found is None or len(rows) == 1:
        return found
    return mx.concatenate([mx.zeros_like(found) if row is None else row for row in rows])


def copied(arrays: list[Any]) -> list[Any]:
    """State arrays for a checkpoint, evaluated and in buffers of their own: one that is a view holds all that it is a view of."""
    copies = [None if array is None else own_copy(array) for array in arrays]
    mx.eval([copy for copy in copies if copy is not None])
    return copies
