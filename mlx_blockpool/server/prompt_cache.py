"""ServerPromptCache: the caches of the loaded model. For the engine, and for mlx-lm's sequential path in place of LRUPromptCache.

Chooses, for each model, between the pool and mlx-lm's own caches. Owned by the generation thread; `report` may be read from any.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import plugins
from ..cache.attention import batches_padded
from ..cache.factory import default_pool_bytes
from ..cache.slabs import Slabs
from ..config import PoolConfig, StoreConfig
from ..engine.caches import PooledCaches
from ..engine.opening import open_pooled
from ..engine.request import Running
from ..engine.stock import GuardedPromptCache, StockCaches
from ..errors import PluginError, SpecError, StoreError
from ..memory import batch_memory
from ..prefix.cache import PrefixCache
from ..prefix.lookup import Lookup
from ..prefix.opening import open_store
from ..spec import ModelCacheSpec
from ..store.store import PromptStore
from .drafted import DraftedPrefix
from .provider import BlockpoolModelProvider

log = logging.getLogger(__name__)


class ServerPromptCache:
    """The caches of one model at a time.

    `caches`: what the engine takes; None where requests run one by one through mlx-lm. `max_tokens`: the room that the
    next fetch of such a request reserves behind its prompt; `lookup` explains it.
    """

    def __init__(self, cli_args: Any, config: PoolConfig, store: StoreConfig | None = None) -> None:
        self.config = config
        self.store_config = store
        self.caches: PooledCaches | StockCaches | None = None
        self.prefix: PrefixCache | None = None
        self.lookup: Lookup | None = None
        self.max_tokens = config.max_tokens
        self.report: dict[str, Any] = {"backend": None}
        self._drafted: DraftedPrefix | None = None
        self._cli_args = cli_args
        self._manager = plugins.make_plugin_manager()
        self._stock = GuardedPromptCache(cli_args.prompt_cache_size, cli_args.prompt_cache_bytes or 1 << 63)

    # -- models --------------------------------------------------------------------------------------------------------

    def open(self, provider: BlockpoolModelProvider) -> None:
        """Take over the model that the provider has loaded; what was known of the one before is gone."""
        self.close()
        model, model_id = provider.model, Path(str(provider.model_key[0])).name
        spec = None if self._cli_args.kv_bits is not None else self._spec(model, provider.config, model_id)
        if spec is not None and provider.draft_model is not None:
            self._open_drafted(provider, spec)
        elif spec is not None:
            pool_bytes = self.config.pool_bytes or default_pool_bytes()
            self.caches = open_pooled(model, spec, pool_bytes, self.config, self._open_store(provider, spec, model_id))
            self.prefix = self.caches.prefix
        elif provider.draft_model is None and self._cli_args.kv_bits is None:
            self.caches = StockCaches(model, provider.model_key, self._stock, batches_padded(model))
        log.info("%s is served with %s", model_id, self._how())
        self.update_report()

    def close(self) -> None:
        """Let go of the model; what is not on disk yet is written first, within the store's time for it."""
        if self.prefix is not None:
            self.prefix.close()
        self.prefix = self.caches = self.lookup = self._drafted = None
        mx.clear_cache()

    def idle(self) -> None:
        """Nobody asks for anything: write behind what is whole, and after a while the ends of conversations too."""
        if self.prefix is not None and self.prefix.stored is not None:
            self.prefix.stored.idle()

    def _spec(self, model: Any, config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
        """The spec of a model whose layers are all in blocks."""
        try:
            spec = plugins.spec_of_model(model, config, model_id, self._manager)
        except (PluginError, SpecError) as error:
            log.warning("No pool for %s: %s", model_id, error)
            return None
        return spec if spec.is_poolable else None

    def _open_store(self, provider: BlockpoolModelProvider, spec: ModelCacheSpec, model_id: str) -> PromptStore | None:
        if self.store_config is None:
            return None
        if any(group.layer.max_blocks is not None for group in spec.groups):
            log.info("%s has windows, which are not kept on disk yet: a restart begins with an empty pool", model_id)
            return None
        adapter = provider.model_key[1]
        try:
            return open_store(self.store_config, provider.folder, Path(adapter) if adapter else None, spec, model_id)
        except StoreError as error:
            log.warning("Nothing of %s is kept on disk: %s", model_id, error)
            return None

    def _open_drafted(self, provider: BlockpoolModelProvider, spec: ModelCacheSpec) -> None:
        """A pool for the model and one for its draft, by what a block of each takes; mlx-lm's caches if the draft has no spec."""
        draft = self._spec(provider.draft_model, {}, Path(str(provider.model_key[2])).name)
        if draft is None:
            return
        pool_bytes = self.config.pool_bytes or default_pool_bytes()
        sizes = [sum(s.bytes_per_block(g) for g in s.groups) for s in (spec, draft)]
        own = pool_bytes * sizes[0] // sum(sizes)
        self.prefix = PrefixCache(Slabs(spec, own, self.config), str(provider.model_key))
        known = PrefixCache(Slabs(draft, pool_bytes - own, self.config), str(provider.model_key))
        self._drafted = DraftedPrefix(self.prefix, known)

    def _how(self) -> str:
        if self._drafted is not None:
            return "pooled caches and a draft, one request at a time"
        if self.caches is None:
            return "mlx-lm's own caches, one request at a time"
        whose = "mlx-lm's own caches" if self.prefix is None else "pooled caches"
        return f"{whose}, {'ragged batches' if self.caches.ragged else 'padded batches' if self.caches.merges else 'no batches'}"

    # -- what mlx-lm's sequential path calls ---------------------------------------------------------------------------

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """Layer caches for a prompt and the tokens left to compute, never none. On a miss of the pool: empty pooled caches."""
        if self.prefix is None:
            return self._stock.fetch_nearest_cache(model, tokens)
        if self._drafted is not None:
            fetched = self._drafted.fetch(tokens, self.max_tokens)
        else:
            fetched = self.prefix.fetch(tokens, self.max_tokens)
        self.lookup = fetched.lookup
        return fetched.caches, fetched.rest

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant") -> None:
        """Keep a finished sequence. Its blocks go back to the pool: the caches must not be used again."""
        if self.prefix is None:
            self._stock.insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
        elif self._drafted is not None:
            self._drafted.finish(tokens, prompt_cache, cache_type)
        else:
            self.prefix.finish(tokens, prompt_cache, cache_type)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        return self._stock.stats_by_type() if self.prefix is None else self.prefix.stats_by_kind()

    @property
    def nbytes(self) -> int:
        return self._stock.nbytes if self.prefix is None else self.prefix.nbytes

    def __len__(self) -> int:
        return len(self._stock) if self.prefix is None else len(self.prefix)

    def release_all(self) -> None:
        """After a failure: no cache that was handed out is in use any more."""
        for prefix in (self.prefix, self._drafted.draft if self._drafted else None):
            if prefix is not None:
                prefix.release_all()

    # -- figures -------------------------------------------------------------------------------------------------------

    def capacity(self) -> int | None:
        """The most tokens that one request can have; None: no limit of ours."""
        if self._drafted is not None:
            return self._drafted.capacity()
        return None if self.prefix is None else self.prefix.pool.sequence_capacity()

    def update_report(self, batch: list[Running] | None = None, counts: Mapping[str, int] | None = None) -> None:
        """Figures for GET /v1/cache, replaced as a whole so that other threads may read them."""
        if self.prefix is None:
            report = {"backend": "mlx-lm", "sequences": len(self._stock), "known_bytes": self._stock.nbytes}
        else:
            report = self._pool_report(self.prefix)
        self.report = report | {"batch": self._batch_report(batch or []), "engine": dict(counts or {})}

    def _pool_report(self, prefix: PrefixCache) -> dict[str, Any]:
        pool = prefix.pool
        return {
            "backend": "blockpool",
            "ragged": prefix.slabs.ragged,
            "pool_bytes": pool.pool_bytes,
            "array_bytes": prefix.slabs.nbytes,
            "known_bytes": prefix.nbytes,
            "sequences": len(prefix),
            "lookups": prefix.num_lookups,
            "prompt_tokens": prefix.num_prompt_tokens,
            "cached_tokens": prefix.num_hit_tokens,
            "skipped": prefix.num_skipped,
            "groups": [asdict(c) for c in pool.settle()],
            "fragmentation": [round(pool.fragmentation(g), 3) for g in range(len(prefix.slabs.spec.groups))],
            "decode_paths": dict(prefix.slabs.path_counts),
            "store": None if prefix.stored is None else prefix.stored.report(),
        }

    def _batch_report(self, batch: list[Running]) -> dict[str, Any] | None:
        """The running batch in the pool, and what it would take padded."""
        if self.prefix is None or not self.prefix.slabs.ragged or not batch:
            return None
        tables = [running.caches[0].sequence.tables for running in batch if running.caches]
        held = [len({block for own in tables for block in own[g].ids}) for g in range(len(self.prefix.slabs.spec.groups))]
        return batch_memory(self.prefix.slabs.spec, [len(running.tokens) for running in batch], held).bytes.as_dict()
