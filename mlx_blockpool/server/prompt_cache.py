"""ServerPromptCache: what mlx-lm's ResponseGenerator is given in place of its LRUPromptCache.

Chooses, for each loaded model, between the pool's prefix cache and mlx-lm's own. Owned by the generation thread; `report`
may be read from any.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from .. import plugins
from ..cache.attention import attach, batches_padded, step_synchronously_if_copied
from ..cache.factory import default_pool_bytes
from ..cache.slabs import Slabs
from ..config import PoolConfig
from ..errors import PluginError, SpecError
from ..prefix.cache import PrefixCache
from ..prefix.lookup import Lookup
from ..spec import ModelCacheSpec
from .provider import BlockpoolModelProvider

log = logging.getLogger(__name__)


class GuardedPromptCache(LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's prompt cache, except that a hit leaves a token to compute and that caches end where their tokens end."""

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant") -> None:
        # Behind a draft, the model's and the draft's caches are ahead of what was accepted, each by its own amount.
        if can_trim_prompt_cache(prompt_cache) and all(hasattr(c, "offset") for c in prompt_cache):
            end = min(len(tokens), *(c.offset for c in prompt_cache))
            tokens = tokens[:end]
            for cache in prompt_cache:
                cache.trim(cache.offset - end)
        mx.eval([c.state for c in prompt_cache])
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if rest or cache is None:
            return cache, rest
        if can_trim_prompt_cache(cache) and trim_prompt_cache(cache, 1) == 1:
            return cache, tokens[-1:]
        return None, tokens


class ServerPromptCache:
    """mlx-lm's prompt cache protocol over a PrefixCache, or over LRUPromptCache where a model's layers are not pooled.

    `batches`: the model gives the same logits in a batch as alone, one way or another. `max_tokens` is the room that the next
    fetch reserves behind its prompt; `lookup` explains the last fetch.
    """

    def __init__(self, cli_args: Any, config: PoolConfig) -> None:
        self.config = config
        self.prefix: PrefixCache | None = None
        self.lookup: Lookup | None = None
        self.batches = True
        self.max_tokens = config.max_tokens
        self.report: dict[str, Any] = {"backend": None}
        self._cli_args = cli_args
        self._manager = plugins.make_plugin_manager()
        self._stock = GuardedPromptCache(cli_args.prompt_cache_size, cli_args.prompt_cache_bytes or 1 << 63)

    # -- models --------------------------------------------------------------------------------------------------------

    def open(self, provider: BlockpoolModelProvider) -> None:
        """Take over the model that the provider has loaded; what was known of the one before is gone."""
        self.close()
        model, model_id = provider.model, Path(str(provider.model_key[0])).name
        self.batches = True
        spec = self._spec(model, provider.config, model_id)
        if spec is None or not spec.is_poolable or provider.draft_model is not None or self._cli_args.kv_bits is not None:
            self.batches = batches_padded(model)
            log.info("%s is served with mlx-lm's own caches, %s", model_id, _how(False, self.batches))
            self.update_report()
            return
        pool_bytes = self.config.pool_bytes or default_pool_bytes()
        slabs = Slabs(spec, pool_bytes, self.config)
        ragged = attach(model, slabs)
        self.batches = ragged or batches_padded(model)
        if step_synchronously_if_copied(model, slabs):
            log.info("%s: decode steps run one at a time; overlapping ones would copy the pool on this device", model_id)
        self.prefix = PrefixCache(slabs, str(provider.model_key))
        log.info(
            "%s: pool of %.2f GB, one sequence can have %d tokens, %s",
            model_id,
            pool_bytes / 1e9,
            slabs.pool.sequence_capacity(),
            _how(ragged, self.batches),
        )
        self.update_report()

    def close(self) -> None:
        self.prefix = None
        self.lookup = None
        mx.clear_cache()

    def _spec(self, model: Any, config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
        try:
            return plugins.spec_of_model(model, config, model_id, self._manager)
        except (PluginError, SpecError) as error:
            log.warning("No pool for %s: %s", model_id, error)
            return None

    # -- what ResponseGenerator calls ----------------------------------------------------------------------------------

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """Layer caches for a prompt and the tokens left to compute, never none. On a miss of the pool: empty pooled caches."""
        if self.prefix is None:
            return self._stock.fetch_nearest_cache(model, tokens)
        fetched = self.prefix.fetch(tokens, self.max_tokens)
        self.lookup = fetched.lookup
        return fetched.caches, fetched.rest

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant") -> None:
        """Keep a finished sequence. Its blocks go back to the pool: the caches must not be used again."""
        if self.prefix is None:
            self._stock.insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
        else:
            self.prefix.finish(tokens, prompt_cache, cache_type)
        self.update_report()

    def keep(self, model: Any, tokens: list[int], prompt_cache: list[Any], cache_type: str) -> None:
        """Keep a sequence that goes on."""
        if self.prefix is None:
            self.insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
        else:
            self.prefix.keep(tokens, prompt_cache, cache_type)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        if self.prefix is None:
            self._stock.trim_to(n_sequences=n_sequences, n_bytes=n_bytes)
        elif n_bytes is not None:
            self.prefix.trim_to(n_bytes)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        if self.prefix is None:
            return self._stock.stats_by_type()  # type: ignore[no-any-return]
        return self.prefix.stats_by_kind()

    @property
    def nbytes(self) -> int:
        return self._stock.nbytes if self.prefix is None else self.prefix.nbytes

    def __len__(self) -> int:
        return len(self._stock) if self.prefix is None else len(self.prefix)

    def release(self, prompt_cache: list[Any]) -> None:
        """Give a sequence's blocks back and keep nothing of it, whoever still refers to its caches."""
        if self.prefix is not None:
            self.prefix.release(prompt_cache)

    def release_all(self) -> None:
        """After a failure: no cache that was handed out is in use any more."""
        if self.prefix is not None:
            self.prefix.release_all()

    @property
    def keeps_chunks(self) -> bool:
        """Whether keeping costs nothing and serves at any token, so that a prefill may leave its prefix chunk by chunk."""
        return self.prefix is not None and self.prefix.slabs.ragged and not self.prefix.slabs.window_groups

    def known_tokens(self, tokens: list[int]) -> int:
        """How many tokens of a prompt a fetch would find now."""
        return len(tokens) if self.prefix is None else self.prefix.look(tokens).hit

    # -- figures -------------------------------------------------------------------------------------------------------

    def capacity(self) -> int | None:
        """The most tokens that one request can have; None: no limit of ours."""
        return None if self.prefix is None else self.prefix.pool.sequence_capacity()

    def update_report(self) -> None:
        """Figures for GET /v1/cache, replaced as a whole so that other threads may read them."""
        if self.prefix is None:
            self.report = {"backend": "mlx-lm", "sequences": len(self._stock), "known_bytes": self._stock.nbytes}
            return
        prefix, pool = self.prefix, self.prefix.pool
        self.report = {
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
            "last": str(self.lookup) if self.lookup else None,
        }


def _how(ragged: bool, batches: bool) -> str:
    return "ragged batches" if ragged else "padded batches" if batches else "one request at a time"
