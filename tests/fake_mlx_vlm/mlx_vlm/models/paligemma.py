"""A type whose prompts attend in both directions."""

from .sketch import Model as Model
from .sketch import ModelConfig as ModelConfig
from .sketch import TextConfig as TextConfig
from .sketch import VisionConfig as VisionConfig
