"""A prefix cache from its start to its end, over a store where a folder is given, and requests on
it as the engine makes them.

Nothing is computed by a model: see computed.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from prefix.computed import compute, look
from store.stores import open_store

from mlx_blockpool.config import PoolConfig
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.prefix.cache import Acquired
from mlx_blockpool.prefix.retention import RetentionPolicy
from mlx_blockpool.ranks.group import ALONE, Ranks
from mlx_blockpool.spec import CompositeLayer, FullLayer, ModelCacheSpec, StateLayer, WindowLayer
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.prompt_store import PromptStore
from mlx_blockpool.tier.cache import TieredPrefixCache
from mlx_blockpool.tier.write_behind import StoredPrefixes

STATE = StateLayer((((1, 3), "float32"), ((1, 2, 2), "int64")))
# 12 and 32 bytes.
STATE_BYTES = 44
FULL, WINDOW = FullLayer(1, 2, 2), WindowLayer(1, 2, 2, 300)
# A block of each group is 4096 bytes.
STATED = {
    "hybrid": ModelCacheSpec("m", (STATE, FULL, STATE), "float32"),
    "composite": ModelCacheSpec(
        "m", (CompositeLayer((STATE, FULL)), CompositeLayer((STATE, WINDOW))), "float32"
    ),
    "states alone": ModelCacheSpec("m", (STATE, STATE), "float32"),
}
SPECS = {
    "full": ModelCacheSpec("m", (FULL,), "float32"),
    "window": ModelCacheSpec("m", (WINDOW, FULL), "float32"),
    **STATED,
}
BLOCK = 4096
NOBODY = RetentionPolicy()
# The pool's bits are those of the spec.
POOL_FIELDS = {field.name for field in fields(PoolConfig)} - {"bits"}


class Life:
    """A prefix cache of `pool_bytes`, over a store where a folder is given.

    `config`: fields of PoolConfig and of StoreConfig.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        folder: Path | None = None,
        disk: Disk | None = None,
        pool_bytes: int = 5_000_000,
        ranks: Ranks = ALONE,
        **config: Any,
    ) -> None:
        settings = PoolConfig(
            **{
                "state_bytes": 100_000,
                **{name: config.pop(name) for name in POOL_FIELDS & config.keys()},
            }
        )
        self.arena = KVArena(spec, pool_bytes, settings)
        self.arena.capabilities = RAGGED
        store = None if folder is None else open_store(folder, disk, **config)
        self.prefix = TieredPrefixCache(self.arena, store=store, config=settings, ranks=ranks)

    @property
    def stored(self) -> StoredPrefixes:
        assert isinstance(self.prefix.stored, StoredPrefixes)
        return self.prefix.stored

    @property
    def store(self) -> PromptStore:
        return self.stored.store

    def answer(
        self,
        prompt: Sequence[int],
        places: Collection[int] = (),
        kind: str = "assistant",
        step: int = 0,
    ) -> int:
        """A request kept at `places`, computed in passes of `step` tokens.

        Returns its hit; what it took over is right.
        """
        found = self.prefix.acquire(list(prompt), 20)
        self.compute(found, prompt, places=places, step=step)
        self.prefix.release(list(prompt), found.caches, kind)
        self.check()
        return found.lookup.hit

    def compute(
        self,
        found: Acquired,
        prompt: Sequence[int],
        policy: RetentionPolicy = NOBODY,
        places: Collection[int] = (),
        step: int = 0,
    ) -> None:
        """The rest of a prompt that was acquired."""
        at = found.lookup.hit
        look(found.caches, prompt, at)
        for end in sorted({*(p for p in places if at < p < len(prompt)), len(prompt)}):
            compute(found.caches, prompt[:end], at, step)
            at = end
            if end < len(prompt):
                self.prefix.insert(list(prompt[:end]), found.caches, "user", policy)
        look(found.caches, prompt, at)

    def acquired(self, tokens: Sequence[int]) -> int:
        """A hit of which everything is right, and nothing is held any more."""
        found = self.prefix.acquire(tokens, 20)
        look(found.caches, tokens, found.lookup.hit)
        self.prefix.discard(found.caches)
        self.check()
        assert {(c.held, c.reserved) for c in self.arena.pool.settle()} == {(0, 0)}
        return found.lookup.hit

    def check(self) -> None:
        self.prefix.check()
        assert self.arena.running_bytes + self.prefix.index.state_bytes <= self.arena.state_bytes

    def write(self, tails: bool = False) -> None:
        """Everything that is due; `tails`: the ends of conversations too."""
        for _ in range(2):
            self.stored.write_behind(1 << 40, at_once=tails)
            assert self.store.flush()
        self.stored.write_behind(0)

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        return [node.hash for node in self.prefix.index.trie.match(tokens).path]

    def on_disk(self, tokens: Sequence[int]) -> list[bool]:
        return [node.on_disk for node in self.prefix.index.trie.match(tokens).path]


class Keeper(Life):
    """A Life of `blocks` blocks, whose requests come from agents and mark beginnings.

    `now`: its time in seconds.
    """

    def __init__(
        self, spec: ModelCacheSpec, blocks: int = 16, folder: Path | None = None, **config: Any
    ) -> None:
        states = config.setdefault("state_bytes", None) if spec.fixed_bytes_per_agent() else 0
        super().__init__(spec, folder, pool_bytes=blocks * BLOCK + (states or 0), **config)
        self.now = 1000.0
        self.pins.clock = self.prefix.retention.days.clock = lambda: self.now

    @property
    def pins(self) -> Any:
        return self.prefix.retention.pins

    @property
    def agents(self) -> dict[str, int]:
        return self.prefix.index.accounting.largest(99)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.prefix.keep_up()

    def ask(
        self,
        prompt: Sequence[int],
        pins: Sequence[tuple[int, float]] = (),
        policy: RetentionPolicy = NOBODY,
        places: Sequence[int] = (),
    ) -> int:
        """A request of which beginnings are marked. Returns its hit; what it took over is right."""
        found = self.prefix.acquire(list(prompt), 20)
        self.compute(found, prompt, policy, {*places, *(end for end, _ in pins)})
        return self.end(found, prompt, pins, policy)

    def end(
        self,
        found: Acquired,
        prompt: Sequence[int],
        pins: Sequence[tuple[int, float]] = (),
        policy: RetentionPolicy = NOBODY,
    ) -> int:
        self.prefix.release(list(prompt), found.caches, policy=policy)
        for end, seconds in pins:
            self.prefix.pin_for(prompt[:end], seconds)
        self.prefix.retention.quotas.enforce(policy.owner)
        self.check()
        return found.lookup.hit

    def hit(self, prompt: Sequence[int]) -> int:
        """How much of a prompt is known, and could be gone on from."""
        return self.prefix.look([*prompt, 49]).hit

    def check(self) -> None:
        super().check()
        self.pins.check()
