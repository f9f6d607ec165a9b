"""gemma3: every `sliding_window_pattern`-th layer is full, the others are windows.

mlx_lm/models/gemma3_text.py and gemma3.py. mlx-lm ignores `layer_types`; the absent keys have mlx-lm's defaults.
"""

from __future__ import annotations

from typing import Any

from mlx_blockpool.hookspecs import hookimpl
from mlx_blockpool.spec import ModelCacheSpec

from .config_layers import kv_layer, spec_of

DEFAULTS = {
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}


@hookimpl
def model_cache_spec(config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
    if config.get("model_type") not in ("gemma3", "gemma3_text"):
        return None
    wrapped = config["model_type"] == "gemma3"
    text = {**DEFAULTS, **({"num_key_value_heads": 4, **config["text_config"]} if wrapped else config)}
    full = kv_layer(text, text["head_dim"])
    window = kv_layer(text, text["head_dim"], text["sliding_window"])
    pattern = text["sliding_window_pattern"]
    layers = (full if (i + 1) % pattern == 0 else window for i in range(text["num_hidden_layers"]))
    return spec_of(model_id, {"torch_dtype": config.get("torch_dtype") or config.get("dtype"), **text}, layers)
