"""Shared by the providers that read config.json alone. Knows no mlx."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlx_blockpool.spec import DTYPE_BYTES, FullLayer, LayerSpec, ModelCacheSpec, WindowLayer


def kv_layer(config: dict[str, Any], head_dim: int, window: int | None = None) -> FullLayer:
    """One attention layer; `window` in tokens makes it a window layer."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    if window is None:
        return FullLayer(heads, head_dim, head_dim)
    return WindowLayer(heads, head_dim, head_dim, window)


def spec_of(model_id: str, config: dict[str, Any], layers: Iterable[LayerSpec]) -> ModelCacheSpec:
    return ModelCacheSpec(model_id, tuple(layers), dtype_of(config))


def dtype_of(config: dict[str, Any]) -> str:
    """The dtype that config.json states; bfloat16, as most models are published, where it states none."""
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    return dtype if dtype in DTYPE_BYTES else "bfloat16"
