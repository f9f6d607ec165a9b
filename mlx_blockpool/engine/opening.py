"""Chooses the caches of a model, by describing the model and trying it, not by a list."""

from __future__ import annotations

import logging
from typing import Any

from ..config import PoolConfig
from ..errors import SpecError
from ..kv.arena import KVArena
from ..kv.attach import attach, batches_padded, step_synchronously_if_copied
from ..kv.factory import default_pool_bytes, spec_of_loaded
from ..spec import ModelCacheSpec
from ..store.prompt_store import PromptStore
from ..tier.cache import TieredPrefixCache
from .caches import PaddedCaches, PooledCaches
from .stock import GuardedPromptCache, StockCaches

log = logging.getLogger(__name__)


def open_caches(model: Any, pool_bytes: int | None = None, max_kv_size: int | None = None) -> PooledCaches | StockCaches:
    """Caches for a loaded model in a new pool of `pool_bytes` at most (default: half of what the model leaves free).

    `max_kv_size` as in open_pool. A model whose caches are of its own classes cannot be described, and runs on them.
    """
    try:
        spec = spec_of_loaded(model, max_kv_size)
    except SpecError as error:
        log.info("no pool: %s", error)
        return StockCaches(model, "", GuardedPromptCache(), batches_padded(model))
    return open_pooled(model, spec, default_pool_bytes() if pool_bytes is None else pool_bytes)


def open_pooled(
    model: Any, spec: ModelCacheSpec, pool_bytes: int, config: PoolConfig | None = None, store: PromptStore | None = None
) -> PooledCaches:
    """The same for a model that was described. Attaches it if its batches can be ragged.

    `store` has the records of these weights.
    """
    config = config or PoolConfig()
    arena = KVArena(spec, pool_bytes, config)
    caches: PooledCaches
    if attach(model, arena):
        caches = PooledCaches(TieredPrefixCache(arena, store=store, config=config))
    else:
        # A padded batch is not in the pool: it has half of the bytes to itself.
        arena = KVArena(spec, pool_bytes // 2, config)
        prefix = TieredPrefixCache(arena, store=store, config=config)
        caches = PaddedCaches(prefix, pool_bytes - pool_bytes // 2, batches_padded(model, spec))
    if step_synchronously_if_copied(model, arena):
        log.info("Decode steps run one at a time; overlapping ones would copy the pool on this device")
    return caches
