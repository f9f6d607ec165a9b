"""Which providers there are, and what they say about a model.

Bundled providers register first and entry points second; pluggy asks the last registered first, so an installed plugin
overrides a bundled one.
"""

from __future__ import annotations

import importlib
import traceback
from typing import Any

import pluggy

from . import hookspecs
from .errors import BlockpoolError, PluginError
from .spec import LayerSpec, ModelCacheSpec

BUNDLED = ("default", "llama", "qwen2", "gemma3", "gpt_oss")


def make_plugin_manager() -> pluggy.PluginManager:
    """All providers. Raises PluginError if one cannot be imported or implements a hook that does not exist."""
    manager = pluggy.PluginManager("mlx_blockpool")
    manager.add_hookspecs(hookspecs)
    for name in BUNDLED:
        # Under the module's name: an installed plugin may be called like the architecture.
        manager.register(importlib.import_module(f"mlx_blockpool_plugins.{name}"))
    try:
        manager.load_setuptools_entrypoints("mlx_blockpool")
        manager.check_pending()
    except (pluggy.PluginValidationError, ImportError) as error:
        raise PluginError(f"A plugin in entry-point group mlx_blockpool does not load: {error}. Fix or uninstall it.") from error
    return manager


def spec_from_config(config: dict[str, Any], model_id: str, manager: pluggy.PluginManager | None = None) -> ModelCacheSpec:
    """Describe a model of which only config.json is at hand."""
    return _ask(manager or make_plugin_manager(), None, config, model_id)


def spec_of_model(
    model: Any, config: dict[str, Any], model_id: str, manager: pluggy.PluginManager | None = None
) -> ModelCacheSpec:
    """Describe a loaded model. The dtype is the model's own: quantised weights may run in another than config.json says.

    Raises PluginError if the provider contradicts the model, SpecError if nobody can describe it.
    """
    spec = _ask(manager or make_plugin_manager(), model, config, model_id)
    return check_spec(spec, model)


def check_spec(spec: ModelCacheSpec, model: Any) -> ModelCacheSpec:
    """Compare a spec with the model that it describes; the spec with the model's dtype. What plugin authors run.

    Raises PluginError that names the first layer that differs.
    """
    traced = importlib.import_module("mlx_blockpool_plugins.default").trace(model, spec.model_id)
    if len(spec.layers) != len(traced.layers):
        raise PluginError(
            f"{spec.model_id}: the spec has {len(spec.layers)} layers and the model makes {len(traced.layers)} caches."
        )
    pairs: zip[tuple[LayerSpec, LayerSpec]] = zip(spec.layers, traced.layers, strict=True)
    for index, (found, needed) in enumerate(pairs):
        if found != needed:
            raise PluginError(f"{spec.model_id}, layer {index}: the spec says {found}; the model makes {needed}.")
    return spec.with_dtype(traced.dtype)


def _ask(manager: pluggy.PluginManager, model: Any, config: dict[str, Any], model_id: str) -> ModelCacheSpec:
    try:
        found = manager.hook.model_cache_spec(model=model, config=config, model_id=model_id)
    except BlockpoolError:
        raise
    except Exception as error:
        # Anybody's code: what it raises is its own, and the frame it came from names it.
        raise PluginError(f"{model_id}: {_culprit(error)} raised {type(error).__name__}: {error}.") from error
    if not isinstance(found, ModelCacheSpec):
        raise PluginError(f"{model_id}: found {type(found).__name__} from a provider; needed a ModelCacheSpec or None.")
    return found


def _culprit(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "a provider"
