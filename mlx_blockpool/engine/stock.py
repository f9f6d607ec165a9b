"""mlx-lm's own caches and prompt cache, for models with layers that are not in blocks.

Owned by the generation thread.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from ..kv.capabilities import Capabilities
from ..kv.prompt_cache import tokens_held
from ..prefix.salts import SHARED
from .caches import Caches, Opened
from .request import KIND
from .sequence import Sequence

log = logging.getLogger(__name__)


class StockCaches(Caches):
    """In place of PooledCaches.

    A sequence that continues is cached as a copy; the only limit is that of `prompts`. no_pool: why
    the model has no pool; "": no plugin describes it.
    """

    def __init__(
        self, model: Any, key: Any, prompts: GuardedPromptCache, no_pool: str = ""
    ) -> None:
        self._model = model
        self._key = key
        self._prompts = prompts
        self.capabilities = Capabilities(differs=(no_pool,) if no_pool else ())

    def open(self, sequence: Sequence, others: Collection[Sequence]) -> Opened:
        caches, rest = self._prompts.fetch_nearest_cache(
            self._key_of(sequence.policy.salt), sequence.tokens
        )
        if caches is None:
            caches, rest = stock_prompt_cache(self._model), sequence.tokens
        return Opened(caches, len(sequence.tokens) - len(rest), None)

    def cached_tokens(self, tokens: list[int], salt: bytes = SHARED) -> int:
        return self._prompts.cached_tokens(self._key_of(salt), list(tokens))

    def insert(self, sequence: Sequence, kind: str, end: int) -> None:
        self._insert(sequence, end, copy.deepcopy(sequence.caches), kind)

    def insert_given(self, sequence: Sequence, caches: list[Any]) -> None:
        self._insert(sequence, tokens_held(caches), copy.deepcopy(caches), KIND)

    def release(self, sequence: Sequence, kind: str) -> None:
        self._insert(sequence, sequence.computed, sequence.caches, kind)
        sequence.caches = None

    def _key_of(self, salt: bytes) -> Any:
        """Prompts under a salt belong to another model for mlx-lm's cache."""
        return (self._key, salt) if salt else self._key

    def _insert(self, sequence: Sequence, held: int, caches: Any, kind: str) -> None:
        if held:
            self._prompts.insert_cache(
                self._key_of(sequence.policy.salt), sequence.tokens[:held], caches, cache_type=kind
            )


class GuardedPromptCache(LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's prompt cache, except that a hit leaves a token to compute and that caches end
    where their tokens end. Caches without a part of mlx-lm's interface, which another package may
    have, are not cached.
    """

    _has_warned = False

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        try:
            needed = [(c.is_trimmable(), c.nbytes, c.state) for c in prompt_cache]
        except (AttributeError, NotImplementedError) as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "The model's caches are not reused, so that every prompt is computed whole: %s",
                    error,
                )
            return
        # After a draft, the model's and the draft's caches are ahead of what was accepted, each by
        # another amount.
        if all(can_trim for can_trim, *_ in needed) and all(
            hasattr(c, "offset") for c in prompt_cache
        ):
            end = min(len(tokens), *(c.offset for c in prompt_cache))
            tokens = tokens[:end]
            for cache in prompt_cache:
                cache.trim(cache.offset - end)
        mx.eval([c.state for c in prompt_cache])
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
        # mlx-lm retains an empty root for each model, and here for each salt, whose entries it has
        # dropped.
        roots = self._trie._trie
        for key in [key for key, root in roots.items() if not root]:
            del roots[key]

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
        return cache, rest + tokens[-1:]

    def cached_tokens(self, model: Any, tokens: list[int]) -> int:
        """How many tokens fetch_nearest_cache() would find. Changes nothing."""
        found = self._trie.search(model, tokens[:-1])
        whole = max(len(found.exact or ()), len(found.shorter or ()))
        if found.longer is None or found.common_prefix <= whole:
            return whole
        cut = can_trim_prompt_cache(self._trie.get(model, found.longer).prompt_cache)
        # mlx-lm leaves one token of the prompt to compute.
        return min(found.common_prefix, len(tokens) - 2) if cut else whole
