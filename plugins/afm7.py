"""afm7: its last layers read what the last cache holds, at the positions of each sequence of a
batch. mlx-lm's model counts keys to find the position of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_blockpool.hooks import AttentionAdapter, hookimpl


@hookimpl
def attention_adapters() -> list[AttentionAdapter]:
    return [AttentionAdapter("afm7", _is_model, _compute)]


def _is_model(cls: type) -> bool:
    return (cls.__module__, cls.__name__) == ("mlx_lm.models.afm7", "AFMModel")


def _compute(
    module: Any, call: Callable[..., Any], inputs: mx.array, cache: list[Any] | None = None
) -> Any:
    """The hidden states [batch, n, dim] of tokens [batch, n], each sequence from its offset."""
    if cache is None or not isinstance(cache[0].offset, mx.array):
        return call(module, inputs, cache)
    hidden, offset, last = module.embedding(inputs), cache[0].offset, cache[-1]
    mask = cache[0].make_mask(inputs.shape[1])
    for layer, own in zip(module.layers, cache, strict=True):
        hidden = layer(hidden, mask, cache=own)
    for layer in module.kv_reuse_layers:
        hidden += _attend(layer.self_attn, layer.input_layernorm(hidden), last, offset, mask)
        hidden += layer.mlp(layer.post_attention_layernorm(hidden))
    return module.output_norm(hidden)


def _attend(module: Any, x: mx.array, cache: Any, offset: mx.array, mask: Any) -> mx.array:
    """Attention of x [batch, n, dim] to the keys and values of the last cache."""
    batch, n, _ = x.shape
    queries = module.q_proj(x).reshape(batch, n, module.n_heads, -1).transpose(0, 2, 1, 3)
    queries = module.q_norm(module.rope(queries, offset=offset))
    keys, values = cache.keys_and_values()
    out = cache.attend(queries, keys, values, module.scale, mask, None)
    found: mx.array = module.out_proj(out.transpose(0, 2, 1, 3).reshape(batch, n, -1))
    return found
