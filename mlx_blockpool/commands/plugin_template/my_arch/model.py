"""A decoder whose attention caps its scores, in the form of mlx-lm's model files. Put your model in
its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask


@dataclass
class ModelArgs(BaseModelArgs):  # type: ignore[misc]
    """The fields of config.json."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    score_cap: float


class Attention(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        heads, kv_heads = args.num_attention_heads, args.num_key_value_heads
        self.q_proj = nn.Linear(args.hidden_size, heads * args.head_dim, bias=False)
        self.k_proj = nn.Linear(args.hidden_size, kv_heads * args.head_dim, bias=False)
        self.v_proj = nn.Linear(args.hidden_size, kv_heads * args.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * args.head_dim, args.hidden_size, bias=False)
        self.rope = nn.RoPE(args.head_dim)

    def __call__(self, x: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
        batch, length, _ = x.shape
        kv_heads, cap = self.args.num_key_value_heads, self.args.score_cap
        queries, keys, values = (
            projected.reshape(batch, length, -1, self.args.head_dim).swapaxes(1, 2)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        queries, keys = self.rope(queries, cache.offset), self.rope(keys, cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
        queries = queries.reshape(batch, kv_heads, -1, length, self.args.head_dim)
        scores = queries @ keys[:, :, None].swapaxes(-1, -2) * self.args.head_dim**-0.5
        scores = cap * mx.tanh(scores / cap)
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)
        out = mx.softmax(scores, axis=-1) @ values[:, :, None]
        return self.o_proj(out.flatten(1, 2).swapaxes(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(args.hidden_size)
        self.attention = Attention(args)
        self.mlp = nn.Linear(args.hidden_size, args.hidden_size)

    def __call__(self, x: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
        x = x + self.attention(self.norm(x), mask, cache)
        return x + nn.silu(self.mlp(x))


class Model(nn.Module):
    """Logits [batch, tokens, vocabulary] of tokens [batch, tokens]."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.embed = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Layer(args) for _ in range(args.num_hidden_layers)]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        x = self.embed(tokens)
        mask = create_attention_mask(x, cache[0], return_array=True)
        for layer, own in zip(self.layers, cache, strict=True):
            x = layer(x, mask, own)
        return self.embed.as_linear(x)
