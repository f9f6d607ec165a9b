"""Caches of several parts, of chunks, and of layers without attention; lists of layer caches. Owned by the generation thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy, deepcopy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache

from ..errors import PoolExhaustedError
from ..mlx_lm_compat import BaseCache, saved_as
from ..spec import ChunkLayer
from .layer_caches import PooledKVCache
from .rows import View, tokens
from .sequence import SequenceBlocks, StandIn
from .state_caches import PooledArraysCache


@saved_as(CacheList)
class PooledCacheList(StandIn, CacheList):  # type: ignore[misc]
    """Stands in for CacheList: its parts are pooled caches of one sequence, or of one batch."""

    _stock = CacheList

    def __deepcopy__(self, memo: dict[int, Any]) -> PooledCacheList:
        return PooledCacheList(*(deepcopy(part, memo) for part in self.caches))

    def __copy__(self) -> PooledCacheList:
        return PooledCacheList(*(copy(part) for part in self.caches))

    def extract(self, idx: int) -> PooledCacheList:
        return PooledCacheList(*(part.extract(idx) for part in self.caches))

    @classmethod
    def join(cls, caches: list[Any]) -> PooledCacheList:
        return PooledCacheList(*batch_of(cache.caches for cache in caches))

    def member(self, idx: int) -> PooledCacheList:
        return PooledCacheList(*member_of(self.caches, idx))

    def begin_rows(self, counts: Sequence[int]) -> None:
        begin_rows(self.caches, counts)

    def commit_rows(self, kept: Sequence[int]) -> None:
        commit_rows(self.caches, kept)


@saved_as(ChunkedKVCache)
class PooledChunkedKVCache(PooledKVCache, ChunkedKVCache):  # type: ignore[misc]
    """Stands in for ChunkedKVCache: reads at most the last `chunk_size` tokens of those before a call, and what comes with it.

    All tokens stay in blocks, so that a prefix is resumed at any of them; what a state was assigned to lacks the first ones.
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
        start, views = self.start_position, []
        for keys, values in self.views():
            count = keys.shape[2]
            if start < count:
                views.append((tokens(keys, start), tokens(values, start)))
            start = max(0, start - count)
        return views

    def trim(self, n: int) -> int:
        n = int(ChunkedKVCache.trim(self, n))
        self.sequence.cut(self.place.group, self.size())
        return n

    def _position(self) -> tuple[int, ...]:
        return self.offset, self.chunk_size, self.start_position

    def _take(self, *state: Any) -> None:
        keys, values, offset, chunk_size, start = state
        if offset:
            self._write_over(keys, values, offset - start, start)
        self.offset, self.chunk_size, self.start_position = offset, chunk_size, start
        self.first_held = start
        self.sequence.cut(self.place.group, self.size())

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        raise NotImplementedError(
            "A model that cuts its own chunks reads one position from its cache. Its sequences run one at a time."
        )


@saved_as(KVCache)
class UnusedKVCache(KVCache):  # type: ignore[misc]
    """Stands in for a cache that mlx-lm makes for a layer without attention. It stays empty, alone and in a batch."""

    def __deepcopy__(self, memo: dict[int, Any]) -> UnusedKVCache:
        return UnusedKVCache()

    def __reduce__(self) -> tuple[Any, ...]:
        return KVCache, ()

    @classmethod
    def merge(cls, caches: list[Any]) -> UnusedBatch:
        return UnusedBatch()


class UnusedBatch(BaseCache):  # type: ignore[misc]
    """A batch of UnusedKVCaches."""

    def extract(self, idx: int) -> UnusedKVCache:
        return UnusedKVCache()

    def filter(self, *_: Any, **__: Any) -> None:
        """A batch of empty caches has no rows, and nothing to pad."""

    extend = prepare = finalize = begin_rows = commit_rows = filter

    def make_mask(self, *args: Any, **_: Any) -> Any:
        return "causal" if args and args[0] > 1 else None

    @property
    def state(self) -> list[mx.array]:
        return []

    def empty(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return 0


def batch_of(caches: Iterable[list[Any]]) -> list[Any]:
    """Batch caches of sequences whose own caches are given up for them: what merge() does, without its forks."""
    return [_join(list(layer)) for layer in zip(*caches, strict=True)]


def _join(layer: list[Any]) -> Any:
    cls = type(layer[0])
    return cls.join(layer) if hasattr(cls, "join") else cls.merge(layer)


def begin_rows(batch: Iterable[Any], counts: Sequence[int]) -> None:
    """Compute the next tokens of each sequence of a ragged batch by rows, counts[i] of sequence i, until commit_rows().

    The model is called with tokens [rows, 1] then. Raises PoolExhaustedError, and all caches are as they were.
    """
    begun: list[Any] = []
    try:
        for cache in batch:
            cache.begin_rows(counts)
            begun.append(cache)
    except PoolExhaustedError:
        commit_rows(begun, [0] * len(counts))
        raise


def commit_rows(batch: Iterable[Any], kept: Sequence[int]) -> None:
    """Keep the first kept[i] rows of sequence i, 0 or more, once everything that was computed from rows is evaluated.

    With zeros alone it is also what follows a forward that failed.
    """
    for cache in batch:
        cache.commit_rows(kept)


def member_of(batch: Iterable[Any], idx: int) -> list[Any]:
    """The caches of a sequence that leaves a batch for good: what extract() does, without its forks."""
    return [layer.member(idx) if hasattr(layer, "member") else layer.extract(idx) for layer in batch]


def leaves_of(caches: Iterable[Any]) -> list[Any]:
    """The caches of one sequence, each list replaced by its parts, in the order of spec.leaves."""
    leaves: list[Any] = []
    for cache in caches:
        leaves += leaves_of(cache.caches) if isinstance(cache, CacheList) else [cache]
    return leaves


def as_stock(caches: Iterable[Any]) -> list[Any]:
    """mlx-lm's own caches with the content of pooled ones, as its prompt-cache files take them."""
    return [_as_stock(cache) for cache in caches]


def _as_stock(cache: Any) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*as_stock(cache.caches))
    return KVCache() if isinstance(cache, UnusedKVCache) else type(cache).from_state(cache.state)


def sequence_of(caches: Iterable[Any]) -> SequenceBlocks | None:
    """The sequence that pooled caches belong to; None for mlx-lm's own.

    Raises ValueError for layer caches of several sequences: they were copied one by one, with something written between.
    """
    found = [getattr(leaf, "sequence", None) for leaf in leaves_of(caches) if not isinstance(leaf, UnusedKVCache)]
    if not found or any(sequence is None for sequence in found):
        return None
    if len({id(sequence) for sequence in found}) > 1:
        raise ValueError("These layer caches belong to several sequences. Copy all layer caches of a sequence at once.")
    return found[0]


def tokens_held(caches: Iterable[Any]) -> int:
    """How many tokens the caches of one sequence hold; 0 where none of them counts, as states do not."""
    return max((int(leaf.offset) for leaf in leaves_of(caches) if hasattr(leaf, "offset")), default=0)


def state_caches(caches: Iterable[Any]) -> dict[int, PooledArraysCache]:
    """The caches of state layers, by their place among the leaves."""
    return {i: leaf for i, leaf in enumerate(leaves_of(caches)) if isinstance(leaf, PooledArraysCache)}
