"""The installed plugins, and the specs of models that their providers return.

Bundled providers register first and entry points second; pluggy calls the last registered first, so
an installed plugin overrides a bundled one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar, cast

import pluggy

from . import hooks, mlx_lm_compat
from .errors import PluginError, SpecError, UnknownModelTypeError
from .hooks import AttentionAdapter, CacheAdapter
from .spec import CompositeLayer, FullLayer, LayerSpec, ModelCacheSpec, StateLayer

log = logging.getLogger(__name__)

# Code that is written later is not what this process runs.
STARTED = time.time()
GROUP = "mlx_blockpool"
BUNDLED = (
    "default",
    "afm7",
    "deepseek_v41",
    "gpt_bigcode",
    "mla",
    "states",
    "prediction_heads",
    "vision_text",
    "volatile",
)
PACKAGE = "mlx_blockpool_plugins"


def make_plugin_manager() -> pluggy.PluginManager:
    """All plugins. Raises PluginError if one cannot be imported or implements an unknown hook."""
    manager = empty_plugin_manager()
    for name in BUNDLED:
        # Under the module's name: an installed plugin may be named like the architecture.
        manager.register(importlib.import_module(f"{PACKAGE}.{name}"))
    points = entry_points(group=GROUP)
    for point in points:
        _load(point)
    try:
        # pluggy reads the metadata of all distributions again.
        if points:
            manager.load_setuptools_entrypoints(GROUP)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(
            f"A plugin in entry-point group {GROUP} does not load: {error}. Fix or uninstall it."
        ) from error
    return manager


def installed_plugins() -> pluggy.PluginManager:
    """make_plugin_manager(), once for a process and its path. Nothing is registered with it."""
    return _made(make_plugin_manager, *sys.path)


@functools.lru_cache(1)
def _made(make: Callable[[], pluggy.PluginManager], *path: str) -> pluggy.PluginManager:
    return make()


def empty_plugin_manager() -> pluggy.PluginManager:
    """A plugin manager with our hooks and without providers."""
    manager = pluggy.PluginManager("mlx_blockpool")
    manager.add_hookspecs(hooks)
    return manager


def model_classes(
    config: dict[str, Any], manager: pluggy.PluginManager | None = None
) -> tuple[type, type]:
    """The model class and its ModelArgs class for a config.json: those of a plugin, else mlx-lm's.

    Raises UnknownModelTypeError if neither has the type, and PluginError that names a plugin which
    raises or returns something else.
    """
    return plugin_classes(config, manager) or stock_classes(config)


def plugin_classes(
    config: dict[str, Any], manager: pluggy.PluginManager | None = None
) -> tuple[type, type] | None:
    """The classes of a plugin for a config.json. Returns None if no plugin has some.

    Raises PluginError as model_classes() does.
    """
    manager = manager or installed_plugins()
    hook, given = manager.hook.model_classes, {"config": config}
    found = _first(manager, hook, given, f"model_type {config.get('model_type')!r}")
    if found is None or (
        isinstance(found, tuple)
        and len(found) == 2
        and all(isinstance(part, type) for part in found)
    ):
        return cast(tuple[type, type] | None, found)
    source = _source(manager, hook, given)
    raise PluginError(
        f"{source} returned {found!r} instead of a model class and its ModelArgs class."
    )


def stock_classes(config: dict[str, Any]) -> tuple[type, type]:
    """mlx-lm's model class and ModelArgs class for a config.json. Raises UnknownModelTypeError."""
    printed = io.StringIO()
    try:
        # A module whose dependency is missing (olmo) prints and exits.
        with contextlib.redirect_stdout(printed):
            found: tuple[type, type] = mlx_lm_compat.get_classes(config)
        return found
    except SystemExit as error:
        why = printed.getvalue().strip() or "its module exits"
        raise UnknownModelTypeError(_without_classes(config, why)) from error
    except (
        AttributeError,
        ImportError,
        KeyError,
        # A type with thousands of dots.
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        cause = error.__cause__
        absent = not isinstance(cause, ImportError) or (
            isinstance(cause, ModuleNotFoundError) and str(cause.name).startswith("mlx_lm.models.")
        )
        raise UnknownModelTypeError(
            _without_classes(config, None if absent else str(cause))
        ) from error


def _without_classes(config: dict[str, Any], why: str | None) -> str:
    """What is missing for the model of a config.json, and what to do.

    why: the reason why mlx-lm's module does not load, if it has one.
    """
    kind, name = config.get("model_type"), f"mlx-lm {mlx_lm_compat.installed()}"
    if why is not None:
        text = f"{name} cannot load its module for model_type {kind!r}: {why}"
    else:
        text = (
            f"neither {name} nor an installed plugin has model_type {kind!r}. Correct it, or "
            "install a plugin that has it (with mlx-vlm, its text models are served)"
        )
    if (file := config.get("model_file")) is not None:
        text += (
            f". The config names {file!r} as the code of the model, which runs only with "
            "--trust-remote-code"
        )
    return text


def spec_from_config(
    config: dict[str, Any], model_id: str, manager: pluggy.PluginManager | None = None
) -> ModelCacheSpec:
    """Describe a model by its config.json alone."""
    return _described(manager or installed_plugins(), None, config, model_id)


def spec_of_model(
    model: Any, config: dict[str, Any], model_id: str, manager: pluggy.PluginManager | None = None
) -> ModelCacheSpec:
    """Describe a loaded model. The dtype is the model's own: quantised weights may run in another
    one than config.json says.

    What an installed plugin says is not compared with the model here: probe() proves it. Raises
    PluginError for a plugin that raises or returns something else, SpecError if no provider
    describes the model.
    """
    manager = manager or installed_plugins()
    spec = _described(manager, model, config, model_id)
    source = _installed_source(
        manager,
        manager.hook.model_cache_spec,
        {"model": model, "config": config, "model_id": model_id},
    )
    if source is None:
        return spec
    dtype = importlib.import_module(f"{PACKAGE}.default").dtype_of_caches(model)
    return replace(spec, dtype=dtype or spec.dtype, source=source)


def traced_spec(model: Any, model_id: str) -> ModelCacheSpec:
    """Describe a loaded model by its caches alone, because no config.json describes one rank's
    part. Raises SpecError.
    """
    found: ModelCacheSpec = importlib.import_module(f"{PACKAGE}.default").trace(model, model_id)
    return found


def check_spec(spec: ModelCacheSpec, model: Any) -> ModelCacheSpec:
    """The spec with the model's dtype, if it agrees with the caches that the model makes. For
    authors of plugins.

    Raises PluginError that names the first layer that differs, and SpecError for caches of classes
    that mlx-lm does not have, with which nothing is compared.
    """
    traced = traced_spec(model, spec.model_id)
    if len(spec.layers) != len(traced.layers):
        raise PluginError(
            f"{spec.model_id}: the spec has {len(spec.layers)} layers and the model makes "
            f"{len(traced.layers)} caches."
        )
    pairs: zip[tuple[LayerSpec, LayerSpec]] = zip(spec.layers, traced.layers, strict=True)
    for index, (found, needed) in enumerate(pairs):
        if found != needed:
            raise PluginError(
                f"{spec.model_id}, layer {index}: the spec says {found}; the model makes {needed}."
            )
    return spec.with_dtype(traced.dtype)


def attention_adapters(manager: pluggy.PluginManager | None = None) -> list[AttentionAdapter]:
    """The attention adapters of all plugins, those of installed ones last. A plugin that raises or
    returns something else is left out, which is logged.
    """
    return _adapters(AttentionAdapter, "attention_adapters", manager)


def cache_adapters(manager: pluggy.PluginManager | None = None) -> list[CacheAdapter]:
    """The cache adapters of all plugins, as attention_adapters() returns those."""
    return _adapters(CacheAdapter, "cache_adapters", manager)


Adapter = TypeVar("Adapter", AttentionAdapter, CacheAdapter)


def _adapters(
    kind: type[Adapter], hook: str, manager: pluggy.PluginManager | None
) -> list[Adapter]:
    manager = manager or installed_plugins()
    found: list[Adapter] = []
    for impl in getattr(manager.hook, hook).get_hookimpls():
        try:
            returned: Any = impl.function()
            given = list(returned)
            wrong = next((each for each in given if not isinstance(each, kind)), None)
            if wrong is not None:
                raise TypeError(f"{wrong!r} is of another class than {kind.__name__}")
        except (Exception, SystemExit) as error:
            # Code from anywhere: models are served without it.
            source = name_of(manager, impl.plugin)
            text = "%s: %s() failed: %s: %s. Its adapters are not used."
            log.warning(text, source, hook, type(error).__name__, error)
            continue
        source = "" if _is_bundled(impl.plugin) else name_of(manager, impl.plugin)
        found += [replace(adapter, source=source) for adapter in given]
    return found


def versions() -> list[str]:
    """The installed plugins with their versions, and the names of their attention adapters, in the
    order in which they are used: what all ranks of a group need alike.
    """
    manager = installed_plugins()
    installed = (f"{d.metadata['Name']} {d.version}" for _, d in manager.list_plugin_distinfo())
    adapters = (f"adapter {a.name}" for a in attention_adapters(manager) if a.source)
    return [*installed, *adapters]


def code_digest(modules: Iterable[str]) -> str | None:
    """32 hex digits for the code of this package, of the packages of all plugins, and of some
    imported modules; None where code has no file, or one that was written since this process began.
    """
    manager = installed_plugins()
    packages = {__package__, PACKAGE}
    for plugin in manager.get_plugins():
        where = plugin if inspect.ismodule(plugin) or inspect.isclass(plugin) else type(plugin)
        name = where.__name__ if inspect.ismodule(where) else where.__module__
        packages.add(name.partition(".")[0])
    files = set[str]()
    for name in packages | {*modules}:
        module = sys.modules.get(name)
        file, folders = getattr(module, "__file__", None), getattr(module, "__path__", None)
        if name in packages and folders is not None:
            files |= {
                os.path.join(folder, each)
                for top in folders
                for folder, _, names_below in os.walk(top)
                for each in names_below
                if each.endswith(".py")
            }
        elif file is not None:
            files.add(file)
        else:
            return None
    if any(os.stat(each).st_mtime > STARTED for each in files):
        return None
    found = hashlib.blake2b(digest_size=16)
    for each in sorted(files):
        found.update(Path(each).read_bytes())
    return found.hexdigest()


def provided_spec(
    manager: pluggy.PluginManager, model: Any, config: dict[str, Any], model_id: str
) -> ModelCacheSpec | None:
    """The providers' spec of a model, not yet compared with it. Returns None if no provider
    describes the model.

    Raises PluginError that names a provider which raises or returns something else, and the
    SpecError of one that cannot describe the model.
    """
    hook, given = (
        manager.hook.model_cache_spec,
        {"model": model, "config": config, "model_id": model_id},
    )
    found = _first(manager, hook, given, model_id)
    if found is not None and (problem := _problem_with(found)) is not None:
        source = _source(manager, hook, given)
        raise PluginError(
            f"{model_id}: {source} returned {problem} instead of a ModelCacheSpec or None."
        )
    return cast(ModelCacheSpec | None, found)


def _first(
    manager: pluggy.PluginManager, hook: pluggy.HookCaller, given: dict[str, Any], subject: str
) -> Any:
    """What the first plugin returns from a hook. Raises PluginError that names a plugin which
    raises, and the SpecError of one that cannot describe the model.
    """
    try:
        return hook(**given)
    except SpecError as error:
        if _is_bundled(_provider_of(hook, given)):
            # Users cannot fix a bundled provider, so it is not named.
            raise
        raise type(error)(
            f"{str(error).rstrip('.')}. Raised by {_source(manager, hook, given)}."
        ) from error
    except (PluginError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # Code from anywhere may raise anything, and modules may exit.
        text = f"raised {type(error).__name__}: {error}. Fix or uninstall it."
        raise PluginError(f"{subject}: {_source(manager, hook, given)} {text}") from error


def _provider_of(hook: pluggy.HookCaller, given: dict[str, Any]) -> Any:
    """The first plugin that raises or answers when it is called by itself, as errors of the
    whole call do not name one.
    """
    for impl in hook.get_hookimpls()[::-1]:
        if not _is_wrapper(impl):
            names = [name for name in (*impl.argnames, *impl.kwargnames) if name in given]
            try:
                found: Any = impl.function(**{name: given[name] for name in names})
            except KeyboardInterrupt:
                raise
            except BaseException:
                return impl.plugin
            if found is not None:
                return impl.plugin
    return None


def _source(manager: pluggy.PluginManager, hook: pluggy.HookCaller, given: dict[str, Any]) -> str:
    """The names of the plugin whose result or error a hook gives, and of the wrappers around
    it.
    """
    provider = _provider_of(hook, given)
    wrappers = [name_of(manager, impl.plugin) for impl in hook.get_hookimpls() if _is_wrapper(impl)]
    named = [] if provider is None else [name_of(manager, provider)]
    return ", wrapped by ".join(named + wrappers)


def _installed_source(
    manager: pluggy.PluginManager, hook: pluggy.HookCaller, given: dict[str, Any]
) -> str | None:
    """_source() of a result that an installed plugin gives or changes; None: a bundled one."""
    impls = hook.get_hookimpls()
    # No bundled provider runs a second time where it is the only one.
    if all(_is_bundled(impl.plugin) for impl in impls):
        return None
    if not any(map(_is_wrapper, impls)) and _is_bundled(_provider_of(hook, given)):
        return None
    return _source(manager, hook, given)


def _is_bundled(plugin: Any) -> bool:
    return inspect.ismodule(plugin) and plugin.__name__.startswith(f"{PACKAGE}.")


def _is_wrapper(impl: pluggy.HookImpl) -> bool:
    return impl.wrapper or impl.hookwrapper


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
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Code from anywhere, as in _first().
        dist = (
            f"{point.dist.name} {point.dist.version}" if point.dist else "An unknown distribution"
        )
        raise PluginError(
            f"{dist}: entry point {point.name} = {point.value} in group {GROUP} does not load: "
            f"{type(error).__name__}: {error}. Fix or uninstall it."
        ) from error


def _described(
    manager: pluggy.PluginManager, model: Any, config: dict[str, Any], model_id: str
) -> ModelCacheSpec:
    found = provided_spec(manager, model, config, model_id)
    if found is None:
        raise SpecError(
            f"{model_id}: no provider describes this model. Install a plugin that does."
        )
    return found


def _problem_with(found: Any) -> str | None:
    if not isinstance(found, ModelCacheSpec):
        return type(found).__name__
    if not isinstance(found.layers, tuple):
        return f"a spec whose layers are a {type(found.layers).__name__}, not a tuple"
    if found.bits is not None:
        return "a spec of quantised blocks (leave out bits=: pools choose them)"
    return next(filter(None, map(_problem_with_layer, found.layers)), None)


def _problem_with_layer(layer: Any) -> str | None:
    if not isinstance(layer, CompositeLayer):
        return (
            None
            if isinstance(layer, FullLayer | StateLayer)
            else f"a spec with {layer!r} for a layer"
        )
    if not isinstance(layer.parts, tuple):
        return f"a spec with a composite layer whose parts are {layer.parts!r}, not a tuple"
    return next(filter(None, map(_problem_with_layer, layer.parts)), None)
