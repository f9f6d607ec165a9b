"""Keys and values in the states of mlx-lm's caches: gathered when a state is read, checked and copied when one is assigned.

Knows arrays, no sequences. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from ..spec import Form
from .rows import Quantised, Rows, View, arrays_of, as_rows, columns
from .sequence import join
from .state_caches import copied


class GatheredState:
    """(keys, values, *rest) of a layer, which `saved` makes of its rows when they are read: one array of several runs.

    To isinstance() it is a tuple, so that mlx.utils and mlx-lm look into it. mx.eval() does not, and gathers nothing: the runs
    were evaluated where they lie.
    """

    def __init__(self, views: list[View], rest: tuple[Any, ...], saved: Callable[[Rows], Any]) -> None:
        mx.eval(views)
        self._views = views
        self._rest = rest
        self._saved = saved

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return tuple

    def __len__(self) -> int:
        return 2 + len(self._rest)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[Any]:
        return iter((*map(self._saved, join(self._views)), *self._rest))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


def taken(name: str, given: Any, shape: tuple[int, int, int, int], dtype: mx.Dtype, form: Form | None) -> Rows:
    """The first tokens of given keys or values, rows of `shape`: an array, or words of `form`; in buffers of their own.

    What is given may be a view of the blocks, and a slab with another reader would be copied. Raises ValueError if it does not
    fit.
    """
    batch, heads, size, dim = shape
    arrays = arrays_of(given)
    given_as = form if isinstance(given, Quantised) else None
    needed = [((batch, heads, size, width), of) for width, of in columns(dim, dtype, given_as)]
    found = [((*array.shape[:2], min(size, array.shape[2]), *array.shape[3:]), array.dtype) for array in arrays]
    if found != needed:
        expected, there = (
            " and ".join(f"{of} in {kind}" for of, kind in shapes)
            for shapes in (needed, [(array.shape, array.dtype) for array in arrays])
        )
        raise ValueError(f"This layer takes {name} of shape {expected}; those given are {there}.")
    return as_rows(copied([array[..., :size, :] for array in arrays]), given_as)
