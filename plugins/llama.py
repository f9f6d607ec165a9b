"""llama: full layers, or sliding ones where `layer_types` says so. mlx_lm/models/llama.py."""

from __future__ import annotations

from typing import Any

from mlx_blockpool.hookspecs import hookimpl
from mlx_blockpool.spec import ModelCacheSpec

from .config_layers import kv_layer, spec_of


@hookimpl
def model_cache_spec(config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
    if config.get("model_type") != "llama":
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    window = config.get("sliding_window")
    return spec_of(model_id, config, (kv_layer(config, head_dim, window if t == "sliding_attention" else None) for t in types))
