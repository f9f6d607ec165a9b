"""States of cache classes that mlx-lm does not have, saved and restored by their adapters.

Owned by the generation thread.
"""

from __future__ import annotations

import functools
import json
from copy import deepcopy
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import StateError
from ..hooks import CacheAdapter
from ..spec import SAFETENSORS
from .other_caches import StateCache
from .sequence import SequenceBlocks

# The form of a saved state, which is its first array, has a length that is a multiple of this: the
# digits of a number then hardly change the size.
FORM_BYTES = 256


def as_arrays(saved: Any) -> list[mx.array]:
    """What an adapter has saved as arrays: the form of it in JSON, as bytes, then its own.

    Raises TypeError for what cannot be stored.
    """
    arrays: list[mx.array] = []

    def form(value: Any) -> Any:
        if isinstance(value, mx.array):
            dtype = str(value.dtype).rpartition(".")[2]
            if dtype not in SAFETENSORS:
                raise TypeError(f"a state has an array of {dtype}, which cannot be stored")
            if not value.size:
                return {"empty": [value.shape, dtype]}
            arrays.append(value)
            return {"array": len(arrays)}
        if type(value) in (list, tuple):
            return {type(value).__name__: list(map(form, value))}
        if type(value) is dict:
            return {"dict": [[form(key), form(of)] for key, of in value.items()]}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(
            f"a state has a {type(value).__name__}; save arrays, numbers and texts in lists, "
            "tuples and dicts"
        )

    text = json.dumps(form(saved)).encode()
    padded = text.ljust(-(-len(text) // FORM_BYTES) * FORM_BYTES)
    return [mx.array(np.frombuffer(padded, np.uint8)), *arrays]


def from_arrays(arrays: list[mx.array]) -> Any:
    """What as_arrays() was given."""

    def value(form: Any) -> Any:
        if not isinstance(form, dict):
            return form
        ((kind, of),) = form.items()
        match kind:
            case "array":
                # Models may write into arrays, and this one may be that of a checkpoint.
                return mx.array(arrays[of])
            case "empty":
                return mx.zeros(of[0], getattr(mx, of[1]))
            case "dict":
                return {value(key): value(each) for key, each in of}
            case "tuple":
                return tuple(map(value, of))
            case _:
                return list(map(value, of))

    return value(json.loads(bytes(arrays[0])))


class OwnState(StateCache):
    """An instance of a subclass of the adapter's class.

    _own: the adapter, and an empty cache of its class.
    """

    _own: tuple[CacheAdapter, Any]

    def saved_arrays(self) -> list[Any]:
        self.sequence.need_blocks()
        try:
            return as_arrays(self._own[0].save(self))
        except Exception as error:
            # Code of a plugin may raise anything.
            raise _failed(self._own[1], "save", error) from error

    def restore_arrays(self, arrays: list[Any]) -> None:
        adapter, empty = self._own
        kept = {name: getattr(self, name) for name in ("sequence", "layer", "_own")}
        vars(self).clear()
        vars(self).update(deepcopy(vars(empty)), **kept)
        if not arrays:
            return
        try:
            adapter.restore(self, from_arrays(arrays))
        except Exception as error:
            raise _failed(empty, "restore", error) from error

    def take(self, cache: Any) -> None:
        """Hold what a cache of the adapter's class holds. Raises ValueError for another."""
        adapter, empty = self._own
        if not isinstance(cache, type(empty)):
            raise ValueError(
                f"Cache {self.layer} is a {type(cache).__name__}; the model has a "
                f"{type(empty).__name__} there."
            )
        self.restore_arrays(as_arrays(adapter.save(cache)))

    def _on(self, sequence: SequenceBlocks) -> Any:
        copy = own_state(sequence, self.layer, self._own)
        copy.restore_arrays(self.saved_arrays())
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        adapter, empty = self._own
        copy = deepcopy(empty)
        adapter.restore(copy, adapter.save(self))
        return deepcopy, (copy,)


def _failed(empty: Any, what: str, error: Exception) -> StateError:
    name, why = type(empty).__name__, f"{type(error).__name__}: {error}"
    return StateError(f"The adapter for {name} does not {what} a state: {why}")


def own_state(sequence: SequenceBlocks, leaf: int, own: tuple[CacheAdapter, Any]) -> OwnState:
    """An empty state of a sequence, as `own` of its StateLayer says."""
    kind: Any = type(own[1])
    cls = _pooled_class(kind)
    cache = cls.__new__(cls)
    cache.sequence, cache.layer, cache._own = sequence, leaf, own
    cache.restore_arrays([])
    return cache


@functools.cache
def _pooled_class(cls: type) -> type[OwnState]:
    return type(f"Pooled{cls.__name__}", (OwnState, cls), {"__module__": cls.__module__})
