"""What state layers held behind one token, as the parts of a record. Knows arrays and records; nothing of where they are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache.contents import as_bytes
from ..cache.slabs import Slabs
from ..errors import BadRecordError
from ..spec import StateLayer
from ..store.record import Part, Record

_DTYPES = {
    mx.float32: ("F32", np.float32),
    mx.float16: ("F16", np.float16),
    mx.bfloat16: ("BF16", np.uint16),
    mx.int64: ("I64", np.int64),
    mx.int32: ("I32", np.int32),
    mx.uint32: ("U32", np.uint32),
}
_BY_NAME = {name: (dtype, numpy) for dtype, (name, numpy) in _DTYPES.items()}


def state_parts(states: Mapping[int, Sequence[Any]]) -> tuple[Part, ...]:
    """One for each array, by leaf and entry; an entry without an array has none."""
    return tuple(Part(name, _DTYPES[array.dtype][0], tuple(array.shape)) for name, array in _named(states))


def state_bytes(states: Mapping[int, Sequence[Any]]) -> list[memoryview]:
    """The bytes of evaluated states, in the order of state_parts()."""
    return [as_bytes(array) for _, array in _named(states)]


def states_in(record: Record, views: Sequence[memoryview], slabs: Slabs) -> dict[int, list[Any]]:
    """The states in a record, copied. Raises BadRecordError if they are not those of this model's layers."""
    leaves = {i: slabs.spec.leaves[i] for i in slabs.state_leaves}
    found: dict[int, list[Any]] = {i: [None] * len(leaf.arrays) for i, leaf in leaves.items() if isinstance(leaf, StateLayer)}
    for part, view in zip(record.parts, views, strict=True):
        try:
            leaf, entry = map(int, part.name.removeprefix("states.").split("."))
            dtype, numpy = _BY_NAME[part.dtype]
            array = mx.array(np.frombuffer(view, numpy).reshape(part.shape))
            found[leaf][entry] = array.view(mx.bfloat16) if dtype == mx.bfloat16 else array
        except (KeyError, IndexError, ValueError) as error:
            raise BadRecordError(f"{record.file_name}: found {part}, needed a state of this model.") from error
    return found


def _named(states: Mapping[int, Sequence[Any]]) -> list[tuple[str, Any]]:
    return [(f"states.{leaf}.{i}", a) for leaf in sorted(states) for i, a in enumerate(states[leaf]) if a is not None]
