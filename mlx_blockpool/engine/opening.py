"""Chooses the caches of a model by what it can do with a pool, not by a list of models."""

from __future__ import annotations

import logging
from typing import Any

from ..config import KVBits, PoolConfig
from ..errors import PluginError, SpecError
from ..kv.arena import KVArena
from ..kv.build import default_pool_bytes, describe, open_served
from ..ranks.group import ALONE, Ranks
from ..store.prompt_store import PromptStore
from ..tier.cache import TieredPrefixCache
from .caches import PooledCaches
from .stock import GuardedPromptCache, StockCaches

log = logging.getLogger(__name__)


def open_caches(
    model: Any,
    pool_bytes: int | None = None,
    max_kv_size: int | None = None,
    bits: KVBits | None = None,
    ranks: Ranks = ALONE,
) -> PooledCaches | StockCaches:
    """Caches for a loaded model in a new pool of `pool_bytes` at most (default: half of what the
    model leaves free).

    `max_kv_size` and `ranks` as in open_pool, `bits` as config.bits of open_served(). A model that
    cannot be described, or whose plugin describes other caches, runs on its own caches; in a group
    it raises GroupError.
    """
    try:
        spec = describe(model, max_kv_size=max_kv_size, ranks=ranks)
        if pool_bytes is None:
            pool_bytes = default_pool_bytes()
        config = PoolConfig(bits=bits)
        return wrap(open_served(model, spec, pool_bytes, config, ranks), config, ranks=ranks)
    except (PluginError, SpecError) as error:
        if bits is None:
            log.info("no pool: %s", error)
        else:
            log.warning("no pool, and no %s: %s", bits, error)
        return StockCaches(model, "", GuardedPromptCache(), str(error))


def wrap(
    arena: KVArena,
    config: PoolConfig | None = None,
    store: PromptStore | None = None,
    ranks: Ranks = ALONE,
) -> PooledCaches:
    """Caches in a pool of open_served(). `store` has the records of these weights."""
    prefix = TieredPrefixCache(arena, store=store, config=config or PoolConfig(), ranks=ranks)
    if arena.capabilities.synchronous:
        log.info(
            "Decode steps run one at a time; overlapping ones would copy the pool on this device"
        )
    return PooledCaches(prefix)
