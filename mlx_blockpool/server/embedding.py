"""Embeddings by models that are made for them: a text's hidden states, pooled into one vector as the model's folder specifies.

The folder is one of sentence-transformers: modules.json names a pooling, and perhaps a normalisation. A text is computed in
chunks on the generation thread, one text of all clients at a time; while replies run they get as much time between the chunks.
Its keys and values are in blocks of the model's pool, which it gives back; a model without a pool has mlx-lm's caches.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..claims import read_json
from ..errors import LoadError, PoolExhaustedError, RequestTooLargeError, TooManyPositionsError
from ..tier.cache import TieredPrefixCache
from .bodies import InvalidRequestError
from .jobs import run_on_generation_thread
from .model import LoadedModel
from .models.provider import ModelKey
from .prompts.preparation import Turns
from .replies import has_hung_up

# One text at a time, of all clients in turn.
_computing = Turns()

CHUNK_TOKENS = 256
# Of a text for a model without a pool.
MOST_TOKENS = 32_768
# How long a text waits before it looks for room in the pool again.
ROOM_SECONDS = 0.05
UNLOADED = "The model was unloaded in the meantime. Try again."
MODULES = "modules.json"
MAX_FILE_BYTES = 1 << 20
POOLINGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
# The same in files of newer versions.
MODES = {"lasttoken": "last", "mean": "mean", "cls": "first"}


class NoEmbeddingsError(Exception):
    """The model is not one for embeddings, or one of a kind that is not supported."""


@dataclass(frozen=True)
class Pooling:
    """The way from hidden states to a vector. kind: the last or the first state, or the mean of all."""

    kind: str
    normalises: bool


def pooling_of(folder: Path) -> Pooling:
    """The pooling of a model's folder. Raises NoEmbeddingsError for a model without."""
    try:
        modules = read_json(folder / MODULES, MAX_FILE_BYTES)
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        (path,) = [module["path"] for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
        config = read_json(folder / _plain(path) / "config.json", MAX_FILE_BYTES)
        given = [kind for name, kind in POOLINGS.items() if config.get(name)]
        given = [MODES[config["pooling_mode"]]] if "pooling_mode" in config else given
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoEmbeddingsError("it has no pooling in a modules.json, as embedding models have") from error
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


def embed(
    generator: Any, key: ModelKey, texts: list[list[int]], size: int | None, keep_seconds: float | None, connection: socket.socket
) -> list[list[float]]:
    """The first `size` values of each text's vector, by its tokens; None: all of them. On the socket's thread.

    `keep_seconds`: as in RequestOptions.

    Raises NoEmbeddingsError, RequestTooLargeError, InvalidRequestError for more values than there are, LoadError if the model is
    unloaded meanwhile, PoolExhaustedError, and ConnectionAbortedError once the client has hung up.
    """
    served = run_on_generation_thread(generator, partial(_begin, generator.registry, key))
    try:
        vectors = _vectors(generator, served, texts, size, connection)
    finally:
        run_on_generation_thread(generator, partial(_end, generator.registry, served, keep_seconds))
    return [shortened(vector, size) for vector in vectors]


def _begin(registry: Any, key: ModelKey) -> LoadedModel:
    """Keep a model from being idle until _end()."""
    served: LoadedModel | None = registry.loaded.get(key)
    if served is None:
        raise LoadError(UNLOADED)
    served.num_embedding += 1
    return served


def _end(registry: Any, served: LoadedModel, keep_seconds: float | None) -> None:
    served.num_embedding -= 1
    registry.use(served, keep_seconds)


def _vectors(
    generator: Any, served: LoadedModel, texts: list[list[int]], size: int | None, connection: socket.socket
) -> list[list[float]]:
    """The whole vector of each text, after a look at all lengths."""
    pooling, vectors = pooling_of(served.provider.folder), []
    most = served.capacity() or MOST_TOKENS
    for tokens in texts:
        _check_length(tokens, served.positions, most)
    if size is not None:
        _check_size(size, run_on_generation_thread(generator, partial(_width_of, served.provider.model)))
    for tokens in texts:
        text = EmbeddedText(generator, served.key, pooling, tokens)
        while (vector := _vector_of(generator, text, connection)) is None:
            time.sleep(ROOM_SECONDS)
        vectors.append(vector)
    return vectors


def _check_length(tokens: list[int], positions: int | None, most: int) -> None:
    if positions is not None and len(tokens) > positions:
        raise TooManyPositionsError(len(tokens), positions)
    if len(tokens) > most:
        raise RequestTooLargeError(len(tokens), most)


def _check_size(size: int, width: int) -> None:
    if size > width:
        raise InvalidRequestError("dimensions", f"the model's vectors have {width:,} values; found {size:,}")


def shortened(vector: list[float], size: int | None) -> list[float]:
    """The first `size` values, with length 1."""
    if size is None or size == len(vector):
        return vector
    length = sum(value * value for value in vector[:size]) ** 0.5 or 1.0
    return [value / length for value in vector[:size]]


def _vector_of(generator: Any, text: EmbeddedText, connection: socket.socket) -> list[float] | None:
    """The vector of a text, computed in its turn; None while running replies have the room, so that other texts pass it."""
    with _computing.turn("text"):
        try:
            return run_on_generation_thread(generator, text.vector) if _compute(generator, text, connection) else None
        finally:
            # Arrays are freed on the thread that has made them.
            run_on_generation_thread(generator, text.close)


def _compute(generator: Any, text: EmbeddedText, connection: socket.socket) -> bool:
    """Compute all chunks of a text, and leave running replies as much time between them. Returns False if there is no room."""
    while not text.is_whole:
        if has_hung_up(connection):
            raise ConnectionAbortedError("the client hung up")
        start = time.monotonic()
        if not run_on_generation_thread(generator, text.advance):
            return False
        if generator.has_waiting:
            time.sleep(time.monotonic() - start)
    return True


class EmbeddedText:
    """One text on its way through a model. Its arrays are the generation thread's."""

    def __init__(self, generator: Any, key: ModelKey, pooling: Pooling, tokens: list[int]) -> None:
        self._registry, self._health = generator.registry, generator.health
        self._key, self._pooling, self._tokens = key, pooling, tokens
        self._network: Any = None
        self._prefix: TieredPrefixCache | None = None
        self._caches: list[Any] | None = None
        self._sum: Any = None
        self._done = 0

    @property
    def is_whole(self) -> bool:
        return self._done == len(self._tokens)

    def advance(self) -> bool:
        """Compute the next chunk. Returns False if running replies have the room; raises PoolExhaustedError if none run."""
        served = self._registry.loaded.get(self._key)
        if served is None or (self._network is not None and self._network is not served.provider.model):
            raise LoadError(UNLOADED)
        if self._caches is None:
            self._network, self._prefix = served.provider.model, served.prefix
            try:
                self._caches = self._open()
            except PoolExhaustedError:
                if not served.live:
                    raise
                return False
        chunk = self._tokens[self._done : self._done + CHUNK_TOKENS]
        states = _states_of(self._network)(mx.array([chunk]), cache=self._caches)[0].astype(mx.float32)
        if self._pooling.kind == "mean":
            self._sum = states.sum(axis=0) + (0 if self._sum is None else self._sum)
        elif self._pooling.kind == "last" or self._sum is None:
            self._sum = states[-1 if self._pooling.kind == "last" else 0]
        mx.eval(self._sum, [cache.state for cache in self._caches])
        self._done += len(chunk)
        self._health.mark()
        return True

    def _open(self) -> list[Any]:
        if self._prefix is not None:
            return self._prefix.lend(len(self._tokens))
        caches: list[Any] = make_prompt_cache(self._network)
        return caches

    def vector(self) -> list[float]:
        """The vector of a whole text."""
        vector = self._sum
        if self._pooling.kind == "mean":
            vector = vector / len(self._tokens)
        if self._pooling.normalises:
            vector = vector / mx.maximum(mx.linalg.norm(vector), 1e-12)
        return [float(value) for value in vector.tolist()]

    def close(self) -> None:
        """Give the memory back."""
        if self._prefix is not None and self._caches is not None:
            self._prefix.discard(self._caches)
        self._network = self._prefix = self._caches = self._sum = None


def _states_of(network: Any) -> Callable[..., Any]:
    """The part of a model that returns hidden states, before the vocabulary."""
    states = getattr(getattr(network, "language_model", network), "model", None)
    if not callable(states):
        raise NoEmbeddingsError("mlx-lm's code for it has no part that ends before the vocabulary")
    return states  # type: ignore[no-any-return]


def _width_of(network: Any) -> int:
    """How many values a hidden state has. mlx knows it without computing one."""
    return int(_states_of(network)(mx.array([[0]])).shape[-1])
