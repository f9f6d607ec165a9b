"""mlx-lm's own caches over rounded keys and values: what a pool that holds them in few bits is compared with.

mlx-lm quantises full layers of single sequences only. Rounded caches read the values that quantised blocks stand for, in any of
mlx-lm's cache classes and with any attention. Knows no blocks.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from ..spec import CompositeLayer, Form, FullLayer, LayerSpec, ModelCacheSpec


class Rounded:
    """One of mlx-lm's caches. Keys and values are quantised and dequantised on the way in; all else is the cache's own.

    forms: of keys and of values; None: they stay as they are.
    """

    def __init__(self, cache: Any, forms: tuple[Form | None, Form | None]) -> None:
        self.__dict__.update(_cache=cache, _forms=forms)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """The cache's own, of keys and values [1, kv_heads, n, dim] rounded row by row."""
        of_keys, of_values = self._forms
        return self._cache.update_and_fetch(_rounded_rows(keys, of_keys), _rounded_rows(values, of_values))

    def __getattr__(self, name: str) -> Any:
        # A copy in the making has no cache yet.
        return getattr(object.__getattribute__(self, "_cache"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cache, name, value)


def rounded(caches: list[Any], spec: ModelCacheSpec) -> list[Any]:
    """mlx-lm's empty caches of one sequence, one for each of spec.layers, rounded as the spec's blocks hold keys and values."""
    return [_rounded(cache, layer, spec) for cache, layer in zip(caches, spec.layers, strict=True)]


def _rounded(cache: Any, layer: LayerSpec, spec: ModelCacheSpec) -> Any:
    if isinstance(layer, CompositeLayer):
        return CacheList(*(_rounded(part, of, spec) for part, of in zip(cache.caches, layer.parts, strict=True)))
    forms = spec.forms(layer) if isinstance(layer, FullLayer) else (None, None)
    return cache if forms == (None, None) else Rounded(cache, forms)


def _rounded_rows(rows: mx.array, form: Form | None) -> mx.array:
    if form is None:
        return rows
    words = mx.quantize(rows, group_size=form.group_size, bits=form.bits)
    return mx.dequantize(*words, group_size=form.group_size, bits=form.bits)
