"""A pytest plugin for mlx-lm's own test modules: a small model for load(), and pooled caches under
the names that they import.

BLOCKPOOL_UPSTREAM says which: stock (mlx-lm's own caches), pooled, attached (pooled, and models
attached to their pool), or served (our generator and handler). Only globals of the test modules are
replaced; mlx-lm's modules stay as they are. BLOCKPOOL_UPSTREAM_MODEL is the model's folder.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator as StockBatchGenerator
from mlx_lm.models import cache as stock

from mlx_blockpool.config import KVBits
from mlx_blockpool.errors import SpecError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.build import KEPT_TOKENS, config_of
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.layer_caches import PooledKVCache, PooledRotatingKVCache
from mlx_blockpool.kv.other_caches import (
    PooledArraysCache,
    PooledChunkedKVCache,
    PooledQuantizedKVCache,
)
from mlx_blockpool.kv.probe import probe
from mlx_blockpool.kv.prompt_cache import PooledCacheList, make_prompt_cache, pooled_caches
from mlx_blockpool.kv.sequence import SequenceBlocks
from mlx_blockpool.plugins import spec_of_model
from mlx_blockpool.prefix.cache import PrefixCache
from mlx_blockpool.spec import ChunkLayer, FullLayer, ModelCacheSpec, WindowLayer

MODE = os.environ["BLOCKPOOL_UPSTREAM"]
ATTACHED = MODE == "attached"
POOLED = ("pooled", "attached")
LARGEST_BLOCK = 20_000_000
# (kv_heads, key_dim, value_dim, dtype) of the model that was loaded last: what a cache is made for
# before it is given anything.
SHAPE: list[tuple[int, int, int, str]] = [(8, 4, 4, "float32")]


def own_pool(layer: Any, dtype: str, bits: KVBits | None = None) -> KVArena:
    """A pool for one cache of one layer."""
    spec = ModelCacheSpec("upstream", (layer,), dtype).with_bits(bits)
    slabs = KVArena(spec, 64 * sum(spec.bytes_per_block(group) for group in spec.groups))
    slabs.capabilities = Capabilities(ragged=ATTACHED)
    return slabs


@functools.cache
def fitting(cls: type) -> type:
    """A pooled cache that takes a pool of the right shape once it is given the first keys and
    values.
    """

    def __init__(self: Any, layer: Any, *sizes: int, kv_bits: KVBits | None = None) -> None:  # noqa: N807
        self.make_layer = functools.partial(_layer, layer, sizes)
        self.kv_bits = kv_bits
        *shape, dtype = SHAPE[-1] if kv_bits is None else (8, 128, 128, "float32")
        cls.__init__(self, SequenceBlocks(own_pool(self.make_layer(*shape), dtype, kv_bits)), 0)  # type: ignore[misc]

    def update_and_fetch(self: Any, keys: Any, values: Any) -> Any:
        if mx.issubdtype(keys.dtype, mx.integer):
            # As a test counts with them; no model's keys are integers.
            keys, values = keys.astype(mx.float32), values.astype(mx.float32)
        needed = (keys.shape[1], keys.shape[3], values.shape[3], str(keys.dtype).rpartition(".")[2])
        place = self.place.layer
        if self.empty() and needed != (
            place.kv_heads,
            place.key_dim,
            place.value_dim,
            self.sequence.arena.spec.dtype,
        ):
            pool = own_pool(self.make_layer(*needed[:3]), needed[3], self.kv_bits)
            cls.__init__(self, SequenceBlocks(pool), 0)  # type: ignore[misc]
        return cls.update_and_fetch(self, keys, values)  # type: ignore[attr-defined]

    members = {
        "__init__": __init__,
        "update_and_fetch": update_and_fetch,
        "__module__": cls.__module__,
    }
    return type(cls.__name__, (cls,), members)


def _layer(layer: Any, sizes: tuple[int, ...], kv_heads: int, key_dim: int, value_dim: int) -> Any:
    return layer(kv_heads, key_dim, value_dim, *sizes)


class Substitute(type):
    """The type of a name that makes pooled caches, and is mlx-lm's class in every other way."""

    stock: Any
    make: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.stock)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.stock, name)


def substitute(stock_class: Any, make: Any) -> Any:
    return Substitute(stock_class.__name__, (), {"stock": stock_class, "make": staticmethod(make)})


CLASSES = {
    "KVCache": substitute(stock.KVCache, lambda: fitting(PooledKVCache)(FullLayer)),
    "QuantizedKVCache": substitute(
        stock.QuantizedKVCache,
        lambda group_size=64, bits=8: fitting(PooledQuantizedKVCache)(
            FullLayer, kv_bits=KVBits(bits, bits, group_size)
        ),
    ),
    "RotatingKVCache": substitute(
        stock.RotatingKVCache,
        lambda max_size, keep=0: fitting(PooledRotatingKVCache)(WindowLayer, max_size, keep),
    ),
    "ChunkedKVCache": substitute(
        stock.ChunkedKVCache,
        lambda chunk_size: fitting(PooledChunkedKVCache)(ChunkLayer, chunk_size),
    ),
    "ArraysCache": substitute(
        stock.ArraysCache, lambda size, left_padding=None: states(size, left_padding)
    ),
    "CacheList": substitute(stock.CacheList, PooledCacheList),
}


def states(size: int, left_padding: Any) -> Any:
    if left_padding is not None:
        # A batch of its own, as models make it for padded prompts.
        return stock.ArraysCache(size, left_padding)
    return PooledArraysCache(SequenceBlocks(own_pool(FullLayer(1, 4, 4), "float32")), size)


class Pools:
    """The pool of each model that caches were asked for, and of each type that its weights were
    cast to.
    """

    def __init__(self) -> None:
        self.opened: list[tuple[Any, Any, KVArena | None]] = []

    def of(self, model: Any) -> KVArena | None:
        """None for a model whose caches have classes of their own, and for one whose blocks are
        larger than a test should be.
        """
        dtypes = {array.dtype for _, array in tree_flatten(model.parameters())}
        for known, types, slabs in self.opened:
            if known is model and types == dtypes:
                return slabs
        slabs = self.open(model)
        # Small models come and go by the hundred.
        self.opened = [*self.opened[-3:], (model, dtypes, slabs)]
        return slabs

    def open(self, model: Any, max_kv_size: int | None = None) -> KVArena | None:
        if max_kv_size is not None:
            # Not asked for again: a model that load() made makes pooled caches by now.
            known = self.of(model)
            return (
                None
                if known is None
                else self.fill(model, known.spec.with_windows(max_kv_size, KEPT_TOKENS))
            )
        try:
            spec = spec_of_model(model, config_of(model), "upstream")
        except SpecError:
            return None
        return self.fill(model, spec)

    def fill(self, model: Any, spec: ModelCacheSpec) -> KVArena | None:
        block = sum(spec.bytes_per_block(group) for group in spec.groups)
        if block > LARGEST_BLOCK:
            return None
        slabs = KVArena(spec, 40 * block + 20 * spec.fixed_bytes_per_agent())
        slabs.capabilities = probe(model, slabs, attaches=ATTACHED)
        return slabs


POOLS = Pools()


def pooled_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
    """mlx-lm's make_prompt_cache, from a pool."""
    if "make_cache" in vars(model):
        # The test has its own idea.
        made: list[Any] = model.make_cache()
        return made
    slabs = POOLS.of(model) if max_kv_size is None else POOLS.open(model, max_kv_size)
    return (
        list(stock.make_prompt_cache(model, max_kv_size)) if slabs is None else pooled_caches(slabs)
    )


def load(path: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The small model under any name. What makes its caches makes pooled ones."""
    model, tokenizer = mlx_lm.load(os.environ["BLOCKPOOL_UPSTREAM_MODEL"])[:2]
    if MODE in POOLED:
        slabs = POOLS.of(model)
        assert slabs is not None
        assert slabs.capabilities.ragged == ATTACHED
        layer = slabs.spec.groups[0].layer
        SHAPE.append((layer.kv_heads, layer.key_dim, layer.value_dim, slabs.spec.dtype))
        # Of the class, so that a test can give the model another one and take it back.
        make_cache = {
            "make_cache": lambda self: make_prompt_cache(self, slabs),
            "__module__": type(model).__module__,
        }
        model.__class__ = type(type(model).__name__, (type(model),), make_cache)
        LOADED.append(slabs)
    return model, tokenizer


LOADED: list[KVArena] = []


def prompt_cache(*args: Any, **kwargs: Any) -> Any:
    """LRUPromptCache() of a server is a PrefixCache; where its own limits are tested it is
    mlx-lm's.
    """
    return stock.LRUPromptCache(*args, **kwargs) if args or kwargs else PrefixCache(LOADED[-1])


class BatchGenerator(StockBatchGenerator):  # type: ignore[misc]
    """mlx-lm's, whose caches of a limited size are pooled too: it does not ask the model for
    those.
    """

    def insert_segments(
        self, segments: Any, max_tokens: Any = None, caches: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if self.max_kv_size is not None:
            caches = [
                given or pooled_prompt_cache(self.model, self.max_kv_size)
                for given in caches or [None] * len(segments)
            ]
        return super().insert_segments(segments, max_tokens, caches, *args, **kwargs)


def substitute_in(module: ModuleType) -> None:
    names: dict[str, Any] = {"load": load}
    if MODE == "served":
        names |= importlib.import_module("served").NAMES
    if MODE in POOLED:
        names |= {
            **CLASSES,
            "make_prompt_cache": pooled_prompt_cache,
            "LRUPromptCache": prompt_cache,
        }
        names["BatchGenerator"] = BatchGenerator
    for name, value in names.items():
        if name in vars(module):
            setattr(module, name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for name in {item.module.__name__ for item in items}:  # type: ignore[attr-defined]
        substitute_in(sys.modules[name])
