"""Serves the text part of models whose type only mlx-vlm has, where mlx-vlm is installed.

mlx-vlm's language models return more than logits, have caches of mlx-vlm's classes, and keep the
positions of the last images on the module. TextModel gives them the interface of mlx-lm's models.
mlx-vlm is imported for a type that mlx-lm lacks, and only then.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_blockpool.errors import SpecError, UnknownModelTypeError
from mlx_blockpool.hooks import hookimpl
from mlx_blockpool.plugins import stock_classes

PACKAGE = "mlx_vlm"
# The names of a language model's weights begin with this.
PREFIX = "language_model."
# Their tokens attend to later ones of a prompt, so that a cached prefix is not what a whole prompt
# computes.
NOT_CAUSAL = ("falcon_perception", "mllama", "paligemma")
# The parts of a config.json for which mlx-vlm has classes.
PARTS = ("text", "vision", "perceiver", "projector", "audio")


@hookimpl
def model_classes(config: dict[str, Any]) -> tuple[type, type] | None:
    if not isinstance(config.get("model_type"), str) or importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        stock_classes(config)
    except UnknownModelTypeError:
        name = _architecture(config)
        return None if name is None else (_text_model(name), TextArgs)
    return None


@hookimpl
def model_cache_spec(model: Any, model_id: str) -> None:
    """Leaves the spec to the default provider. Raises SpecError for a model on mlx-vlm's caches."""
    if isinstance(model, TextModel) and model.needs_own:
        raise SpecError(
            f"{model_id}: {model.needs_own}. Its requests run one at a time on mlx-vlm's caches, "
            "unless a plugin describes it."
        )


@dataclass(frozen=True)
class TextArgs:
    """mlx-vlm's module of a model, and the model's config as mlx-vlm reads it."""

    architecture: Any
    config: Any

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> TextArgs:
        """Raises what mlx-vlm raises for a config that says too little."""
        architecture = importlib.import_module(str(_architecture(config)))
        given = copy.deepcopy(config)
        given.setdefault("text_config", given.pop("llm_config", {}))
        for part in ("vision", "audio"):
            given.setdefault(f"{part}_config", {})
        found = architecture.ModelConfig.from_dict(given)
        utils = importlib.import_module(f"{PACKAGE}.utils")
        return cls(
            architecture, utils.update_module_configs(found, architecture, given, list(PARTS))
        )


class TextModel(nn.Module):  # type: ignore[misc]
    """The language model of one of mlx-vlm's models, with the interface of mlx-lm's.

    Its weights have the names that they have in the whole model. Raises UnknownModelTypeError for a
    model that does not run on text alone.
    """

    def __init__(self, args: TextArgs) -> None:
        super().__init__()
        name = args.architecture.__name__
        whole: Any = args.architecture.Model(args.config)
        if not hasattr(whole, "language_model"):
            raise _unserved(name, "it has no language model")
        if importlib.import_module(f"{PACKAGE}.generate.diffusion").is_diffusion_model(whole):
            raise _unserved(name, "it does not generate one token after another")
        self.language_model = whole.language_model
        self.args = args
        # Not a submodule: the weights of the other parts are never computed.
        self._whole: Callable[[], Any] = lambda: whole
        tokens = mx.zeros((1, 2), mx.int32)
        # Positions have three axes where those of images do. Nothing is computed here.
        failed: Exception | None = None
        for self._axes in ((), (3,)):
            try:
                self(tokens, cache=self._own_caches())
                break
            except Exception as error:
                # Models of many kinds, written for other inputs.
                failed = failed or error
        else:
            why = (
                f"its language model does not run on text alone ({type(failed).__name__}: {failed})"
            )
            raise _unserved(name, why) from failed
        own = [leaf for each in self._own_caches() for leaf in getattr(each, "caches", (each,))]
        unknown = sorted({type(leaf).__name__ for leaf in own if _stock_cache(leaf) is None})
        # Why it needs mlx-vlm's caches.
        self.needs_own = f"mlx-lm has no cache class {', '.join(unknown)}" if unknown else ""
        try:
            self(tokens, cache=self.make_cache())
        except Exception as error:
            self.needs_own = f"it does not run on mlx-lm's caches ({type(error).__name__}: {error})"

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        """Logits [rows, tokens, vocabulary] after the tokens `inputs` [rows, tokens]."""
        model = self.language_model
        more: dict[str, Any] = {}
        if hasattr(model, "_rope_deltas"):
            # Without them it continues at the positions of its last call.
            model._rope_deltas = model._position_ids = None
            positions = _positions(inputs, cache)
            more["position_ids"] = mx.broadcast_to(positions, (*self._axes, *inputs.shape))
        loans: list[tuple[Any, Any]] = []
        lent = None if cache is None else [_lend(each, loans) for each in cache]
        out = model(inputs, inputs_embeds=input_embeddings, cache=lent, **more)
        for owner, loan in loans:
            _return(owner, loan)
        logits: mx.array = getattr(out, "logits", out)
        return logits

    @property
    def layers(self) -> Any:
        return self.language_model.layers

    def make_cache(self) -> list[Any]:
        """Caches of mlx-lm's classes if the model runs on them, else mlx-vlm's."""
        own = self._own_caches()
        return own if self.needs_own else [_stock_cache(cache) for cache in own]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The weights of the language model by the names of its parameters."""
        whole: Any = self._whole()
        architecture = self.args.architecture
        parts = [whole]
        if hasattr(architecture, "LanguageModel") and hasattr(self.args.config, "text_config"):
            parts.append(whole.language_model)
        for part in parts:
            if hasattr(part, "sanitize"):
                weights = part.sanitize(weights)
        return {name: value for name, value in weights.items() if name.startswith(PREFIX)}

    def _own_caches(self) -> list[Any]:
        caches: list[Any] = _own().make_prompt_cache(self.language_model)
        return caches


def _architecture(config: dict[str, Any]) -> str | None:
    """The name of mlx-vlm's module for a model type. Returns None if mlx-vlm lacks the type too.

    Raises UnknownModelTypeError for a type without a text model.
    """
    try:
        kind = importlib.import_module(f"{PACKAGE}.utils").get_model_type(config)
    except Exception as error:
        # It reads fields of a config.json from anywhere.
        raise _unserved(str(config.get("model_type")), f"its config fails ({error})") from error
    if not str(kind).isidentifier():
        return None
    name = f"{PACKAGE}.models.{kind}"
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        raise _unserved(name, f"its module does not load ({error})") from error
    except Exception as error:
        raise _unserved(name, f"its module does not load ({error})") from error
    if not hasattr(found, "Model") or not hasattr(found, "ModelConfig"):
        raise _unserved(name, "it has no language model")
    if kind in NOT_CAUSAL:
        raise _unserved(name, "its prompts cannot be computed in parts")
    return name


def _unserved(architecture: str, why: str) -> UnknownModelTypeError:
    kind = architecture.rpartition(".")[2]
    return UnknownModelTypeError(
        f"model type {kind!r} is mlx-vlm's, and {why}. Serve the model with mlx-vlm"
    )


@functools.cache
def _text_model(architecture: str) -> type:
    """TextModel by the name of mlx-vlm's module, which logs and reports show."""
    return type("TextModel", (TextModel,), {"__module__": architecture})


def _own() -> Any:
    """mlx-vlm's caches."""
    return importlib.import_module(f"{PACKAGE}.models.cache")


def _stock() -> Any:
    """mlx-lm's caches."""
    return importlib.import_module("mlx_lm.models.cache")


def _positions(inputs: mx.array, cache: Any) -> mx.array:
    """The positions [rows or 1, tokens] of a text: those after what its caches hold."""
    leaves = [leaf for each in cache or () for leaf in getattr(each, "caches", (each,))]
    offsets = (leaf.offset for leaf in leaves if hasattr(leaf, "offset"))
    return mx.array(next(offsets, 0)).reshape(-1, 1) + mx.arange(inputs.shape[1])


def _stock_cache(cache: Any) -> Any:
    """mlx-lm's empty cache in place of one of mlx-vlm's, or None if it has no such class."""
    own, stock = _own(), _stock()
    # Exact types: a subclass may store its content elsewhere.
    kind = type(cache)
    if kind is own.KVCache:
        return stock.KVCache()
    if kind is own.RotatingKVCache:
        return stock.RotatingKVCache(cache.max_size, cache.keep)
    if kind is own.ChunkedKVCache:
        return stock.ChunkedKVCache(cache.chunk_size)
    if kind is own.ArraysCache:
        return stock.ArraysCache(len(cache.cache))
    if kind is own.CacheList:
        parts = [_stock_cache(part) for part in cache.caches]
        return None if None in parts else stock.CacheList(*parts)
    return None


def _lend(cache: Any, loans: list[tuple[Any, Any]]) -> Any:
    """A cache with the methods of mlx-vlm's for one call, if it is one of mlx-lm's. Adds states to
    `loans`, with what has them meanwhile.
    """
    own, stock = _own(), _stock()
    if isinstance(cache, stock.CacheList):
        both = _list_class(stock.CacheList, own.CacheList)
        return both(*(_lend(part, loans) for part in cache.caches))
    if isinstance(cache, stock.ArraysCache):
        loan = own.ArraysCache(len(cache.cache))
        loan.cache = list(cache.cache)
        loan.left_padding, loan.lengths = cache.left_padding, cache.lengths
        loans.append((cache, loan))
        return loan
    return cache


@functools.cache
def _list_class(stock: type, own: type) -> type:
    """A list of caches that mlx-vlm's models and the pool recognise."""
    return type("CacheList", (stock, own), {})


def _return(owner: Any, loan: Any) -> None:
    for index, value in enumerate(loan.cache):
        owner[index] = value
    owner.left_padding, owner.lengths = loan.left_padding, loan.lengths
