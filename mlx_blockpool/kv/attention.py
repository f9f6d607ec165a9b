"""Attention over keys and values that lie in runs, as the model computed them or quantised. Knows
arrays only.

One token reads its runs in place. Several tokens have quantised runs dequantised for them, some
heads at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from ..spec import BLOCK_TOKENS
from .quantised import Attended, Rows, concatenated, dense, part_of, scores, weighed

# Keys and values that are dequantised at a time, or those of one head where these are more.
PIECE_BYTES = 16 * 2**20


def attend_runs(
    queries: mx.array,
    views: Sequence[Attended],
    scale: float,
    sinks: mx.array | None,
    mask: mx.array | None = None,
) -> mx.array:
    """softmax(scale * q k^T) v for queries [B, heads, 1, key_dim] over runs of keys [1, kv_heads,
    n, dim].

    Equal to attention over the concatenated runs up to the order of sums; nothing is copied. The
    scores of all runs and of the sinks [heads] share one softmax. mask: [.., 1, n] for all heads,
    or [.., heads, 1, n].
    """
    batch, heads, _, _ = queries.shape
    kv_heads = views[0][0].shape[1]
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        mask = mask.reshape(-1, kv_heads, heads // kv_heads, mask.shape[-1])
    out = attend_grouped(group_queries(queries, kv_heads, scale), views, sinks, mask)
    return out.reshape(batch, heads, 1, -1)


def attend_quantised(
    queries: mx.array,
    views: Sequence[tuple[Rows, Rows]],
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of queries [1, heads, n, key_dim] to quantised runs: of one token in place, of
    several by mlx's own kernel, whose masks and sums it has.

    As many kv heads are dequantised at a time as PIECE_BYTES hold, and evaluated before the next
    ones, which mlx would else dequantise ahead.
    """
    if queries.shape[2] == 1:
        # A token sees all before it.
        return attend_runs(queries, views, scale, sinks, None if isinstance(mask, str) else mask)
    kv_heads, dims = views[0][0].shape[1], [rows.shape[-1] for rows in views[0]]
    head_bytes = sum(keys.shape[2] for keys, _ in views) * sum(dims) * queries.itemsize
    step = max(1, PIECE_BYTES // head_bytes)
    group = queries.shape[1] // kv_heads
    outputs: list[mx.array] = []
    for first in range(0, kv_heads, step):
        if outputs:
            mx.eval(outputs[-1])
        keys, values = (
            _dense_heads(rows, slice(first, first + step)) for rows in zip(*views, strict=True)
        )
        mine = slice(first * group, (first + step) * group)
        own = (
            mask[..., mine, :, :]
            if isinstance(mask, mx.array) and mask.ndim > 2 and mask.shape[-3] > 1
            else mask
        )
        own_sinks = None if sinks is None else sinks[mine]
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, mine], keys, values, scale=scale, mask=own, sinks=own_sinks
            )
        )
    return concatenated(outputs, 1)


def group_queries(queries: mx.array, kv_heads: int, scale: float) -> mx.array:
    """Queries [B, heads, 1, dim] as [B, kv_heads, heads / kv_heads, dim], scaled: all of one kv
    head in one product.
    """
    batch, heads, _, dim = queries.shape
    return (queries * scale).reshape(batch, kv_heads, heads // kv_heads, dim)


def attend_grouped(
    grouped: mx.array,
    views: Sequence[Attended],
    sinks: mx.array | None,
    mask: mx.array | None = None,
) -> mx.array:
    """attend_runs() of grouped queries [B, kv_heads, group, key_dim]; returns [B, kv_heads,
    group, value_dim] in their type.
    """
    columns = [scores(grouped, keys) for keys, _ in views]
    if mask is not None:
        columns = [_masked(concatenated(columns, -1), mask)]
    if len(views) == 1 and sinks is None:
        return weighed(softmax(columns[0]), views[0][1]).astype(grouped.dtype)
    columns = _sink_scores(columns[0], sinks) + columns
    return _weigh(softmax(concatenated(columns, -1)), views, 0 if sinks is None else 1).astype(
        grouped.dtype
    )


class MergedAttention:
    """attend_grouped() of members that read one run each of the same arrays [1, kv_heads, blocks *
    256, ..], of float32 on a CPU, in one product: mlx picks the rows where they lie.

    starts, counts: the first token of each member's run, which begins a block, and how many it has.
    What follows the shorter ones there has no infinities, which a weight of 0 does not remove.
    """

    def __init__(
        self, starts: Sequence[int], counts: Sequence[int], blocks: int, heads: int, dims: list[int]
    ) -> None:
        members, longest, tokens = len(starts), max(counts), blocks * BLOCK_TOKENS
        seen = np.arange(longest) < np.array(counts)[:, None]
        self._mask = None if seen.all() else mx.array(seen[:, None, None])
        begins = np.array(starts)[:, None] // BLOCK_TOKENS + np.arange(heads) * blocks
        self._picked = (
            mx.arange(members * heads, dtype=mx.uint32).reshape(members, heads),
            mx.array(begins.astype(np.uint32)),
        )
        # Of the last blocks they end outside of the array: only what is picked is read.
        self._keys = (
            (heads, blocks, dims[0], longest),
            (tokens * dims[0], BLOCK_TOKENS * dims[0], 1, dims[0]),
        )
        self._values = [
            ((heads, blocks, longest, dim), (tokens * dim, BLOCK_TOKENS * dim, dim, 1))
            for dim in dims
        ]

    def attend(self, grouped: mx.array, held: Any, values: int) -> mx.array:
        """held: the arrays of a layer, of which the first has the keys; values: which has those."""
        columns = mx.gather_mm(grouped, mx.as_strided(held[0], *self._keys), *self._picked)
        if self._mask is not None:
            columns = mx.where(self._mask, columns, -mx.inf)
        weights = mx.softmax(columns, axis=-1, precise=True)
        read = mx.as_strided(held[values], *self._values[values])
        return mx.gather_mm(weights, read, *self._picked).astype(grouped.dtype)


def attend_causally(
    grouped: mx.array, keys: mx.array, values: mx.array, sinks: mx.array | None
) -> mx.array:
    """Attention of several rows [rows, kv_heads, group, dim] by mlx's own kernel, if they are the
    last tokens of one run.

    Each row sees itself and all before it. Returns [rows, kv_heads, group, value_dim].
    """
    rows, kv_heads, group, dim = grouped.shape
    sinks = None if sinks is None else sinks.reshape(-1)
    if rows == 1:
        out = mx.fast.scaled_dot_product_attention(
            grouped.reshape(1, -1, 1, dim), keys, values, scale=1.0, mask=None, sinks=sinks
        )
        return out.reshape(1, kv_heads, group, -1)
    queries = grouped.reshape(rows, kv_heads * group, dim).swapaxes(0, 1)[None]
    out = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=1.0, mask="causal", sinks=sinks
    )
    return out[0].swapaxes(0, 1).reshape(rows, kv_heads, group, -1)


def attend_cluster(
    grouped: mx.array,
    shared: Sequence[Attended],
    own: Sequence[Sequence[Attended]],
    sinks: mx.array | None,
    counts: Sequence[int] | None = None,
    masks: Sequence[mx.array | None] | None = None,
) -> mx.array:
    """Attention of the rows [rows, kv_heads, group, dim] of members that all begin with the runs
    `shared`, which are read once.

    counts: rows of each member; None for one. own: the runs of each member that follow, of any
    length but not empty; of the last n tokens its rows see masks[i] [rows * group, n]. The scores
    of each row share one softmax, so that nothing needs merging by log-sum-exp (as fast, and
    rounded once more). Returns [rows, kv_heads, group, value_dim].
    """
    rows, kv_heads, group, dim = grouped.shape
    cuts = [cut * group for cut in accumulate(counts or [1] * len(own), initial=0)]
    # All rows of one kv head in one product.
    stacked = grouped.swapaxes(0, 1).reshape(1, kv_heads, rows * group, dim)
    own_scores = _own_scores(
        list(mx.split(stacked, cuts[1:-1], axis=2)) if len(own) > 1 else [stacked], own, masks
    )
    sinks = None if sinks is None else mx.repeat(sinks.reshape(kv_heads, 1, group), rows, axis=1)
    columns = [
        *_sink_scores(own_scores, sinks),
        *(scores(stacked, keys) for keys, _ in shared),
        own_scores,
    ]
    weights = softmax(concatenated(columns, -1))
    first = 0 if sinks is None else 1
    after = first + sum(keys.shape[2] for keys, _ in shared)
    out = concatenated(
        [
            _weigh(weights[:, :, a:b], views, after)
            for views, (a, b) in zip(own, pairwise(cuts), strict=True)
        ],
        2,
    )
    if shared:
        out = _weigh(weights, shared, first) + out
    return out.astype(grouped.dtype).reshape(kv_heads, rows, group, -1).swapaxes(0, 1)


def softmax(columns: mx.array) -> mx.array:
    """Over the last axis, summed in float32.

    On CPU 16-bit scores take half the time if they are widened first.
    """
    if columns.dtype != mx.float32 and mx.default_device() == mx.cpu:
        return mx.softmax(columns.astype(mx.float32), axis=-1).astype(columns.dtype)
    return mx.softmax(columns, axis=-1, precise=True)


def _dense_heads(rows: Iterable[Rows], heads: slice) -> mx.array:
    """Keys or values of some heads over several runs, as the model computes them."""
    return concatenated([dense(part_of(run, (slice(None), heads))) for run in rows], 2)


def _masked(columns: mx.array, mask: mx.array) -> mx.array:
    """Apply a mask of the last columns as mlx's own attention does: booleans select, numbers are
    added.
    """
    before = columns.shape[-1] - mask.shape[-1]
    if before:
        return mx.concatenate(
            [columns[..., :before], _masked(columns[..., before:], mask)], axis=-1
        )
    if mask.dtype == mx.bool_:
        return mx.where(mask, columns, mx.array(-mx.inf, columns.dtype))
    return columns + mask.astype(columns.dtype)


def _sink_scores(like: mx.array, sinks: mx.array | None) -> list[mx.array]:
    """A column to put next to scores [B, kv_heads, rows, n]; sinks in the order of kv_heads and
    rows.
    """
    if sinks is None:
        return []
    batch, kv_heads, rows, _ = like.shape
    return [
        mx.broadcast_to(sinks.reshape(1, kv_heads, rows, 1), (batch, kv_heads, rows, 1)).astype(
            like.dtype
        )
    ]


def _own_scores(
    tails: Sequence[mx.array],
    own: Sequence[Sequence[Attended]],
    masks: Sequence[mx.array | None] | None,
) -> mx.array:
    """Scores [1, kv_heads, all rows, longest] of each member's own runs, -inf after the shorter
    ones and where a mask hides.
    """
    rows = []
    for i, (mine, views) in enumerate(zip(tails, own, strict=True)):
        found = concatenated([scores(mine, keys) for keys, _ in views], -1)
        mask = None if masks is None else masks[i]
        rows.append(found if mask is None else _masked(found, mask))
    longest = max(r.shape[-1] for r in rows)
    for i, r in enumerate(rows):
        if r.shape[-1] < longest:
            rows[i] = mx.pad(
                r,
                [(0, 0)] * 3 + [(0, longest - r.shape[-1])],
                constant_values=mx.array(-mx.inf, r.dtype),
            )
    return concatenated(rows, 2)


def _weigh(weights: mx.array, views: Sequence[Attended], start: int) -> mx.array:
    """The sum of the values, weighed by the columns from `start` on."""
    parts = []
    for _, values in views:
        stop = start + values.shape[2]
        parts.append(weighed(weights[..., start:stop], values))
        start = stop
    return sum(parts[1:], parts[0])
