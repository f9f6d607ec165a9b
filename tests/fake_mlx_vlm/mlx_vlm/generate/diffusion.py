"""Models that generate all tokens of a block at once."""

from __future__ import annotations

from typing import Any


def is_diffusion_model(model: Any) -> bool:
    return hasattr(model, "mask_token")
