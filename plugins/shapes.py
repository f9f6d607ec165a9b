"""Models built for their shapes alone: their parameters stay lazy."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from mlx_blockpool.plugins import model_classes
from mlx_blockpool.spec import DTYPE_BYTES

# Modules that are not quantised if a config that is not mlx-lm's does not say so.
UNQUANTISED = ("embed_tokens", "lm_head")


def build(config: dict[str, Any]) -> Any:
    """The model of a config.json, built by a plugin's classes or mlx-lm's, in its published dtype.
    Writes into `config`, as mlx-lm does.

    Raises UnknownModelTypeError, PluginError, and any error of the model.
    """
    model_class, args_class = model_classes(config)
    arguments: Any = args_class
    model: Any = model_class(arguments.from_dict(config))
    dtype = getattr(mx, dtype_of(config))
    casts = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, array: mx.array) -> mx.array:
        return (
            array.astype(dtype)
            if mx.issubdtype(array.dtype, mx.floating) and casts(name)
            else array
        )

    model.update(tree_map_with_path(cast, model.parameters()))
    return model


def dtype_of(config: dict[str, Any]) -> str:
    """The dtype that config.json states; bfloat16, as most models are published, where it states
    none.
    """
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix(
        "torch."
    )
    return dtype if dtype in DTYPE_BYTES else "bfloat16"


def weight_bytes(config: dict[str, Any]) -> tuple[int, int, int | None]:
    """Bytes of the weights, the number of parameters, and the bits of the quantised ones; None:
    nothing is quantised.

    An estimate: quantises the modules that mlx-lm's convert would. Writes into `config`; raises
    what build() raises.
    """
    quantised = _quantisation(config)
    tied = _setting(config, "tie_word_embeddings") is not False
    model = build(config)
    modules = dict(model.named_modules())
    size = parameters = 0
    for name, array in tree_flatten(model.parameters()):
        owner, _, leaf = name.rpartition(".")
        # Some models have a head until they load weights without one. A config omits the key if it
        # is true.
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
    scale_bytes = 2 * array.itemsize if quantisation["mode"] == "affine" else 1
    return int(
        array.size * quantisation["bits"] // 8
        + array.size // quantisation["group_size"] * scale_bytes
    )


def _quantisation(config: dict[str, Any]) -> Callable[[str], dict[str, Any] | None]:
    """How the module of a name is quantised: bits, group_size and mode, or None."""
    own = _setting(config, "quantization") or _setting(config, "quantization_config") or {}
    method = own.get("quant_method")
    if method in ("mxfp4", "mxfp8"):
        own = {**own, "bits": int(method[-1]), "group_size": 32, "mode": method}
    if not own.get("bits"):
        return lambda name: None
    default = {
        "group_size": own.get("group_size", 64),
        "bits": own["bits"],
        "mode": own.get("mode", "affine"),
    }
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
