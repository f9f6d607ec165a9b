"""Loads models as mlx-lm does, also those whose classes a plugin brings.

mlx_lm.load() always takes mlx-lm's own classes; mlx_lm.utils.load_model() takes any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm import utils

from .. import mlx_lm_compat
from ..plugins import plugin_classes, stock_classes


def load(path: str, **options: Any) -> Any:
    """mlx_lm.load() with the classes of plugins. Raises what it raises, and PluginError."""
    return mlx_lm_compat.rebind(mlx_lm_compat.load, load_model=load_model)(path, **options)


def load_model(model_path: Path, *args: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """mlx_lm.utils.load_model() with the classes of plugins, which are used in place of code in the
    model's folder.

    Raises what it raises, UnknownModelTypeError, and PluginError.
    """
    found = plugin_classes(utils.load_config(model_path))
    if found is None:
        options["get_model_classes"] = stock_classes
    else:
        options["get_model_classes"] = lambda config: found
        options["model_config"] = {**(options.get("model_config") or {}), "model_file": None}
    loaded: tuple[Any, dict[str, Any]] = utils.load_model(model_path, *args, **options)
    return loaded
