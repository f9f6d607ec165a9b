"""Rows of keys or values, as arrays or quantised as mlx does it: slices, conversions, and the two
products of attention.

Knows arrays, no slabs and no sequences. Quantised rows move as words: dequantised and quantised
again they would be others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx

from ..spec import Form


class Quantised(NamedTuple):
    """Rows [.., n, dim] as mx.quantize makes them: packed [.., n, dim * bits / 32], scales and
    biases [.., n, dim / group_size].

    A tuple, because mx.eval() takes the arrays out of tuples and silently leaves other objects
    alone.
    """

    packed: mx.array
    scales: mx.array
    biases: mx.array
    form: Form

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.form.group_size)

    @property
    def dtype(self) -> mx.Dtype:
        """Of the rows."""
        return self.scales.dtype


Rows: TypeAlias = mx.array | Quantised
# The rows of each array of a layer: keys and values.
View: TypeAlias = tuple[Rows, ...]


class Joint(NamedTuple):
    """Rows of several arrays as those of one array, whose dimensions follow each other."""

    parts: View

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return (*self.parts[0].shape[:-1], sum(part.shape[-1] for part in self.parts))


class Roles(NamedTuple):
    """What attention makes of the arrays of a layer: queries are scored by the first `keys` of
    them as one, and the array `values` is summed.
    """

    keys: int
    values: int

    @property
    def num_arrays(self) -> int:
        """How many arrays are read."""
        return max(self.keys, self.values + 1)

    def attended(self, view: View) -> Attended:
        """Keys and values among the rows of each array."""
        return view[0] if self.keys == 1 else Joint(view[: self.keys]), view[self.values]


# What attention reads: keys and values.
Attended: TypeAlias = tuple[Rows | Joint, Rows]
KEYS_AND_VALUES = Roles(1, 1)
# An index of rows that takes their last axis as a whole.
Where: TypeAlias = slice | tuple[slice | mx.array, ...]


def in_form(rows: Rows, form: Form | None) -> Rows:
    """Rows as a slab of this form holds them: arrays are quantised, words of the form stay as
    they are.
    """
    if isinstance(rows, Quantised):
        assert rows.form == form, (
            f"{rows.form} != {form}: words of another form would have to be quantised again"
        )
        return rows
    if form is None:
        return rows
    packed, scales, biases = mx.quantize(rows, group_size=form.group_size, bits=form.bits)
    return Quantised(packed, scales, biases, form)


def arrays_of(rows: Rows) -> list[mx.array]:
    """The array itself, or packed words, scales and biases."""
    return list(rows[:3]) if isinstance(rows, Quantised) else [rows]


def as_rows(arrays: list[mx.array], form: Form | None) -> Rows:
    """The inverse of arrays_of()."""
    if form is None:
        (array,) = arrays
        return array
    packed, scales, biases = arrays
    return Quantised(packed, scales, biases, form)


def columns(dim: int, dtype: mx.Dtype, form: Form | None) -> list[tuple[int, mx.Dtype]]:
    """Width and type of each array that holds rows of `dim` values."""
    if form is None:
        return [(dim, dtype)]
    groups = dim // form.group_size
    return [(dim * form.bits // 32, mx.uint32), (groups, dtype), (groups, dtype)]


def each(function: Callable[..., mx.array], *rows: Rows) -> Rows:
    """What `function` makes of the arrays of rows of one form: slices, copies and concatenations
    along any axis but the last.
    """
    if len(rows) == 1 and not isinstance(rows[0], Quantised):
        return function(rows[0])
    forms = {r.form if isinstance(r, Quantised) else None for r in rows}
    assert len(forms) == 1, f"{forms}: rows of several forms"
    return as_rows(
        [function(*parts) for parts in zip(*map(arrays_of, rows), strict=True)], forms.pop()
    )


def part_of(rows: Rows, where: Where) -> Rows:
    """rows[where]: a view.

    Each layer reads for each sequence of a batch: a loop over one array would be felt.
    """
    if not isinstance(rows, Quantised):
        return rows[where]
    packed, scales, biases, form = rows
    return Quantised(packed[where], scales[where], biases[where], form)


def put(held: Rows, where: Where, rows: Rows) -> None:
    """held[where] = rows, in place, which are quantised if what is held is."""
    if not isinstance(held, Quantised):
        assert not isinstance(rows, Quantised), f"{rows.form} != None: words where arrays are held"
        held[where] = rows
        return
    held.packed[where], held.scales[where], held.biases[where] = arrays_of(in_form(rows, held.form))


def tokens(rows: Rows, start: int, stop: int | None = None) -> Rows:
    """Tokens [start, stop) of rows [batch, heads, n, dim]: a view."""
    return part_of(rows, (slice(None), slice(None), slice(start, stop)))


def own_copy(array: mx.array) -> mx.array:
    """A copy in a new buffer: mx.contiguous() returns the buffer of which an array is one
    contiguous part.
    """
    return mx.where(mx.array(True), array, mx.zeros((), array.dtype))


def own_copies(arrays: list[Any]) -> list[Any]:
    """own_copy() of each array, evaluated; None stays None.

    A view would keep alive all that it is a view of.
    """
    copies = [None if array is None else own_copy(array) for array in arrays]
    mx.eval([copy for copy in copies if copy is not None])
    return copies


def concatenated(arrays: Sequence[mx.array], axis: int = 0) -> mx.array:
    """One array of several along an axis; of one array itself, not a copy."""
    return arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays), axis=axis)


def joined(rows: Sequence[Rows], axis: int) -> Rows:
    """concatenated() of rows of one form, along any axis but the last."""
    return rows[0] if len(rows) == 1 else each(lambda *arrays: concatenated(arrays, axis), *rows)


def dense(rows: Rows) -> mx.array:
    """Rows as an array, bit-equal to mx.dequantize(); an array as it is.

    On CPU mx.dequantize() takes ten operations on 32-bit words; these take half the time and a
    third of the memory.
    """
    if not isinstance(rows, Quantised):
        return rows
    packed, scales, biases, form = rows
    if not _is_on_cpu():
        return mx.dequantize(packed, scales, biases, group_size=form.group_size, bits=form.bits)
    values = packed.view(mx.uint8)
    if form.bits == 4:
        values = mx.stack([values & 15, values >> 4], axis=-1)
    values = values.astype(rows.dtype).reshape(*scales.shape, form.group_size)
    return (values * scales[..., None] + biases[..., None]).reshape(rows.shape)


def scores(queries: mx.array, keys: Rows | Joint) -> mx.array:
    """queries k^T: [1, heads, rows, dim] by [1, heads, n, dim] -> [1, heads, rows, n]; of
    quantised keys in float32 on CPU.
    """
    if isinstance(keys, Joint):
        ends = list(accumulate(part.shape[-1] for part in keys.parts))
        found = [
            scores(queries[..., start:end], part)
            for part, (start, end) in zip(keys.parts, pairwise([0, *ends]), strict=True)
        ]
        return sum(found[1:], found[0])
    return (
        _product(queries, keys, True)
        if isinstance(keys, Quantised)
        else queries @ keys.swapaxes(-1, -2)
    )


def weighed(weights: mx.array, values: Rows) -> mx.array:
    """Sums of values: [1, heads, rows, n] by [1, heads, n, dim] -> [1, heads, rows, dim]; of
    quantised ones as scores().
    """
    return (
        _product(weights, values, False)
        if isinstance(values, Quantised)
        else weights.astype(values.dtype) @ values
    )


def _product(left: mx.array, right: Quantised, transpose: bool) -> mx.array:
    """Reads words that are a part of an array in place.

    On CPU quantized_matmul() would copy them, and gather_qmm() does not. Both sum in the type of
    their operands there, one number after the other: 16 bits would be wrong by a tenth, and six
    times as slow as float32.
    """
    packed, scales, biases, form = right
    if not _is_on_cpu():
        return mx.quantized_matmul(
            left,
            packed,
            scales,
            biases,
            transpose=transpose,
            group_size=form.group_size,
            bits=form.bits,
        )
    heads = _numbers(packed.shape[1])
    return mx.gather_qmm(
        left.astype(mx.float32),
        packed,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        lhs_indices=heads,
        rhs_indices=heads,
        transpose=transpose,
        group_size=form.group_size,
        bits=form.bits,
    )


@cache
def _numbers(count: int) -> mx.array:
    return mx.array([list(range(count))], dtype=mx.uint32)


def _is_on_cpu() -> bool:
    return bool(mx.default_device() == mx.cpu)
