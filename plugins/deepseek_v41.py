"""deepseek_v41: its cache class as a state: a window, a row for each whole group of tokens, and the
rows of a group that is not whole yet.
"""

from __future__ import annotations

import sys
from typing import Any

from mlx_blockpool.hooks import CacheAdapter, hookimpl

FIELDS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate", "offset")


@hookimpl
def cache_adapters() -> list[CacheAdapter]:
    # No cache has this class before its module is imported.
    module = sys.modules.get("mlx_lm.models.deepseek_v41")
    # One that holds something else is not known.
    if module is None or vars(module.LayerCache(1)).keys() != {*FIELDS, "window_size"}:
        return []
    return [CacheAdapter(module.LayerCache, save=_save, restore=_restore)]


def _save(cache: Any) -> list[Any]:
    return [getattr(cache, name) for name in FIELDS]


def _restore(cache: Any, saved: list[Any]) -> None:
    for name, value in zip(FIELDS, saved, strict=True):
        setattr(cache, name, value)
