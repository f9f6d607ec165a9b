"""A slab: the arrays that hold neighbouring blocks of one layer group, and writing and reading in
them.

A layer has several arrays with a row for each token: keys, values, and others if it has more. All
are written and read alike. Knows positions in its arrays, no ids of blocks and no sequences. Owned
by the generation thread. No view of a slab may outlive the step that made it: a write would copy
the whole slab instead of changing it in place.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..spec import BLOCK_TOKENS, LayerGroup, ModelCacheSpec
from .quantised import (
    KEYS_AND_VALUES,
    Attended,
    Roles,
    Rows,
    View,
    arrays_of,
    as_rows,
    columns,
    dense,
    each,
    in_form,
    part_of,
    put,
)


class Slab:
    """The arrays of each layer of one group, in the order of layer.arrays: [1, heads, blocks * 256,
    ..] each, or three if quantised.

    layers: the rows of each layer. forms: how each array of a layer is quantised; None for one that
    is as the model computes it. is_plain: whether all are.
    """

    def __init__(self, spec: ModelCacheSpec, group: LayerGroup, blocks: int) -> None:
        self.blocks = blocks
        self.forms = spec.forms(group.layer)
        self.is_plain = not any(self.forms)
        self._heads = [array.heads for array in group.layer.arrays]
        self.layers: list[View] = [
            tuple(
                as_rows(
                    [
                        mx.zeros((1, array.heads, blocks * BLOCK_TOKENS, width), of)
                        for width, of in columns(array.dim, getattr(mx, spec.dtype_of(array)), form)
                    ],
                    form,
                )
                for array, form in zip(group.layer.arrays, self.forms, strict=True)
            )
            for _ in group.layers
        ]
        mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        """All arrays, layer by layer."""
        return [array for view in self.layers for rows in view for array in arrays_of(rows)]

    def as_written(self, *rows: Rows) -> View:
        """Rows in the forms of this slab, to be written in pieces."""
        return tuple(map(in_form, rows, self.forms))

    def write(self, index: int, start: int, *rows: Rows) -> None:
        """Put rows [1, heads, n, dim] of each array of the group's layer `index` at tokens [start,
        start + n).
        """
        count = rows[0].shape[2]
        if count == self.blocks * BLOCK_TOKENS:
            # mlx takes what fills an array instead of copying it, in whatever order its bytes are.
            rows = tuple(each(mx.contiguous, given) for given in self.as_written(*rows))
        where = (slice(None), slice(None), slice(start, start + count))
        held: Any
        for held, given in zip(self.layers[index], rows, strict=True):
            if self.is_plain:
                # In each layer of each step: a call would be felt.
                held[where] = given
            else:
                put(held, where, given)

    def scatter(self, index: int, places: tuple[mx.array, ...], *rows: Rows) -> None:
        """Put rows [n, heads, 1, dim] of each array of the group's layer `index` at tokens:
        `places` is what indices() has made of them.

        One scatter in place for each array, where n writes would be n operations.
        """
        held: Any
        for held, given, heads in zip(self.layers[index], rows, self._heads, strict=True):
            # Arrays of one layer may differ in heads.
            where: Any = places
            if heads < places[0].shape[1]:
                where = tuple([part[:, :heads] for part in places])
            # A scatter of rows without numbers, as values of dimension 0, ends the process.
            if given.shape[-1] and self.is_plain:
                held[where] = given
            elif given.shape[-1]:
                put(held, where, given)

    def clear(self, start: int, end: int) -> None:
        """Zero tokens [start, end) in all layers, of arrays that are not quantised."""
        for array in self.arrays():
            array[:, :, start:end] = 0

    def indices(self, tokens: list[int]) -> tuple[mx.array, ...]:
        """Tokens [n] as three indices [n, heads, 1] of uint32, mlx's own type, which mlx would make
        once more in each layer of each step.
        """
        shape = len(tokens), max(self._heads), 1
        found = [
            mx.zeros(shape, mx.uint32),
            mx.arange(shape[1], dtype=mx.uint32)[None, :, None],
            mx.array(tokens, mx.uint32)[:, None, None],
        ]
        return tuple([mx.contiguous(mx.broadcast_to(part, shape)) for part in found])

    def read(self, index: int, start: int, count: int) -> View:
        """Views of tokens [start, start + count) of each array of the group's layer `index`."""
        where = (slice(None), slice(None), slice(start, start + count))
        return tuple([part_of(rows, where) for rows in self.layers[index]])

    def rows_at(self, index: int, places: mx.array) -> View:
        """Copies of the rows [rows, heads, n, dim] of each array of the group's layer `index` at
        the tokens `places` [rows, n], as the model computes them.
        """
        return tuple(
            dense(each(lambda held: mx.take(held[0], places, axis=1).swapaxes(0, 1), rows))
            for rows in self.layers[index]
        )

    def read_attended(
        self,
        index: int,
        start: int,
        count: int,
        first: int,
        last: int,
        roles: Roles = KEYS_AND_VALUES,
    ) -> Attended:
        """Views of tokens [start, start + count) and heads [first, last) of the keys and values of
        the group's layer `index`.
        """
        where = (slice(None), slice(first, last), slice(start, start + count))
        held = self.layers[index][: roles.num_arrays]
        return roles.attended(tuple([part_of(rows, where) for rows in held]))


# (slab, first token in it, tokens): a stretch of a sequence that lies in one piece.
SlabRun = tuple[Slab, int, int]
