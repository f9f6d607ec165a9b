"""Change: one model on its way in, one on its way out, or both, stage by stage.

Owned by the generation thread; `stage`, `since` and what the coming model says of itself may be read from any.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Protocol

from ...errors import BadModelError, LoadError, PoolExhaustedError
from ..model import LoadedModel
from ..requests import Suspended
from .catalog import Catalog
from .provider import ModelKey

log = logging.getLogger(__name__)

# A step that has only a hash to wait for, and delays nobody.
HASH_WAIT_SECONDS = 0.02


class Loaded(Protocol):
    """The registry, as far as a change needs it."""

    loaded: dict[ModelKey, LoadedModel]
    piece_bytes: int
    own_bytes: int | None
    counts: Counter[str]
    catalog: Catalog

    def make(self, key: ModelKey) -> LoadedModel: ...
    def share(self) -> int: ...
    def add(self, served: LoadedModel) -> None: ...
    def take_out(self, key: ModelKey) -> LoadedModel: ...


class ModelSwap:
    """Loads `load`, in place of `unload` where both are given. Call advance() until it says that it is through.

    The old model goes only once all that can be checked of the new one is right. If the new one then cannot be loaded
    nevertheless, the old one is loaded again. `error` says why `load` is not there. What ran on the model that goes is
    `suspended`, for whoever has the line to put there.
    """

    def __init__(self, models: Loaded, load: ModelKey | None = None, unload: ModelKey | None = None) -> None:
        self.load = load
        self.unload = unload
        self.error: Exception | None = None
        self.coming: LoadedModel | None = None
        self.stage = "checking"
        self.began = self.since = time.monotonic()
        self.leaving: LoadedModel | None = None
        self.suspended: list[Suspended] = []
        self._models = models
        self._steps = self._run()

    def advance(self) -> bool:
        """Go on for a while. Whether it is through."""
        for _ in self._steps:
            return False
        return True

    def abort(self) -> None:
        """Stop where it is: what is neither here nor gone is gone."""
        self._steps.close()
        for served in (self.coming, self.leaving):
            if served is not None:
                served.close()
        self.coming = self.leaving = None

    def _enter(self, stage: str) -> None:
        self.stage, self.since = stage, time.monotonic()

    def _run(self) -> Generator[None, None, None]:
        if self.load is not None:
            self.error = self._prepare(self.load)
            if self.error is not None:
                return
        if self.unload is not None:
            yield from self._take_out(self.unload)
        if self.load is None:
            return
        yield from self._bring_in()
        if self.error is not None and self.unload is not None:
            yield from self._bring_back(self.unload)

    def _prepare(self, key: ModelKey) -> Exception | None:
        """Errors are returned, here and below: one that is raised refers to frames, and they to arrays."""
        self.coming = self._models.make(key)
        try:
            self.coming.prepare(self._models.own_bytes)
            return None
        except PoolExhaustedError as error:
            failure: Exception = LoadError(self._hide(f"Cannot load {key.model}: {error}", key))
        except (Exception, SystemExit) as error:
            # Anybody's files and code. (Some model files call exit().)
            failure = BadModelError(self._hide(f"Cannot load {key.model}: {type(error).__name__}: {error}", key))
        self._drop_coming()
        return failure

    def _take_out(self, key: ModelKey) -> Iterator[None]:
        self.leaving = self._models.take_out(key)
        self.suspended = self.leaving.suspend()
        self._enter("saving")
        yield
        if self._models.loaded:
            # They take their turns meanwhile.
            yield from self.leaving.save()
        self.leaving.close()
        self.leaving = None
        self._models.counts["unloads"] += 1

    def _bring_in(self) -> Iterator[None]:
        assert self.coming is not None
        key, failure = self.coming.key, None
        self._enter("loading")
        try:
            self.coming.begin_hashing()
            yield from self.coming.read(self._models.piece_bytes)
            yield from self._wait_for_hash(self.coming)
            self._enter("warming")
            yield
            self.coming.open(self._models.share())
        except (Exception, SystemExit) as error:
            read = f"{self.coming.read_bytes} of {self.coming.weights_bytes} bytes of its weights were read"
            failure = LoadError(self._hide(f"Cannot load {key.model} now: {type(error).__name__}: {error} ({read})", key))
        if failure is None:
            self._models.add(self.coming)
            self.coming = None
        else:
            self._drop_coming()
        self.error = failure

    def _wait_for_hash(self, coming: LoadedModel) -> Iterator[None]:
        """Its records on disk go by the hash of its weights. Other models are served meanwhile."""
        if not coming.is_hashed:
            self._enter("hashing")
        while not coming.is_hashed:
            yield
            coming.wait_for_hash(0.0 if self._models.loaded else HASH_WAIT_SECONDS)

    def _bring_back(self, key: ModelKey) -> Iterator[None]:
        failure, self.error = self.error, None
        log.warning("%s; %s is loaded again", failure, key.model)
        self.error = self._prepare(key)
        if self.error is None:
            yield from self._bring_in()
        if self.error is not None:
            log.error("%s is not there either: %s", key.model, self.error)
        self.error = failure

    def _hide(self, message: str, key: ModelKey) -> str:
        """The message without this machine's paths, for clients read it; the whole of it is in the log."""
        log.debug("%s", message)
        return self._models.catalog.hide(message, key)

    def _drop_coming(self) -> None:
        assert self.coming is not None
        self.coming.close()
        self.coming = None
