"""mlx-lm's own caches over rounded keys and values: what a pool that holds them in few bits is
compared with.

mlx-lm quantises full layers of single sequences only. Rounded caches read the values that quantised
blocks stand for, in any of mlx-lm's cache classes and with any attention. Knows no blocks.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from ..spec import CompositeLayer, Form, FullLayer, LayerSpec, ModelCacheSpec


def rounded_cache(
    cache: Any, forms: tuple[Form | None, ...], write: str = "update_and_fetch"
) -> Any:
    """The same cache of mlx-lm's, which from now on quantises and dequantises keys and values that
    are appended, row by row.

    forms: of each array; None for those that stay as they are. write: the method that appends.
    """
    cls = type(cache)

    def rounding(self: Any, *rows: mx.array) -> Any:
        return getattr(cls, write)(self, *map(_rounded_rows, rows, forms))

    cache.__class__ = type(cls.__name__, (cls,), {write: rounding})
    return cache


def rounded(caches: list[Any], spec: ModelCacheSpec) -> list[Any]:
    """mlx-lm's empty caches of one sequence, one for each of spec.layers, rounded as the spec's
    blocks hold keys and values.
    """
    return [_rounded(cache, layer, spec) for cache, layer in zip(caches, spec.layers, strict=True)]


def _rounded(cache: Any, layer: LayerSpec, spec: ModelCacheSpec) -> Any:
    if isinstance(layer, CompositeLayer):
        return CacheList(
            *(_rounded(part, of, spec) for part, of in zip(cache.caches, layer.parts, strict=True))
        )
    if isinstance(layer, FullLayer) and any(forms := spec.forms(layer)):
        return rounded_cache(cache, forms, layer.names[0])
    return cache


def _rounded_rows(rows: mx.array, form: Form | None) -> mx.array:
    if form is None:
        return rows
    words = mx.quantize(rows, group_size=form.group_size, bits=form.bits)
    return mx.dequantize(*words, group_size=form.group_size, bits=form.bits)
