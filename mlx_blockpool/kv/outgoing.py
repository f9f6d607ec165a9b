"""Pooled caches as the file that mlx-lm's save_prompt_cache makes of them, a piece at a time. Owned by the generation thread."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import save_prompt_cache

from ..dtypes import safetensors_name
from ..mlx_lm_compat import rebind
from .parts import as_stock

# The header is filled up with spaces to a multiple of this.
ALIGNMENT = 8


class Outgoing:
    """A safetensors file of `nbytes`: `head`, then each of `count` pieces. The caches stay as they are until the last one.

    A piece is one head of one array: no view of a slab outlives the call that copies it.
    """

    def __init__(self, caches: list[Any], metadata: dict[str, str]) -> None:
        self._caches = caches
        arrays, texts = _as_saved(caches, metadata)
        described: dict[str, Any] = {"__metadata__": texts}
        end = 0
        self._pieces: list[tuple[str, int | None]] = []
        for name, array in arrays.items():
            start, end = end, end + array.nbytes
            described[name] = {"dtype": safetensors_name(array.dtype), "shape": list(array.shape), "data_offsets": [start, end]}
            by_head = array.ndim == 4 and array.shape[0] == 1
            self._pieces += [(name, head) for head in range(array.shape[1])] if by_head else [(name, None)]
        text = json.dumps(described).encode()
        text += b" " * (math.ceil(len(text) / ALIGNMENT) * ALIGNMENT - len(text))
        self.head = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.head) + end

    @property
    def count(self) -> int:
        return len(self._pieces)

    def piece(self, index: int) -> bytes:
        """The bytes of one piece, copied."""
        name, head = self._pieces[index]
        array = _as_saved(self._caches, {})[0][name]
        part = mx.contiguous(array if head is None else array[:, head])
        return np.asarray(part.view(mx.uint16) if part.dtype == mx.bfloat16 else part).tobytes()


def _as_saved(caches: list[Any], metadata: dict[str, str]) -> tuple[dict[str, mx.array], dict[str, str]]:
    """What mlx-lm would write: arrays, not evaluated, and texts, by name."""
    found: list[tuple[dict[str, mx.array], dict[str, str]]] = []
    writer = SimpleNamespace(array=mx.array, save_safetensors=lambda _, arrays, texts: found.append((arrays, texts)))
    rebind(save_prompt_cache, mx=writer)("", as_stock(caches), metadata)
    return found[0]
