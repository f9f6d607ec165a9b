"""Brings the code of models of type `slopes`, which mlx-lm does not have."""

from __future__ import annotations

from typing import Any

from mlx_blockpool import hookimpl


@hookimpl
def model_classes(config: dict[str, Any]) -> tuple[type, type] | None:
    if config.get("model_type") != "slopes":
        return None
    # mlx is only imported for these models.
    from .model import Model, ModelArgs

    return Model, ModelArgs
