"""ModelRegistry: the loaded models, the queue of their requests, the swap in progress, and when
models are measured.

Owned by the generation thread. Any thread may call find() and read the attributes, which are
replaced as a whole.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from queue import Queue
from typing import Any

import mlx.core as mx

from ...config import EngineConfig, ServerConfig
from ...engine.caches import PooledCaches
from ...engine.measuring import measured
from ...errors import (
    BadModelError,
    DisagreeError,
    GroupLostError,
    LoadError,
    MeasuringStoppedError,
    ModelNotFoundError,
    PoolExhaustedError,
)
from ...formatting import count
from ...kv.build import default_pool_bytes
from ...model_files import device
from ...store.measurements import Measurements
from ...tier.opening import measurements_of
from ..bodies import InvalidRequestError
from ..model import LoadedModel
from ..provider import BlockpoolModelProvider, ModelKey
from ..watch.event_log import EventLog, ModelEvents
from .catalog import Catalog
from .inspection import inspect
from .queue import Claim, CommandBackoff, ModelQueue, ModelUsage, SwapPlan

log = logging.getLogger(__name__)

# A step that has nothing to do but wait for a hash, while no other model needs the thread.
HASH_WAIT_SECONDS = 0.02


@dataclass(eq=False)
class LoadCommand:
    """A client's command to load or unload a model. Its result goes to `queue`: None, or an error.

    claim:        which models may be unloaded for a load. UNWAITED: no client reads the result of
                  the command.
    keep_seconds: as in RequestOptions. An unload with it only ends what `owner` has asked for; one
    without is for all clients.
    owner:        the name of the client's key; None if keys have no names.
    is_left:      the client is gone. sequence: None, as for a request that has not started.
    """

    queue: Queue[Any]
    key: ModelKey
    unload: bool
    claim: Claim = Claim.COMMAND
    keep_seconds: float | None = None
    owner: str | None = None
    is_left: bool = False
    sequence: None = None

    def leave(self) -> None:
        """The generation thread drops the command."""

    def done(self) -> None:
        self.queue.put(None)

    def fail(self, error: Exception) -> None:
        self.queue.put(error.with_traceback(None))


class ModelRegistry:
    """`loaded` models by key, and the `queue` of requests for them and for others.

    swap:      the change of models in progress. plan: the next one, which begins once the model
               that it unloads is not busy.
    own_bytes: the limit of each model's pool; None if it depends on the memory that is free once
    the model is loaded.
    sizes:     bytes of weights by key.
    speeds:    measures how fast the models are.
    log:       the events of the server.
    model_class, swap_class: of models and their swaps; in a group those of server.ranked.
    failures:  by key, why a model could not be loaded, and until when it is not tried again.
    """

    def __init__(self, template: BlockpoolModelProvider, server: ServerConfig) -> None:
        self.template = template
        self.config = config = server.models
        self.catalog = Catalog(template, config)
        self.queue = ModelQueue(
            config.patience_seconds, drain=max(config.patience_seconds, config.drain_seconds)
        )
        self.own_bytes = (
            None if server.pool.pool_bytes is None else server.pool.pool_bytes // config.max_models
        )
        self.loaded: dict[ModelKey, LoadedModel] = {}
        self.swap: ModelSwap | None = None
        self.plan = SwapPlan()
        self.log = EventLog()
        self.model_class = LoadedModel
        self.swap_class: Callable[..., ModelSwap] = ModelSwap
        self.counts = Counter(loads=0, unloads=0, swaps=0, failures=0)
        self.sizes: dict[ModelKey, int] = {}
        self.failures: dict[ModelKey, tuple[Exception, float]] = {}
        self._server = server
        self._measurements = measurements_of(server.store)
        self.speeds = ModelSpeeds(self, server.engine, self._measurements)
        first = max(config.patience_seconds, config.linger_seconds)
        self._backoff = CommandBackoff(first, config.most_rest_seconds, lambda: self.queue.clock())
        self._own_seconds = math.inf if config.idle_seconds is None else config.idle_seconds
        # Commands to unload, and when they arrived.
        self._unloads: list[tuple[LoadCommand, float]] = []

    # -- from any thread ---------------------------------------------------------------------------

    def find(self, wanted: Any, again: bool = False) -> ModelKey:
        """The key of the model that a request describes, once its files are checked. `again`: even
        if it failed lately.

        Raises ModelNotFoundError, also for a model that is not allowed, BadModelError and
        LoadError.
        """
        key = self.catalog.key_of(wanted, with_aliases=not again)
        return key if key in self.loaded else self.check_files(key, again)

    def need_one_rank(self, place: str, what: str) -> None:
        """Raises InvalidRequestError at `place` of a request if several ranks share the models:
        they compute no `what`.
        """
        if not self.template.ranks.decides:
            why = (
                f"a server of several ranks computes no {what}; start one without mlx.launch for "
                "them"
            )
            raise InvalidRequestError(place, why)

    def check_files(self, key: ModelKey, again: bool = False) -> ModelKey:
        """Check the files of a model that may be loaded, and return its key.

        Raises what find() raises.
        """
        failure, until = self.failures.get(key, (LoadError(), 0.0))
        if not again and time.monotonic() < until:
            raise type(failure)(
                f"{failure} (It is not tried again for {until - time.monotonic():.0f} seconds.)"
            )
        try:
            self.sizes[key] = inspect(
                key, self.catalog, self.config, self.template.cli_args.trust_remote_code
            )
        except (ModelNotFoundError, BadModelError) as error:
            raise type(error)(self.catalog.hide(str(error), key)) from error
        return key

    def events_of(self, key: ModelKey) -> ModelEvents:
        """The log as a model appends to it."""
        loaded = self.loaded.get(key)
        return self.log.of_model(self.catalog.id_of(key.model)) if loaded is None else loaded.events

    # -- memory ------------------------------------------------------------------------------------

    def fits(self, key: ModelKey, without: ModelKey | None = None) -> bool:
        """Return whether a model can be loaded in addition to the loaded ones, if `without` is
        unloaded.
        """
        if not self.loaded.keys() - {without}:
            return True
        free = device.memory_bytes() - mx.get_active_memory() - self._promised_bytes()
        if without is not None:
            free += self.loaded[without].weights_bytes + self.loaded[without].pool_bytes
        return (
            len(self.loaded) - (without is not None) < self.config.max_models
            and self.sizes.get(key, 0) <= free
        )

    def share(self) -> int:
        """Bytes for the pool of a model that was just read: half of what is free, divided
        between the models still to come.
        """
        if self.own_bytes is not None:
            return self.own_bytes
        return max(0, default_pool_bytes() - self._promised_bytes() // 2) // (
            self.config.max_models - len(self.loaded)
        )

    def _promised_bytes(self) -> int:
        """Bytes that the pools of the loaded models may still allocate."""
        return sum(max(0, model.pool_bytes - model.array_bytes) for model in self.loaded.values())

    # -- changes -----------------------------------------------------------------------------------

    def make(self, key: ModelKey) -> LoadedModel:
        provider = BlockpoolModelProvider(self.template.cli_args, self.template.ranks)
        return self.model_class(
            key, provider, self._server, self.events_of(key), self._measurements
        )

    def add(self, model: LoadedModel) -> None:
        """Take a model that was loaded.

        The server itself keeps its default model, as if a client without a name did.
        """
        model.used = self.queue.clock()
        model.keeps = {None: self._own_seconds} if model.key == self.catalog.default else {}
        model.idle_seconds = self._own_seconds
        self.loaded = {**self.loaded, model.key: model}
        self._backoff.note_load(model.key)
        self.counts["loads"] += 1

    def take_out(self, key: ModelKey) -> LoadedModel:
        model = self.loaded[key]
        self.loaded = {other: model for other, model in self.loaded.items() if other != key}
        return model

    def use(self, model: LoadedModel, owner: str | None, keep_seconds: float | None) -> None:
        """Note that a request uses a loaded model, which its owner wants to stay for `keep_seconds`
        without another request.

        The last request or command of each owner counts, and the model stays for the longest time
        that an owner wants.
        """
        model.used = self.queue.clock()
        self._keep(model, owner, keep_seconds)

    def _keep(self, model: LoadedModel, owner: str | None, keep_seconds: float | None) -> None:
        model.keeps[owner] = self._own_seconds if keep_seconds is None else keep_seconds
        model.idle_seconds = max(model.keeps.values())

    def enqueue(self, reply: Any) -> None:
        """Let a request wait for its model."""
        options = reply.request.options
        self.queue.add(
            reply.args.model,
            reply,
            options.priority,
            options.agent,
            Claim.of_request(options.may_load),
        )

    def take(self, command: LoadCommand) -> None:
        """Let a command wait for its turn; drop it if no client waits for it and the same one
        waits already.
        """
        waiting = (
            [other for other, _ in self._unloads]
            if command.unload
            else [entry.item for entry in self.queue]
        )
        commands = [
            other
            for other in waiting
            if isinstance(other, LoadCommand) and other.claim is Claim.UNWAITED
        ]
        if command.claim is Claim.UNWAITED and any(other.key == command.key for other in commands):
            return
        if not command.unload:
            self.queue.add(command.key, command, claim=command.claim)
            return
        if command.keep_seconds is not None and command.key in self.loaded:
            self._keep(self.loaded[command.key], command.owner, command.keep_seconds)
        self._unloads.append((command, self.queue.clock()))

    def answer_load(self, command: LoadCommand) -> None:
        """Answer a command to load a model that is loaded.

        It does not count as a use while requests wait for other models.
        """
        model = self.loaded[command.key]
        if any(
            entry.claim is Claim.REQUEST and entry.key not in self.loaded for entry in self.queue
        ):
            self._keep(model, command.owner, command.keep_seconds)
        else:
            self.use(model, command.owner, command.keep_seconds)
        command.done()

    def usages(self) -> list[ModelUsage]:
        closed = {
            command.key: arrived
            for command, arrived in reversed(self._unloads)
            if command.keep_seconds is None
        }
        usages = []
        for model in self.loaded.values():
            rest = min(self._backoff.seconds(model.key), self._own_seconds)
            until = None if rest else closed.get(model.key)
            usages.append(
                ModelUsage(model.key, model.is_busy, model.ready, model.used, until, rest)
            )
        return usages

    def make_plan(self) -> None:
        """Plan the next swap, unless one is in progress."""
        self.plan = SwapPlan() if self.swap else self.queue.plan(self.usages(), self.fits)

    def begin_with(self, key: ModelKey) -> ModelSwap:
        """Begin to load a model while no swap is in progress: the first one of this process."""
        self.swap = self.swap_class(self, key)
        # Of the processor: most of it went into imports.
        self.swap.seconds["imports"] = time.process_time()
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
        commanded = {command.key for command, _ in self._unloads if command.keep_seconds is None}
        for usage in idle:
            if usage.key in commanded and self.queue.is_rested(usage):
                return self.swap_class(self, unload=usage.key, by_command=True)
        load, unload = self.plan.load, self.plan.unload
        if load is not None and (
            unload is None or self.plan.must or any(u.key == unload and not u.busy for u in usages)
        ):
            # If that frees too little memory, another model is unloaded next.
            return self.swap_class(
                self,
                load if self.fits(load, without=unload) else None,
                unload,
                self.plan.by_command,
            )
        for usage in idle:
            if self._is_over(usage):
                return self.swap_class(
                    self,
                    unload=usage.key,
                    by_command=self.queue.clock() - usage.used < self._own_seconds,
                )
        return None

    def _is_over(self, usage: ModelUsage) -> bool:
        """Return whether a model has been idle for as long as its clients and the server keep
        it.
        """
        has_expired = self.queue.clock() - usage.used >= self.loaded[usage.key].idle_seconds
        return has_expired and self.queue.is_idle(usage) and self.queue.is_rested(usage)

    def _answer_unloads(self) -> None:
        """Answer the commands to unload that have been carried out, or that leave a model
        loaded.
        """
        usages = {usage.key: usage for usage in self.usages()}
        unloads, self._unloads = self._unloads, []
        for command, arrived in unloads:
            usage, seconds = usages.get(command.key), self.config.wait_seconds
            if usage is None or (command.keep_seconds is not None and not self._is_over(usage)):
                command.done()
            elif usage.rest and self.queue.clock() - arrived > seconds:
                name = self.catalog.id_of(command.key.model)
                command.fail(
                    LoadError(
                        f"{name} was in use, and was not unloaded within {seconds:g} seconds. Try "
                        "again later."
                    )
                )
            elif not command.is_left:
                self._unloads.append((command, arrived))

    def _note(self, swap: ModelSwap) -> None:
        """Count a swap that has ended, log it, and remember why its model could not be loaded."""
        now, error, load = time.monotonic(), swap.error, swap.load
        if error is not None:
            self.counts["failures"] += 1
            if isinstance(error, LoadError | BadModelError) and load is not None:
                # A new exception: those who raise this one add frames to it.
                recent = {
                    key: failure for key, failure in self.failures.items() if failure[1] > now
                }
                self.failures = {
                    **recent,
                    load: (type(error)(str(error)), now + self.config.retry_seconds),
                }
            log.warning("%s", error)
            return
        if load is not None:
            self.failures = {key: failure for key, failure in self.failures.items() if key != load}
            self.counts["swaps"] += swap.unload is not None
            self.queue.linger = min(self.config.linger_seconds, now - swap.began)
            log.info(
                "loaded %s in %.2f s (%s)", load.model, now - swap.began, swap.parts(self.loaded)
            )
        if swap.unload is not None:
            if swap.by_command:
                self._backoff.note_unload(swap.unload)
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


class ModelSwap:
    """Loads `load`, after it has unloaded `unload`; either may be None. Call advance() until it
    returns True.

    `by_command`: a command causes it, and not a request.

    The old model is unloaded only after the files of the new one were checked. If the new one still
    cannot be loaded, the old one is loaded again. `error`: why `load` was not loaded. Requests that
    ran on the old model go back into the queue.
    """

    def __init__(
        self,
        models: ModelRegistry,
        load: ModelKey | None = None,
        unload: ModelKey | None = None,
        by_command: bool = False,
    ) -> None:
        self.load = load
        self.unload = unload
        self.by_command = by_command
        self.error: Exception | None = None
        self.coming: LoadedModel | None = None
        self.stage = "checking"
        self.began = self.since = time.monotonic()
        self.seconds: dict[str, float] = {}
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
        now = time.monotonic()
        self.seconds[self.stage] = now - self.since
        self.stage, self.since = stage, now

    def parts(self, loaded: Mapping[ModelKey, LoadedModel]) -> str:
        """What took how long, of a swap that has ended, in words."""
        assert self.load is not None
        model, seconds = loaded[self.load], {**self.seconds}
        seconds[self.stage] = time.monotonic() - self.since
        stages = "".join(f"{stage} {took:.2f} s, " for stage, took in seconds.items())
        forwards = count(model.num_forwards, "forward")
        return f"{stages}of which the proof {model.proof_seconds:.2f} s with {forwards}"

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
        """Errors are returned, here and below: one that is raised refers to frames, and they to
        arrays.
        """
        self.coming = self._models.make(key)
        try:
            self.coming.prepare(self._models.own_bytes)
            return None
        except PoolExhaustedError as error:
            failure: Exception = LoadError(self._hide(f"Cannot load {key.model}: {error}", key))
        except (Exception, SystemExit) as error:
            # Files and code from anywhere. (Some model files call exit().)
            failure = BadModelError(
                self._hide(f"Cannot load {key.model}: {type(error).__name__}: {error}", key)
            )
        self._drop_coming()
        return failure

    def _take_out(self, key: ModelKey) -> Iterator[None]:
        self.leaving = self._models.take_out(key)
        for suspended in self.leaving.suspend():
            self._models.queue.add(
                key, suspended, claim=Claim.of_request(suspended.request.options.may_load)
            )
        self._enter("saving")
        yield
        yield from self._save(self.leaving)
        self.leaving.close()
        self.leaving.events.add("model_unloaded", {})
        self.leaving = None
        self._models.counts["unloads"] += 1

    def _bring_in(self) -> Generator[None, None, Exception | None]:
        assert self.coming is not None
        key, failure = self.coming.key, None
        self._enter("loading")
        events = self.coming.events
        events.add("model_loading", {})
        try:
            yield from self._open(self.coming)
        except (GroupLostError, DisagreeError):
            raise
        except (Exception, SystemExit) as error:
            read = (
                f"{self.coming.read_bytes} of {self.coming.weights_bytes} bytes of its weights "
                "were read"
            )
            failure = LoadError(
                self._hide(
                    f"Cannot load {key.model} now: {type(error).__name__}: {error} ({read})", key
                )
            )
        if failure is None:
            self._models.add(self.coming)
            self.coming = None
            events.add("model_loaded", {})
        else:
            self._drop_coming()
            events.add("model_unloaded", {})
        return failure

    def _save(self, leaving: LoadedModel) -> Iterator[None]:
        """Write what is not on disk yet in parts, between which the other models run, if there
        are any.
        """
        if self._models.loaded:
            yield from leaving.save()

    def _open(self, coming: LoadedModel) -> Iterator[None]:
        """Read the weights, and wait for their hash, which names the model's records on disk.

        Other models run meanwhile.
        """
        hashing = coming.begin_hashing()
        yield from coming.read(self._models.config.piece_bytes)
        if hashing is not None and not hashing.is_done:
            self._enter("hashing")
        while hashing is not None and not hashing.is_done:
            yield
            hashing.wait(0.0 if self._models.loaded else HASH_WAIT_SECONDS)
        self._enter("warming")
        yield
        coming.open(self._models.share())

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


class ModelSpeeds:
    """Measures how fast models are once the server is quiet. What was measured is remembered, and
    what they were proven to do.

    has_arrivals: whether something arrived that the thread has not taken yet.
    """

    def __init__(
        self, registry: ModelRegistry, config: EngineConfig, measurements: Measurements
    ) -> None:
        self.has_arrivals: Callable[[], bool] = lambda: False
        self._registry = registry
        self._config = config
        self._measurements = measurements
        # When a measuring was tried last, or seconds could not be written.
        self._tried = 0.0
        # Seconds saved before this start, and those since that are remembered.
        self._saved_before, self._remembered = measurements.add_saved(0.0) or 0.0, 0.0

    def saved(self) -> dict[str, float]:
        """The seconds of prefill that reuse has saved."""
        models = self._registry.log.models.values()
        since_start = sum(events.counts.seconds_saved for events in models)
        found = {
            "since_start": since_start,
            "since_installation": self._saved_before + since_start,
        }
        return {name: round(seconds, 3) for name, seconds in found.items()}

    def remember_saved(self) -> None:
        """Write the seconds that were saved since the last call into the store's database."""
        now = self.saved()["since_start"]
        if now == self._remembered:
            return
        if self._measurements.add_saved(now - self._remembered) is not None:
            self._remembered = now
        else:
            # Not again at once: a locked database makes the thread wait.
            self._tried = self._registry.queue.clock()

    def catch_up(self) -> None:
        """Measure loaded models that are not measured yet, if the server is quiet, until
        something arrives.
        """
        loaded, now = self._registry.loaded.values(), self._registry.queue.clock()
        if (
            now - max([self._tried, *(model.used for model in loaded)])
            < self._registry.config.quiet_seconds
        ):
            return
        self.remember_saved()
        for model in loaded:
            if isinstance(model.caches, PooledCaches) and model.caches.is_unmeasured:
                self._tried = now
                before = _known(model.caches)
                measured(
                    model.provider.model,
                    model.caches,
                    self._config,
                    self._measurements,
                    model.provider.name,
                    self._look,
                )
                if _known(model.caches) != before:
                    log.info("the costs of steps of %s have been measured", model.provider.name)
                    if model.engine is not None:
                        model.engine.steps.decide()
                    model.update_report()

    def _look(self) -> None:
        """Raise MeasuringStoppedError unless the server is still quiet."""
        registry = self._registry
        if (
            any(map(_is_busy, registry.loaded.values()))
            or registry.queue
            or self.has_arrivals()
            or registry.swap is not None
        ):
            raise MeasuringStoppedError


def _known(caches: PooledCaches) -> tuple[Any, ...]:
    """The measured costs of a model's steps, for comparison."""
    return caches.curve, caches.prefix.arena.decode.costs, caches.unmeasurable, caches.is_unmeasured


def _is_busy(model: LoadedModel) -> bool:
    """Whether a model has requests, or reads or writes records: a measuring would wait for the
    disk, and delay what reads it.
    """
    if model.is_busy:
        return True
    caches = model.caches
    return isinstance(caches, PooledCaches) and (
        caches.are_blocks_coming or caches.prefix.stored.is_writing
    )


def store_report(registry: ModelRegistry) -> dict[str, str]:
    """For GET /health, under `store`: what fails in the prompt store's folder; empty if nothing
    does.
    """
    stores = [
        store
        for model in list(registry.loaded.values())
        if (store := model.report.get("store")) is not None
    ]
    problem = next((store["problem"] for store in stores if store["problem"]), None)
    return {} if problem is None else {"store": problem}
