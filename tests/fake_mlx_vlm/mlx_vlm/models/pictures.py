"""A model that only computes with images."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from .sketch import LanguageModel as SketchLanguageModel
from .sketch import ModelConfig as ModelConfig
from .sketch import TextConfig as TextConfig
from .sketch import VisionConfig as VisionConfig


class LanguageModel(SketchLanguageModel):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("pixel_values are needed")


class Model(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.language_model = LanguageModel(config.text_config)
