"""Attention to quantised runs against mlx's own attention to the same rows as the model computes
them.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from thorough import only

from mlx_blockpool.kv import attention
from mlx_blockpool.kv.attach import scaled_dot_product_attention
from mlx_blockpool.kv.attention import (
    attend_cluster,
    attend_quantised,
    attend_runs,
    group_queries,
)
from mlx_blockpool.kv.quantised import Quantised, View, dense, in_form, joined, tokens
from mlx_blockpool.spec import Form

KV_HEADS, HEADS = 2, 6
# (form of keys, form of values, dim of keys, dim of values)
SHAPES: list[tuple[Form | None, Form | None, int, int]] = [
    (Form(8, 64), Form(8, 64), 64, 128),
    (Form(8, 32), Form(4, 32), 32, 96),
    (Form(4, 64), Form(4, 64), 128, 128),
    (None, Form(8, 64), 64, 64),
    (Form(4, 32), None, 32, 40),
]
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
# Of the largest figure. mlx's own quantised products in 16 bits are off by 0.1 on CPU.
TOLERANCES = {mx.float32: 1e-5, mx.bfloat16: 1.2e-2, mx.float16: 2e-3}


def random(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def quantised(shape: Any, n: int, dtype: mx.Dtype, seed: int = 1, kv_heads: int = KV_HEADS) -> View:
    """Keys and values of `n` tokens, a view of a longer array."""
    keys, values = (
        tokens(
            in_form(random(1, kv_heads, n + 30, dim, dtype=dtype, seed=seed + 100 * i), form),
            20,
            20 + n,
        )
        for i, (form, dim) in enumerate(zip(shape[:2], shape[2:], strict=True))
    )
    return keys, values


def cut(view: View, *ends: int) -> list[View]:
    return [
        (tokens(view[0], a, b), tokens(view[1], a, b))
        for a, b in zip((0, *ends), (*ends, None), strict=True)
    ]


def expected(
    queries: mx.array, view: View, scale: float, mask: Any = None, sinks: Any = None
) -> mx.array:
    found: mx.array = mx.fast.scaled_dot_product_attention(
        queries, dense(view[0]), dense(view[1]), scale=scale, mask=mask, sinks=sinks
    )
    return found


def in_float32(queries: mx.array, view: View, scale: float, sinks: Any = None) -> mx.array:
    """The same words with everything else in float32, which a 16-bit result is to be close to."""
    keys, values = (
        r._replace(scales=r.scales.astype(mx.float32), biases=r.biases.astype(mx.float32))
        if isinstance(r, Quantised)
        else r.astype(mx.float32)
        for r in view
    )
    return expected(
        queries.astype(mx.float32),
        (keys, values),
        scale,
        None,
        None if sinks is None else sinks.astype(mx.float32),
    )


def assert_close(found: mx.array, needed: mx.array, dtype: mx.Dtype) -> None:
    assert found.dtype == dtype, "the model's own type goes on"
    assert found.shape == needed.shape
    assert (
        mx.abs(found.astype(mx.float32) - needed).max() <= TOLERANCES[dtype] * mx.abs(needed).max()
    ).item()


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_one_token_attends_to_its_runs_in_place(shape: Any, dtype: mx.Dtype, sinks: bool) -> None:
    view, queries = quantised(shape, 700, dtype), random(1, HEADS, 1, shape[2], dtype=dtype)
    sink = random(HEADS, dtype=dtype, seed=9) if sinks else None
    needed = in_float32(queries, view, 0.25, sink)
    for views in ([view], cut(view, 256, 600)):
        assert_close(attend_runs(queries, views, 0.25, sink), needed, dtype)


@pytest.mark.parametrize("mask", ["causal", "chunk", "added", "of each head"])
def test_one_token_takes_a_mask_in_place(mask: Any) -> None:
    view, queries = quantised(SHAPES[0], 700, mx.float32), random(1, HEADS, 1, 64)
    mask = {
        "chunk": mx.arange(700)[None] > 444,
        "added": random(1, 1, 1, 700, seed=7),
        "of each head": random(1, HEADS, 1, 700, seed=7) > 0,
    }.get(mask, mask)
    for sink in (None, random(HEADS, seed=9)):
        needed = expected(queries, view, 0.25, mask, sink)
        for views in ([view], cut(view, 256, 600)):
            assert_close(attend_quantised(queries, views, 0.25, mask, sink), needed, mx.float32)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_a_cluster_attends_like_each_of_its_members(
    shape: Any, dtype: mx.Dtype, sinks: bool
) -> None:
    queries = random(3, HEADS, 1, shape[2], dtype=dtype)
    shared = quantised(shape, 300, dtype)
    own = [quantised(shape, n, dtype, 2 + n) for n in (3, 200, 40)]
    sink = random(HEADS, dtype=dtype, seed=9) if sinks else None
    grouped = group_queries(queries, KV_HEADS, 0.25)
    rows = None if sink is None else sink.reshape(KV_HEADS, -1)
    found = attend_cluster(grouped, cut(shared, 256), [[o] for o in own], rows).reshape(
        3, HEADS, 1, -1
    )
    for i in range(3):
        whole = joined([shared[0], own[i][0]], 2), joined([shared[1], own[i][1]], 2)
        assert_close(found[i : i + 1], in_float32(queries[i : i + 1], whole, 0.25, sink), dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["causal", "window", "added", "of each head", None])
@pytest.mark.parametrize("piece", [1, 2**24], ids=["one head at a time", "all heads at once"])
def test_several_tokens_attend_as_to_the_rows_that_the_model_computed(
    shape: Any, dtype: mx.Dtype, mask: Any, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "PIECE_BYTES", piece)
    n, length = 300, 7
    view, queries = quantised(shape, n, dtype), random(1, HEADS, length, shape[2], dtype=dtype)
    seen = mx.arange(n)[None] <= n - length + mx.arange(length)[:, None]
    mask = {
        "window": seen & (mx.arange(n)[None] > 100),
        "added": mx.where(seen, 0, -1e4).astype(dtype),
        "of each head": seen & (random(1, HEADS, 1, n, seed=7) > 0),
    }.get(mask, mask)
    sinks = random(HEADS, dtype=dtype, seed=9)
    for views in ([view], cut(view, 256)):
        for sink in (None, sinks):
            found = attend_quantised(queries, views, 0.25, mask, sink)
            assert mx.array_equal(found, expected(queries, view, 0.25, mask, sink)).item()


def test_one_token_evaluates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step that waits inside a forward ends the overlap of steps."""
    monkeypatch.setattr(attention, "PIECE_BYTES", 1)
    view, queries = quantised(SHAPES[0], 50, mx.float32), random(1, HEADS, 1, 64)
    needed = expected(queries, view, 0.25)
    with monkeypatch.context() as patched:
        patched.setattr(mx, "eval", lambda *_: pytest.fail("it evaluates"))
        found = [
            attend_quantised(queries, [view], 0.25, mask, None)
            for mask in (None, mx.ones((1, 50), mx.bool_))
        ]
    assert all(mx.allclose(f, needed, atol=1e-5).item() for f in found)


@pytest.mark.parametrize("length", [1, 5])
def test_a_layer_that_reads_anothers_rows_without_a_cache(length: int) -> None:
    view, queries = quantised(SHAPES[0], 50, mx.float32), random(1, HEADS, length, 64)
    mask = "causal" if length > 1 else None
    found = scaled_dot_product_attention(queries, *view, cache=None, scale=0.25, mask=mask)
    assert mx.allclose(found, expected(queries, view, 0.25, mask), atol=1e-5).item()


@pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="the peak of other devices depends on their kernels"
)
@pytest.mark.parametrize("dtype", only([mx.float32, mx.bfloat16], mx.bfloat16), ids=str)
def test_the_peak_of_a_chunk_is_bounded(dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "PIECE_BYTES", 2**20)
    view = quantised(SHAPES[0], 2048, dtype, kv_heads=8)
    queries, rows = random(1, 8, 4, 64, dtype=dtype), (dense(view[0]), dense(view[1]))
    mx.eval(view, queries, rows)
    peaks = [
        peak(lambda: expected(queries, rows, 0.25)),
        peak(lambda: attend_quantised(queries, [view], 0.25, "causal", None)),
    ]
    all_heads = sum(r.nbytes for r in rows)
    assert peaks[1] <= peaks[0] + 2 * attention.PIECE_BYTES < all_heads, (
        f"{peaks} bytes in addition to {all_heads} of dequantised rows"
    )


def peak(attend: Any) -> int:
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(attend())
    return int(mx.get_peak_memory() - before)
