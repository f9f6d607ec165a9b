"""What is in a block, as bytes that outlive it: copies out of the slabs and back. Owned by the
generation thread.

The layout of a record's parts: for each layer of the groups, in order, each of its arrays [heads,
tokens, dim]: keys, values, then others. A quantised array is three parts: packed words, scales and
biases. Every part is copied bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from ..spec import numpy_name, safetensors_name
from .arena import KVArena
from .quantised import arrays_of, columns

# In the memory of the processor; bfloat16 as uint16, which has its bits.
HostArray: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True)
class Content:
    """One array of a block's content: its name, dtype and shape."""

    name: str
    dtype: mx.Dtype
    shape: tuple[int, ...]

    @property
    def safetensors_dtype(self) -> str:
        return safetensors_name(self.dtype)

    def array(self, data: memoryview) -> HostArray:
        """The array in these bytes, not copied."""
        return np.frombuffer(data, self._numpy_dtype).reshape(self.shape)

    @cached_property
    def _numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(numpy_name(self.safetensors_dtype))


def contents(arena: KVArena, groups: Sequence[int], tokens: int) -> list[Content]:
    """The arrays that hold the first `tokens` tokens of one block of each group."""
    found = []
    for group in (arena.spec.groups[g] for g in groups):
        arrays = group.layer.arrays
        parts = [
            (f"{array.name}{suffix}", dtype, (array.heads, tokens, width))
            for array, form in zip(arrays, arena.spec.forms(group.layer), strict=True)
            for suffix, (width, dtype) in zip(
                [""] if form is None else [".packed", ".scales", ".biases"],
                columns(array.dim, getattr(mx, arena.spec.dtype_of(array)), form),
                strict=True,
            )
        ]
        found += [
            Content(f"layers.{layer}.{name}", dtype, shape)
            for layer in group.layers
            for name, dtype, shape in parts
        ]
    return found


def copy_out(
    arena: KVArena, places: Sequence[tuple[int, int]], start: int, end: int
) -> list[mx.array]:
    """Tokens [start, end) of blocks, given as (group, block): evaluated copies, in the order of
    contents().
    """
    found: list[mx.array] = []
    for group, block in places:
        slab, first = arena.locate(group, block)
        for index in range(len(slab.layers)):
            for rows in slab.read(index, first + start, end - start):
                found += [mx.contiguous(array[0]) for array in arrays_of(rows)]
    mx.eval(found)
    return found


def copy_in(
    arena: KVArena, places: Sequence[tuple[int, int]], start: int, arrays: Sequence[HostArray]
) -> None:
    """Put arrays in the order of contents() at tokens [start, ...) of blocks. They may change once
    this returns.

    Where the device writes, a step in flight would still read the slabs, and make it copy them:
    that is waited for, and so are its own writes.
    """
    rest = iter(arrays)
    in_place = shares_memory()
    if not in_place:
        mx.synchronize()
    for group, block in places:
        slab, first = arena.locate(group, block)
        targets = slab.arrays()
        for target, part in zip(targets, islice(rest, len(targets)), strict=True):
            if in_place:
                _write(target, first + start, part)
            else:
                target[:, :, first + start : first + start + part.shape[1]] = _on_device(
                    part, target.dtype
                )[None]
        if not in_place:
            mx.eval(targets)


def shares_memory() -> bool:
    """Return whether the processor can write to the device's memory, which saves a copy.

    Found out by trying.
    """
    return (mx.default_device() == mx.cpu or mx.metal.is_available()) and _is_seen(
        str(mx.default_device())
    )


@cache
def _is_seen(device: str) -> bool:
    """Return whether the default device, named by `device`, sees what the processor has written."""
    array = mx.zeros((1024,))
    mx.eval(array)
    try:
        _in_host_memory(array)[:] = 1
    except ValueError:
        # A copy, or a view that may not be written.
        return False
    return bool((mx.sum(array) == 1024).item())


def _write(target: mx.array, start: int, part: HostArray) -> None:
    """Put [heads, n, dim] at tokens [start, start + n) of an array of a slab; the view of it
    is gone when this returns.
    """
    _in_host_memory(target)[0, :, start : start + part.shape[1]] = part


def _in_host_memory(array: mx.array) -> HostArray:
    """A view of an evaluated array: writes to it change the array."""
    buffer: Any = array
    return np.frombuffer(buffer, numpy_name(safetensors_name(array.dtype))).reshape(array.shape)


def array_in(data: memoryview, safetensors_dtype: str, shape: tuple[int, ...]) -> mx.array:
    """A copy of these bytes as an array.

    Raises KeyError for an unknown dtype and ValueError for another number of bytes.
    """
    found = mx.array(np.frombuffer(data, numpy_name(safetensors_dtype)).reshape(shape))
    return found.view(mx.bfloat16) if safetensors_dtype == "BF16" else found


def _on_device(part: HostArray, dtype: mx.Dtype) -> mx.array:
    found = mx.array(part)
    return found.view(mx.bfloat16) if dtype == mx.bfloat16 and found.dtype == mx.uint16 else found


def as_bytes(array: mx.array) -> memoryview:
    """The bytes of an evaluated array, not copied."""
    if not array.size:
        # Values of dimension 0, as of keys that only choose what is attended to.
        return memoryview(b"")
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return memoryview(plain).cast("B")  # type: ignore[arg-type]
