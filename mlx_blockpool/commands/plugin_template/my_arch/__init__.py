"""Plugin of mlx-blockpool for models of type my_arch: their code, and their caches."""

from __future__ import annotations

from typing import Any

from mlx_blockpool import ModelCacheSpec, hookimpl
from mlx_blockpool.spec import FullLayer


@hookimpl
def model_classes(config: dict[str, Any]) -> tuple[type, type] | None:
    if config.get("model_type") != "my_arch":
        return None
    from . import model

    return model.Model, model.ModelArgs


@hookimpl
def model_cache_spec(config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
    if config.get("model_type") != "my_arch":
        return None
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    layers = (FullLayer(heads, key_dim=dim, value_dim=dim),) * config["num_hidden_layers"]
    return ModelCacheSpec(model_id, layers, dtype=config.get("torch_dtype", "bfloat16"))
