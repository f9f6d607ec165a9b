"""qwen2: full layers only; mlx-lm ignores the config's window. mlx_lm/models/qwen2.py."""

from __future__ import annotations

from typing import Any

from mlx_blockpool.hookspecs import hookimpl
from mlx_blockpool.spec import ModelCacheSpec

from .config_layers import kv_layer, spec_of


@hookimpl
def model_cache_spec(config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
    if config.get("model_type") != "qwen2":
        return None
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return spec_of(model_id, config, [kv_layer(config, head_dim)] * config["num_hidden_layers"])
