"""A prefix cache over a store, from a start to its end; keys are those of test_prefix_machine and say which token they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from prefix.test_prefix_machine import LAYER_STEP, family, keys_of, numbers
from store.stores import open_store

from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.layer_caches import PooledRotatingKVCache
from mlx_blockpool.prefix.resume import lay_out
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, WindowLayer
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.prompt_store import PromptStore
from mlx_blockpool.tier.cache import TieredPrefixCache
from mlx_blockpool.tier.restore import RestorePlan
from mlx_blockpool.tier.write_behind import StoredPrefixes

# A block is 8192 bytes.
SPEC = ModelCacheSpec("m", (FullLayer(1, 2, 2), FullLayer(1, 2, 2)), "float32")
WINDOWED = ModelCacheSpec("m", (WindowLayer(1, 2, 2, 300), FullLayer(1, 2, 2)), "float32")
BLOCK = 256
# Bytes of a file, at most.
FILE = 10_500
ONE, TWO, THREE = (list(family(n, 5 * BLOCK + 30)) for n in (1, 2, 3))


class Life:
    """A prefix cache over a store, from a start to its end."""

    def __init__(
        self, folder: Path, disk: Disk | None = None, pool: int = 100 * 8192, spec: ModelCacheSpec = SPEC, **config: Any
    ) -> None:
        self.arena = KVArena(spec, pool)
        self.arena.ragged = True
        self.store: PromptStore = open_store(folder, disk, **config)
        self.prefix = TieredPrefixCache(self.arena, store=self.store)

    @property
    def stored(self) -> StoredPrefixes:
        assert self.prefix.stored is not None
        return self.prefix.stored

    def write(self) -> None:
        self.stored.write_behind(1 << 40)
        assert self.store.flush()
        self.stored.write_behind(0)

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        return [node.hash for node in self.prefix.index.trie.match(tokens).path]

    def on_disk(self, tokens: Sequence[int]) -> list[bool]:
        return [node.residency.on_disk for node in self.prefix.index.trie.match(tokens).path]

    def fetched(self, tokens: Sequence[int]) -> int:
        """A hit whose every key is right."""
        found = self.prefix.acquire(tokens, 20)
        for layer, cache in enumerate(found.caches if found.lookup.hit else ()):
            keys, expected = cache.keys_and_values()[0], numbers(tuple(tokens))[: found.lookup.hit] + layer * LAYER_STEP
            if isinstance(cache, PooledRotatingKVCache):
                keys, expected = cache._temporal_order(keys), expected[-cache.max_size :]
            assert np.array_equal(np.array(keys)[0, 0, :, 0], expected)
        self.prefix.discard(found.caches)
        self.prefix.check()
        assert {(c.held, c.reserved) for c in self.arena.pool.settle()} == {(0, 0)}
        return found.lookup.hit


def wanted(life: Life, tokens: Sequence[int]) -> RestorePlan:
    """What a prompt that begins with these tokens would bring back."""
    found = life.prefix.plan_restore(life.prefix.match([*tokens, 1]), len(tokens))
    assert found is not None
    return found


def compute(life: Life, tokens: list[int]) -> None:
    """From the first token on, as somebody does who could not wait."""
    caches = lay_out(life.prefix.admission, life.prefix.index.trie.match([]), 0, None, len(tokens), len(tokens) + 20)
    for layer, cache in enumerate(caches):
        keys = keys_of(tokens, 0, layer)
        mx.eval(cache.update_and_fetch(keys, keys + 1000))
    life.prefix.release(tokens, caches)
