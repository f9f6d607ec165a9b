"""A text model whose caches have a class that mlx-lm lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from .cache import DecayingKVCache


@dataclass
class ModelConfig(llama.ModelArgs):
    pass


class LanguageModel(llama.Model):
    def __call__(
        self, inputs: mx.array, inputs_embeds: Any = None, mask: Any = None, cache: Any = None
    ) -> mx.array:
        assert all(isinstance(each, DecayingKVCache) for each in cache or ())
        return super().__call__(inputs, cache, inputs_embeds)

    def make_cache(self) -> list[Any]:
        return [DecayingKVCache() for _ in self.layers]


class Model(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.language_model = LanguageModel(config)
