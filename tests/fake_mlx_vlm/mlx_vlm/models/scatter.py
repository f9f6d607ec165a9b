"""A model that generates by diffusion."""

from __future__ import annotations

from .sketch import Model as SketchModel
from .sketch import ModelConfig as ModelConfig
from .sketch import TextConfig as TextConfig
from .sketch import VisionConfig as VisionConfig


class Model(SketchModel):
    mask_token = 7
