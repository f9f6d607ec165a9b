"""Providers that are wrong, and ways to break what the kit is to look at."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_blockpool_plugins import default

from mlx_blockpool.hooks import hookimpl
from mlx_blockpool.kv import block_bytes as contents
from mlx_blockpool.kv import quantised
from mlx_blockpool.kv.batch_cache import PooledBatchCache
from mlx_blockpool.kv.layer_caches import PooledKVCache, PooledRotatingKVCache
from mlx_blockpool.kv.other_caches import PooledArraysCache, StateBatch
from mlx_blockpool.prefix import cache as prefix_cache
from mlx_blockpool.spec import FullLayer, LayerSpec, ModelCacheSpec, StateLayer, WindowLayer


class Provider:
    """Answers with what `change` makes of the right spec, for one model type."""

    def __init__(
        self, model_type: str, change: Callable[[ModelCacheSpec], Any] = lambda spec: spec
    ) -> None:
        self.model_type = model_type
        self.change = change

    @hookimpl
    def model_cache_spec(self, model: Any, config: dict[str, Any], model_id: str) -> Any:
        if config.get("model_type") != self.model_type:
            return None
        return self.change(default.model_cache_spec(model=model, config=config, model_id=model_id))


class Raising(Provider):
    @hookimpl
    def model_cache_spec(self, config: dict[str, Any]) -> Any:
        return config["a_key_of_its_own"]


class RaisingForOthers(Provider):
    @hookimpl
    def model_cache_spec(self, model: Any, config: dict[str, Any], model_id: str) -> Any:
        assert config["num_hidden_layers"]
        return super().model_cache_spec(model, config, model_id)


class Claiming(Provider):
    @hookimpl
    def model_cache_spec(self, model: Any, config: dict[str, Any], model_id: str) -> Any:
        return default.model_cache_spec(
            model=model, config={**config, "model_type": "llama", **SHAPE}, model_id=model_id
        )


class Scribbling(Provider):
    @hookimpl
    def model_cache_spec(self, model: Any, config: dict[str, Any], model_id: str) -> Any:
        config.setdefault("head_dim_of_mine", 7)
        return super().model_cache_spec(model, config, model_id)


class WithoutModel(Provider):
    """Answers with `change` only where there is no model."""

    @hookimpl
    def model_cache_spec(self, model: Any, config: dict[str, Any], model_id: str) -> Any:
        found = Provider(self.model_type).model_cache_spec(model, config, model_id)
        return found if found is None or model is not None else self.change(found)


class Unmarked:
    def model_cache_spec(self, model: Any, config: dict[str, Any], model_id: str) -> Any:
        return default.model_cache_spec(model=model, config=config, model_id=model_id)


SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 131,
}


def layers_with(
    change: Callable[[LayerSpec], LayerSpec],
) -> Callable[[ModelCacheSpec], ModelCacheSpec]:
    return lambda spec: replace(spec, layers=tuple(map(change, spec.layers)))


def wrong_heads(layer: LayerSpec) -> LayerSpec:
    return replace(layer, kv_heads=layer.kv_heads + 1) if isinstance(layer, FullLayer) else layer


def wrong_kind(layer: LayerSpec) -> LayerSpec:
    return (
        FullLayer(layer.kv_heads, layer.key_dim, layer.value_dim)
        if isinstance(layer, WindowLayer)
        else layer
    )


def one_too_small(layer: LayerSpec) -> LayerSpec:
    return replace(layer, max_size=layer.max_size - 1) if isinstance(layer, WindowLayer) else layer


def without_state(layer: LayerSpec) -> LayerSpec:
    return FullLayer(0, 0, 0) if isinstance(layer, StateLayer) else layer


def swapped(spec: ModelCacheSpec) -> ModelCacheSpec:
    first, *between, last = spec.layers
    assert first != last
    return replace(spec, layers=(last, *between, first))


def one_less(spec: ModelCacheSpec) -> ModelCacheSpec:
    return replace(spec, layers=spec.layers[1:])


def explode(spec: ModelCacheSpec) -> Any:
    raise KeyError("weights")


# -- what breaks a right spec's caches; each patches through monkeypatch ---------------------------


def forgets_a_token(patch: Any) -> None:
    """A cache that has nothing in the place of one token of a long write."""
    right = PooledKVCache._write

    def write(self: Any, keys: mx.array, values: mx.array) -> None:
        there = (mx.arange(keys.shape[2]) != 100)[:, None]
        right(self, keys * there, values * there)

    patch.setattr(PooledKVCache, "_write", write)


def wraps_a_token_late(patch: Any) -> None:
    right = PooledRotatingKVCache._write_one

    def write(self: Any, *rows: mx.array) -> None:
        if self.offset == self.max_size + 1:
            self._idx = self.keep
        right(self, *rows)

    patch.setattr(PooledRotatingKVCache, "_write_one", write)


def forgets_states(patch: Any) -> None:
    """A prefix that is resumed without what its states were."""
    right = prefix_cache.lay_out

    def lay_out(room: Any, match: Any, hit: int, checkpoint: Any, prompt: int, total: int) -> Any:
        caches = right(room, match, hit, checkpoint, prompt, total)
        for cache in prefix_cache.leaves_of(caches):
            if isinstance(cache, PooledArraysCache):
                cache.cache = [None] * len(cache.cache)
        return caches

    patch.setattr(prefix_cache, "lay_out", lay_out)


def resumes_without_checkpoint(patch: Any) -> None:
    patch.setattr(prefix_cache.PrefixCache, "_place", lambda *_: None)


def resumes_a_token_late(patch: Any) -> None:
    """A hit of one token more than is there."""
    right = prefix_cache.lay_out

    def lay_out(room: Any, match: Any, hit: int, checkpoint: Any, prompt: int, total: int) -> Any:
        caches = right(room, match, hit, checkpoint, prompt, total)
        for cache in prefix_cache.leaves_of(caches):
            if isinstance(cache, PooledKVCache) and hit:
                cache.offset += 1
        return caches

    patch.setattr(prefix_cache, "lay_out", lay_out)


def takes_another_out(patch: Any) -> None:
    """A batch from which the first leaves, whoever was meant."""
    patch.setattr(
        PooledBatchCache,
        "filter",
        lambda self, kept: setattr(self, "members", self.members[: len(kept)]),
    )


def mixes_states(patch: Any) -> None:
    right = StateBatch.extend

    def extend(self: Any, other: Any) -> None:
        right(self, other)
        self.cache = [None if c is None else c[::-1] for c in self.cache]

    patch.setattr(StateBatch, "extend", extend)


def loses_biases(patch: Any) -> None:
    """Quantised blocks in which a long write has lost the biases of its groups."""
    right = quantised.in_form

    def in_form(given: Any, form: Any) -> Any:
        found = right(given, form)
        is_long = isinstance(found, quantised.Quantised) and given.shape[2] > 20
        return found._replace(biases=mx.zeros_like(found.biases)) if is_long else found

    for module in _importers("in_form", right):
        patch.setattr(module, "in_form", in_form)


def writes_other_bits(patch: Any) -> None:
    right = contents.as_bytes
    for module in _importers("as_bytes", right):
        patch.setattr(
            module,
            "as_bytes",
            lambda array: right(array + 1 if mx.issubdtype(array.dtype, mx.floating) else array),
        )


def _importers(name: str, function: Any) -> list[Any]:
    ours = [module for key, module in sys.modules.items() if key.startswith("mlx_blockpool.")]
    return [module for module in ours if vars(module).get(name) is function]
