"""Embeddings by models that are made for them: a text's hidden states, pooled into one vector as
the model's folder specifies.

The folder is one of sentence-transformers: modules.json names a pooling, and perhaps a
normalisation. A text is computed in chunks on the generation thread, one text of all clients at a
time; while replies run there are equally long pauses between the chunks. Its keys and values are in
blocks of the model's pool until it is computed; without a pool they are in mlx-lm's caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..config import EngineConfig
from ..errors import LoadError, PoolExhaustedError
from ..model_files.check import read_json
from .bodies import InvalidRequestError
from .jobs import Steps, between_steps
from .model import LoadedModel
from .preparation import KeyedLock
from .prompts.job import check_length
from .provider import ModelKey

# One text at a time, of all clients in turn.
_computing = KeyedLock()

CHUNK_TOKENS = 256
# How long a text waits before it tries again to get blocks of the pool.
ROOM_SECONDS = 0.05
UNLOADED = "The model was unloaded in the meantime. Try again."
MODULES = "modules.json"
MAX_FILE_BYTES = 1 << 20
POOLINGS = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
# The same in files of newer versions.
MODES = {"lasttoken": "last", "mean": "mean", "cls": "first"}


class NoEmbeddingsError(Exception):
    """The model is not one for embeddings, or one of a kind that is not supported."""


@dataclass(frozen=True)
class Pooling:
    """The way from hidden states to a vector. kind: the last or the first state, or the mean of
    all.
    """

    kind: str
    normalises: bool


def pooling_of(folder: Path) -> Pooling:
    """The pooling of a model's folder. Raises NoEmbeddingsError for a model without."""
    try:
        modules = read_json(folder / MODULES, MAX_FILE_BYTES)
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        (path,) = [
            module["path"] for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"
        ]
        config = read_json(folder / _plain(path) / "config.json", MAX_FILE_BYTES)
        given = [kind for name, kind in POOLINGS.items() if config.get(name)]
        given = [MODES[config["pooling_mode"]]] if "pooling_mode" in config else given
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoEmbeddingsError(
            "it has no pooling in a modules.json, as embedding models have"
        ) from error
    others = set(kinds) - {"Transformer", "Pooling", "Normalize"}
    if others or len(given) != 1:
        what = f"its modules {', '.join(sorted(others))}" if others else "its pooling"
        raise NoEmbeddingsError(f"{what} cannot be computed here")
    return Pooling(given[0], "Normalize" in kinds)


def _plain(path: Any) -> str:
    """A folder's name; anything else could lead out of the model's folder."""
    if not isinstance(path, str) or Path(path).name != path:
        raise ValueError("no folder of the model")
    return path


def embed(scope: Any, key: ModelKey, texts: list[list[int]], size: int | None) -> list[list[float]]:
    """The first `size` values of each text's vector, by its tokens; all of them without a `size`.
    On the socket's thread.

    `scope`: the RequestScope.

    Raises NoEmbeddingsError, RequestTooLargeError, InvalidRequestError for more values than there
    are, LoadError if the model is unloaded meanwhile, PoolExhaustedError, and
    ConnectionAbortedError once the client has hung up.
    """
    generator, connection = scope.generator, scope.connection
    with _in_use(scope, key) as served:
        pooling = pooling_of(served.provider.folder)
        most = served.capacity() or EngineConfig.endless_tokens
        for tokens in texts:
            check_length(len(tokens), most, served.positions)
        if size is not None:
            width = between_steps(generator, partial(_width_of, served.provider.model))
            if size > width:
                raise InvalidRequestError(
                    "dimensions", f"the model's vectors have {width:,} values; found {size:,}"
                )
        vectors: list[list[float]] = []
        while len(vectors) < len(texts):
            with _computing.hold("text"):
                vector = between_steps(
                    generator,
                    vector_steps(generator, served, pooling, texts[len(vectors)]),
                    connection,
                )
            if vector is not None:
                vectors.append(shortened(vector, size))
            else:
                # Texts of others go first.
                time.sleep(ROOM_SECONDS)
    return vectors


@contextmanager
def _in_use(scope: Any, key: ModelKey) -> Iterator[LoadedModel]:
    """Count as a request of the model, so that it is not unloaded as idle."""
    generator, registry = scope.generator, scope.generator.registry

    def begin() -> LoadedModel:
        served: LoadedModel | None = registry.loaded.get(key)
        if served is None:
            raise LoadError(UNLOADED)
        served.num_embedding += 1
        return served

    def end() -> None:
        served.num_embedding -= 1
        registry.use(served, scope.owner, scope.options.keep_seconds)

    served = between_steps(generator, begin)
    try:
        yield served
    finally:
        between_steps(generator, end)


def shortened(vector: list[float], size: int | None) -> list[float]:
    """Truncate to `size` dimensions and renormalise."""
    if size is None or size == len(vector):
        return vector
    length = sum(value * value for value in vector[:size]) ** 0.5 or 1.0
    return [value / length for value in vector[:size]]


def vector_steps(
    generator: Any, served: LoadedModel, pooling: Pooling, tokens: list[int]
) -> Steps[list[float] | None]:
    """Compute the vector of a text, a chunk at a time. None while running replies hold the pool.

    Raises PoolExhaustedError if none run, and LoadError once the model is unloaded.
    """
    _check_loaded(generator, served)
    network, prefix = served.provider.model, served.prefix
    try:
        caches = make_prompt_cache(network) if prefix is None else prefix.lend(len(tokens))
    except PoolExhaustedError:
        if not served.live:
            raise
        return None
    try:
        total: Any = None
        for start in range(0, len(tokens), CHUNK_TOKENS):
            begun = time.monotonic()
            _check_loaded(generator, served)
            chunk = tokens[start : start + CHUNK_TOKENS]
            states = _states_of(network)(mx.array([chunk]), cache=caches)[0].astype(mx.float32)
            if pooling.kind == "mean":
                total = states.sum(axis=0) + (0 if total is None else total)
            elif pooling.kind == "last" or total is None:
                total = states[-1 if pooling.kind == "last" else 0]
            mx.eval(total, [cache.state for cache in caches])
            generator.health.mark()
            yield time.monotonic() - begun if generator.has_waiting else 0.0
    finally:
        if prefix is not None:
            prefix.discard(caches)
    vector = total / len(tokens) if pooling.kind == "mean" else total
    if pooling.normalises:
        vector = vector / mx.maximum(mx.linalg.norm(vector), 1e-12)
    return [float(value) for value in vector.tolist()]


def _check_loaded(generator: Any, served: LoadedModel) -> None:
    if generator.registry.loaded.get(served.key) is not served:
        raise LoadError(UNLOADED)


def _states_of(network: Any) -> Callable[..., Any]:
    """The part of a model that returns hidden states, before the vocabulary."""
    states = getattr(getattr(network, "language_model", network), "model", None)
    if not callable(states):
        raise NoEmbeddingsError("mlx-lm's code for it has no part that ends before the vocabulary")
    return states  # type: ignore[no-any-return]


def _width_of(network: Any) -> int:
    """How many values a hidden state has. mlx finds it without computing one."""
    return int(_states_of(network)(mx.array([[0]])).shape[-1])
