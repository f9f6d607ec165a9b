"""Makes pools and prompt caches: the list of layer caches that mlx-lm's model is called with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import mlx.core as mx

from ..config import KVBits, PoolConfig
from ..errors import PoolExhaustedError
from ..plugins import spec_of_model, traced_spec
from ..ranks.group import ALONE, Joined, Ranks
from ..spec import ChunkLayer, CompositeLayer, LayerSpec, ModelCacheSpec, StateLayer, WindowLayer
from ..system import memory_bytes
from .arena import KVArena
from .layer_caches import PooledKVCache, PooledRotatingKVCache
from .parts import PooledCacheList, PooledChunkedKVCache, UnusedKVCache
from .quantised_caches import PooledQuantizedKVCache
from .sequence import SequenceBlocks
from .shards import agreed, apart, is_stage, need_whole
from .state_caches import PooledArraysCache

log = logging.getLogger(__name__)

# In the windows of max_kv_size tokens, as in mlx-lm's.
KEPT_TOKENS = 4


def pooled_caches(arena: KVArena, sequence: SequenceBlocks | None = None) -> list[Any]:
    """Layer caches of one sequence, one for each that mlx-lm makes; empty, without `sequence` a new one."""
    sequence = sequence or SequenceBlocks(arena)
    leaves = count()
    return [_pooled(sequence, layer, leaves) for layer in arena.spec.layers]


def make_prompt_cache(model: Any, arena: KVArena, max_kv_size: int | None = None) -> list[Any]:
    """In place of mlx-lm's make_prompt_cache: one sequence in the pool `arena`, which was opened for this model.

    Raises ValueError unless the pool was opened with the same `max_kv_size`; None takes the pool's. As in mlx-lm, a model that
    makes its own caches does without it.
    """
    if max_kv_size not in (None, arena.spec.max_kv_size) and not hasattr(model, "make_cache"):
        raise ValueError(
            f"This pool was opened with max_kv_size={arena.spec.max_kv_size}, which its blocks are laid out for; caches of "
            f"{max_kv_size} tokens need another. Open one with open_pool(model, max_kv_size={max_kv_size})."
        )
    return pooled_caches(arena)


def open_pool(
    model: Any,
    pool_bytes: int | None = None,
    config: PoolConfig | None = None,
    *,
    attach: bool = True,
    max_kv_size: int | None = None,
    group: Any = None,
) -> KVArena:
    """A pool for a loaded model, `pool_bytes` at most (default: half of the memory that the model leaves free).

    attach: let the model's attention read blocks where they lie, if a few random tokens give the same logits that way.
    arena.ragged says whether they did. If not, or with attach=False, each acquire() copies the cached prefix to one piece, and
    batches are padded. max_kv_size: what mlx-lm's make_prompt_cache means by it. config.bits: blocks hold keys and values in so
    many bits. Raises ValueError if the model's attention cannot read such blocks: nothing else does. group: of mx.distributed, as
    sharded_load() took it. All its ranks open a pool, and the least `pool_bytes` counts; raises GroupError if their pools cannot
    be alike.
    """
    config, ranks = config or PoolConfig(), ALONE if group is None else Joined.of(group, "tensor")
    bits = config.bits
    arena = arena_for(model, lambda: quantised(spec_of_loaded(model, max_kv_size, ranks), bits), pool_bytes, config, ranks)
    try_out(model, arena, attach, ranks)
    return arena


def arena_for(
    model: Any,
    describe: Callable[[], ModelCacheSpec],
    pool_bytes: int | None = None,
    config: PoolConfig | None = None,
    ranks: Ranks = ALONE,
) -> KVArena:
    """The pool of open_pool(), for a model that is described now and not tried out yet."""
    spec = agreed(describe, ranks)
    (least,) = ranks.least([default_pool_bytes() if pool_bytes is None else pool_bytes])
    arena = KVArena(spec, least, config)
    arena.is_stage = is_stage(model)
    return arena


def spec_of_loaded(model: Any, max_kv_size: int | None = None, ranks: Ranks = ALONE) -> ModelCacheSpec:
    """The spec of a loaded model, named by its architecture, for a `max_kv_size` as in with_windows(). Raises SpecError.

    Of one rank's part of a model its caches are the description; raises GroupError for one without its `ranks`.
    """
    name = type(model).__module__.rpartition(".")[2]
    if ranks.size == 1:
        need_whole(model)
        return with_windows(spec_of_model(model, config_of(model), name), model, max_kv_size)
    with apart(model):
        return with_windows(traced_spec(model, name), model, max_kv_size)


def with_windows(spec: ModelCacheSpec, model: Any, max_kv_size: int | None) -> ModelCacheSpec:
    """The spec of the caches that mlx-lm makes for a model and a `max_kv_size`: windows, unless the model makes its own caches.

    Raises ValueError for one that has no room for the tokens that are always kept and the next one.
    """
    if max_kv_size is None or hasattr(model, "make_cache"):
        return spec
    if max_kv_size <= KEPT_TOKENS:
        raise ValueError(f"max_kv_size is {max_kv_size}, and a window keeps the first {KEPT_TOKENS} tokens. Give more than that.")
    return spec.with_windows(max_kv_size, KEPT_TOKENS)


def quantised(spec: ModelCacheSpec, bits: KVBits | None) -> ModelCacheSpec:
    """The spec of pools whose blocks hold keys and values in `bits`. Raises ValueError if they would hold all as it is."""
    found = spec.with_bits(bits)
    if found.bits is None and bits is not None and (bits.keys or bits.values):
        rows = "has no keys and values" if not spec.groups else "has no keys or values whose size is a multiple of 32"
        raise ValueError(f"{spec.model_id} {rows}: blocks cannot hold them in fewer bits.")
    return found


def try_out(model: Any, arena: KVArena, attach_it: bool, ranks: Ranks = ALONE) -> None:
    """Attach a model if a few random tokens give the same logits that way, on all ranks. Where they cannot be computed, it stays
    as it is.

    Raises ValueError, or what trying raised, if that leaves a quantised pool that nothing reads.
    """
    # attach.py tries the caches that this module makes.
    from .attach import attach, attach_alone, leaves_padding_out, step_synchronously_if_copied

    is_quantised = arena.spec.bits is not None
    if is_quantised and not attach_it:
        raise ValueError("Only attached attention reads quantised blocks: leave out attach=False, or the bits.")
    try:
        arena.pads_states = bool(arena.state_leaves) and leaves_padding_out(model, ranks)
        if attach_it:
            if not attach(model, arena, ranks) and is_quantised and not attach_alone(model, arena, ranks):
                raise ValueError(f"The attention of {arena.spec.model_id} does not read quantised blocks: leave out the bits.")
            step_synchronously_if_copied(model, arena)
    except (PoolExhaustedError, RuntimeError) as error:
        if is_quantised or ranks.size > 1:
            raise
        # The pool is too small to try it, or the device cannot run the model: its use will say so.
        log.info("%s is not attached: %s", type(model).__module__, error)


def config_of(model: Any) -> dict[str, Any]:
    """The fields of config.json that the model still has."""
    args = getattr(model, "args", None)
    return {**vars(args)} if args is not None and hasattr(args, "__dict__") else {}


def default_pool_bytes() -> int:
    """Half of the memory that is left once the model is loaded."""
    return max(0, memory_bytes() - mx.get_active_memory()) // 2


def _pooled(sequence: SequenceBlocks, layer: LayerSpec, leaves: Iterator[int]) -> Any:
    """The cache of one layer; `leaves` counts the caches made."""
    if isinstance(layer, CompositeLayer):
        return PooledCacheList(*(_pooled(sequence, part, leaves) for part in layer.parts))
    leaf = next(leaves)
    if isinstance(layer, StateLayer):
        return PooledArraysCache(sequence, len(layer.arrays), leaf)
    if leaf not in sequence.arena.places:
        return UnusedKVCache()
    if isinstance(layer, ChunkLayer):
        return PooledChunkedKVCache(sequence, leaf)
    if isinstance(layer, WindowLayer):
        return PooledRotatingKVCache(sequence, leaf)
    keys, values = sequence.arena.spec.forms(layer)
    return (PooledKVCache if keys is None or keys != values else PooledQuantizedKVCache)(sequence, leaf)
