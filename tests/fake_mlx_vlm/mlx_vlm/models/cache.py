"""mlx-vlm's caches: copies of mlx-lm's, with a method and a class that mlx-lm lacks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock


def copied(cls: Any, **more: Any) -> Any:
    names = {n: v for n, v in vars(cls).items() if n not in ("__dict__", "__weakref__")}
    return type(cls.__name__, cls.__bases__, names | more)


def update_window(self: Any, index: int, source: mx.array, width: int) -> None:
    self.cache[index] = source[:, source.shape[1] - width :]


KVCache = copied(stock.KVCache)
RotatingKVCache = copied(stock.RotatingKVCache)
ChunkedKVCache = copied(stock.ChunkedKVCache)
CacheList = copied(stock.CacheList)
ArraysCache = copied(stock.ArraysCache, update_window=update_window)


class DecayingKVCache(KVCache):  # type: ignore[misc,valid-type]
    """A class that only this package has."""


def make_prompt_cache(model: Any) -> list[Any]:
    if hasattr(model, "make_cache"):
        return list(model.make_cache())
    return [KVCache() for _ in model.layers]
