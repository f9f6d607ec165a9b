"""Layer caches other than KVCache and RotatingKVCache: chunks, quantised keys and values, states,
and layers without attention.

Owned by the generation thread.
"""

from __future__ import annotations

from typing import Any, NoReturn

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, QuantizedKVCache

from ..mlx_lm_compat import saved_as
from ..spec import ChunkLayer, Form
from .layer_caches import PooledKVCache
from .quantised import Quantised, Rows, View, arrays_of, as_rows, tokens
from .sequence import ALL_ALIKE, SequenceBlocks, SequenceCache, StandIn


@saved_as(ChunkedKVCache)
class PooledChunkedKVCache(PooledKVCache, ChunkedKVCache):  # type: ignore[misc]
    """Stands in for ChunkedKVCache: reads at most the last `chunk_size` tokens of those before a
    call, and what comes with it.

    All tokens stay in blocks, so that a prefix is resumed at any of them; what a state was assigned
    to lacks the first ones.
    """

    _stock = ChunkedKVCache

    def __init__(self, sequence: SequenceBlocks, layer: int) -> None:
        super().__init__(sequence, layer)
        assert isinstance(self.place.layer, ChunkLayer)
        self.chunk_size = self.place.layer.chunk_size
        self.start_position = 0

    def maybe_trim_front(self) -> None:
        self.start_position = max(self.start_position, self.offset - self.chunk_size)

    def attended(self) -> list[View]:
        start, views = self.start_position, list[View]()
        for view in self.views():
            count = view[0].shape[2]
            if start < count:
                views.append(tuple(tokens(rows, start) for rows in view))
            start = max(0, start - count)
        return views

    def trim(self, n: int) -> int:
        n = int(ChunkedKVCache.trim(self, n))
        self.sequence.cut(self.place.group, self.size())
        return n

    def _position(self) -> tuple[int, ...]:
        return self.offset, self.chunk_size, self.start_position

    def _take(self, *state: Any) -> None:
        *rows, offset, chunk_size, start = state
        if offset:
            self._write_over(rows, offset - start, start)
        self.offset, self.chunk_size, self.start_position = offset, chunk_size, start
        self.first_held = start
        self.sequence.cut(self.place.group, self.size())

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        raise NotImplementedError(
            "A model that cuts its own chunks reads one position from its cache. Its sequences "
            "run one at a time."
        )


@saved_as(KVCache)
class UnusedKVCache(KVCache):  # type: ignore[misc]
    """Stands in for a cache that mlx-lm makes for a layer without attention, and for a batch of
    such caches.

    It stays empty.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> UnusedKVCache:
        return UnusedKVCache()

    def __reduce__(self) -> tuple[Any, ...]:
        return KVCache, ()

    @classmethod
    def merge(cls, caches: list[Any]) -> UnusedKVCache:
        return UnusedKVCache()

    join = merge

    def extract(self, idx: int) -> UnusedKVCache:
        return UnusedKVCache()

    member = extract

    def filter(self, *_: Any, **__: Any) -> None:
        """A batch of empty caches has no rows, and nothing to pad."""

    extend = prepare = finalize = filter


@saved_as(QuantizedKVCache)
class PooledQuantizedKVCache(PooledKVCache, QuantizedKVCache):  # type: ignore[misc]
    """The keys and values of one layer of one sequence, both in one form. Bit-equal to a
    QuantizedKVCache from its first token.

    mlx-lm takes a cache with an attribute `bits` for this class, so that no other pooled cache may
    have one: windows, chunks, and keys and values in different bits are saved dequantised.
    """

    _stock = QuantizedKVCache

    def __init__(self, sequence: SequenceBlocks, layer: int) -> None:
        super().__init__(sequence, layer)
        form, other = self.forms
        assert form is not None, "keys that are not quantised"
        assert form == other, f"{form} != {other}: keys and values in several forms"
        self._form: Form = form

    @property
    def bits(self) -> int:
        return self._form.bits

    @property
    def group_size(self) -> int:
        return self._form.group_size

    def _position(self) -> tuple[int, ...]:
        return self.offset, self.group_size, self.bits

    def _take(self, *state: Any) -> None:
        """Takes words of the form of its blocks only: other words would have to be quantised
        again.
        """
        if len(state) != 5:
            self._refuse("this state is not quantised")
        keys, values, offset, group_size, bits = state
        if Form(bits, group_size) != self._form:
            self._refuse(f"this state is in {bits} bits, groups of {group_size}")
        super()._take(keys, values, offset)

    @staticmethod
    def _saved(rows: Rows) -> Any:
        return tuple(arrays_of(rows))

    def _rows(self, given: Any) -> Rows:
        if isinstance(given, Quantised):
            return given
        if not isinstance(given, tuple | list) or len(given) != 3:
            self._refuse(f"this {type(given).__name__} is not a tuple of words, scales and biases")
        return as_rows(list(given), self._form)

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(
            f"This layer is in {self.bits} bits, groups of {self.group_size}, and {why}. Call "
            f"to_quantized({self.group_size}, {self.bits}) on a cache that is not quantised."
        )


class StateCache(SequenceCache):
    """The cache of a state layer."""

    def saved_arrays(self) -> list[Any]:
        """What it holds; an array may be missing, and may be changed by the next step."""
        raise NotImplementedError

    def restore_arrays(self, arrays: list[Any]) -> None:
        """Hold what saved_arrays() has returned, and nothing else."""
        raise NotImplementedError


@saved_as(ArraysCache)
class PooledArraysCache(StateCache, ArraysCache):  # type: ignore[misc]
    """Stands in for ArraysCache: `size` arrays that each step replaces."""

    _stock = ArraysCache

    def __init__(self, sequence: SequenceBlocks, size: int, layer: int = 0) -> None:
        super().__init__(size)
        self.cache: list[Any] = [None] * size
        self.sequence = sequence
        self.layer = layer

    def saved_arrays(self) -> list[Any]:
        return self.cache

    def restore_arrays(self, arrays: list[Any]) -> None:
        self.cache = list(arrays)

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
        """The states of several sequences, which stay as they are; mlx-lm's own batch where some
        are not pooled.
        """
        if not all(isinstance(c, PooledArraysCache) for c in caches):
            return ArraysCache.merge(caches)
        if all(c.sequence.arena.capabilities.ragged for c in caches):
            return StateBatch([c.fork() for c in caches])
        # The other layers are in mlx-lm's padded batches, and nothing continues with these.
        return StateBatch([c._on(c.sequence.fork()) for c in caches])

    @classmethod
    def join(cls, caches: list[Any]) -> StateBatch:
        """merge() of caches of an attached model whose owner no longer uses them."""
        return StateBatch(caches)


@saved_as(ArraysCache)
class StateBatch(StandIn, ArraysCache):  # type: ignore[misc]
    """The states of several sequences, one row each.

    As in mlx-lm's own, a sequence without a state has zeros where others have one.
    """

    _stock = ArraysCache

    def __init__(self, members: list[PooledArraysCache]) -> None:
        super().__init__(len(members[0].cache))
        self.members = list(members)
        self._need_members()
        for member in members:
            if member.batch_size != 1:
                raise ValueError(
                    "A pooled cache holds one sequence, and this one has the states of "
                    f"{member.batch_size}. "
                    "Make one cache for each sequence and merge() them, as batch_generate does."
                )
        self.cache: list[Any] = [
            _rows([m.cache[entry] for m in members]) for entry in range(len(members[0].cache))
        ]
        for member in members:
            # Until member() or extract() returns its row, so that states are held once.
            member.cache = [None] * len(member.cache)

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

    @property
    def pads(self) -> bool:
        """True if the states leave out the padding of tokens on the right."""
        return all(member.sequence.arena.capabilities.pads_states for member in self.members)

    def extract(self, idx: int) -> PooledArraysCache:
        """A cache with the row of one member, which continues on its own."""
        return self._with_row(self.members[idx].fork(), idx)

    def member(self, idx: int) -> PooledArraysCache:
        """The cache of one member itself, with its row, for the owner of a sequence that leaves
        the batch.
        """
        return self._with_row(self.members[idx], idx)

    def _with_row(self, member: PooledArraysCache, idx: int) -> PooledArraysCache:
        alone = len(self.members) == 1
        member.cache = [
            c if alone or c is None else mx.contiguous(c[idx : idx + 1]) for c in self.cache
        ]
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
                f"A batch of pooled states cannot be extended by a {type(other).__name__}. "
                f"{ALL_ALIKE}"
            )
        super().extend(other)
        self.members = self.members + other.members

    def prepare(self, lengths: Any = None, right_padding: Any = None, **_: Any) -> None:
        """Raises ValueError if padding would reach the states of a model that does not leave it
        out.
        """
        padded = right_padding is not None and max(right_padding) > 0
        if padded and not self.pads:
            raise ValueError(
                "Prompts of several lengths in one batch are padded, and this model takes padding "
                "into its states. "
                "Compute them one at a time: prefill_batch_size=1."
            )
        super().prepare(lengths=lengths)

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.cache if c is not None)


def _rows(rows: list[Any]) -> mx.array | None:
    """One array of the rows [1, ..] of several sequences, zeros for those that have none; None
    if none has one.
    """
    found = next((row for row in rows if row is not None), None)
    if found is None or len(rows) == 1:
        return found
    return mx.concatenate([mx.zeros_like(found) if row is None else row for row in rows])
