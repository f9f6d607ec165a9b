"""A slab: the arrays that hold neighbouring blocks of one layer group, and writing and reading in
them.

A layer has several arrays with a row for each token: keys and values. All are written and read
alike. Knows positions in its arrays, no ids of blocks and no sequences. Owned by the generation
thread. No view of a slab may outlive the step that made it: a write would copy the whole slab
instead of changing it in place.
"""

from __future__ import annotations

import mlx.core as mx

from ..spec import BLOCK_TOKENS, Form, FullLayer
from .quantised import Rows, View, arrays_of, as_rows, columns, each, in_form, part_of, put


class Slab:
    """The arrays of each layer of one group: [1, kv_heads, blocks * 256, ..], one for keys and for
    values, or three if quantised.

    layers: the rows of each layer. forms: how each array of a layer is quantised; None for one in
    the model's dtype.
    """

    def __init__(
        self,
        layer: FullLayer,
        layers: int,
        blocks: int,
        dtype: mx.Dtype,
        forms: tuple[Form | None, ...] = (None, None),
    ) -> None:
        shape = (1, layer.kv_heads, blocks * BLOCK_TOKENS)
        dims = layer.key_dim, layer.value_dim
        self.blocks = blocks
        self.forms = forms
        self.layers: list[View] = [
            tuple(
                as_rows(
                    [mx.zeros((*shape, width), of) for width, of in columns(dim, dtype, form)], form
                )
                for dim, form in zip(dims, forms, strict=True)
            )
            for _ in range(layers)
        ]
        mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        """All arrays, layer by layer: those of its keys, then those of its values."""
        return [array for view in self.layers for rows in view for array in arrays_of(rows)]

    def as_written(self, *rows: Rows) -> View:
        """Rows in the forms of this slab, to be written in pieces."""
        return tuple(map(in_form, rows, self.forms))

    def write(self, index: int, start: int, *rows: Rows) -> None:
        """Put rows [1, kv_heads, n, dim] of the group's layer `index` at tokens [start, start +
        n).
        """
        count = rows[0].shape[2]
        if count == self.blocks * BLOCK_TOKENS:
            # mlx takes what fills an array instead of copying it, in whatever order its bytes are.
            rows = tuple(each(mx.contiguous, given) for given in self.as_written(*rows))
        where = (slice(None), slice(None), slice(start, start + count))
        for held, given in zip(self.layers[index], rows, strict=True):
            put(held, where, given)

    def scatter(self, index: int, places: mx.array, *rows: Rows) -> None:
        """Put rows [1, kv_heads, n, dim] of the group's layer `index` at the tokens `places` [n].

        One scatter in place for each array, where n writes would be n operations.
        """
        where = (slice(None), slice(None), places)
        for held, given in zip(self.layers[index], rows, strict=True):
            put(held, where, given)

    def read(
        self, index: int, start: int, count: int, first: int = 0, last: int | None = None
    ) -> View:
        """Views of tokens [start, start + count) and heads [first, last) of the group's layer
        `index`.
        """
        where = (slice(None), slice(first, last), slice(start, start + count))
        return tuple([part_of(rows, where) for rows in self.layers[index]])


# (slab, first token in it, tokens): a stretch of a sequence that lies in one piece.
SlabRun = tuple[Slab, int, int]
