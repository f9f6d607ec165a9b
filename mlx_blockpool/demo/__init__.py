"""A tiny chat model that answers questions about this project, and five agents that talk to it.

Holds the model's folder and its questions; benchmarks/demo of the repository trains it. Does not
import mlx.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["NAME", "model_path"]

# What --model takes in place of a folder.
NAME = "demo"


def model_path(name: str = NAME) -> str:
    """Return the folder of the bundled model, in the form that mlx_lm.load takes; any other name
    is returned unchanged.
    """
    return str(Path(__file__).parent / "model") if name == NAME else name
