"""Brings the code of models of type `slopes`, which mlx-lm does not have, and says what their
caches hold.
"""

from __future__ import annotations

from typing import Any

from mlx_blockpool import hookimpl
from mlx_blockpool.hooks import CacheAdapter


@hookimpl
def model_classes(config: dict[str, Any]) -> tuple[type, type] | None:
    if config.get("model_type") != "slopes":
        return None
    # mlx is only imported for these models.
    from .model import Model, ModelArgs

    return Model, ModelArgs


@hookimpl
def cache_adapters() -> list[CacheAdapter]:
    from .model import Rows

    return [CacheAdapter(Rows, Rows.all, write="append", size="length")]
