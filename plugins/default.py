"""The provider for every model of mlx-lm: runs the model once, unevaluated, and reads the shapes of
its caches.

Parameters stay lazy, so a full-size model costs kilobytes and a tenth of a second.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_blockpool.errors import PluginError, SpecError, UnknownModelTypeError
from mlx_blockpool.hooks import CacheAdapter, hookimpl
from mlx_blockpool.plugins import cache_adapters
from mlx_blockpool.spec import (
    ChunkLayer,
    CompositeLayer,
    FullLayer,
    LayerSpec,
    ModelCacheSpec,
    StateLayer,
    TokenArray,
    WindowLayer,
)

from . import shapes

# The bytes of states are compared after MANY tokens and after twice that and one more, which shows
# arrays that double, and after FULL, when groups of up to 10, 12, 14, 15 or 16 tokens lack one.
MANY, FULL = 2048, 5039
# What pooled caches add to a class.
TAKEN = {"sequence", "layer", "fork", "take", "saved_arrays", "restore_arrays", "_on", "_own"}


@hookimpl
def model_cache_spec(model: Any, config: dict[str, Any], model_id: str) -> ModelCacheSpec:
    if model is not None:
        return trace(model, model_id)
    if "model_type" not in config:
        raise SpecError(f"{model_id}: the config has no model_type.")
    config = copy.deepcopy(config)  # mlx-lm's ModelArgs write into it
    try:
        return trace(shapes.build(config), model_id).with_dtype(shapes.dtype_of(config))
    except UnknownModelTypeError as error:
        raise UnknownModelTypeError(f"{model_id}: {error}") from error
    except (SpecError, PluginError):
        raise
    except Exception as error:
        # mlx-lm's code for a config.json from anywhere may raise anything. Its own ValueErrors are
        # sentences.
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise SpecError(
            f"{model_id}: mlx-lm cannot build a model from this config: {why}"
        ) from error


def trace(model: Any, model_id: str) -> ModelCacheSpec:
    """The spec of a model by its own make_cache and forward pass. Evaluates nothing.

    Raises SpecError for a cache class that mlx-lm 0.32 does not have.
    """
    caches, adapters = _empty_caches(model), dict[type, CacheAdapter]()
    others = {type(leaf) for leaf in _leaves(caches)} - _kinds()
    if others:
        adapters = {cls: CacheAdapter(cls, source=_name(cls)) for cls in others if _saves(cls)}
        adapters |= {adapter.cls: adapter for adapter in cache_adapters()}
    if any(cls in adapters and adapters[cls].arrays is None for cls in others):
        return _with_own_states(model, model_id, caches, adapters)
    _compute(model, caches)
    layers = tuple(_layer(cache, model_id, adapters) for cache in caches)
    dtype = _dtype(caches, adapters) or "float16"
    source = _source(caches, adapters)
    return ModelCacheSpec(model_id, layers, dtype, source=source)


def dtype_of_caches(model: Any) -> str | None:
    """The dtype of the first keys that a model computes, by one unevaluated forward pass. Returns
    None if its caches have no keys, or if it does not run on them.
    """
    try:
        caches = _compute(model, _empty_caches(model))
        return _dtype(caches, {adapter.cls: adapter for adapter in cache_adapters()})
    except Exception:
        # A model of a plugin may raise anything. probe() finds out whether it runs.
        return None


def _empty_caches(model: Any) -> list[Any]:
    # It takes a second to import, which commands without a model do not wait for.
    from mlx_lm.models import cache as upstream

    caches: list[Any] = upstream.make_prompt_cache(model)
    return caches


def _compute(model: Any, caches: list[Any]) -> list[Any]:
    # After two tokens longcat_flash_ngram's state has all of its size.
    model(mx.zeros((1, 2), mx.int32), cache=caches)
    return caches


def _leaves(caches: list[Any]) -> list[Any]:
    return [leaf for c in caches for leaf in getattr(c, "caches", (c,))]


def _kinds() -> set[type]:
    """mlx-lm's classes that have a layer kind, but for lists of them."""
    from mlx_lm.models import cache as upstream

    own = upstream.KVCache, upstream.RotatingKVCache, upstream.ChunkedKVCache, upstream.ArraysCache
    return set(own)


def _dtype(caches: list[Any], adapters: Mapping[type, CacheAdapter]) -> str | None:
    for leaf in _leaves(caches):
        adapter = adapters.get(type(leaf))
        keys = getattr(leaf, "keys", None)
        if adapter is not None:
            keys = None if adapter.arrays is None else adapter.arrays(leaf)[0]
        if keys is not None:
            return str(keys.dtype).removeprefix("mlx.core.")
    return None


def _layer(cache: Any, model_id: str, adapters: Mapping[type, CacheAdapter]) -> LayerSpec:
    from mlx_lm.models import cache as upstream

    # Exact types: a subclass may store its content elsewhere.
    kind = type(cache)
    if kind in adapters:
        return _adapted(adapters[kind], cache, model_id)
    if kind is upstream.KVCache:
        return FullLayer(*_dims(cache))
    if kind is upstream.RotatingKVCache:
        return WindowLayer(*_dims(cache), cache.max_size, cache.keep)
    if kind is upstream.ChunkedKVCache:
        return ChunkLayer(*_dims(cache), cache.chunk_size)
    if kind is upstream.ArraysCache:
        arrays = (a for a in cache.cache if a is not None)
        return StateLayer(
            tuple((tuple(a.shape), str(a.dtype).removeprefix("mlx.core.")) for a in arrays)
        )
    if kind is upstream.CacheList:
        return CompositeLayer(tuple(_layer(part, model_id, adapters) for part in cache.caches))
    raise SpecError(
        f"{model_id}: no layer kind has the cache class {kind.__module__}.{kind.__name__}. "
        "Serve the model with mlx-lm's own caches, or install a plugin that describes it."
    )


def _source(caches: list[Any], adapters: Mapping[type, CacheAdapter]) -> str | None:
    sources = {adapters[type(leaf)].source for leaf in _leaves(caches) if type(leaf) in adapters}
    return ", ".join(sorted(sources)) or None


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"


@functools.lru_cache(maxsize=64)
def _saved_by(adapter: CacheAdapter) -> str:
    """Names how an adapter saves a class, by the code of both: what other code has saved may mean
    something else.
    """
    parts: list[Any] = [*adapter.cls.__mro__[:-1], adapter.save, adapter.restore]
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        try:
            digest.update(Path(inspect.getsourcefile(part) or "").read_bytes())
        except (OSError, TypeError):
            # Code without a file: another process may have other code.
            digest.update(secrets.token_bytes())
    # The pool's own form of what is saved is the first one.
    return f"1 {_name(adapter.cls)} {digest.hexdigest()}"


def _saves(cls: type) -> bool:
    """Return whether a class has the methods of a CacheAdapter's `save` and `restore`."""
    return hasattr(cls, "prefix_cache_snapshot") and hasattr(cls, "prefix_cache_restore")


def _with_own_states(
    model: Any, model_id: str, caches: list[Any], adapters: Mapping[type, CacheAdapter]
) -> ModelCacheSpec:
    """The spec of a model some of whose caches are states of other classes.

    What they take is seen after three numbers of tokens, unevaluated.
    """
    from mlx_lm.models.cache import CacheList

    tokens, seen = 0, list[tuple[int, list[int]]]()
    for count in (MANY, MANY + 1, FULL - 2 * MANY - 1):
        model(mx.zeros((1, count), mx.int32), cache=caches)
        tokens += count
        seen.append((tokens, [_saved_bytes(leaf, adapters, model_id) for leaf in _leaves(caches)]))
    (_, first), (_, last) = seen[:2]
    growths = [-(-max(0, b - a) // MANY) for a, b in zip(first, last, strict=True)]
    most = [
        max(0, *(each[i] - growth * tokens for tokens, each in seen))
        for i, growth in enumerate(growths)
    ]
    empty = _leaves(_empty_caches(model))
    leaves = iter(zip(_leaves(caches), empty, most, growths, strict=True))

    def layer(cache: Any) -> LayerSpec:
        if isinstance(cache, CacheList):
            return CompositeLayer(tuple(map(layer, cache.caches)))
        _, own, n_bytes, growth = next(leaves)
        adapter = adapters.get(type(cache))
        if adapter is None or adapter.arrays is not None:
            return _layer(cache, model_id, adapters)
        arrays = (((1, n_bytes), "uint8"),)
        return StateLayer(arrays, own=(adapter, own), growth=growth, saved_by=_saved_by(adapter))

    dtype = _dtype(caches, adapters) or "float16"
    layers = tuple(map(layer, caches))
    source = _source(caches, adapters)
    return ModelCacheSpec(model_id, layers, dtype, batches=False, source=source)


def _saved_bytes(cache: Any, adapters: Mapping[type, CacheAdapter], model_id: str) -> int:
    """The bytes of a state as it is saved, with some for its form; 0 for other caches.

    Raises SpecError that names the plugin.
    """
    adapter = adapters.get(type(cache))
    if adapter is None or adapter.arrays is not None:
        return 0
    taken = sorted(TAKEN & {*dir(cache)})
    try:
        if taken:
            raise TypeError(f"its attributes must have other names than {', '.join(taken)}")
        if not hasattr(cache, "__dict__"):
            raise TypeError("its instances have no __dict__")
        held = [value for _, value in tree_flatten(adapter.save(cache))]
    except Exception as error:
        # Code from anywhere may raise anything.
        raise SpecError(_failed(adapter, model_id, error)) from error
    return 512 + sum(64 + getattr(value, "nbytes", 0) for value in held)


def _failed(adapter: CacheAdapter, model_id: str, error: Exception) -> str:
    return (
        f"{model_id}: the adapter for {adapter.cls.__name__} of {adapter.source} failed: "
        f"{type(error).__name__}: {error}."
    )


def _adapted(adapter: CacheAdapter, cache: Any, model_id: str) -> LayerSpec:
    """The layer of a plugin's cache class. Raises SpecError that names the plugin."""
    names = adapter.write, adapter.size
    assert adapter.arrays is not None, "the adapter of a state"
    try:
        keys, values, *others = adapter.arrays(cache)
        dims = keys.shape[1], keys.shape[3], values.shape[3]
        more = tuple(
            TokenArray(f"array{i}", a.shape[1], a.shape[3], str(a.dtype).removeprefix("mlx.core."))
            for i, a in enumerate(others, 2)
        )
        if keys.shape[1] != values.shape[1]:
            raise ValueError(f"{keys.shape[1]} heads of keys and {values.shape[1]} of values")
        return FullLayer(*dims, more=more, names=names)
    except Exception as error:
        # Code from anywhere may raise anything.
        raise SpecError(_failed(adapter, model_id, error)) from error


def _dims(cache: Any) -> tuple[int, int, int]:
    if cache.keys is None:
        return 0, 0, 0
    return cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3]
