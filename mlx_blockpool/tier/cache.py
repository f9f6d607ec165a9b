"""TieredPrefixCache: a prefix cache that also has what a prompt store holds on disk. Owned by the generation thread."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from contextlib import suppress
from typing import Any

from ..config import PoolConfig
from ..errors import PoolExhaustedError
from ..kv.arena import KVArena
from ..prefix.cache import USUAL, Acquired, PrefixCache
from ..prefix.resume import in_memory, resumable
from ..prefix.retention import RetentionPolicy
from ..prefix.salts import SHARED
from ..prefix.trie import PrefixRef
from ..store.prompt_store import PromptStore
from .restore import RestorePlan
from .write_behind import StoredPrefixes


class TieredPrefixCache(PrefixCache):
    """A PrefixCache over `store`, which names what its keys and values are computed with. None: memory is all it has.

    What is inserted is written behind by `stored.write_behind()`. acquire() brings back what is on disk and waits for it;
    acquire_resident() does not, for callers that run the restore of plan_restore() themselves.
    """

    def __init__(self, arena: KVArena, namespace: str = "", store: PromptStore | None = None, config: PoolConfig = USUAL) -> None:
        super().__init__(arena, namespace if store is None else store.namespace, config)
        self.stored = None if store is None else StoredPrefixes(self.index, arena, self.admission, store)

    def acquire(
        self,
        tokens: Tokens[int],
        max_tokens: int = PoolConfig.max_tokens,
        at_most: int | None = None,
        salt: bytes = SHARED,
        start: PrefixRef | None = None,
    ) -> Acquired:
        """PrefixCache.acquire() after what is worth reading has come back from disk, as far as there is room for it."""
        start = self.match(tokens, salt, start)
        plan = self.plan_restore(start, len(tokens) - 1 if at_most is None else at_most) if len(tokens) else None
        if plan is not None and self.stored is not None:
            with suppress(PoolExhaustedError):
                self.stored.restore_now(plan)
        return self.acquire_resident(tokens, max_tokens, at_most, salt, start)

    def acquire_resident(
        self,
        tokens: Tokens[int],
        max_tokens: int,
        at_most: int | None = None,
        salt: bytes = SHARED,
        start: PrefixRef | None = None,
    ) -> Acquired:
        """acquire() from what is in memory now: reads nothing from disk."""
        return super().acquire(tokens, max_tokens, at_most, salt, start)

    def resident(self, match: PrefixRef, at_most: int) -> PrefixRef:
        if self.stored is not None:
            plan = self._on_disk(match, at_most)
            self.stored.num_cheaper += plan is not None and not self.stored.is_worth_reading(plan)
            self.stored.touch(match.path)
        return super().resident(match, at_most)

    def plan_restore(self, match: PrefixRef, at_most: int) -> RestorePlan | None:
        """The restore that a match is worth waiting for; None where disk adds nothing, or computing it is faster."""
        plan = self._on_disk(match, at_most)
        return plan if plan is not None and self.stored and self.stored.is_worth_reading(plan) else None

    def _on_disk(self, match: PrefixRef, most: int) -> RestorePlan | None:
        if self.stored is None:
            return None
        return self.stored.plan_restore(match, most, resumable(self.arena, in_memory(match), most)[0])

    def within_reach(self, tokens: Tokens[int], salt: bytes = SHARED) -> int:
        """How many tokens of a prompt are in memory, or on disk and worth reading."""
        plan = self.plan_restore(self.match(tokens, salt), len(tokens) - 1)
        return super().within_reach(tokens, salt) if plan is None else plan.have + plan.tokens

    def remember(self, tokens: Tokens[int], caches: list[Any], kind: str, terms: RetentionPolicy, goes_on: bool) -> PrefixRef:
        ref = super().remember(tokens, caches, kind, terms, goes_on)
        if self.stored is not None and terms.is_written:
            self.stored.note_path(ref.path, ref.tokens)
        return ref

    def keep_up(self) -> None:
        """Between two steps: let go of what has been kept for long enough, in memory and on disk. Cheap."""
        super().keep_up()
        if self.stored is not None:
            self.retention.spare_on(self.stored.store)

    def close(self) -> bool:
        """Write what is not on disk yet. Returns whether all of it is; without a store there is nothing to write."""
        return self.stored is None or self.stored.close()
