"""Subject: a tiny model and its provider, the input of every check.

Knows how to make a model from a config; does not know the checks.
"""

from __future__ import annotations

import copy
import random
from functools import cached_property
from importlib.metadata import version
from typing import Any
from unittest import SkipTest

import mlx.core as mx
import mlx.nn as nn
import pluggy
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from ..config import KVBits
from ..errors import BlockpoolError, SpecError, UnknownModelTypeError
from ..kv.arena import KVArena
from ..kv.build import config_of
from ..kv.proof import MOST_TOKENS, sizes_of
from ..kv.rounded_caches import rounded
from ..plugins import (
    check_spec,
    empty_plugin_manager,
    make_plugin_manager,
    model_classes,
    plugin_classes,
    provided_spec,
)
from ..spec import ModelCacheSpec

MOST_PARAMETERS = 50_000_000
POOL_BYTES = 64_000_000
SEQUENCES = 12


class ConformanceError(AssertionError):
    """A check failed. The message says what the check got, what it expected and what to do."""

    def __init__(self, found: str, needed: str, hint: str) -> None:
        super().__init__(f"Got {found}; expected {needed}. {hint}")


class NotCheckedError(SkipTest):
    """A check does not apply to the model; the message says why. pytest skips the test."""


class Subject:
    """A tiny model in float32, to which a loaded one is cast, and its provider.

    model:     a loaded mlx-lm model, or the config.json of one as a dict.
    provider:  a module or object with the hook, the only one that is called; None: all installed
               ones, as in the server.

    Raises ConformanceError for anything else.
    """

    def __init__(self, model: Any, provider: Any = None) -> None:
        self.manager = make_plugin_manager() if provider is None else _manager_of(provider)
        # A module of mlx is a dict too.
        if isinstance(model, nn.Module):
            config = config_of(model)
        else:
            config, model = model, tiny_model(model, self.manager)
        model.set_dtype(mx.float32)
        model.eval()
        self.model = model
        self.config = in_float32(config)
        self.model_id = type(model).__module__.rpartition(".")[2]
        self.cold_logits: dict[Any, list[mx.array]] = {}

    def describe(self, model: Any, config: dict[str, Any]) -> ModelCacheSpec | None:
        """The provider's spec, or None if it does not describe this model.

        Raises SpecError or PluginError.
        """
        return provided_spec(self.manager, model, config, self.model_id)

    @cached_property
    def spec(self) -> ModelCacheSpec:
        """The provider's spec of the model. Raises ConformanceError if it has none."""
        found = self.describe(self.model, copy.deepcopy(self.config))
        if found is None:
            raise ConformanceError(
                f"None for a model of type {self.config.get('model_type', self.model_id)!r}",
                "a ModelCacheSpec",
                "Return None for models of other types only.",
            )
        return found

    @cached_property
    def wrong(self) -> str | None:
        """The fault of the spec that makes all other checks pointless, or None."""
        try:
            check_spec(self.spec, self.model)
        except SpecError:
            # Its caches are of classes that mlx-lm does not have.
            return None
        except (ConformanceError, BlockpoolError) as error:
            return str(error)
        return None

    @cached_property
    def vocabulary(self) -> int:
        """The size of the model's vocabulary."""
        return int(self.model(mx.zeros((1, 1), mx.int32), cache=self.stock()).shape[-1])

    @cached_property
    def sizes(self) -> list[int]:
        """The lengths of windows and chunks, in tokens."""
        return sizes_of(*self.spec.leaves)

    @property
    def short_sizes(self) -> list[int]:
        """The windows and chunks that are short enough for a test to run beyond their end."""
        return [size for size in self.sizes if size <= MOST_TOKENS]

    def stock(self, bits: KVBits | None = None) -> list[Any]:
        """mlx-lm's own caches of one sequence; keys and values rounded as blocks of `bits` hold
        them.
        """
        return rounded(make_prompt_cache(self.model), self.spec.with_bits(bits))

    @property
    def pool_bytes(self) -> int:
        """Bytes for a dozen of the longest sequences."""
        return max(
            POOL_BYTES,
            SEQUENCES
            * (self.spec.bytes_per_agent(3 * MOST_TOKENS) + self.spec.bytes_per_checkpoint()),
        )

    def arena(self) -> KVArena:
        """A new pool."""
        return KVArena(self.spec, self.pool_bytes)

    def tokens(self, seed: int, count: int) -> list[int]:
        """Random tokens, without the last ones of the vocabulary, which are often special."""
        return random.Random(seed).choices(range(1, max(2, self.vocabulary * 9 // 10)), k=count)


def _manager_of(provider: Any) -> pluggy.PluginManager:
    manager = empty_plugin_manager()
    manager.register(provider)
    manager.check_pending()
    if not manager.hook.model_cache_spec.get_hookimpls():
        raise ConformanceError(
            f"no hook in {provider!r}",
            "a function model_cache_spec",
            "Mark it with mlx_blockpool.hookimpl.",
        )
    return manager


def tiny_model(config: dict[str, Any], manager: pluggy.PluginManager | None = None) -> Any:
    """The model of a config.json in float32, with random weights under which a wrong key changes
    the logits. Its classes are those of the plugins in `manager`, of installed ones, or mlx-lm's.

    Raises ConformanceError if it is not tiny, or if there are no classes for its type.
    """
    if not isinstance(config, dict):
        raise ConformanceError(
            f"{config!r} for a model",
            "a loaded mlx-lm model, or the config.json of one as a dict",
            "Give one.",
        )
    config = copy.deepcopy(config)  # mlx-lm's ModelArgs write into it
    try:
        own = None if manager is None else plugin_classes(config, manager)
        model_class, args_class = own or model_classes(config)
    except UnknownModelTypeError as error:
        found = f"a config with the model_type {config.get('model_type')!r}"
        hint = "Correct it, install a plugin that has it, or give the loaded model."
        raise ConformanceError(
            found, f"a type that mlx-lm {version('mlx-lm')} or a plugin has", hint
        ) from error
    arguments: Any = args_class
    model: Any = model_class(arguments.from_dict(config))
    size = sum(value.size for _, value in tree_flatten(model.parameters()))
    if size > MOST_PARAMETERS:
        hint = (
            "Lower hidden_size, intermediate_size, num_hidden_layers and vocab_size in a copy of "
            "its config.json."
        )
        raise ConformanceError(
            f"a model of {size:,} parameters", f"a tiny one, at most {MOST_PARAMETERS:,}", hint
        )
    keys = iter(mx.random.split(mx.random.key(0), len(tree_flatten(model.parameters())) + 1))
    model.update(tree_map(lambda value: _random(value, next(keys)), model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def in_float32(config: dict[str, Any]) -> dict[str, Any]:
    """A config as it would be if the model were published in float32, as the kit runs it."""
    found = {**copy.deepcopy(config), "torch_dtype": "float32"}
    for part in (found, found.get("text_config")):
        if isinstance(part, dict):
            part.update({key: "float32" for key in ("torch_dtype", "dtype") if part.get(key)})
    return found


def _random(value: Any, key: mx.array) -> Any:
    return (
        mx.random.normal(value.shape, key=key) * 0.25
        if mx.issubdtype(value.dtype, mx.floating)
        else value
    )
