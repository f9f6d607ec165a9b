"""Quantised rows against mlx's own functions and against float64."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_blockpool.kv import quantised as quantised_module
from mlx_blockpool.kv.quantised import (
    Quantised,
    arrays_of,
    as_rows,
    dense,
    each,
    in_form,
    joined,
    scores,
    tokens,
    weighed,
)
from mlx_blockpool.spec import Form

FORMS = [Form(8, 64), Form(4, 64), Form(8, 32), Form(4, 32)]
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
# Of the largest figure: what products in 16 bits, one number after the other, are off by is ten
# times as much.
TOLERANCES = {mx.float32: 1e-5, mx.bfloat16: 5e-3, mx.float16: 5e-3}


def random(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 1) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def words(rows: mx.array, form: Form) -> Quantised:
    found = in_form(rows, form)
    assert isinstance(found, Quantised)
    return found


def equal(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(
        bool(mx.array_equal(x, y).item()) for x, y in zip(a, b, strict=True)
    )


def exact(rows: Quantised) -> np.ndarray[Any, Any]:
    """Values in float64."""
    numbers, form = np.array(rows.packed.view(mx.uint8)).astype(np.uint8), rows.form
    if form.bits == 4:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(*numbers.shape[:-1], -1)
    scales, biases = (
        np.array(a.astype(mx.float32)).astype(np.float64)[..., None]
        for a in (rows.scales, rows.biases)
    )
    grouped = numbers.astype(np.float64).reshape(*scales.shape[:-1], form.group_size)
    return (grouped * scales + biases).reshape(rows.shape)


def off(found: mx.array, expected: np.ndarray[Any, Any]) -> float:
    """The largest difference, in parts of the largest figure."""
    return float(
        np.abs(np.array(found.astype(mx.float32)) - expected).max() / np.abs(expected).max()
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_words_and_values_are_those_of_mlx(form: Form, dtype: mx.Dtype) -> None:
    rows = random(1, 2, 40, 128, dtype=dtype)
    found, expected = (
        words(rows, form),
        mx.quantize(rows, group_size=form.group_size, bits=form.bits),
    )
    assert equal(arrays_of(found), expected)
    assert (found.shape, found.dtype, found.form) == (rows.shape, dtype, form)
    # The whole, and a part of each dimension.
    for part in (found, each(lambda a: a[:, 1:, 7:30], found)):
        values = dense(part)
        assert (values.shape, values.dtype) == (part.shape, dtype)
        assert mx.array_equal(
            values, mx.dequantize(*part[:3], group_size=form.group_size, bits=form.bits)
        ).item()


def test_an_array_stays_one() -> None:
    rows = random(1, 2, 3, 80)
    assert in_form(rows, None) is rows
    assert dense(rows) is rows
    assert arrays_of(rows) == [rows]
    assert as_rows([rows], None) is rows
    assert joined([rows], 2) is rows
    assert mx.array_equal(tokens(rows, 1), rows[:, :, 1:]).item()
    assert mx.array_equal(joined([tokens(rows, 0, 1), tokens(rows, 1)], 2), rows).item()


def test_words_of_the_same_form_stay_and_others_are_an_error() -> None:
    rows = words(random(1, 2, 3, 64), Form(8, 64))
    assert in_form(rows, Form(8, 64)) is rows
    for other in (Form(8, 32), Form(4, 64), None):
        with pytest.raises(AssertionError, match="another form"):
            in_form(rows, other)
    with pytest.raises(AssertionError, match="several forms"):
        joined([rows, dense(rows)], 2)


def test_slices_and_joins_keep_the_words() -> None:
    rows = words(random(1, 2, 9, 64), Form(4, 32))
    parts = [tokens(rows, 0, 4), tokens(rows, 4, 5), tokens(rows, 5)]
    assert [p.shape for p in parts] == [(1, 2, 4, 64), (1, 2, 1, 64), (1, 2, 4, 64)]
    assert equal(arrays_of(joined(parts, 2)), arrays_of(rows))
    assert equal(arrays_of(as_rows(arrays_of(rows), rows.form)), arrays_of(rows))


def test_mlx_evaluates_the_arrays() -> None:
    rows = words(random(1, 8, 4096, 128), Form(8, 64))
    before = mx.get_active_memory()
    mx.eval([(rows, rows)])
    assert mx.get_active_memory() - before > 0.9 * sum(a.nbytes for a in arrays_of(rows))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_equal_those_in_float64(form: Form, dtype: mx.Dtype) -> None:
    keys, values = (
        tokens(words(random(1, 2, 900, 128, dtype=dtype, seed=s), form), 100, 800) for s in (1, 2)
    )
    queries = random(1, 2, 3, 128, dtype=dtype, seed=3) * 128**-0.5
    wide = np.array(queries.astype(mx.float32)).astype(np.float64)
    found = scores(queries, keys)
    assert off(found, wide @ exact(keys).swapaxes(-1, -2)) < TOLERANCES[dtype]
    weights = mx.softmax(found.astype(mx.float32), axis=-1)
    expected = np.array(weights).astype(np.float64) @ exact(values)
    out = weighed(weights.astype(found.dtype), values)
    assert out.shape == queries.shape
    assert off(out, expected) < TOLERANCES[dtype]
    assert found.dtype == out.dtype == (mx.float32 if mx.default_device() == mx.cpu else dtype)


@pytest.mark.parametrize("form", [Form(8, 64), Form(4, 32)], ids=str)
def test_products_and_values_on_other_devices_are_the_same(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take other functions of mlx there, which the processor has too."""
    keys = tokens(words(random(1, 2, 90, 64), form), 10, 80)
    queries, weights = random(1, 2, 3, 64, seed=2), random(1, 2, 3, 70, seed=3)
    found = []
    for on_cpu in (True, False):
        monkeypatch.setattr(quantised_module, "_is_on_cpu", lambda here=on_cpu: here)
        found.append((scores(queries, keys), weighed(weights, keys), dense(keys)))
    for here, elsewhere in zip(*found, strict=True):
        assert off(elsewhere, np.array(here)) < 1e-6


def test_products_of_arrays_are_in_their_own_type() -> None:
    keys = random(1, 2, 5, 80, dtype=mx.bfloat16)
    queries = random(1, 2, 3, 80, dtype=mx.bfloat16, seed=3)
    found = scores(queries, keys)
    assert mx.array_equal(found, queries @ keys.swapaxes(-1, -2)).item()
    out = weighed(found.astype(mx.float32), keys)
    assert out.dtype == mx.bfloat16
    assert mx.array_equal(out, found @ keys).item()


@pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="other devices need not copy what they read"
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_products_read_a_part_of_a_slab_in_place(dtype: mx.Dtype) -> None:
    whole = words(random(1, 4, 4096, 128, dtype=dtype), Form(8, 64))
    mx.eval(whole)
    part = tokens(whole, 256, 2256)
    queries, weights = random(1, 4, 1, 128), random(1, 4, 1, 2000)
    mx.eval(queries, weights, scores(queries[:, :, :, :], tokens(whole, 0, 256)))
    # Scales and biases in float32, and the scores.
    allowed = (
        2 * 4 * part.scales.size + 2 * 4 * queries.shape[1] * 2000
        if dtype != mx.float32
        else 4 * 4 * 2000
    )
    for product in (lambda: scores(queries, part), lambda: weighed(weights, part)):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(product())
        extra = mx.get_peak_memory() - before
        assert extra <= allowed + 32_768 < part.packed.size * 4 // 2, (
            f"{extra} bytes in addition to {part.packed.size * 4} of words"
        )
