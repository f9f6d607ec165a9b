"""Describes llama models without windows, from config.json alone.

mlx_lm/models/llama.py makes one KVCache a layer.
"""

from __future__ import annotations

from typing import Any

from mlx_blockpool import ModelCacheSpec, hookimpl
from mlx_blockpool.spec import FullLayer


@hookimpl
def model_cache_spec(config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
    if config.get("model_type") != "llama" or config.get("layer_types"):
        return None
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    layers = (FullLayer(heads, key_dim=dim, value_dim=dim),) * config["num_hidden_layers"]
    return ModelCacheSpec(
        f"{model_id}, by tiny-llama", layers, dtype=config.get("torch_dtype", "bfloat16")
    )
