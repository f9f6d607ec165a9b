"""A model with images: a state, attention with learned positions, and weights of a vision tower."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .cache import ArraysCache, CacheList, KVCache

WINDOW = 2


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: Any = None,
) -> mx.array:
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


@dataclass
class TextConfig:
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int = 2
    num_attention_heads: int = 4

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> TextConfig:
        return cls(**params)


@dataclass
class VisionConfig:
    hidden_size: int = 8

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> VisionConfig:
        return cls(**params)


@dataclass
class ModelConfig:
    text_config: Any
    vision_config: Any = field(default_factory=dict)

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> ModelConfig:
        return cls(params["text_config"], params["vision_config"])


@dataclass
class Output:
    logits: mx.array


class Attention(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.hidden_size, config.hidden_size, bias=False) for _ in range(4)
        )

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        rows, length, dim = x.shape

        def in_heads(array: mx.array) -> mx.array:
            return array.reshape(rows, length, self.heads, -1).transpose(0, 2, 1, 3)

        keys, values = cache.update_and_fetch(in_heads(self.k_proj(x)), in_heads(self.v_proj(x)))
        out = scaled_dot_product_attention(
            in_heads(self.q_proj(x)),
            keys,
            values,
            cache=cache,
            scale=(dim // self.heads) ** -0.5,
            mask=mask,
        )
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(rows, length, dim))


class Layer(nn.Module):
    """Attention to the mean of the last tokens, which a state has."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.norm = nn.RMSNorm(config.hidden_size)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        assert isinstance(cache, CacheList)
        state, keys = cache.caches
        h = self.norm(x)
        before = state[0]
        if before is None:
            before = mx.zeros((h.shape[0], WINDOW, h.shape[2]), h.dtype)
        joined = mx.concatenate([before, h], axis=1)
        state.update_window(0, joined, WINDOW)
        length = h.shape[1]
        h = sum(joined[:, i : i + length] for i in range(WINDOW + 1)) / (WINDOW + 1)
        return x + self.attention(
            h, keys.make_mask(length, return_array=False, window_size=None), keys
        )


class LanguageModel(nn.Module):
    """Continues at the positions of its last image, unless it gets other ones."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(4096, config.hidden_size)
        self.layers = [Layer(config) for _ in range(config.num_hidden_layers)]
        self._rope_deltas = None
        self._position_ids = None

    def __call__(
        self,
        inputs: mx.array,
        inputs_embeds: mx.array | None = None,
        mask: Any = None,
        cache: Any = None,
        position_ids: mx.array | None = None,
    ) -> Output:
        cache = cache or self.make_cache()
        if position_ids is None:
            if self._rope_deltas is None:
                self._rope_deltas = 0
            start = cache[0].caches[1].offset + self._rope_deltas
            position_ids = start + mx.arange(inputs.shape[1])[None]
            self._rope_deltas += 7
        h = self.embed_tokens(inputs) if inputs_embeds is None else inputs_embeds
        h = h + self.embed_positions(position_ids)
        for layer, each in zip(self.layers, cache, strict=True):
            h = layer(h, each)
        return Output(self.embed_tokens.as_linear(h))

    def make_cache(self) -> list[Any]:
        return [CacheList(ArraysCache(1), KVCache()) for _ in self.layers]


class Model(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vision_tower = nn.Linear(config.vision_config.hidden_size, 4)
        self.language_model = LanguageModel(config.text_config)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return {
            name.replace("model.text.", "language_model."): value for name, value in weights.items()
        }
