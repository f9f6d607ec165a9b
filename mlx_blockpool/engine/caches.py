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
from ..prefix.stored import Restore
from ..spec import BLOCK_TOKENS
from .request import Running

# Records are copied into the pool for so long at a time, so that running replies go on.
RESTORE_SECONDS = 0.02


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
        self._restores: dict[int, Restore] = {}

    @property
    def keeps_chunks(self) -> bool:
        """Whether keeping costs nothing and serves at any token, so that every chunk of a prefill is kept."""
        return self.ragged and not self.prefix.slabs.window_groups

    def capacity(self) -> int | None:
        """The most tokens that one sequence can have; None: no limit."""
        return self.prefix.pool.sequence_capacity()

    def open(self, running: Running, others: Sequence[Running]) -> Opened:
        """Caches for a request beside `others`, with room to begin with: the rest is secured step by step.

        Raises PoolExhaustedError if there is no room now. Who was swapped out needs a block to spare for each of the others, or
        it would soon have to go again.
        """
        self.abandon(running)
        room = min(running.left_to_produce(), BLOCK_TOKENS)
        try:
            fetched = self.prefix.fetch(running.tokens, room)
        except PoolExhaustedError:
            if not self.stop_restoring():
                raise
            fetched = self.prefix.fetch(running.tokens, room)
        try:
            self.prefix.room.need_spare(len(others) if running.swaps else 0)
        except PoolExhaustedError:
            self.prefix.release(fetched.caches)
            raise
        return Opened(fetched.caches, fetched.lookup.hit, fetched.lookup)

    def is_ready(self, running: Running) -> bool:
        """Whether open() would not have to wait for the disk; what is missing is read from now on, see advance()."""
        stored = self.prefix.stored
        if stored is None:
            return True
        if running.uid not in self._restores:
            path = self.prefix.known.trie.match(running.tokens).path
            missing = stored.missing(path)
            if not stored.arriving.isdisjoint(missing):
                # Another request waits for the same.
                return False
            if not missing:
                return True
            try:
                self._restores[running.uid] = stored.restore(path)
            except PoolExhaustedError:
                # It starts from what is in memory, once there is room for that.
                return True
        return self._restores[running.uid].advance()

    def advance(self, idle: bool) -> bool:
        """Between two steps: write behind, and go on reading. Returns whether something that was waited for is there.

        `idle`: there is nothing to compute meanwhile, so that it may take its time.
        """
        if self.prefix.stored is not None:
            self.prefix.stored.write_behind()
        done = [restore.advance(wait=idle, seconds=RESTORE_SECONDS) for restore in self._restores.values()]
        return any(done)

    def abandon(self, running: Running) -> None:
        """A request that has started, or never will: what was read for it is known like anything else."""
        restore = self._restores.pop(running.uid, None)
        if restore is not None:
            restore.release()

    def stop_restoring(self) -> bool:
        """Give up the blocks of what is being read: who can go on now goes first. Returns whether there were any."""
        stopped = list(self._restores.values())
        self._restores.clear()
        for restore in stopped:
            restore.release()
        return bool(stopped)

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
        self.stop_restoring()
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

    def open(self, running: Running, others: Sequence[Running]) -> Opened:
        if others:
            self._fit([*others, running])
        return super().open(running, others)

    def secure(self, batch: Sequence[Running]) -> None:
        if not self.merges:
            super().secure(batch)
        elif len(batch) > 1:
            self._fit(batch)

    def _fit(self, batch: Sequence[Running]) -> None:
        """Raises PoolExhaustedError if a padded batch would be too large. One sequence alone is never."""
        needed = batch_memory(self.prefix.slabs.spec, [len(running.tokens) + 1 for running in batch]).bytes.grown.allocated
        if needed > self.batch_bytes:
            hint = f"The padded batch would take {needed} bytes and has {self.batch_bytes}. Raise --pool-bytes."
            raise PoolExhaustedError(len(batch), len(batch) - 1, 0, "batch", hint)
