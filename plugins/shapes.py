"""mlx-lm's models built for their shapes alone: their parameters stay lazy.

Importing mlx_lm imports transformers, 0.6 s of the 0.8 s that a plan then takes. So mlx-lm's model modules are imported from its
folder once more, under a package name of their own; mlx_lm itself is neither imported nor changed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import sys
import types
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from mlx_blockpool import mlx_lm_compat

from .config_layers import dtype_of

PACKAGE = "mlx_lm_shapes"
# mlx_lm/utils.py's function from a config to its class, and the names that it reads.
CLASSES = ("_get_classes", "MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING")
# Modules that are not quantised if a config that is not mlx-lm's does not say so.
UNQUANTISED = ("embed_tokens", "lm_head")


def build(config: dict[str, Any]) -> Any:
    """The model that mlx-lm makes of a config.json, in its published dtype. Writes into `config`, as mlx-lm does.

    Raises KeyError, TypeError or ValueError for a config that mlx-lm has no model for, and any error of the model.
    """
    printed = io.StringIO()
    try:
        # A module whose own dependency is missing (olmo) prints and exits.
        with contextlib.redirect_stdout(printed):
            model_class, args_class = _find_classes()(config)
    except SystemExit as error:
        raise ValueError(printed.getvalue().strip() or "its module exits") from error
    model = model_class(args_class.from_dict(config))
    dtype = getattr(mx, dtype_of(config))
    casts = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) and casts(name) else array

    model.update(tree_map_with_path(cast, model.parameters()))
    return model


def cache_module(model: Any) -> Any:
    """The module of the model's cache classes: mlx_lm.models.cache, or its copy for a model of build()."""
    built = type(model).__module__.startswith(f"{PACKAGE}.")
    return importlib.import_module(f"{PACKAGE if built else 'mlx_lm'}.models.cache")


def module_of(kind: type) -> str:
    """mlx-lm's name of the module that defines a class."""
    return kind.__module__.replace(f"{PACKAGE}.", "mlx_lm.", 1)


def weight_bytes(config: dict[str, Any]) -> tuple[int, int, int | None]:
    """Bytes of the weights, the number of parameters, and the bits of the quantised ones; None: nothing is quantised.

    An estimate: quantises the modules that mlx-lm's convert would. Writes into `config`; raises what build() raises.
    """
    quantised = _quantisation(config)
    tied = _setting(config, "tie_word_embeddings") is not False
    model = build(config)
    modules = dict(model.named_modules())
    size = parameters = 0
    for name, array in tree_flatten(model.parameters()):
        owner, _, leaf = name.rpartition(".")
        # Some models have a head until they load weights without one. A config omits the key if it is true.
        if tied and owner.endswith("lm_head"):
            continue
        parameters += array.size
        takes = leaf == "weight" and hasattr(modules.get(owner), "to_quantized")
        size += _array_bytes(array, quantised(owner) if takes else None)
    default = quantised("")
    return size, parameters, None if default is None else default["bits"]


def _array_bytes(array: mx.array, quantisation: dict[str, Any] | None) -> int:
    if quantisation is None or array.shape[-1] % quantisation["group_size"]:
        return int(array.nbytes)
    # Each group has a scale and a bias, or in the mx and nv formats a scale of one byte.
    beside = 2 * array.itemsize if quantisation["mode"] == "affine" else 1
    return int(array.size * quantisation["bits"] // 8 + array.size // quantisation["group_size"] * beside)


def _quantisation(config: dict[str, Any]) -> Callable[[str], dict[str, Any] | None]:
    """How the module of a name is quantised: bits, group_size and mode, or None."""
    own = _setting(config, "quantization") or _setting(config, "quantization_config") or {}
    method = own.get("quant_method")
    if method in ("mxfp4", "mxfp8"):
        own = {**own, "bits": int(method[-1]), "group_size": 32, "mode": method}
    if not own.get("bits"):
        return lambda name: None
    default = {"group_size": own.get("group_size", 64), "bits": own["bits"], "mode": own.get("mode", "affine")}
    spared = own.get("modules_to_not_convert") or (UNQUANTISED if method else ())

    def of(name: str) -> dict[str, Any] | None:
        found = own.get(name, True) if name else True
        if found is False or any(fnmatch(name, f"*{pattern}*") for pattern in spared):
            return None
        return {**default, **found} if isinstance(found, dict) else default

    return of


def _setting(config: dict[str, Any], key: str) -> Any:
    """The value of `key` in config.json or in its text_config."""
    text = config.get("text_config")
    return config.get(key, text.get(key) if isinstance(text, dict) else None)


@functools.cache
def _find_classes() -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    """mlx_lm.utils._get_classes, compiled from its source so that it finds the modules of PACKAGE."""
    spec = importlib.util.find_spec("mlx_lm")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    assert folders, "mlx-lm is not installed"
    body = ast.parse(Path(folders[0], "utils.py").read_text(encoding="utf-8")).body
    parts = [node for node in body if _defines(node) in CLASSES]
    if len(parts) != len(CLASSES):
        found: Callable[[dict[str, Any]], tuple[Any, Any]] = mlx_lm_compat.get_classes
        return found
    package = types.ModuleType(PACKAGE)
    package.__path__ = folders
    sys.modules[PACKAGE] = package
    renamed = types.SimpleNamespace(import_module=lambda name: importlib.import_module(name.replace("mlx_lm.", f"{PACKAGE}.", 1)))
    names: dict[str, Any] = {"importlib": renamed}
    exec(compile(ast.Module(parts, []), "mlx_lm/utils.py", "exec"), names)
    found = names[CLASSES[0]]
    return found


def _defines(node: ast.stmt) -> str | None:
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None
