"""A slab: the arrays that hold neighbouring blocks of one layer group, and writing and reading in them.

Knows places in its arrays, no blocks' ids and no sequences. Owned by the generation thread.
No view of a slab may outlive the step that made it: a write would copy the whole slab instead of going in place.
"""

from __future__ import annotations

import mlx.core as mx

from ..spec import BLOCK_TOKENS, Form, FullLayer
from .rows import Rows, View, arrays_of, as_rows, columns, each, in_form, part_of, put


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
            [as_rows([mx.zeros((*shape, width), of) for width, of in columns(dim, dtype, form)], form) for _ in range(layers)]
            for dim, form in zip((layer.key_dim, layer.value_dim), forms, strict=True)
        )
        mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        """Every array, layer by layer: those of its keys, then those of its values."""
        return [array for pair in zip(self.keys, self.values, strict=True) for rows in pair for array in arrays_of(rows)]

    def as_written(self, keys: Rows, values: Rows) -> View:
        """Keys and values in the forms of this slab, for pieces that are written one by one."""
        return in_form(keys, self.forms[0]), in_form(values, self.forms[1])

    def write(self, index: int, start: int, keys: Rows, values: Rows) -> None:
        """Put keys and values [1, kv_heads, n, dim] of the group's layer `index` at tokens [start, start + n)."""
        count = keys.shape[2]
        if count == self.blocks * BLOCK_TOKENS:
            # mlx takes what fills an array instead of copying it, in whatever order its bytes are.
            keys, values = (each(mx.contiguous, rows) for rows in self.as_written(keys, values))
        where = (slice(None), slice(None), slice(start, start + count))
        put(self.keys[index], where, keys)
        put(self.values[index], where, values)

    def scatter(self, index: int, places: mx.array, keys: Rows, values: Rows) -> None:
        """Put keys and values [1, kv_heads, n, dim] of the group's layer `index` at the tokens `places` [n].

        One scatter in place for each array, where n writes would be n operations.
        """
        where = (slice(None), slice(None), places)
        put(self.keys[index], where, keys)
        put(self.values[index], where, values)

    def whole(self, index: int) -> View:
        """Keys and values of all tokens of the group's layer `index`: the arrays themselves."""
        return self.keys[index], self.values[index]

    def read(self, index: int, start: int, count: int, first: int = 0, last: int | None = None) -> View:
        """Views of tokens [start, start + count) and heads [first, last) of the group's layer `index`."""
        where = (slice(None), slice(first, last), slice(start, start + count))
        return part_of(self.keys[index], where), part_of(self.values[index], where)
