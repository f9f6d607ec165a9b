"""Prefixes of a model that runs with a draft model: two prefix caches that give the same prefix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from ..errors import BlockpoolError
from ..prefix.cache import ORDINARY, Acquired
from ..prefix.retention import RetentionPolicy
from ..prefix.salts import SHARED
from ..tier.cache import TieredPrefixCache


class DraftedPrefix:
    """A prefix cache for the model and one for its draft, each in its own pool. Their caches go in one list, as in mlx-lm."""

    def __init__(self, prefix: TieredPrefixCache, draft: TieredPrefixCache) -> None:
        self.prefix = prefix
        self.draft = draft

    def acquire(self, tokens: list[int], room: int, salt: bytes = SHARED) -> Acquired:
        """Caches of both that end at the same token. Raises what TieredPrefixCache.acquire raises, and holds nothing then."""
        room += 1  # what is verified last is written one token behind the reply
        hit = min(self.prefix.look(tokens, salt).hit, self.draft.look(tokens, salt).hit)
        first = self.prefix.acquire(tokens, room, hit, salt)
        try:
            second = self.draft.acquire(tokens, room, first.lookup.hit, salt)
        except BlockpoolError:
            # Nobody will use the first.
            self.prefix.discard(first.caches)
            raise
        if second.lookup.hit != first.lookup.hit:
            # No window of the draft ends there.
            self.discard([*first.caches, *second.caches])
            first, second = self.prefix.acquire(tokens, room, 0, salt), self.draft.acquire(tokens, room, 0, salt)
        # Neither has checkpoints: it was the draft that knew no more.
        behind = first.lookup.cause == "no checkpoint"
        lookup = replace(first.lookup, cause="draft", given=(), expected=()) if behind else first.lookup
        return Acquired([*first.caches, *second.caches], first.rest, lookup)

    def release(self, tokens: list[int], caches: list[Any], kind: str, terms: RetentionPolicy = ORDINARY) -> None:
        """Keep what both hold of `tokens`: behind a draft each is ahead of them by its own amount."""
        for prefix, own in zip((self.prefix, self.draft), self._parts(caches), strict=True):
            ahead = own[0].offset - len(tokens)
            if ahead > 0 and can_trim_prompt_cache(own):
                trim_prompt_cache(own, ahead)
            prefix.release(tokens, own, kind, terms)

    def discard(self, caches: list[Any]) -> None:
        for prefix, own in zip((self.prefix, self.draft), self._parts(caches), strict=True):
            prefix.discard(own)

    def capacity(self) -> int:
        """The most tokens that one sequence can have in both pools."""
        return min(self.prefix.pool.sequence_capacity(), self.draft.pool.sequence_capacity()) - 1

    def _parts(self, caches: list[Any]) -> tuple[list[Any], list[Any]]:
        first = len(self.prefix.slabs.spec.layers)
        return caches[:first], caches[first:]
