"""ModelRegistry: the loaded models, the models that may be loaded, the queue of their requests, and the swap in progress.

Owned by the generation thread. Any thread may call find() and read the attributes, which are replaced as a whole.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from dataclasses import dataclass
from queue import Queue
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ... import system
from ...config import ServerConfig
from ...errors import BadModelError, LoadError, ModelNotFoundError
from ...kv.factory import default_pool_bytes
from ...tier.opening import measurements_of
from ..bodies import InvalidRequestError
from ..live.log import EventLog, ModelEvents
from ..model import LoadedModel
from .catalog import Catalog
from .inspection import inspect
from .provider import BlockpoolModelProvider, ModelKey
from .queue import ModelQueue, ModelUsage, Plan
from .speeds import ModelSpeeds
from .swap import ModelSwap

if TYPE_CHECKING:
    from ..ranked.leader import Leader

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadCommand:
    """A client's command to load or unload a model. Its result goes to `queue`: None, or an error.

    `keep_seconds`: as in RequestOptions.
    """

    queue: Queue[Any]
    key: ModelKey
    unload: bool
    keep_seconds: float | None = None

    def done(self) -> None:
        self.queue.put(None)

    def fail(self, error: Exception) -> None:
        self.queue.put(error.with_traceback(None))


class ModelRegistry:
    """`loaded` models by key, and the `queue` of requests for them and for others.

    swap:      the change of models in progress. plan: the next one, which begins once the model that it unloads is not busy.
    own_bytes: the pool of each model takes at most this; None: that depends on what is free once the model is loaded.
    sizes:     bytes of weights by key.
    speeds:    measures how fast the models are.
    log:       the events of the server.
    leader:    takes the turns of rank 0 with other ranks; None: there are none.
    failures:  by key, why a model could not be loaded, and until when it is not tried again.
    """

    def __init__(self, template: BlockpoolModelProvider, server: ServerConfig) -> None:
        self.template = template
        self.config = config = server.models
        self.catalog = Catalog(template, config)
        self.queue = ModelQueue(config.patience_seconds, drain=max(config.patience_seconds, config.drain_seconds))
        self.own_bytes = None if server.pool.pool_bytes is None else server.pool.pool_bytes // config.max_models
        self.piece_bytes = config.piece_bytes
        self.loaded: dict[ModelKey, LoadedModel] = {}
        self.swap: ModelSwap | None = None
        self.plan = Plan()
        self.log = EventLog()
        self.leader: Leader | None = None
        self.counts = Counter(loads=0, unloads=0, swaps=0, failures=0)
        self.sizes: dict[ModelKey, int] = {}
        self.failures: dict[ModelKey, tuple[Exception, float]] = {}
        self._server = server
        self.speeds = ModelSpeeds(self, server.engine, measurements_of(server.store))
        # Commands to unload, and when they arrived.
        self._unloads: list[tuple[LoadCommand, float]] = []

    # -- from any thread -----------------------------------------------------------------------------------------------

    def find(self, wanted: Any, again: bool = False) -> ModelKey:
        """The key of the model that a request describes, once its files are checked. `again`: even if it failed lately.

        Raises ModelNotFoundError, also for a model that is not allowed, BadModelError and LoadError.
        """
        key = self.catalog.key_of(wanted, with_aliases=not again)
        return key if key in self.loaded else self.check_files(key, again)

    def need_one_rank(self, place: str, what: str) -> None:
        """Raises InvalidRequestError at `place` of a request if several ranks share the models: they compute no `what`."""
        if self.template.ranks.size > 1:
            why = f"a server of several ranks computes no {what}; start one without mlx.launch for them"
            raise InvalidRequestError(place, why)

    def check_files(self, key: ModelKey, again: bool = False) -> ModelKey:
        """Check the files of a model that may be loaded, and return its key. Raises what find() raises."""
        failure, until = self.failures.get(key, (LoadError(), 0.0))
        if not again and time.monotonic() < until:
            raise type(failure)(f"{failure} (It is not tried again for {until - time.monotonic():.0f} seconds.)")
        try:
            self.sizes[key] = inspect(key, self.catalog, self.config, self.template.cli_args.trust_remote_code)
        except (ModelNotFoundError, BadModelError) as error:
            raise type(error)(self.catalog.hide(str(error), key)) from error
        return key

    def events_of(self, key: ModelKey) -> ModelEvents:
        """The log as a model appends to it."""
        loaded = self.loaded.get(key)
        return self.log.of(self.catalog.id_of(key.model)) if loaded is None else loaded.events

    # -- room ----------------------------------------------------------------------------------------------------------

    def has_room(self, key: ModelKey, without: ModelKey | None = None) -> bool:
        """Return whether a model can be loaded beside the loaded ones, apart from `without`."""
        if not self.loaded.keys() - {without}:
            return True
        free = system.memory_bytes() - mx.get_active_memory() - self._promised_bytes()
        if without is not None:
            free += self.loaded[without].weights_bytes + self.loaded[without].pool_bytes
        return len(self.loaded) - (without is not None) < self.config.max_models and self.sizes.get(key, 0) <= free

    def share(self) -> int:
        """Bytes for the pool of a model that was just read: half of what is free, divided between the models still to come."""
        if self.own_bytes is not None:
            return self.own_bytes
        return max(0, default_pool_bytes() - self._promised_bytes() // 2) // (self.config.max_models - len(self.loaded))

    def _promised_bytes(self) -> int:
        """Bytes that the pools of the loaded models may still allocate."""
        return sum(max(0, model.pool_bytes - model.array_bytes) for model in self.loaded.values())

    # -- changes -------------------------------------------------------------------------------------------------------

    def make(self, key: ModelKey) -> LoadedModel:
        provider = BlockpoolModelProvider(self.template.cli_args, self.template.ranks)
        return LoadedModel(key, provider, self._server, self.events_of(key), self.speeds)

    def add(self, model: LoadedModel) -> None:
        self.use(model, None)
        self.loaded = {**self.loaded, model.key: model}
        self.counts["loads"] += 1

    def take_out(self, key: ModelKey) -> LoadedModel:
        model = self.loaded[key]
        self.loaded = {other: model for other, model in self.loaded.items() if other != key}
        return model

    def use(self, model: LoadedModel, keep_seconds: float | None) -> None:
        """Note that a request uses a loaded model, which is unloaded after `keep_seconds` without another one."""
        model.used = self.queue.clock()
        own = math.inf if self.config.idle_seconds is None else self.config.idle_seconds
        model.idle_seconds = own if keep_seconds is None else keep_seconds

    def unload(self, command: LoadCommand) -> None:
        """Unload a model once the requests that arrived before the command have ended."""
        self._unloads.append((command, self.queue.clock()))

    def usages(self) -> list[ModelUsage]:
        closed = {command.key: arrived for command, arrived in reversed(self._unloads)}
        return [ModelUsage(m.key, m.is_busy, m.ready, m.used, closed.get(m.key)) for m in self.loaded.values()]

    def make_plan(self) -> None:
        """Plan the next swap, unless one is in progress."""
        self.plan = Plan() if self.swap else self.queue.plan(self.usages(), self.has_room)

    def begin_with(self, key: ModelKey) -> ModelSwap:
        """Begin to load a model while no swap is in progress."""
        self.swap = ModelSwap(self, key)
        return self.swap

    def begin(self) -> bool:
        """Begin the swap that is due, if there is one. Returns whether a swap is in progress."""
        if self.swap is None:
            self.swap = self._due()
        return self.swap is not None

    def advance(self) -> ModelSwap | None:
        """Continue the swap. Returns it once it has ended."""
        if self.swap is None or not self.swap.advance():
            return None
        ended, self.swap = self.swap, None
        self._note(ended)
        return ended

    def _due(self) -> ModelSwap | None:
        self._answer_unloads()
        usages = self.usages()
        idle = [usage for usage in usages if self.queue.is_idle(usage)]
        for usage in idle:
            if usage.closed is not None:
                return ModelSwap(self, unload=usage.key)
        load, unload = self.plan.load, self.plan.unload
        if load is not None and (unload is None or self.plan.must or any(u.key == unload and not u.busy for u in usages)):
            # If even that leaves too little room, another model goes next.
            return ModelSwap(self, load if self.has_room(load, without=unload) else None, unload)
        for usage in idle:
            if self.queue.clock() - usage.used >= self.loaded[usage.key].idle_seconds:
                return ModelSwap(self, unload=usage.key)
        return None

    def _answer_unloads(self) -> None:
        """Answer the commands to unload models that are not loaded any more."""
        done = [command for command, _ in self._unloads if command.key not in self.loaded]
        self._unloads = [(command, arrived) for command, arrived in self._unloads if command.key in self.loaded]
        for command in done:
            command.done()

    def _note(self, swap: ModelSwap) -> None:
        """Count a swap that has ended, log it, and remember why its model could not be loaded."""
        now, error, load = time.monotonic(), swap.error, swap.load
        if error is not None:
            self.counts["failures"] += 1
            if isinstance(error, LoadError | BadModelError) and load is not None:
                # A new exception: those who raise this one add frames to it.
                recent = {key: failure for key, failure in self.failures.items() if failure[1] > now}
                self.failures = {**recent, load: (type(error)(str(error)), now + self.config.retry_seconds)}
            log.warning("%s", error)
            return
        if load is not None:
            self.failures = {key: failure for key, failure in self.failures.items() if key != load}
            self.counts["swaps"] += swap.unload is not None
            self.queue.linger = min(self.config.linger_seconds, now - swap.began)
            log.info("loaded %s in %.2f s", load.model, now - swap.began)
        if swap.unload is not None:
            log.info("unloaded %s", swap.unload.model)

    def abort(self) -> None:
        """Give up the swap in progress."""
        if self.swap is not None:
            self.swap.abort()
            self.swap = None

    def close(self) -> None:
        """Unload every model, also those of a swap in progress."""
        self.abort()
        for key in list(self.loaded):
            self.take_out(key).close()
        for command, _ in self._unloads:
            command.done()
        self.log.close()
