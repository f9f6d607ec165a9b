"""Attention of one token over keys and values that lie in several runs. Knows arrays only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .slabs import View


def attend_runs(queries: mx.array, views: list[View], scale: float, sinks: mx.array | None) -> mx.array:
    """softmax(scale * q k^T) v for queries [B, heads, 1, key_dim] over runs of keys [1, kv_heads, n, dim].

    Equal to attention over the concatenated runs up to the order of sums; nothing is copied. The scores of all runs and of
    the sinks [heads] share one softmax.
    """
    batch, heads, _, dim = queries.shape
    kv_heads = views[0][0].shape[1]
    grouped = (queries * scale).reshape(batch, kv_heads, heads // kv_heads, dim)
    scores = [grouped @ keys.swapaxes(-1, -2) for keys, _ in views]
    weights: Any = scores
    if sinks is not None:
        column = mx.broadcast_to(sinks.reshape(1, kv_heads, -1, 1), (batch, kv_heads, heads // kv_heads, 1))
        weights = [column.astype(scores[0].dtype), *scores]
    weights = mx.softmax(mx.concatenate(weights, axis=-1), axis=-1, precise=True)
    start = 0 if sinks is None else 1
    out: mx.array | None = None
    for _, values in views:
        stop = start + values.shape[2]
        part = weights[..., start:stop] @ values
        out = part if out is None else out + part
        start = stop
    assert out is not None
    return mx.reshape(out, (batch, heads, 1, -1))
