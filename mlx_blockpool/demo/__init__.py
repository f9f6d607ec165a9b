"""A tiny chat model about mlx-blockpool itself, with the data and the script that made it.

Knows where the model lies. Does not know mlx; only train and numpy_math do.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_path"]


def model_path() -> str:
    """The folder of the bundled demo model, in the form that mlx_lm.load takes."""
    return str(Path(__file__).parent / "model")
