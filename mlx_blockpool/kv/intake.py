"""mlx-lm's caches of one sequence, copied into the pool layer by layer. Owned by the generation thread."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from .arena import KVArena
from .factory import pooled_caches
from .layer_caches import PooledLayer
from .parts import UnusedKVCache, leaves_of, tokens_held
from .rows import columns
from .sequence import SequenceBlocks

# Of the classes that a pooled cache extends, the most special one first.
_STOCK = (QuantizedKVCache, ChunkedKVCache, RotatingKVCache, KVCache, ArraysCache)


class Intake:
    """Pooled caches `pooled` of a new sequence that take over what `theirs` hold, leaf by leaf.

    `blocks`: how many blocks of each layer group the sequence will have, to be reserved first where they may be short.
    """

    def __init__(self, arena: KVArena, theirs: list[Any]) -> None:
        self.sequence = SequenceBlocks(arena)
        self.pooled = pooled_caches(arena, self.sequence)
        self.blocks = [arena.spec.blocks(tokens_held(theirs), group.layer) for group in arena.spec.groups]
        self._leaves = list(zip(leaves_of(self.pooled), leaves_of(theirs), strict=True))[::-1]

    def advance(self) -> bool:
        """Take over one leaf; the original may be freed afterwards. Returns whether there are more."""
        if self._leaves:
            mine, their = self._leaves.pop()
            if not isinstance(mine, UnusedKVCache):
                mine.state = _given(mine, their)
            if isinstance(mine, PooledLayer):
                mx.eval(mine.state)
        return bool(self._leaves)


def from_stock(caches: list[Any], arena: KVArena) -> list[Any]:
    """Pooled caches with the content of mlx-lm's own, as load_prompt_cache reads them, or of another pool's.

    Raises ValueError for caches that do not fit the pool's model, PoolExhaustedError where there is no room.
    """
    if (reason := why_not(arena, caches)) is not None:
        raise ValueError(reason)
    intake = Intake(arena, caches)
    while intake.advance():
        pass
    return intake.pooled


def why_not(arena: KVArena, theirs: list[Any]) -> str | None:
    """Why the pool cannot take over these caches, or None."""
    ours, leaves = leaves_of(pooled_caches(arena)), leaves_of(theirs)
    if len(leaves) != len(ours):
        return f"These are {len(leaves)} layer caches; {arena.spec.model_id} has {len(ours)}."
    for layer, (mine, their) in enumerate(zip(ours, leaves, strict=True)):
        if (reason := _why_not_leaf(arena, mine, their)) is not None:
            return f"Cache {layer} {reason}"
    return None


def _given(mine: Any, their: Any) -> Any:
    """The state that a leaf takes over; of another pool the words, which quantised again would be others."""
    own = isinstance(mine, PooledLayer) and isinstance(their, PooledLayer) and their.forms == mine.forms
    return their.held() if own else their.state


def _why_not_leaf(arena: KVArena, mine: Any, their: Any) -> str | None:
    stock = next(cls for cls in _STOCK if isinstance(mine, cls))
    # Beside the padded keys of a batch, the states of its members are pooled ones.
    if type(their) not in (stock, type(mine)):
        hint = f" Call to_quantized({mine.group_size}, {mine.bits}) on it." if stock is QuantizedKVCache else ""
        return f"is a {type(their).__name__}; {arena.spec.model_id} has a {stock.__name__} there.{hint}"
    if stock is ArraysCache:
        rows = {array.shape[0] for array in their.cache if array is not None}
        if len(mine.cache) != len(their.cache) or not rows <= {1}:
            return f"has {len(their.cache)} states of {max(rows, default=0)} sequences; the pool takes {len(mine.cache)} of one."
        return None
    if stock is RotatingKVCache and (their.keep, their.max_size) != (mine.keep, mine.max_size):
        return f"has a window of {their.max_size} tokens that keeps {their.keep}; the pool's {mine.max_size} and {mine.keep}."
    if stock is QuantizedKVCache and (their.bits, their.group_size) != (mine.bits, mine.group_size):
        return f"is in {their.bits} bits, groups of {their.group_size}; the pool's {mine.bits} and {mine.group_size}."
    if not isinstance(mine, PooledLayer) or their.keys is None:
        return None
    layer, forms = mine.place.layer, mine.forms if stock is QuantizedKVCache else (None, None)
    dims = zip((layer.key_dim, layer.value_dim), forms, strict=True)
    needed = [(1, layer.kv_heads, width, of) for dim, form in dims for width, of in columns(dim, arena.dtype, form)]
    given = [array for rows in (their.keys, their.values) for array in (rows if isinstance(rows, tuple | list) else [rows])]
    found = [(*array.shape[:2], array.shape[3], array.dtype) for array in given]
    return None if found == needed else f"has keys and values of (batch, heads, dim, dtype) {found}; the pool's are {needed}."
