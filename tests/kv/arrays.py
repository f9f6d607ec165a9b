"""Pools without a model, and keys and values that can be read in a failure: key = token number, value = key + 1000."""

from __future__ import annotations

import mlx.core as mx

from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, WindowLayer

HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6


def make_slabs(*windows: tuple[int, int], layers: int = 2, blocks: int = 64) -> KVArena:
    """A pool of `layers` full layers, then one window layer for each (max_size, keep)."""
    full = [FullLayer(HEADS, KEY_DIM, VALUE_DIM)] * layers
    ring = [WindowLayer(HEADS, KEY_DIM, VALUE_DIM, max_size, keep) for max_size, keep in windows]
    spec = ModelCacheSpec("test", (*full, *ring), "float32")
    return KVArena(spec, blocks * sum(spec.bytes_per_block(g) for g in spec.groups))


def numbered(start: int, count: int, batch: int = 1) -> tuple[mx.array, mx.array]:
    """Keys [batch, heads, count, key_dim] and values of tokens start, start + 1, ..; row b adds 100,000 * b."""
    tokens = mx.arange(start, start + count, dtype=mx.float32)[None, None, :, None]
    rows = 100_000 * mx.arange(batch, dtype=mx.float32)[:, None, None, None]
    heads = 0.25 * mx.arange(HEADS, dtype=mx.float32)[None, :, None, None]
    keys = mx.broadcast_to(tokens + rows + heads, (batch, HEADS, count, KEY_DIM))
    return mx.contiguous(keys), mx.contiguous(mx.broadcast_to(keys[..., :1] + 1000, (batch, HEADS, count, VALUE_DIM)))
