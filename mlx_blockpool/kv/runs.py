"""Attention over keys and values that lie in runs, as the model computed them or quantised. Knows arrays only.

One token reads its runs in place. Several tokens have quantised runs dequantised for them, some heads at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx

from .rows import Rows, View, concatenated, dense, part_of, scores, weighed

# Keys and values that are dequantised at a time, or those of one head where these are more.
PIECE_BYTES = 16 * 2**20


def attend_runs(
    queries: mx.array, views: list[View], scale: float, sinks: mx.array | None, mask: mx.array | None = None
) -> mx.array:
    """softmax(scale * q k^T) v for queries [B, heads, 1, key_dim] over runs of keys [1, kv_heads, n, dim].

    Equal to attention over the concatenated runs up to the order of sums; nothing is copied. The scores of all runs and of
    the sinks [heads] share one softmax. mask: [.., 1, n] for all heads, or [.., heads, 1, n].
    """
    batch, heads, _, _ = queries.shape
    kv_heads = views[0][0].shape[1]
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        mask = mask.reshape(-1, kv_heads, heads // kv_heads, mask.shape[-1])
    out = attend_grouped(group_queries(queries, kv_heads, scale), views, sinks, mask)
    return out.reshape(batch, heads, 1, -1)


def attend_quantised(queries: mx.array, views: list[View], scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
    """Attention of queries [1, heads, n, key_dim] to quantised runs: of one token in place, of several by heads."""
    if queries.shape[2] == 1:
        # A token sees all before it.
        return attend_runs(queries, views, scale, sinks, None if isinstance(mask, str) else mask)
    return attend_by_heads(queries, views, scale, mask, sinks)


def attend_by_heads(queries: mx.array, views: list[View], scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
    """Attention of queries [1, heads, n, key_dim] to quantised runs by mlx's own kernel, whose masks and sums it has.

    As many kv heads are dequantised at a time as PIECE_BYTES hold, and evaluated before the next ones, which mlx would else
    dequantise ahead.
    """
    kv_heads, dims = views[0][0].shape[1], [rows.shape[-1] for rows in views[0]]
    head_bytes = sum(keys.shape[2] for keys, _ in views) * sum(dims) * queries.itemsize
    step = max(1, PIECE_BYTES // head_bytes)
    group = queries.shape[1] // kv_heads
    outputs: list[mx.array] = []
    for first in range(0, kv_heads, step):
        if outputs:
            mx.eval(outputs[-1])
        keys, values = (_dense_heads(rows, slice(first, first + step)) for rows in zip(*views, strict=True))
        mine = slice(first * group, (first + step) * group)
        own = mask[..., mine, :, :] if isinstance(mask, mx.array) and mask.ndim > 2 and mask.shape[-3] > 1 else mask
        own_sinks = None if sinks is None else sinks[mine]
        outputs.append(
            mx.fast.scaled_dot_product_attention(queries[:, mine], keys, values, scale=scale, mask=own, sinks=own_sinks)
        )
    return concatenated(outputs, 1)


def group_queries(queries: mx.array, kv_heads: int, scale: float) -> mx.array:
    """Queries [B, heads, 1, dim] as [B, kv_heads, heads / kv_heads, dim], scaled: all of one kv head in one product."""
    batch, heads, _, dim = queries.shape
    return (queries * scale).reshape(batch, kv_heads, heads // kv_heads, dim)


def attend_grouped(grouped: mx.array, views: list[View], sinks: mx.array | None, mask: mx.array | None = None) -> mx.array:
    """attend_runs() of grouped queries [B, kv_heads, group, key_dim]; returns [B, kv_heads, group, value_dim] in their type."""
    columns = [scores(grouped, keys) for keys, _ in views]
    if mask is not None:
        columns = [_masked(concatenated(columns, -1), mask)]
    if len(views) == 1 and sinks is None:
        return weighed(softmax(columns[0]), views[0][1]).astype(grouped.dtype)
    columns = _sink_scores(columns[0], sinks) + columns
    return _weigh(softmax(concatenated(columns, -1)), views, 0 if sinks is None else 1)[0].astype(grouped.dtype)


def attend_rows(grouped: mx.array, views: list[View], sinks: mx.array | None, mask: mx.array | None = None) -> mx.array:
    """Attention of several rows [rows, kv_heads, group, key_dim] of one member to the runs that it reads, each read once.

    mask: [rows * group, n], of the last n tokens. Returns [rows, kv_heads, group, value_dim].
    """
    rows, kv_heads, group, _ = grouped.shape
    out = attend_grouped(_stacked(grouped), views, _repeated(sinks, grouped), mask)
    return out.reshape(kv_heads, rows, group, -1).swapaxes(0, 1)


def attend_causally(grouped: mx.array, keys: mx.array, values: mx.array, sinks: mx.array | None) -> mx.array:
    """attend_rows() by mlx's own kernel, where the rows are the last tokens of one run: each sees itself and all before it."""
    rows, kv_heads, group, dim = grouped.shape
    queries = grouped.reshape(rows, kv_heads * group, dim).swapaxes(0, 1)[None]
    sinks = None if sinks is None else sinks.reshape(-1)
    mask = "causal" if rows > 1 else None
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask, sinks=sinks)
    return out[0].swapaxes(0, 1).reshape(rows, kv_heads, group, -1)


def attend_cluster(
    grouped: mx.array,
    shared: list[View],
    own: list[list[View]],
    sinks: mx.array | None,
    counts: Sequence[int] | None = None,
    masks: Sequence[mx.array | None] | None = None,
) -> mx.array:
    """The same for several members, counts[i] rows of each (None: one), that all begin with the runs `shared`, read once.

    Then follow the runs own[i] of each member, of any length but not empty, of whose last n tokens its
    rows see masks[i] [rows * group, n]. The
    scores of each row share one softmax, so that nothing needs merging by log-sum-exp (as fast, and rounded once more).
    """
    rows, kv_heads, group, _ = grouped.shape
    cuts = list(accumulate(counts or [1] * len(own), initial=0))
    stacked = _stacked(grouped)
    columns = [scores(stacked, keys) for keys, _ in shared]
    tails = list(mx.split(stacked, [cut * group for cut in cuts[1:-1]], axis=2))
    columns = [*_sink_scores(columns[0], _repeated(sinks, grouped)), *columns, _own_scores(tails, own, masks)]
    weights = softmax(mx.concatenate(columns, axis=-1))
    out, start = _weigh(weights, shared, 0 if sinks is None else 1)
    weighed_own = [
        _weigh(weights, views, start, slice(a * group, b * group))[0] for views, (a, b) in zip(own, pairwise(cuts), strict=True)
    ]
    out = (out + mx.concatenate(weighed_own, axis=2)).astype(grouped.dtype)
    return out.reshape(kv_heads, rows, group, -1).swapaxes(0, 1)


def _stacked(grouped: mx.array) -> mx.array:
    """All rows of one kv head in one product: [1, kv_heads, rows * group, dim]."""
    rows, kv_heads, group, dim = grouped.shape
    return grouped.swapaxes(0, 1).reshape(1, kv_heads, rows * group, dim)


def _repeated(sinks: mx.array | None, grouped: mx.array) -> mx.array | None:
    """The sinks of each row that is stacked."""
    rows, kv_heads, group, _ = grouped.shape
    return None if sinks is None else mx.repeat(sinks.reshape(kv_heads, 1, group), rows, axis=1)


def softmax(columns: mx.array) -> mx.array:
    """Over the last axis, summed in float32. On CPU 16-bit scores take half the time if they are widened first."""
    if columns.dtype != mx.float32 and mx.default_device() == mx.cpu:
        return mx.softmax(columns.astype(mx.float32), axis=-1).astype(columns.dtype)
    return mx.softmax(columns, axis=-1, precise=True)


def _dense_heads(rows: Iterable[Rows], heads: slice) -> mx.array:
    """Keys or values of some heads over several runs, as the model computes them."""
    return concatenated([dense(part_of(run, (slice(None), heads))) for run in rows], 2)


def _masked(columns: mx.array, mask: mx.array) -> mx.array:
    """As mlx's own attention does: a mask of booleans keeps, one of numbers is added. It is of the last columns, or of all."""
    before = columns.shape[-1] - mask.shape[-1]
    if before:
        return mx.concatenate([columns[..., :before], _masked(columns[..., before:], mask)], axis=-1)
    if mask.dtype == mx.bool_:
        return mx.where(mask, columns, mx.array(-mx.inf, columns.dtype))
    return columns + mask.astype(columns.dtype)


def _sink_scores(like: mx.array, sinks: mx.array | None) -> list[mx.array]:
    """A column beside scores [B, kv_heads, rows, n]; sinks in the order of kv_heads and rows."""
    if sinks is None:
        return []
    batch, kv_heads, rows, _ = like.shape
    return [mx.broadcast_to(sinks.reshape(1, kv_heads, rows, 1), (batch, kv_heads, rows, 1)).astype(like.dtype)]


def _own_scores(tails: list[mx.array], own: list[list[View]], masks: Sequence[mx.array | None] | None) -> mx.array:
    """Scores [1, kv_heads, all rows, longest] of each member's own runs, -inf after the shorter ones and where a mask hides."""
    rows = []
    for i, (mine, views) in enumerate(zip(tails, own, strict=True)):
        found = concatenated([scores(mine, keys) for keys, _ in views], -1)
        mask = None if masks is None else masks[i]
        rows.append(found if mask is None else _masked(found, mask))
    longest = max(r.shape[-1] for r in rows)
    for i, r in enumerate(rows):
        if r.shape[-1] < longest:
            rows[i] = mx.pad(r, [(0, 0)] * 3 + [(0, longest - r.shape[-1])], constant_values=mx.array(-mx.inf, r.dtype))
    return mx.concatenate(rows, axis=2)


def _weigh(weights: mx.array, views: list[View], start: int, rows: slice = slice(None)) -> tuple[mx.array, int]:
    """The sum of the values, weighed by these rows and the columns from `start` on; and the column after the last one."""
    out: mx.array | None = None
    for _, values in views:
        stop = start + values.shape[2]
        part = weighed(weights[:, :, rows, start:stop], values)
        out = part if out is None else out + part
        start = stop
    assert out is not None
    return out, start
