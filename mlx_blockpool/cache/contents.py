"""What is in a block, as bytes that outlive it: copies out of the slabs and back. Owned by the generation thread.

The layout of a record's parts: for each layer of the groups, in order, keys and values [kv_heads, tokens, dim]; quantised as
mlx does it, each becomes packed weights, scales and biases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..spec import LayerGroup
from .slabs import Slabs

GROUP_SIZE = 32
_SAFETENSORS = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32"}
_NUMPY = {mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: np.uint16, mx.uint32: np.uint32}


@dataclass(frozen=True)
class Content:
    """One array of a block's content: its name, dtype and shape."""

    name: str
    dtype: mx.Dtype
    shape: tuple[int, ...]

    @property
    def safetensors_dtype(self) -> str:
        return _SAFETENSORS[self.dtype]

    def array(self, data: memoryview) -> mx.array:
        """The array in these bytes, copied."""
        found = mx.array(np.frombuffer(data, _NUMPY[self.dtype]).reshape(self.shape))
        return found.view(mx.bfloat16) if self.dtype == mx.bfloat16 else found


def contents(slabs: Slabs, groups: Sequence[int], tokens: int, bits: int | None = None) -> list[Content]:
    """What the first `tokens` tokens of one block of each group are, array by array."""
    found = []
    for g in groups:
        for name, heads, dim in _tensors(slabs.spec.groups[g]):
            shape = (heads, tokens)
            if bits is None or dim % GROUP_SIZE:
                found.append(Content(name, slabs.dtype, (*shape, dim)))
                continue
            found.append(Content(f"{name}.packed", mx.uint32, (*shape, dim * bits // 32)))
            found += [Content(f"{name}.{part}", slabs.dtype, (*shape, dim // GROUP_SIZE)) for part in ("scales", "biases")]
    return found


def copy_out(slabs: Slabs, places: Sequence[tuple[int, int]], start: int, end: int, bits: int | None = None) -> list[mx.array]:
    """Tokens [start, end) of blocks, given as (group, block): evaluated copies, in the order of contents()."""
    found: list[mx.array] = []
    for group, block in places:
        slab, first = slabs.locate(group, block)
        for index in range(len(slab.keys)):
            for array in slab.read(index, first + start, end - start):
                found += _stored(array[0], bits)
    mx.eval(found)
    return found


def copy_in(
    slabs: Slabs, places: Sequence[tuple[int, int]], start: int, arrays: Sequence[mx.array], bits: int | None = None
) -> None:
    """Put what copy_out() gave at tokens [start, ...) of blocks.

    No step may be in flight, which would still read the slabs: see mx.synchronize(). For the same reason it waits for its own
    writes: of two that are in flight the second copies the slab.
    """
    rest = iter(arrays)
    for group, block in places:
        slab, first = slabs.locate(group, block)
        layer = slabs.spec.groups[group].layer
        for index in range(len(slab.keys)):
            keys, values = (_loaded(rest, dim, bits) for dim in (layer.key_dim, layer.value_dim))
            slab.write(index, first + start, keys[None], values[None])
        mx.eval(slab.keys, slab.values)


def as_bytes(array: mx.array) -> memoryview:
    """The bytes of an evaluated array, not copied."""
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return memoryview(plain).cast("B")  # type: ignore[arg-type]


def _tensors(group: LayerGroup) -> Iterator[tuple[str, int, int]]:
    for layer in group.layers:
        yield f"layers.{layer}.keys", group.layer.kv_heads, group.layer.key_dim
        yield f"layers.{layer}.values", group.layer.kv_heads, group.layer.value_dim


def _stored(array: mx.array, bits: int | None) -> list[mx.array]:
    if bits is None or array.shape[-1] % GROUP_SIZE:
        return [mx.contiguous(array)]
    return [mx.contiguous(part) for part in mx.quantize(array, group_size=GROUP_SIZE, bits=bits)]


def _loaded(arrays: Iterator[mx.array], dim: int, bits: int | None) -> mx.array:
    if bits is None or dim % GROUP_SIZE:
        return next(arrays)
    return mx.dequantize(next(arrays), next(arrays), next(arrays), group_size=GROUP_SIZE, bits=bits)
