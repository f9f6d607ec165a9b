"""A small transformer whose attention computes its softmax: a key counts less the farther it is
from the query, by a slope for each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int


class Rows:
    """The keys and values of one layer, one array for each forward."""

    def __init__(self) -> None:
        self.parts: list[tuple[mx.array, mx.array]] = []
        self.length = 0

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.parts.append((keys, values))
        self.length += keys.shape[2]
        return self.all()

    @property
    def state(self) -> list[tuple[mx.array, mx.array]]:
        return self.parts

    def all(self) -> tuple[mx.array, mx.array]:
        keys, values = (mx.concatenate(parts, axis=2) for parts in zip(*self.parts, strict=True))
        self.parts = [(keys, values)]
        return keys, values


class Attention(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.num_heads = args.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(args.hidden_size, args.hidden_size, bias=False) for _ in range(4)
        )

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        rows, length, size = x.shape

        def heads(array: mx.array) -> mx.array:
            return array.reshape(rows, length, self.num_heads, -1).transpose(0, 2, 1, 3)

        queries, keys, values = (
            heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # One for each row of a batch, or one number.
        start = mx.array(0 if cache is None else cache.length).reshape(-1, 1, 1, 1)
        if cache is not None:
            keys, values = cache.append(keys, values)
        distance = start + mx.arange(length)[:, None] - mx.arange(keys.shape[2])
        slopes = 2.0 ** -mx.arange(12, self.num_heads + 12)[:, None, None]
        scores = (queries @ keys.swapaxes(2, 3)) * queries.shape[3] ** -0.5 - slopes * distance
        weights = mx.softmax(mx.where(distance < 0, -mx.inf, scores), axis=-1, precise=True)
        out = (weights.astype(values.dtype) @ values).transpose(0, 2, 1, 3)
        return self.o_proj(out.reshape(rows, length, size))


class Layer(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.norms = [nn.RMSNorm(args.hidden_size) for _ in range(2)]
        self.up = nn.Linear(args.hidden_size, 2 * args.hidden_size, bias=False)
        self.down = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        x = x + self.attention(self.norms[0](x), cache)
        return x + self.down(nn.silu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Layer(args) for _ in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size)

    def make_cache(self) -> list[Rows]:
        return [Rows() for _ in self.layers]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        h = self.embed_tokens(inputs)
        for layer, each in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            h = layer(h, each)
        return self.embed_tokens.as_linear(self.norm(h))
