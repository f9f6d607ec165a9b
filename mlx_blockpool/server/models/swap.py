"""ModelSwap: loads one model, unloads another, or both, stage by stage.

Owned by the generation thread; any thread may read `stage`, `since` and the figures of the coming model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from ...errors import BadModelError, DisagreeError, GroupLostError, LoadError, PoolExhaustedError
from ..live.events import ModelLoaded, ModelLoading, ModelUnloaded
from ..model import LoadedModel
from .provider import ModelKey, WeightsHash

if TYPE_CHECKING:
    from .registry import ModelRegistry

log = logging.getLogger(__name__)

# A step that has nothing to do but wait for a hash, while no other model needs the thread.
HASH_WAIT_SECONDS = 0.02


class ModelSwap:
    """Loads `load`, after it has unloaded `unload`; either may be None. Call advance() until it returns True.

    The old model is unloaded only after the files of the new one were checked. If the new one still cannot be loaded, the old
    one is loaded again. `error`: why `load` was not loaded. Requests that ran on the old model go back into the queue.
    """

    def __init__(self, models: ModelRegistry, load: ModelKey | None = None, unload: ModelKey | None = None) -> None:
        self.load = load
        self.unload = unload
        self.error: Exception | None = None
        self.coming: LoadedModel | None = None
        self.stage = "checking"
        self.began = self.since = time.monotonic()
        self.leaving: LoadedModel | None = None
        self._models = models
        self._steps = self._run()

    def advance(self) -> bool:
        """Take the next step. Returns whether the swap has ended."""
        for _ in self._steps:
            return False
        return True

    def abort(self) -> None:
        """Stop, and give up the models that are neither loaded nor unloaded yet."""
        self._steps.close()
        for model in (self.coming, self.leaving):
            if model is not None:
                model.close()
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
        self.error = yield from self._bring_in()
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
            # Files and code from anywhere. (Some model files call exit().)
            failure = BadModelError(self._hide(f"Cannot load {key.model}: {type(error).__name__}: {error}", key))
        self._drop_coming()
        return failure

    def _take_out(self, key: ModelKey) -> Iterator[None]:
        leader = self._models.leader
        if leader is not None:
            leader.unload(self._models.loaded[key])
        self.leaving = self._models.take_out(key)
        for suspended in self.leaving.suspend():
            self._models.queue.add(key, suspended)
        self._enter("saving")
        yield
        if self._models.loaded and leader is None:
            # The other models run between the parts.
            yield from self.leaving.save()
        self.leaving.close()
        self.leaving.events.append(ModelUnloaded())
        self.leaving = None
        self._models.counts["unloads"] += 1

    def _bring_in(self) -> Generator[None, None, Exception | None]:
        assert self.coming is not None
        key, failure = self.coming.key, None
        self._enter("loading")
        events = self.coming.events
        events.append(ModelLoading())
        try:
            if self._models.leader is not None:
                yield
                self._models.leader.load(self.coming)
            else:
                yield from self._read(self.coming)
                self._enter("warming")
                yield
                self.coming.open(self._models.share())
        except (GroupLostError, DisagreeError):
            raise
        except (Exception, SystemExit) as error:
            read = f"{self.coming.read_bytes} of {self.coming.weights_bytes} bytes of its weights were read"
            failure = LoadError(self._hide(f"Cannot load {key.model} now: {type(error).__name__}: {error} ({read})", key))
        if failure is None:
            self._models.add(self.coming)
            self.coming = None
            events.append(ModelLoaded())
        else:
            self._drop_coming()
            events.append(ModelUnloaded())
        return failure

    def _read(self, coming: LoadedModel) -> Iterator[None]:
        hashing = coming.begin_hashing()
        yield from coming.read(self._models.piece_bytes)
        if hashing is not None:
            yield from self._wait_for(hashing)

    def _wait_for(self, hashing: WeightsHash) -> Iterator[None]:
        """Wait for the hash of the weights, which names the model's records on disk. Other models run meanwhile."""
        if not hashing.is_done:
            self._enter("hashing")
        while not hashing.is_done:
            yield
            hashing.wait(0.0 if self._models.loaded else HASH_WAIT_SECONDS)

    def _bring_back(self, key: ModelKey) -> Iterator[None]:
        log.warning("%s; %s is loaded again", self.error, key.model)
        error = self._prepare(key)
        if error is None:
            error = yield from self._bring_in()
        if error is not None:
            log.error("%s could not be loaded again: %s", key.model, error)

    def _hide(self, message: str, key: ModelKey) -> str:
        """The message for clients, without this machine's paths; the log has all of it."""
        log.debug("%s", message)
        return self._models.catalog.hide(message, key)

    def _drop_coming(self) -> None:
        assert self.coming is not None
        self.coming.close()
        self.coming = None
