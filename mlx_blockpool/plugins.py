"""The installed plugins, and the specs of models that their providers return.

Bundled providers register first and entry points second; pluggy calls the last registered first, so an installed plugin
overrides a bundled one.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from . import hookspecs
from .drafts.draft import SourceFactory
from .errors import BlockpoolError, PluginError, SpecError
from .spec import CompositeLayer, FullLayer, LayerSpec, ModelCacheSpec, StateLayer

GROUP = "mlx_blockpool"
BUNDLED = ("default", "llama", "qwen2", "gemma3", "gpt_oss")
NORMALISERS = ("volatile",)
PACKAGE = "mlx_blockpool_plugins"


def make_plugin_manager() -> pluggy.PluginManager:
    """All plugins. Raises PluginError if one cannot be imported or implements an unknown hook."""
    manager = empty_plugin_manager()
    for name in (*BUNDLED, *NORMALISERS):
        # Under the module's name: an installed plugin may be named like the architecture.
        manager.register(importlib.import_module(f"{PACKAGE}.{name}"))
    for point in entry_points(group=GROUP):
        _load(point)
    try:
        manager.load_setuptools_entrypoints(GROUP)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"A plugin in entry-point group {GROUP} does not load: {error}. Fix or uninstall it.") from error
    return manager


def empty_plugin_manager() -> pluggy.PluginManager:
    """A plugin manager with our hooks and without providers."""
    manager = pluggy.PluginManager("mlx_blockpool")
    manager.add_hookspecs(hookspecs)
    return manager


def spec_from_config(config: dict[str, Any], model_id: str, manager: pluggy.PluginManager | None = None) -> ModelCacheSpec:
    """Describe a model by its config.json alone."""
    return _described(provided_spec(manager or make_plugin_manager(), None, config, model_id), model_id)


def spec_of_model(
    model: Any, config: dict[str, Any], model_id: str, manager: pluggy.PluginManager | None = None
) -> ModelCacheSpec:
    """Describe a loaded model. The dtype is the model's own: quantised weights may run in another than config.json says.

    Raises PluginError if the provider contradicts the model, SpecError if no provider describes it.
    """
    manager = manager or make_plugin_manager()
    spec = _described(provided_spec(manager, model, config, model_id), model_id)
    try:
        return check_spec(spec, model)
    except PluginError as error:
        raise PluginError(f"{error} The spec is from {_source(manager, model, config, model_id)}.") from error


def traced_spec(model: Any, model_id: str) -> ModelCacheSpec:
    """Describe a loaded model by its caches alone. No config.json describes the part that one rank has. Raises SpecError."""
    found: ModelCacheSpec = importlib.import_module(f"{PACKAGE}.default").trace(model, model_id)
    return found


def check_spec(spec: ModelCacheSpec, model: Any) -> ModelCacheSpec:
    """The spec with the model's dtype, if it agrees with the model. For authors of plugins.

    Raises PluginError that names the first layer that differs.
    """
    traced = traced_spec(model, spec.model_id)
    if len(spec.layers) != len(traced.layers):
        raise PluginError(
            f"{spec.model_id}: the spec has {len(spec.layers)} layers and the model makes {len(traced.layers)} caches."
        )
    pairs: zip[tuple[LayerSpec, LayerSpec]] = zip(spec.layers, traced.layers, strict=True)
    for index, (found, needed) in enumerate(pairs):
        if found != needed:
            raise PluginError(f"{spec.model_id}, layer {index}: the spec says {found}; the model makes {needed}.")
    return spec.with_dtype(traced.dtype)


def provided_spec(manager: pluggy.PluginManager, model: Any, config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
    """The providers' spec of a model, not yet compared with it; None: no provider describes it.

    Raises PluginError that names a provider which raises or returns something else, and the SpecError of one that cannot describe
    the model.
    """
    try:
        found = manager.hook.model_cache_spec(model=model, config=config, model_id=model_id)
    except SpecError as error:
        plugin = _raiser(manager, error)
        if plugin is None or (inspect.ismodule(plugin) and plugin.__name__.startswith(f"{PACKAGE}.")):
            # A bundled provider needs no name.
            raise
        raise SpecError(f"{str(error).rstrip('.')}. Raised by {name_of(manager, plugin)}.") from error
    except BlockpoolError:
        raise
    except Exception as error:
        # Code from anywhere may raise anything.
        raise PluginError(
            f"{model_id}: {_culprit(manager, error)} raised {type(error).__name__}: {error}. Fix or uninstall it."
        ) from error
    problem = None if found is None else _problem_with(found)
    if problem is not None:
        raise PluginError(
            f"{model_id}: {_source(manager, model, config, model_id)} returned {problem} instead of a ModelCacheSpec or None."
        )
    assert found is None or isinstance(found, ModelCacheSpec)
    return found


def source_factories(model: Any, config: dict[str, Any], manager: pluggy.PluginManager | None = None) -> list[SourceFactory]:
    """What plugins offer to draft with for a loaded model.

    Raises PluginError that names a plugin which raises or returns something else.
    """
    manager = manager or make_plugin_manager()
    given = {"model": model, "config": config}
    found: list[SourceFactory] = []
    for impl in reversed(manager.hook.draft_sources.get_hookimpls()):
        name = name_of(manager, impl.plugin)
        try:
            factories: list[Any] = list(impl.function(*(given[argument] for argument in impl.argnames)) or ())  # type: ignore[call-overload]
        except Exception as error:
            # As in provided_spec().
            raise PluginError(f"{name} raised {type(error).__name__}: {error}, in draft_sources. Fix or uninstall it.") from error
        for factory in factories:
            if not callable(factory):
                raise PluginError(f"{name} returned a {type(factory).__name__} among its draft sources instead of a function.")
        found += factories
    return found


def name_of(manager: pluggy.PluginManager, plugin: Any) -> str:
    """A plugin's distribution, if it has one, its module and its file."""
    where = plugin if inspect.ismodule(plugin) or inspect.isclass(plugin) else type(plugin)
    name = where.__name__ if inspect.ismodule(where) else f"{where.__module__}.{where.__qualname__}"
    try:
        file = inspect.getsourcefile(where) or "no file"
    except TypeError:
        file = "no file"
    dists = [dist for registered, dist in manager.list_plugin_distinfo() if registered is plugin]
    named = f"plugin {dists[0].metadata['Name']} {dists[0].version}" if dists else "provider"
    return f"{named} ({name}, {file})"


def _load(point: EntryPoint) -> None:
    """Import a plugin. Raises PluginError that names it."""
    try:
        point.load()
    except Exception as error:
        # Code from anywhere, as in provided_spec().
        dist = f"{point.dist.name} {point.dist.version}" if point.dist else "An unknown distribution"
        raise PluginError(
            f"{dist}: entry point {point.name} = {point.value} in group {GROUP} does not load: "
            f"{type(error).__name__}: {error}. Fix or uninstall it."
        ) from error


def _described(found: ModelCacheSpec | None, model_id: str) -> ModelCacheSpec:
    if found is None:
        raise SpecError(f"{model_id}: no provider describes this model. Install a plugin that does.")
    return found


def _problem_with(found: Any) -> str | None:
    if not isinstance(found, ModelCacheSpec):
        return type(found).__name__
    if not isinstance(found.layers, tuple):
        return f"a spec whose layers are a {type(found.layers).__name__} and no tuple"
    if found.bits is not None:
        return "a spec of quantised blocks (leave out bits=: pools choose them)"
    wrong = list(_no_layers(found.layers))
    return f"a spec with {wrong[0]!r} for a layer" if wrong else None


def _no_layers(layers: Any) -> Iterator[Any]:
    """The entries among layers and their parts that are no LayerSpec."""
    if not isinstance(layers, tuple):
        yield layers
        return
    for layer in layers:
        if isinstance(layer, CompositeLayer):
            yield from _no_layers(layer.parts)
        elif not isinstance(layer, FullLayer | StateLayer):
            yield layer


def _source(manager: pluggy.PluginManager, model: Any, config: dict[str, Any], model_id: str) -> str:
    """The provider whose spec was used. pluggy does not name it, so each provider is called again by itself."""
    given = {"model": model, "config": config, "model_id": model_id}
    for impl in reversed(manager.hook.model_cache_spec.get_hookimpls()):
        try:
            if impl.function(*(given[name] for name in impl.argnames)) is not None:
                return name_of(manager, impl.plugin)
        except Exception:
            break
    return "a provider"


def _culprit(manager: pluggy.PluginManager, error: BaseException) -> str:
    """The plugin that raised an error, and the line."""
    frames = traceback.extract_tb(error.__traceback__)
    plugin = _raiser(manager, error)
    line = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "no file"
    return f"a provider ({line})" if plugin is None else f"{name_of(manager, plugin)}, at {line},"


def _raiser(manager: pluggy.PluginManager, error: BaseException) -> Any:
    """The plugin whose hook raised an error, or None."""
    impls = manager.hook.model_cache_spec.get_hookimpls()
    codes = {getattr(impl.function, "__code__", None): impl.plugin for impl in impls}
    passed = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((codes[code] for code in passed if code in codes), None)
