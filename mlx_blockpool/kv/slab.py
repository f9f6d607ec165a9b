"""A slab: the arrays that hold neighbouring blocks of one layer group, and writing and reading in them.

Knows places in its arrays, no blocks' ids and no sequences. Owned by the generation thread.
No view of a slab may outlive the step that made it: a write would copy the whole slab instead of going in place.
"""

from __future__ import annotations

import mlx.core as mx

from ..spec import BLOCK_TOKENS, Form, FullLayer
from .rows import Quantised, Rows, View, arrays_of, columns, in_form


class Slab:
    """Keys and values of each layer of one group: arrays [1, kv_heads, blocks * 256, ..], one, or three where quantised.

    forms: how it holds keys and values; None: in the model's dtype.
    """

    def __init__(
        self, layer: FullLayer, layers: int, blocks: int, dtype: mx.Dtype, forms: tuple[Form | None, Form | None] = (None, None)
    ) -> None:
        shape = (1, layer.kv_heads, blocks * BLOCK_TOKENS)
        self.blocks = blocks
        self.forms = forms
        self.keys, self.values = (
            [[mx.zeros((*shape, width), of) for width, of in columns(dim, dtype, form)] for _ in range(layers)]
            for dim, form in zip((layer.key_dim, layer.value_dim), forms, strict=True)
        )
        mx.eval(self.keys, self.values)

    def arrays(self) -> list[mx.array]:
        """Every array, layer by layer: those of its keys, then those of its values."""
        return [array for pair in zip(self.keys, self.values, strict=True) for arrays in pair for array in arrays]

    def as_written(self, keys: Rows, values: Rows) -> View:
        """Keys and values in the forms of this slab, for pieces that are written one by one."""
        return in_form(keys, self.forms[0]), in_form(values, self.forms[1])

    def write(self, index: int, start: int, keys: Rows, values: Rows) -> None:
        """Put keys and values [1, kv_heads, n, dim] of the group's layer `index` at tokens [start, start + n)."""
        stop = start + keys.shape[2]
        whole = keys.shape[2] == self.blocks * BLOCK_TOKENS
        for array, rows in self._targets(index, keys, values):
            # mlx takes what fills an array instead of copying it, in whatever order its bytes are.
            array[:, :, start:stop] = mx.contiguous(rows) if whole else rows

    def put(self, index: int, places: mx.array | int, keys: Rows, values: Rows) -> None:
        """Put keys and values [n, kv_heads, 1, dim], one token of each of n sequences, at the tokens `places` [n].

        One scatter in place for each array, where n writes would be n operations.
        """
        if isinstance(places, int):
            self.write(index, places, keys, values)
            return
        for array, rows in self._targets(index, keys, values):
            array[:, :, places] = rows.swapaxes(0, 2)

    def read(self, index: int, start: int, count: int, first: int = 0, last: int | None = None) -> View:
        """Views of tokens [start, start + count) and heads [first, last) of the group's layer `index`."""
        part = (slice(None), slice(first, last), slice(start, start + count))
        return _part(self.keys[index], self.forms[0], part), _part(self.values[index], self.forms[1], part)

    def _targets(self, index: int, keys: Rows, values: Rows) -> list[tuple[mx.array, mx.array]]:
        """The arrays of the group's layer `index`, each with what is to be written in it."""
        keys, values = self.as_written(keys, values)
        return list(zip(self.keys[index] + self.values[index], arrays_of(keys) + arrays_of(values), strict=True))


def _part(arrays: list[mx.array], form: Form | None, part: tuple[slice, ...]) -> Rows:
    # Each layer reads for each sequence of a batch: loops over one array would be felt.
    if form is None:
        return arrays[0][part]
    packed, scales, biases = arrays
    return Quantised(packed[part], scales[part], biases[part], form)
