"""Prompt caches, the lists of layer caches that mlx-lm calls its models with: made, joined to
batches, filled from mlx-lm's own.

Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from itertools import count
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..errors import PoolExhaustedError
from ..mlx_lm_compat import saved_as
from ..spec import ChunkLayer, CompositeLayer, LayerSpec, StateLayer, WindowLayer
from .arena import KVArena
from .batch_cache import PooledBatchCache
from .layer_caches import PooledKVCache, PooledLayer, PooledRotatingKVCache
from .other_caches import (
    PooledArraysCache,
    PooledChunkedKVCache,
    PooledQuantizedKVCache,
    StateCache,
    UnusedKVCache,
)
from .own_states import OwnState, own_state
from .sequence import SequenceBlocks, StandIn

# Of the classes that a pooled cache extends, the most special one first.
_STOCK = (QuantizedKVCache, ChunkedKVCache, RotatingKVCache, KVCache, ArraysCache)


def pooled_caches(arena: KVArena, sequence: SequenceBlocks | None = None) -> list[Any]:
    """Layer caches of one sequence, one for each that mlx-lm makes; empty, without `sequence` a
    new one.
    """
    sequence = sequence or SequenceBlocks(arena)
    leaves = count()
    return [_pooled(sequence, layer, leaves) for layer in arena.spec.layers]


def make_prompt_cache(model: Any, arena: KVArena, max_kv_size: int | None = None) -> list[Any]:
    """In place of mlx-lm's make_prompt_cache: one sequence in the pool `arena`, which was opened
    for this model.

    Raises ValueError unless the pool was opened with the same `max_kv_size`; None takes the pool's.
    As in mlx-lm, a model that makes its own caches does without it.
    """
    if max_kv_size not in (None, arena.spec.max_kv_size) and not hasattr(model, "make_cache"):
        raise ValueError(
            f"This pool was opened with max_kv_size={arena.spec.max_kv_size}, which its blocks "
            "are laid out for; caches of "
            f"{max_kv_size} tokens need another. Open one with open_pool(model, "
            f"max_kv_size={max_kv_size})."
        )
    return pooled_caches(arena)


def _pooled(sequence: SequenceBlocks, layer: LayerSpec, leaves: Iterator[int]) -> Any:
    """The cache of one layer; `leaves` counts the caches made."""
    if isinstance(layer, CompositeLayer):
        return PooledCacheList(*(_pooled(sequence, part, leaves) for part in layer.parts))
    leaf = next(leaves)
    if isinstance(layer, StateLayer):
        if layer.own is not None:
            return own_state(sequence, leaf, layer.own)
        return PooledArraysCache(sequence, len(layer.arrays), leaf)
    if leaf not in sequence.arena.places:
        return UnusedKVCache()
    if isinstance(layer, ChunkLayer):
        return PooledChunkedKVCache(sequence, leaf)
    if isinstance(layer, WindowLayer):
        return PooledRotatingKVCache(sequence, leaf)
    keys, *others = sequence.arena.spec.forms(layer)
    # mlx-lm's class has keys and values alone, both in one form.
    return (PooledQuantizedKVCache if keys is not None and others == [keys] else PooledKVCache)(
        sequence, leaf
    )


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


def batch_of(caches: Iterable[list[Any]]) -> list[Any]:
    """Batch caches of sequences of an attached model whose own caches are no longer used: what
    merge() does, without its forks.
    """
    return [type(layer[0]).join(list(layer)) for layer in zip(*caches, strict=True)]


def begin_rows(batch: Iterable[Any], counts: Sequence[int]) -> None:
    """Compute the next tokens of each sequence of a ragged batch by rows, counts[i] of sequence i,
    until commit_rows().

    The model is called with tokens [rows, 1] then. Raises PoolExhaustedError, and all caches are as
    they were.
    """
    begun: list[PooledBatchCache] = []
    try:
        for cache in _in_blocks(batch):
            cache.begin_rows(counts)
            begun.append(cache)
    except PoolExhaustedError:
        commit_rows(begun, [0] * len(counts))
        raise


def commit_rows(batch: Iterable[Any], kept: Sequence[int]) -> None:
    """Keep the first kept[i] rows of sequence i, 0 or more, once everything that was computed from
    rows is evaluated.

    With zeros alone it is also what follows a forward that failed.
    """
    for cache in _in_blocks(batch):
        cache.commit_rows(kept)


def begin_chunks(
    batch: Iterable[Any], chunks: Iterable[Iterable[Any]], counts: Sequence[int]
) -> None:
    """Compute the next counts[i] tokens of chunks[i], a batch of one sequence in prefill, in the
    next pass of a ragged batch, until end_chunks().

    The model is called with tokens [rows, 1] then, those of the chunks after those of the batch,
    whose rows have begun.
    """
    for cache, *own in zip(_in_blocks(batch), *map(_in_blocks, chunks), strict=True):
        cache.begin_chunks(own, counts)


def end_chunks(batch: Iterable[Any]) -> None:
    for cache in _in_blocks(batch):
        cache.end_chunks()


def _in_blocks(batch: Iterable[Any]) -> list[PooledBatchCache]:
    """The caches of a ragged batch without those of layers without attention."""
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, PooledBatchCache)]


def member_of(batch: Iterable[Any], idx: int) -> list[Any]:
    """The caches of a sequence that leaves a batch for good: what extract() does, without its
    forks.
    """
    return [layer.member(idx) for layer in batch]


def leaves_of(caches: Iterable[Any]) -> list[Any]:
    """The caches of one sequence, each list replaced by its parts, in the order of spec.leaves."""
    leaves: list[Any] = []
    for cache in caches:
        leaves += leaves_of(cache.caches) if isinstance(cache, CacheList) else [cache]
    return leaves


def as_stock(caches: Iterable[Any]) -> list[Any]:
    """mlx-lm's own caches with the content of pooled ones, as its prompt-cache files take them.

    Raises ValueError for a layer with further arrays or a state of another class, which they have
    no place for.
    """
    return [_as_stock(cache) for cache in caches]


def _as_stock(cache: Any) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*as_stock(cache.caches))
    if isinstance(cache, PooledLayer) and cache.place.layer.more and cache._stock in _STOCK:
        names = ", ".join(array.name for array in cache.place.layer.more)
        raise ValueError(f"mlx-lm's {cache._stock.__name__} has no place for {names}.")
    if isinstance(cache, OwnState):
        kind = type(cache).__bases__[1].__name__
        raise ValueError(f"mlx-lm's prompt-cache files have no place for states of {kind}.")
    return KVCache() if isinstance(cache, UnusedKVCache) else type(cache).from_state(cache.state)


def sequence_of(caches: Iterable[Any]) -> SequenceBlocks | None:
    """The sequence that pooled caches belong to; None for mlx-lm's own.

    Raises ValueError for layer caches of several sequences: they were copied one by one, with
    something written between.
    """
    found = [
        getattr(leaf, "sequence", None)
        for leaf in leaves_of(caches)
        if not isinstance(leaf, UnusedKVCache)
    ]
    if not found or any(sequence is None for sequence in found):
        return None
    if len({id(sequence) for sequence in found}) > 1:
        raise ValueError(
            "These layer caches belong to several sequences. Copy all layer caches of a sequence "
            "at once."
        )
    return found[0]


def tokens_held(caches: Iterable[Any]) -> int:
    """How many tokens the caches of one sequence hold; 0 where none of them counts, as states do
    not.
    """
    return max(
        (int(leaf.offset) for leaf in leaves_of(caches) if hasattr(leaf, "offset")), default=0
    )


def state_caches(caches: Iterable[Any]) -> dict[int, StateCache]:
    """The caches of state layers, by their place among the leaves."""
    return {i: leaf for i, leaf in enumerate(leaves_of(caches)) if isinstance(leaf, StateCache)}


def resumed(
    sequence: SequenceBlocks,
    hit: int,
    rings: Mapping[int, int],
    states: Mapping[int, Sequence[Any]],
) -> list[Any]:
    """Caches that hold the first `hit` tokens of what is in the blocks of a sequence.

    rings: where in the ring of each window group the next token goes. states: the content of each
    state layer, by leaf.
    """
    caches = pooled_caches(sequence.arena, sequence)
    for cache in leaves_of(caches):
        if isinstance(cache, PooledLayer):
            cache.offset = hit
        if isinstance(cache, PooledRotatingKVCache) and cache.place.group in rings:
            cache.set_ring_index(rings[cache.place.group])
    for leaf, state in state_caches(caches).items():
        if states:
            state.restore_arrays(list(states[leaf]))
    return caches


def from_stock(caches: list[Any], arena: KVArena) -> list[Any]:
    """Pooled caches with the content of mlx-lm's own, as load_prompt_cache reads them, or of
    another pool's.

    Raises ValueError for caches that do not fit the pool's model, and PoolExhaustedError if the
    pool cannot hold them.
    """
    return take_over(SequenceBlocks(arena), caches)


def blocks_of(arena: KVArena, caches: Iterable[Any]) -> list[int]:
    """How many blocks of each layer group a sequence has with the content of these caches."""
    held = tokens_held(caches)
    return [arena.spec.blocks(held, group.layer) for group in arena.spec.groups]


def take_over(sequence: SequenceBlocks, theirs: list[Any]) -> list[Any]:
    """Pooled caches of a new sequence with the content of `theirs`.

    Raises ValueError for caches that do not fit.
    """
    arena, pooled = sequence.arena, pooled_caches(sequence.arena, sequence)
    ours, leaves = leaves_of(pooled), leaves_of(theirs)
    if len(leaves) != len(ours):
        raise ValueError(
            f"These are {len(leaves)} layer caches; {arena.spec.model_id} has {len(ours)}."
        )
    for layer, (mine, their) in enumerate(zip(ours, leaves, strict=True)):
        if isinstance(mine, OwnState):
            mine.take(their)
            continue
        stock = next(cls for cls in _STOCK if isinstance(mine, cls))
        # Next to the padded keys of a batch, the states of its members are pooled ones.
        if type(their) not in (stock, type(mine)):
            hint = (
                f" Call to_quantized({mine.group_size}, {mine.bits}) on it."
                if stock is QuantizedKVCache
                else ""
            )
            found = f"Cache {layer} is a {type(their).__name__}"
            raise ValueError(f"{found}; {arena.spec.model_id} has a {stock.__name__} there.{hint}")
        if stock is ArraysCache and (len(their.cache) != len(mine.cache) or their.batch_size > 1):
            found = f"Cache {layer} has {len(their.cache)} states of {their.batch_size} sequences"
            raise ValueError(f"{found}; the pool has {len(mine.cache)} of one.")
        if not isinstance(mine, UnusedKVCache):
            mine.state = _given(mine, their)
        if isinstance(mine, PooledLayer):
            mx.eval(mine.state)
    return pooled


def _given(mine: Any, their: Any) -> Any:
    """The state that a leaf takes over; of another pool the words, which quantised again would
    be others.
    """
    own = (
        isinstance(mine, PooledLayer)
        and isinstance(their, PooledLayer)
        and their.forms == mine.forms
    )
    return their.held() if own else their.state
