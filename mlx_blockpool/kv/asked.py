"""What a model asks the attention of its layers with: the queries, scales and sinks of a decode step, for trials without it.

Owned by the generation thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from .arena import KVArena
from .batch_cache import PooledBatchCache
from .factory import make_prompt_cache
from .parts import batch_of, leaves_of
from .shards import apart


@dataclass(frozen=True)
class Asked:
    """What the attention of a layer is asked with: queries [1, heads, 1, dim], their scale, and sinks [heads]."""

    queries: mx.array
    scale: float
    sinks: mx.array | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a kernel depends on."""
        return self.queries.shape[1], self.queries.dtype, self.sinks is None


def asked_of(model: Any, arena: KVArena) -> dict[int, list[Asked]]:
    """What each layer group is asked with when an attached model decodes one token: one of each kind, its first layer's first.

    Raises PoolExhaustedError where the pool has no room for a sequence.
    """
    found: dict[int, dict[tuple[Any, ...], Asked]] = {}
    counts = dict(arena.decode.path_counts)

    def note(cache: PooledBatchCache, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: Any) -> mx.array:
        asked = Asked(queries, scale, sinks)
        found.setdefault(cache.members[0].place.group, {}).setdefault(asked.kind, asked)
        return PooledBatchCache.attend(cache, queries, keys, values, scale, mask, sinks)

    with apart(model):
        caches = make_prompt_cache(model, arena)
        mx.eval(model(mx.array([[1, 2]]), cache=caches))
        batch = batch_of([caches])
        leaves = [leaf for leaf in leaves_of(batch) if isinstance(leaf, PooledBatchCache)]
        for leaf in leaves:
            leaf.attend = partial(note, leaf)  # type: ignore[method-assign]
        try:
            mx.eval(model(mx.array([[1]]), cache=batch))
        finally:
            for leaf in leaves:
                # It refers to itself, and would keep its blocks.
                del leaf.attend
        kinds = {group: list(each.values()) for group, each in found.items()}
        mx.eval([asked.queries for each in kinds.values() for asked in each])
    arena.decode.path_counts.clear()
    arena.decode.path_counts.update(counts)
    return kinds
