"""Requests on a prefix cache as the engine makes them, with agents, marks and a clock that moves only by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from prefix.test_prefix_machine import keys_of
from prefix.test_states import SPECS as STATED
from prefix.test_states import Life, look, state_of
from store.disks import QuickDisk
from store.stores import open_store

from mlx_blockpool.config import PoolConfig
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.parts import leaves_of
from mlx_blockpool.kv.state_caches import PooledArraysCache
from mlx_blockpool.prefix.cache import Acquired
from mlx_blockpool.prefix.retention import RetentionPolicy
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, WindowLayer
from mlx_blockpool.tier.cache import TieredPrefixCache

FULL, WINDOW = FullLayer(1, 2, 2), WindowLayer(1, 2, 2, 300)
# A block of each group is 4096 bytes.
SPECS = {
    "full": ModelCacheSpec("m", (FULL,), "float32"),
    "window": ModelCacheSpec("m", (WINDOW, FULL), "float32"),
    **STATED,
}
BLOCK = 4096
NOBODY = RetentionPolicy()


class Keeper(Life):
    """A prefix cache of `blocks` blocks, over a store where a folder is given. `now`: its time, in seconds."""

    def __init__(self, spec: ModelCacheSpec, blocks: int = 16, folder: Path | None = None, **config: Any) -> None:
        stored = {name: config.pop(name) for name in ("store_bytes", "idle_seconds", "model_bytes") if name in config}
        settings = PoolConfig(**config)
        states = settings.state_bytes if spec.fixed_bytes_per_agent() else 0
        self.arena = KVArena(spec, blocks * BLOCK + (states or 0), settings)
        self.arena.ragged = True
        store = None if folder is None else open_store(folder, QuickDisk(), **stored)
        self.prefix = TieredPrefixCache(self.arena, store=store, config=settings)
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
        terms: RetentionPolicy = NOBODY,
        places: Sequence[int] = (),
    ) -> int:
        """A request of which beginnings are marked. Returns its hit; what it took over is right."""
        found = self.prefix.acquire(list(prompt), 20)
        self.compute(found, prompt, terms, {*places, *(end for end, _ in pins)})
        return self.end(found, prompt, pins, terms)

    def compute(
        self, found: Acquired, prompt: Sequence[int], terms: RetentionPolicy = NOBODY, places: Sequence[int] | set[int] = ()
    ) -> None:
        at = found.lookup.hit
        look(found.caches, prompt, at)
        for end in sorted({*(p for p in places if at < p < len(prompt)), len(prompt)}):
            for leaf, cache in enumerate(leaves_of(found.caches)):
                if isinstance(cache, PooledArraysCache):
                    cache.cache = state_of(prompt[:end], leaf)
                else:
                    keys = keys_of(prompt[:end], at, leaf)
                    mx.eval(cache.update_and_fetch(keys, keys + 1000))
            at = end
            if end < len(prompt):
                self.prefix.insert(list(prompt[:end]), found.caches, "user", terms)

    def end(
        self, found: Acquired, prompt: Sequence[int], pins: Sequence[tuple[int, float]] = (), terms: RetentionPolicy = NOBODY
    ) -> int:
        self.prefix.release(list(prompt), found.caches, terms=terms)
        for end, seconds in pins:
            self.prefix.pin_for(prompt[:end], seconds)
        self.prefix.retention.end(terms)
        self.check()
        return found.lookup.hit

    def hit(self, prompt: Sequence[int]) -> int:
        """How much of a prompt is known, and could be gone on from."""
        return self.prefix.look([*prompt, 49]).hit

    def check(self) -> None:
        super().check()
        self.pins.check()
