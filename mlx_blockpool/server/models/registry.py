"""ModelRegistry: the loaded models, those that may be loaded, and the change between them that goes on.

Owned by the generation thread. Any thread may find() a model and read what is here: it is replaced as a whole.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from queue import Queue
from typing import Any

import mlx.core as mx

from ... import system
from ...config import EngineConfig, ModelsConfig, PoolConfig, StoreConfig
from ...errors import BadModelError, LoadError, ModelNotFoundError
from ...kv.factory import default_pool_bytes
from ..model import LoadedModel
from .catalog import Catalog
from .inspection import inspect
from .provider import BlockpoolModelProvider, ModelKey
from .queue import ModelQueue, ModelUsage, Plan, QueueEntry
from .swap import ModelSwap

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadCommand:
    """Somebody wants a model loaded, or unloaded, and waits for an answer on `queue`: None, or why not."""

    queue: Queue[Any]
    key: ModelKey
    unload: bool

    def done(self) -> None:
        self.queue.put(None)

    def fail(self, error: Exception) -> None:
        self.queue.put(error.with_traceback(None))


class ModelRegistry:
    """`loaded` by key; `change`: what goes on, `plan`: what is to go on once the model that has to go has nothing live.

    `own_bytes`: what the pool of each may take; None: that depends on what is free once it is loaded. `sizes`: bytes of weights
    by key. `failures`: what could not be loaded, why, and until when it is not tried again. `counts`: loads, unloads, swaps and
    failures.
    """

    def __init__(
        self,
        template: BlockpoolModelProvider,
        engine: EngineConfig,
        pool: PoolConfig,
        store: StoreConfig | None,
        config: ModelsConfig,
    ) -> None:
        self.template = template
        self.config = config
        self.catalog = Catalog(template, config)
        self.own_bytes = None if pool.pool_bytes is None else pool.pool_bytes // config.max_models
        self.piece_bytes = config.piece_bytes
        self.loaded: dict[ModelKey, LoadedModel] = {}
        self.change: ModelSwap | None = None
        self.plan = Plan()
        self.counts = Counter(loads=0, unloads=0, swaps=0, failures=0)
        self.sizes: dict[ModelKey, int] = {}
        self._engine, self._pool, self._store = engine, pool, store
        self.failures: dict[ModelKey, tuple[Exception, float]] = {}
        self._leaving: list[QueueEntry] = []

    # -- from any thread -----------------------------------------------------------------------------------------------

    def find(self, wanted: Any, again: bool = False) -> ModelKey:
        """The key of the model that a request describes, once its files have been looked at. `again`: though it failed before.

        Raises ModelNotFoundError, also for one that is not allowed, BadModelError and LoadError.
        """
        key = self.catalog.key_of(wanted, with_aliases=not again)
        if key in self.loaded:
            return key
        return self.look_at(key, again)

    def default(self) -> ModelKey | None:
        """The model that the server was started with."""
        return self.catalog.default

    def look_at(self, key: ModelKey, again: bool = False) -> ModelKey:
        """The key of a model that may be loaded, once its files have been looked at. Raises as find() does."""
        failure, until = self.failures.get(key, (LoadError(), 0.0))
        if not again and time.monotonic() < until:
            raise type(failure)(f"{failure} (It is not tried again for {until - time.monotonic():.0f} seconds.)")
        try:
            self.sizes[key] = inspect(key, self.catalog, self.config, self.template.cli_args.trust_remote_code)
        except (ModelNotFoundError, BadModelError) as error:
            raise type(error)(self.catalog.hide(str(error), key)) from error
        return key

    # -- room ----------------------------------------------------------------------------------------------------------

    def has_room(self, key: ModelKey, without: ModelKey | None = None) -> bool:
        """Whether a model can be loaded beside those that are, but for one of them."""
        if not self.loaded.keys() - {without}:
            return True
        free = system.memory_bytes() - mx.get_active_memory() - self._promised_bytes()
        if without is not None:
            free += self.loaded[without].weights_bytes + self.loaded[without].pool_bytes
        return len(self.loaded) - (without is not None) < self.config.max_models and self.sizes.get(key, 0) <= free

    def share(self) -> int:
        """What the pool of a model that has just been read may take: half of what is left, divided between those to come."""
        if self.own_bytes is not None:
            return self.own_bytes
        return max(0, default_pool_bytes() - self._promised_bytes() // 2) // (self.config.max_models - len(self.loaded))

    def _promised_bytes(self) -> int:
        """What the pools of the loaded models may take and have not taken yet."""
        return sum(max(0, served.pool_bytes - served.array_bytes) for served in self.loaded.values())

    # -- changes -------------------------------------------------------------------------------------------------------

    def make(self, key: ModelKey) -> LoadedModel:
        return LoadedModel(key, self.template.another(), self._engine, self._pool, self._store)

    def add(self, served: LoadedModel) -> None:
        self.loaded = {**self.loaded, served.key: served}
        self.counts["loads"] += 1

    def take_out(self, key: ModelKey) -> LoadedModel:
        served = self.loaded[key]
        self.loaded = {other: model for other, model in self.loaded.items() if other != key}
        return served

    def let_go(self, order: LoadCommand, arrived: float) -> None:
        """Unload a model once those that came before have been served."""
        self._leaving.append(QueueEntry(order.key, order, arrived))

    def uses(self) -> list[ModelUsage]:
        """What the loaded models are at."""
        closed = {place.key: place.arrived for place in reversed(self._leaving)}
        return [ModelUsage(m.key, bool(m.live), m.ready, m.used, closed.get(m.key)) for m in self.loaded.values()]

    def make_plan(self, line: ModelQueue) -> None:
        """Look who waits for which model."""
        self.plan = Plan()
        if self.change is None:
            self.plan = line.plan(self.uses(), self.has_room)

    def begin_with(self, key: ModelKey) -> ModelSwap:
        """Load a model where none is."""
        assert not self.loaded, f"{len(self.loaded)} models are loaded"
        assert self.change is None, f"{self.change} goes on"
        self.change = ModelSwap(self, key)
        return self.change

    def begin(self, line: ModelQueue) -> None:
        """Begin a change, if there is one to begin and none goes on."""
        if self.change is None:
            self.change = self._due(line)

    def advance(self, line: ModelQueue) -> ModelSwap | None:
        """Go on with the change. Returns it when it is through."""
        if self.change is None:
            return None
        is_through = self.change.advance()
        while self.change.suspended:
            line.add(self.change.unload, self.change.suspended.pop(0))
        if not is_through:
            return None
        change, self.change = self.change, None
        self._note(change, line)
        return change

    def _due(self, line: ModelQueue) -> ModelSwap | None:
        self._answer_orders()
        free = [use for use in self.uses() if not use.busy and not any(map(use.takes, line))]
        for use in free:
            if any(place.key == use.key for place in self._leaving):
                return ModelSwap(self, unload=use.key)
        load, unload = self.plan.load, self.plan.unload
        rests = {use.key for use in self.uses() if not use.busy}
        if load is not None and (unload is None or unload in rests or self.plan.must):
            # Where even that is not room enough, another one goes next.
            return ModelSwap(self, load if self.has_room(load, without=unload) else None, unload)
        for use in free:
            if self.config.idle_seconds is not None and line.clock() - use.used >= self.config.idle_seconds:
                return ModelSwap(self, unload=use.key)
        return None

    def _answer_orders(self) -> None:
        """Those to unload what is not loaded, or not any more."""
        done = [place for place in self._leaving if place.key not in self.loaded]
        self._leaving = [place for place in self._leaving if place.key in self.loaded]
        for place in done:
            place.item.done()

    def _note(self, change: ModelSwap, line: ModelQueue) -> None:
        seconds = time.monotonic() - change.began
        error, load, unload = change.error, change.load, change.unload
        if error is not None:
            self.counts["failures"] += 1
            if isinstance(error, LoadError | BadModelError) and load is not None:
                # Another one: this one will refer to the frames of those who raise it.
                now = time.monotonic()
                recent = {key: failure for key, failure in self.failures.items() if failure[1] > now}
                self.failures = {**recent, load: (type(error)(str(error)), now + self.config.retry_seconds)}
            log.warning("%s", error)
            return
        if load is not None:
            self.failures = {key: failure for key, failure in self.failures.items() if key != load}
            self.counts["swaps"] += unload is not None
            line.linger = min(self.config.linger_seconds, seconds)
            log.info("loaded %s in %.2f s", load.model, seconds)
        if unload is not None:
            log.info("unloaded %s", unload.model)

    def abort(self) -> None:
        """Give up the change that goes on."""
        if self.change is not None:
            self.change.abort()
            self.change = None

    def close(self) -> None:
        """Unload everything, also what is under way."""
        self.abort()
        for key in list(self.loaded):
            self.take_out(key).close()
        for place in self._leaving:
            place.item.done()
