"""Pools without a model, and keys and values that can be read in a failure: key = token number,
value = key + 1000.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_blockpool.config import KVBits, PoolConfig
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, WindowLayer

HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6


def make_slabs(*windows: tuple[int, int], layers: int = 2, blocks: int = 64) -> KVArena:
    """A pool of `layers` full layers, then one window layer for each (max_size, keep)."""
    full = [FullLayer(HEADS, KEY_DIM, VALUE_DIM)] * layers
    ring = [WindowLayer(HEADS, KEY_DIM, VALUE_DIM, max_size, keep) for max_size, keep in windows]
    spec = ModelCacheSpec("test", (*full, *ring), "float32")
    return KVArena(spec, blocks * sum(spec.bytes_per_block(g) for g in spec.groups))


def numbered(
    start: int, count: int, batch: int = 1, dims: tuple[int, int] = (KEY_DIM, VALUE_DIM)
) -> tuple[mx.array, mx.array]:
    """Keys [batch, heads, count, key_dim] and values of tokens start, start + 1, ..; row b adds
    100,000 * b.

    Rows of one number are the same after they were quantised.
    """
    tokens = mx.arange(start, start + count, dtype=mx.float32)[None, None, :, None]
    rows = 100_000 * mx.arange(batch, dtype=mx.float32)[:, None, None, None]
    heads = 0.25 * mx.arange(HEADS, dtype=mx.float32)[None, :, None, None]
    keys = mx.broadcast_to(tokens + rows + heads, (batch, HEADS, count, dims[0]))
    return mx.contiguous(keys), mx.contiguous(
        mx.broadcast_to(keys[..., :1] + 1000, (batch, HEADS, count, dims[1]))
    )


def make_quantised(
    *layers: Any,
    bits: KVBits | None = None,
    dtype: str = "float32",
    blocks: int = 40,
    preallocate: bool = False,
) -> KVArena:
    """A pool of these layers that holds 8 bits, or `bits`; ragged, as if its model were
    attached.
    """
    spec = ModelCacheSpec("test", layers, dtype).with_bits(bits or KVBits(8, 8))
    size = sum(spec.bytes_per_block(g) for g in spec.groups)
    arena = KVArena(spec, blocks * size, PoolConfig(preallocate=preallocate))
    arena.capabilities = RAGGED
    return arena


def drawn(
    start: int, count: int, dim: int = 64, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array]:
    """Random keys and values [1, heads, count, dim], others for each `start`."""
    keys, values = mx.random.normal(
        (2, 1, HEADS, count, dim), dtype, key=mx.random.key(start + 1000)
    )
    return keys, values
