"""What is in a block, as bytes that outlive it: copies out of the slabs and back. Owned by the generation thread.

The layout of a record's parts: for each layer of the groups, in order, keys and values [kv_heads, tokens, dim]; quantised as
mlx does it, each becomes packed words, scales and biases. What blocks hold is copied as it is, words as words; a store of fewer
`bits` quantises it on the way out, and dequantises it on the way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from ..dtypes import numpy_name, safetensors_name
from ..spec import Form, LayerGroup, ModelCacheSpec
from .arena import KVArena
from .rows import Quantised, Rows, arrays_of, dense, in_form

# In the memory of the processor; bfloat16 as uint16, which has its bits.
HostArray: TypeAlias = "np.ndarray[Any, Any]"

# Of what only the store quantises.
GROUP_SIZE = 32


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


def disk_form(own: Form | None, dim: int, bits: int | None) -> Form | None:
    """How records hold rows of `dim` values that blocks hold as `own`: as they are, or in `bits` where that is coarser."""
    if bits is None or dim % GROUP_SIZE or (own is not None and own.bits <= bits):
        return own
    return Form(bits, GROUP_SIZE)


def contents(arena: KVArena, groups: Sequence[int], tokens: int, bits: int | None = None) -> list[Content]:
    """What the first `tokens` tokens of one block of each group are, array by array."""
    found = []
    for g in groups:
        for name, heads, dim, own in _tensors(arena.spec, arena.spec.groups[g]):
            form = disk_form(own, dim, bits)
            shape = (heads, tokens)
            if form is None:
                found.append(Content(name, arena.dtype, (*shape, dim)))
                continue
            found.append(Content(f"{name}.packed", mx.uint32, (*shape, dim * form.bits // 32)))
            found += [Content(f"{name}.{part}", arena.dtype, (*shape, dim // form.group_size)) for part in ("scales", "biases")]
    return found


def copy_out(arena: KVArena, places: Sequence[tuple[int, int]], start: int, end: int, bits: int | None = None) -> list[mx.array]:
    """Tokens [start, end) of blocks, given as (group, block): evaluated copies, in the order of contents()."""
    found: list[mx.array] = []
    for group, block in places:
        slab, first = arena.locate(group, block)
        for index in range(len(slab.keys)):
            for rows in slab.read(index, first + start, end - start):
                found += [mx.contiguous(array[0]) for array in arrays_of(_stored(rows, bits))]
    mx.eval(found)
    return found


def copy_in(
    arena: KVArena, places: Sequence[tuple[int, int]], start: int, arrays: Sequence[HostArray], bits: int | None = None
) -> None:
    """Put arrays in the order of contents() at tokens [start, ...) of blocks. They may change once this returns.

    Where the device writes, a step in flight would still read the slabs, and make it copy them: that is waited for, and so are
    its own writes.
    """
    rest = iter(arrays)
    in_place = shares_memory()
    if not in_place:
        mx.synchronize()
    for group, block in places:
        slab, first = arena.locate(group, block)
        tensors = _tensors(arena.spec, arena.spec.groups[group])
        parts = [part for _, _, dim, own in tensors for part in _loaded(rest, own, disk_form(own, dim, bits), arena.dtype)]
        targets = slab.arrays()
        mx.eval([part for part in parts if isinstance(part, mx.array)])
        for target, part in zip(targets, parts, strict=True):
            if in_place:
                _write(target, first + start, part)
            else:
                target[:, :, first + start : first + start + part.shape[1]] = _on_device(part, target.dtype)[None]
        if not in_place:
            mx.eval(targets)


def shares_memory() -> bool:
    """Return whether the processor can write to the device's memory, which saves a copy. Found out by trying."""
    return (mx.default_device() == mx.cpu or mx.metal.is_available()) and _is_seen(str(mx.default_device()))


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


def _write(target: mx.array, start: int, part: HostArray | mx.array) -> None:
    """Put [kv_heads, n, dim] at tokens [start, start + n) of an array of a slab; the view of it is gone when this returns."""
    host = _in_host_memory(part) if isinstance(part, mx.array) else part
    _in_host_memory(target)[0, :, start : start + part.shape[1]] = host


def _in_host_memory(array: mx.array) -> HostArray:
    """A view of an evaluated array: writes to it change the array."""
    buffer: Any = array
    return np.frombuffer(buffer, numpy_name(safetensors_name(array.dtype))).reshape(array.shape)


def array_in(data: memoryview, safetensors_dtype: str, shape: tuple[int, ...]) -> mx.array:
    """A copy of these bytes as an array. Raises KeyError for an unknown dtype and ValueError for another number of bytes."""
    found = mx.array(np.frombuffer(data, numpy_name(safetensors_dtype)).reshape(shape))
    return found.view(mx.bfloat16) if safetensors_dtype == "BF16" else found


def _on_device(part: HostArray | mx.array, dtype: mx.Dtype) -> mx.array:
    if isinstance(part, mx.array):
        return part
    found = mx.array(part)
    return found.view(mx.bfloat16) if dtype == mx.bfloat16 and found.dtype == mx.uint16 else found


def as_bytes(array: mx.array) -> memoryview:
    """The bytes of an evaluated array, not copied."""
    if not array.size:
        # Values of dimension 0, as of keys that only choose what is attended to.
        return memoryview(b"")
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return memoryview(plain).cast("B")  # type: ignore[arg-type]


def _tensors(spec: ModelCacheSpec, group: LayerGroup) -> Iterator[tuple[str, int, int, Form | None]]:
    """(name, heads, dim, form in the blocks) of keys and values of each layer of a group."""
    keys, values = spec.forms(group.layer)
    for layer in group.layers:
        yield f"layers.{layer}.keys", group.layer.kv_heads, group.layer.key_dim, keys
        yield f"layers.{layer}.values", group.layer.kv_heads, group.layer.value_dim, values


def _stored(rows: Rows, bits: int | None) -> Rows:
    own = rows.form if isinstance(rows, Quantised) else None
    form = disk_form(own, rows.shape[-1], bits)
    return rows if form == own else in_form(dense(rows), form)


def _loaded(arrays: Iterator[HostArray], own: Form | None, form: Form | None, dtype: mx.Dtype) -> list[Any]:
    """The arrays of keys or values as blocks hold them, from those of a record, whose form is `form`."""
    if form is None:
        return [next(arrays)]
    parts = [next(arrays) for _ in range(3)]
    if form == own:
        return parts
    packed, scales, biases = (_on_device(part, dtype) for part in parts)
    return arrays_of(in_form(dense(Quantised(packed, scales, biases, form)), own))
