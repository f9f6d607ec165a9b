"""Chooses the caches of a model, by describing the model and trying it, not by a list."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..config import KVBits, PoolConfig
from ..errors import SpecError
from ..kv.arena import KVArena
from ..kv.attach import attach, attach_alone, batches_padded, step_synchronously_if_copied, verify_alone_if_near
from ..kv.factory import arena_for, default_pool_bytes, quantised, spec_of_loaded
from ..kv.shards import agreed
from ..ranks.group import ALONE, Ranks
from ..spec import ModelCacheSpec
from ..store.prompt_store import PromptStore
from ..tier.cache import TieredPrefixCache
from .caches import PaddedCaches, PooledCaches
from .stock import GuardedPromptCache, StockCaches

log = logging.getLogger(__name__)


def open_caches(
    model: Any,
    pool_bytes: int | None = None,
    max_kv_size: int | None = None,
    bits: KVBits | None = None,
    ranks: Ranks = ALONE,
) -> PooledCaches | StockCaches:
    """Caches for a loaded model in a new pool of `pool_bytes` at most (default: half of what the model leaves free).

    `max_kv_size` and `ranks` as in open_pool, `bits` as in open_arena. A model whose caches are of its own classes cannot be
    described, and runs on them; in a group it raises GroupError.
    """
    try:
        spec = agreed(lambda: spec_of_loaded(model, max_kv_size, ranks), ranks)
    except SpecError as error:
        if bits is None:
            log.info("no pool: %s", error)
        else:
            log.warning("no pool, and no %s: %s", bits, error)
        return StockCaches(model, "", GuardedPromptCache(), batches_padded(model))
    if pool_bytes is None:
        pool_bytes = default_pool_bytes()
    config = PoolConfig(bits=bits)
    return open_pooled(model, open_arena(model, spec, pool_bytes, config, ranks), pool_bytes, config, ranks=ranks)


def open_arena(
    model: Any, spec: ModelCacheSpec, pool_bytes: int, config: PoolConfig | None = None, ranks: Ranks = ALONE
) -> KVArena:
    """A pool for a model that was described, `pool_bytes` at most. Attaches the model if its batches can be ragged, on all ranks.

    Blocks hold keys and values in config.bits. A model whose attention does not read such blocks, or that would lose its batches
    by it, has keys and values as it computes them, with a warning. Where it was not attached, the pool has half of the bytes:
    padded batches are not in it. Raises GroupError on all ranks if their pools cannot be alike.
    """
    config = config or PoolConfig()
    try:
        asked = quantised(spec, config.bits)
    except ValueError as error:
        log.warning("%s Keys and values stay in %s, and --kv-bits is not used.", error, spec.dtype)
        asked = spec
    arena = _open_if(attach, model, asked, pool_bytes, config, ranks)
    if arena is None and asked.bits is not None:
        arena = _open_if(attach, model, spec, pool_bytes, config, ranks)
        if arena is None and not batches_padded(model, spec, ranks):
            arena = _open_if(attach_alone, model, asked, pool_bytes, config, ranks)
        if arena is None or arena.spec.bits is None:
            text = "%s: its attention does not read quantised blocks. Keys and values stay in %s, and --kv-bits is not used."
            log.warning(text, spec.model_id, spec.dtype)
    return arena or arena_for(model, lambda: spec, pool_bytes // 2, config, ranks)


def open_pooled(
    model: Any,
    arena: KVArena,
    pool_bytes: int,
    config: PoolConfig | None = None,
    store: PromptStore | None = None,
    ranks: Ranks = ALONE,
) -> PooledCaches:
    """Caches in a pool that open_arena() has opened. What it does not take of `pool_bytes` is for a padded batch.

    `store` has the records of these weights.
    """
    (pool_bytes,) = ranks.least([pool_bytes])
    prefix = TieredPrefixCache(arena, store=store, config=config or PoolConfig(), ranks=ranks)
    caches: PooledCaches
    if arena.ragged:
        caches = PooledCaches(prefix)
    else:
        # Only attached attention reads quantised blocks, one sequence at a time.
        merges = arena.spec.bits is None and batches_padded(model, arena.spec, ranks)
        caches = PaddedCaches(prefix, pool_bytes - arena.pool.pool_bytes - arena.state_bytes, merges)
        if not merges:
            verify_alone_if_near(model, arena, ranks)
    if step_synchronously_if_copied(model, arena):
        log.info("Decode steps run one at a time; overlapping ones would copy the pool on this device")
    return caches


def _open_if(
    passes: Callable[[Any, KVArena, Ranks], bool],
    model: Any,
    spec: ModelCacheSpec,
    pool_bytes: int,
    config: PoolConfig,
    ranks: Ranks,
) -> KVArena | None:
    """A pool that the model passes a check on; None: it does not."""
    arena = arena_for(model, lambda: spec, pool_bytes, config, ranks)
    return arena if passes(model, arena, ranks) else None
