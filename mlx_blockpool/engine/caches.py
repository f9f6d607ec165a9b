"""Where the caches of a request come from and where they go: the pool's prefix cache, or mlx-lm's own.

The engine asks for caches, for room before each step, and gives back what it computed. Owned by the generation thread.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from ..errors import PoolExhaustedError
from ..memory import batch_memory
from ..prefix.cache import PrefixCache
from ..prefix.lookup import Lookup
from .request import Running


@dataclass(frozen=True)
class Opened:
    """Layer caches that hold the first `cached` tokens of a prompt, and why not more."""

    caches: list[Any]
    cached: int
    lookup: Lookup | None


class PooledCaches:
    """Caches in the pool of `prefix`, for a model that was attached: batches are ragged and live in the pool."""

    ragged = True

    def __init__(self, prefix: PrefixCache) -> None:
        self.prefix = prefix
        self.merges = True

    @property
    def keeps_chunks(self) -> bool:
        """Whether keeping costs nothing and serves at any token, so that every chunk of a prefill is kept."""
        return self.ragged and not self.prefix.slabs.window_groups

    def capacity(self) -> int | None:
        """The most tokens that one sequence can have; None: no limit."""
        return self.prefix.pool.sequence_capacity()

    def open(self, tokens: Sequence[int], room: int, spare: int) -> Opened:
        """Caches for a prompt with room for `room` more tokens.

        Raises PoolExhaustedError if there is no room now, or not for `spare` more blocks for the others.
        """
        fetched = self.prefix.fetch(tokens, room)
        try:
            self.prefix.room.need_spare(spare)
        except PoolExhaustedError:
            self.prefix.release(fetched.caches)
            raise
        return Opened(fetched.caches, fetched.lookup.hit, fetched.lookup)

    def known(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt an open() would find now."""
        return self.prefix.look(tokens).hit

    def secure(self, batch: Sequence[Running]) -> None:
        """Promise each member the blocks of its next token, or raise PoolExhaustedError and promise nothing."""
        self.prefix.room.secure([running.caches or [] for running in batch])

    def keep(self, running: Running, kind: str) -> None:
        """Let others share what is computed of a sequence that goes on."""
        self.prefix.keep(running.tokens[: running.computed], running.caches or [], kind)

    def finish(self, running: Running, kind: str) -> None:
        """Keep what is computed of a sequence and take its caches back."""
        self.prefix.finish(running.tokens[: running.computed], running.caches or [], kind)
        running.caches = None

    def release(self, running: Running) -> None:
        """Take its caches back and keep nothing."""
        if running.caches is not None:
            self.prefix.release(running.caches)
            running.caches = None

    def release_all(self) -> None:
        """After a failure: no caches that were handed out are in use any more."""
        self.prefix.release_all()


class PaddedCaches(PooledCaches):
    """Prefixes in the pool, batches in mlx-lm's padded caches, for a model whose attention does not ask its cache.

    A batch has `batch_bytes` of its own beside the pool. `merges`: the model gives the same logits in a padded batch as alone.
    """

    ragged = False

    def __init__(self, prefix: PrefixCache, batch_bytes: int, merges: bool) -> None:
        super().__init__(prefix)
        self.merges = merges
        self.batch_bytes = batch_bytes

    def secure(self, batch: Sequence[Running]) -> None:
        if not self.merges:
            super().secure(batch)
            return
        lengths = [len(running.tokens) + 1 for running in batch]
        needed = batch_memory(self.prefix.slabs.spec, lengths).bytes.grown.allocated
        if len(batch) > 1 and needed > self.batch_bytes:
            hint = f"The padded batch would take {needed} bytes and has {self.batch_bytes}. Raise --pool-bytes."
            raise PoolExhaustedError(len(batch), len(batch) - 1, 0, "batch", hint)


class StockCaches:
    """mlx-lm's own caches, for a model with layers that are not in blocks. Kept by copy."""

    ragged = False
    keeps_chunks = False

    def __init__(self, model: Any, key: Any, known: GuardedPromptCache, merges: bool) -> None:
        self.merges = merges
        self._model = model
        self._key = key
        self._known = known

    def capacity(self) -> int | None:
        return None

    def open(self, tokens: Sequence[int], room: int, spare: int) -> Opened:
        caches, rest = self._known.fetch_nearest_cache(self._key, list(tokens))
        if caches is None:
            caches, rest = stock_prompt_cache(self._model), list(tokens)
        return Opened(caches, len(tokens) - len(rest), None)

    def known(self, tokens: Sequence[int]) -> int:
        return self._known.known_tokens(self._key, list(tokens))

    def secure(self, batch: Sequence[Running]) -> None:
        """There is no limit."""

    def keep(self, running: Running, kind: str) -> None:
        self._insert(running, copy.deepcopy(running.caches), kind)

    def finish(self, running: Running, kind: str) -> None:
        self._insert(running, running.caches, kind)
        running.caches = None

    def release(self, running: Running) -> None:
        running.caches = None

    def release_all(self) -> None:
        """Nobody counts them."""

    def _insert(self, running: Running, caches: Any, kind: str) -> None:
        if running.computed:
            tokens = running.tokens[: running.computed]
            self._known.insert_cache(self._key, tokens, caches, cache_type=kind)


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
        cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
        return cache, rest + tokens[-1:]

    def known_tokens(self, model: Any, tokens: list[int]) -> int:
        """How many tokens a fetch would find. Changes nothing."""
        found = self._trie.search(model, tokens[:-1])
        whole = max(len(found.exact or ()), len(found.shorter or ()))
        if found.longer is None or found.common_prefix <= whole:
            return whole
        cut = can_trim_prompt_cache(self._trie.get(model, found.longer).prompt_cache)
        return found.common_prefix if cut else whole
