"""mlx-lm's caches of one sequence on their way into the pool, a layer at a time. Owned by the generation thread."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from ..kv.arena import KVArena
from ..kv.factory import pooled_caches
from ..kv.layer_caches import PooledLayer
from ..kv.parts import leaves_of
from ..kv.sequence import SequenceBlocks
from ..kv.state_caches import PooledArraysCache
from .admission import Admission

# Of what a pooled cache stands in for, the most special class first.
_STOCK = (ChunkedKVCache, RotatingKVCache, KVCache, ArraysCache)


class Intake:
    """Pooled caches `pooled` that take over what `theirs` hold, leaf by leaf; room for it is reserved for `sequence`."""

    def __init__(self, arena: KVArena, sequence: SequenceBlocks, theirs: list[Any]) -> None:
        self.sequence = sequence
        self.pooled = pooled_caches(arena, sequence)
        self._leaves = list(zip(leaves_of(self.pooled), leaves_of(theirs), strict=True))[::-1]

    def advance(self) -> bool:
        """Take over one leaf; the original may be freed afterwards. Returns whether there are more."""
        if self._leaves:
            mine, their = self._leaves.pop()
            if isinstance(mine, PooledArraysCache):
                mine.cache = list(their.cache)
            elif isinstance(mine, PooledLayer):
                mine.state = their.state
                mx.eval(mine.state)
        return bool(self._leaves)


def why_not(arena: KVArena, theirs: list[Any]) -> str | None:
    """Why the pool cannot take over these caches, or None."""
    mine = leaves_of(pooled_caches(arena))
    leaves = leaves_of(theirs)
    if len(mine) != len(leaves):
        return f"found {len(leaves)} layer caches; the model of this pool has {len(mine)}."
    reasons = (_why_not_leaf(arena, own, their) for own, their in zip(mine, leaves, strict=True))
    return next((reason for reason in reasons if reason is not None), None)


def _why_not_leaf(arena: KVArena, mine: Any, their: Any) -> str | None:
    stock = next(cls for cls in _STOCK if isinstance(mine, cls))
    # Beside the padded keys of a batch, the states of its members are pooled ones.
    if type(their) not in (stock, type(mine)):
        return f"found a {type(their).__name__}; needed a {stock.__name__}."
    if stock is ArraysCache:
        rows = {array.shape[0] for array in their.cache if array is not None}
        if len(mine.cache) != len(their.cache) or not rows <= {1}:
            return f"found {len(their.cache)} states of {max(rows, default=0)} sequences; needed {len(mine.cache)} of one."
        return None
    if stock is RotatingKVCache and (their.keep, their.max_size) != (mine.keep, mine.max_size):
        return f"found a window of {their.max_size} that keeps {their.keep}; needed {mine.max_size} and {mine.keep}."
    if not isinstance(mine, PooledLayer) or their.keys is None:
        return None
    if stock is ChunkedKVCache and their.start_position:
        return f"found a chunk from token {their.start_position} on; needed all tokens."
    layer = mine.place.layer
    needed = [(1, layer.kv_heads, layer.key_dim, arena.dtype), (1, layer.kv_heads, layer.value_dim, arena.dtype)]
    found = [(*array.shape[:2], array.shape[3], array.dtype) for array in (their.keys, their.values)]
    return None if found == needed else f"found keys and values of (batch, heads, dim, dtype) {found}; needed {needed}."


def begin_intake(arena: KVArena, admission: Admission, theirs: list[Any]) -> Intake | None:
    """Reserve room for `theirs`. Returns None where there is none."""
    sequence = SequenceBlocks(arena)
    held = max([0, *(leaf.offset for leaf in leaves_of(theirs) if hasattr(leaf, "offset"))])
    counts = [arena.spec.blocks(held, group.layer) for group in arena.spec.groups]
    return Intake(arena, sequence, theirs) if admission.can_reserve(sequence.tables, counts) else None
