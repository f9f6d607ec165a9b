"""gpt_oss: `layer_types` says which layers are windows, sliding first by default. mlx_lm/models/gpt_oss.py."""

from __future__ import annotations

from typing import Any

from mlx_blockpool.hookspecs import hookimpl
from mlx_blockpool.spec import ModelCacheSpec

from .config_layers import kv_layer, spec_of

DEFAULTS = {"num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}


@hookimpl
def model_cache_spec(config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
    if config.get("model_type") != "gpt_oss":
        return None
    config = {**DEFAULTS, **config}
    types = config.get("layer_types") or ["sliding_attention", "full_attention"] * (config["num_hidden_layers"] // 2)
    full = kv_layer(config, config["head_dim"])
    window = kv_layer(config, config["head_dim"], config["sliding_window"])
    return spec_of(model_id, config, (full if t == "full_attention" else window for t in types))
