"""Scratch pools: sequences in attention layers of a model, without the model, to try and to time
their steps.

A scratch pool has the layers of one group and is freed with its last cache.
capture_attention_inputs() finds what these layers attend with. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from ..config import PoolConfig
from ..spec import FullLayer, ModelCacheSpec
from .arena import KVArena
from .batch_cache import PooledBatchCache
from .capabilities import RAGGED
from .prompt_cache import batch_of, leaves_of, make_prompt_cache
from .quantised import KEYS_AND_VALUES, Roles
from .shards import without_collectives


def scratch_arena(
    arena: KVArena, layer: FullLayer, layers: int, blocks: int, preallocate: bool, has_kernel: bool
) -> KVArena:
    """A pool of `blocks` for `layers` layers like `layer`, with keys and values alone, whose steps
    run as in `arena`, by the kernel too if `has_kernel`; in one slab if `preallocate`.
    """
    layer = replace(layer, more=())
    spec = ModelCacheSpec(
        arena.spec.model_id, (layer,) * layers, arena.spec.dtype, bits=arena.spec.bits
    )
    found = KVArena(
        spec,
        blocks * spec.bytes_per_block(spec.groups[0]),
        PoolConfig(preallocate=preallocate),
    )
    kernels = frozenset([0]) if has_kernel else frozenset[int]()
    found.capabilities = replace(
        RAGGED, kernels=kernels, synchronous=arena.capabilities.synchronous
    )
    found.decode.streams, found.decode.launch = arena.decode.streams, arena.decode.launch
    return found


def append(
    caches: list[Any], tokens: int, rows: Callable[[tuple[int, ...], mx.Dtype], mx.array] = mx.zeros
) -> list[Any]:
    """Append keys and values that `rows` makes of a shape and a dtype to the layer caches of one
    sequence. Returns the caches.
    """
    for cache in caches if tokens else []:
        layer = cache.place.layer
        shapes = [(1, layer.kv_heads, tokens, dim) for dim in (layer.key_dim, layer.value_dim)]
        cache.write(*(rows(shape, cache.sequence.arena.dtype) for shape in shapes))
    return caches


def pipelined(step: Callable[[], Any], steps: int) -> None:
    """Run steps as an engine does: each one is encoded while the one before it runs.

    `step` returns what is to be evaluated.
    """
    waiting = None
    for _ in range(steps):
        following = step()
        mx.async_eval(following)  # type: ignore[no-untyped-call]
        mx.eval(waiting)
        waiting = following
    mx.eval(waiting)


@dataclass(frozen=True)
class AttentionInputs:
    """What a layer attends with: queries [1, heads, 1, dim], their scale, sinks [heads], and what
    the arrays of the layer are to them.
    """

    queries: mx.array
    scale: float
    sinks: mx.array | None
    roles: Roles = KEYS_AND_VALUES

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a kernel depends on."""
        return self.queries.shape[1], self.queries.dtype, self.sinks is None, self.roles


def capture_attention_inputs(model: Any, arena: KVArena) -> dict[int, list[AttentionInputs]]:
    """The inputs of each layer group when an attached model decodes one token: one of each kind,
    its first layer's first.

    Raises PoolExhaustedError if the pool cannot hold a sequence.
    """
    found: dict[int, dict[tuple[Any, ...], AttentionInputs]] = {}

    def note(
        cache: PooledBatchCache,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
        roles: Roles,
    ) -> mx.array:
        inputs = AttentionInputs(queries, scale, sinks, roles)
        found.setdefault(cache.members[0].place.group, {}).setdefault(inputs.kind, inputs)
        return PooledBatchCache.attend_step(cache, queries, scale, sinks, roles)

    with without_collectives(model), arena.decode.uncounted():
        caches = make_prompt_cache(model, arena)
        mx.eval(model(mx.array([[1, 2]]), cache=caches))
        batch = batch_of([caches])
        leaves = [leaf for leaf in leaves_of(batch) if isinstance(leaf, PooledBatchCache)]
        for leaf in leaves:
            leaf.attend_step = partial(note, leaf)  # type: ignore[method-assign]
        try:
            mx.eval(model(mx.array([[1]]), cache=batch))
        finally:
            for leaf in leaves:
                # It refers to itself, and would keep its blocks.
                del leaf.attend_step
        kinds = {group: list(each.values()) for group, each in found.items()}
        mx.eval([inputs.queries for each in kinds.values() for inputs in each])
    return kinds
