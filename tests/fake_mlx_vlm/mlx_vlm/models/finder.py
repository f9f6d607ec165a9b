"""A model that finds objects."""

from __future__ import annotations

import mlx.nn as nn

from .sketch import ModelConfig as ModelConfig
from .sketch import TextConfig as TextConfig
from .sketch import VisionConfig as VisionConfig


class Model(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.boxes = nn.Linear(config.vision_config.hidden_size, 4)
