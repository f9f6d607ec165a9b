"""Where the caches of a request come from and where they go: the pool and its prefix cache.

The engine asks for caches, for room before each step, and gives back what it computed. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
