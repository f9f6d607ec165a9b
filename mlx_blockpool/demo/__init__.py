"""Two tiny chat models, with the data and the scripts that made them: one answers questions about this project, one calls tools.

Knows where the models lie. Does not know mlx; only train, agent and numpy_math do.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["NAMES", "model_path"]

# What --model takes in place of a folder.
NAMES = {"demo": "model", "demo-agent": "agent_model"}


def model_path(name: str = "demo") -> str:
    """The folder of a bundled model, in the form that mlx_lm.load takes; any other name as it is."""
    return str(Path(__file__).parent / NAMES[name]) if name in NAMES else name
