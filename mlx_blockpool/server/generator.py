"""The generation thread: takes requests off one queue, loads their models, runs the engines' steps,
puts tokens on reply queues.

Prompts arrive tokenized. mlx-lm's ResponseGenerator serves requests with a draft model or images,
one at a time. A request's failure ends that request alone: the thread continues, and is restarted
if it ever dies.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, Queue
from typing import Any

import mlx.core as mx

from ..config import ServerConfig
from ..engine.stock import GuardedPromptCache
from ..errors import BlockpoolError, GroupError, GroupLostError, LoadError, UnavailableError
from ..mlx_lm_compat import ResponseGenerator
from ..store.agents import Agents
from ..store.paths import default_folder
from .access import AccessPolicy, ByteBudget
from .forms import Forms
from .health import STEPS, Health
from .jobs import Job
from .kept_responses import KeptResponses
from .model import LoadedModel
from .models.registry import LoadCommand, ModelRegistry, store_report
from .normalise import Normalisers
from .preparation import KeyedLock, PromptPreparation
from .prompts.workers import PromptWorkers
from .provider import BlockpoolModelProvider
from .replies import Choices, Reply, fit, replies_to
from .sampling import check_sampling
from .sequential import SequentialCache, serve_alone, tokenized
from .step_driver import StepDriver
from .watch.cache_map import CacheMaps
from .watch.explain import Explanations
from .watch.last_hour import LastHour
from .watch.snapshot import BlocksSnapshots
from .wire import check_connection

log = logging.getLogger(__name__)

# How often the thread checks requests that wait for a disk, and a model that is being loaded.
CHANGE_SECONDS = 0.005
REPORT_SECONDS = 0.5
# How often the connection of a waiting client is checked.
HANG_UP_SECONDS = 0.25
STOP_LOOKS_SECONDS = 0.05
# How long a stopping process waits for the responses that say why requests have ended.
LAST_WORDS_SECONDS = 0.5
STOPS = "The server is shutting down."
# The stages of a swap in which the model has nothing to save.
LOADS = ("checking", "loading", "hashing", "warming")


class BlockpoolGenerator(ResponseGenerator):  # type: ignore[misc]
    """mlx-lm's ResponseGenerator around a registry of models with an engine each.

    generate_choices() runs on the thread of a socket and prepares the prompt there; everything
    below _run_generate() runs on the generation thread.

    model:        the one whose request has started last; mlx-lm reads its `model_provider` and
                  `prompt_cache`.
    normalisers, access, warm_up, responses: for the socket threads, as is `pixels`, the budget for
    all images.
    explanations: how the last requests used the cache. forms: compiles the forms of requests.
    maps, hour:   what the page shows. snapshots: what readers of events begin with.
    step_driver:  runs the models' steps, with other ranks or without. agent_files: those of the
                  store; None without one.
    """

    prompt_cache: SequentialCache
    model_provider: BlockpoolModelProvider
    model: LoadedModel | None = None

    def __init__(
        self,
        model_provider: BlockpoolModelProvider,
        config: ServerConfig,
        normalisers: Normalisers,
        drive: Callable[[BlockpoolGenerator, ServerConfig], StepDriver] | None = None,
    ) -> None:
        store = config.store
        self.access = AccessPolicy(config.access)
        self.explanations = Explanations()
        self.maps, self.hour = CacheMaps(self), LastHour()
        self.store_config = store
        self.agent_files = None if store is None else Agents(store.folder or default_folder())
        self.warm_up: Any = None
        self.kv_events: threading.Thread | None = None
        self.normalisers = normalisers
        self.responses = KeptResponses()
        self.health = Health(config.engine.stall_seconds)
        self.registry = ModelRegistry(model_provider, config)
        self.snapshots = BlocksSnapshots(self)
        self.forms = Forms(config.forms)
        self.prompts = PromptWorkers(config.prompts)
        self.pixels = ByteBudget(config.images.pixel_bytes)
        self.preparation = PromptPreparation(self.prompts, config.images, self.registry, self.forms)
        self.registry.speeds.has_arrivals = lambda: self._stop or not self.requests.empty()
        self.step_driver = StepDriver() if drive is None else drive(self, config)
        self._order = KeyedLock()
        # The queue of each request whose prompt is being prepared.
        self._preparing: set[Queue[tuple[int, Any]]] = set()
        self._config, self._reported = config.engine, 0.0
        self._started: Queue[Exception | None] = Queue()
        super().__init__(model_provider, SequentialCache(GuardedPromptCache()))

    # -- from any thread ---------------------------------------------------------------------------

    def generate_choices(
        self, request: Any, generation_args: Any, progress_callback: Any = None
    ) -> Choices:
        """Replace mlx-lm's generate(). Yields pairs of a choice's index and its context, then its
        Responses.

        The last part of a choice is None or the exception that has ended it, which leaves the
        others alone. Closing the iterator ends what is left. Requests of one agent are queued in
        the order of their arrival. Raises ConnectionAbortedError once the client of
        `request.connection` has hung up, and what ModelRegistry.find() and PromptPreparation raise.
        """
        self.preparation.check(request, generation_args)
        args = replace(generation_args, model=self.registry.find(generation_args.model))
        parts: Queue[tuple[int, Any]] = Queue()
        with self._order.hold(request.options.agent):
            self._preparing.add(parts)
            try:
                args = self.preparation.prepare(request, args)
                replies = replies_to(request, args, self.registry.events_of(args.model), parts)
                for reply in replies:
                    self.requests.put(reply)
            finally:
                self._preparing.remove(parts)
        try:
            left, check_due = set(range(request.choices)), 0.0
            while left:
                if (now := time.monotonic()) >= check_due:
                    check_due = now + HANG_UP_SECONDS
                    check_connection(request.connection)
                index, part = self.receive(parts, request.connection)
                if isinstance(part, tuple):
                    if progress_callback is not None:
                        progress_callback(*part)
                elif index in left:
                    yield index, part
                    if part is None or isinstance(part, Exception) or replies[index].is_stopped:
                        left.remove(index)
        finally:
            for reply in replies:
                reply.is_hung_up |= not reply.is_stopped

    def receive(self, queue: Queue[Any], connection: socket.socket | None = None) -> Any:
        """The next item that the generation thread puts on a queue.

        Raises UnavailableError once that thread has stopped, and ConnectionAbortedError once
        `connection` was hung up.
        """
        while True:
            try:
                return queue.get(timeout=HANG_UP_SECONDS)
            except Empty:
                if self._stop or not self.generation_available():
                    raise UnavailableError(STOPS) from None
            check_connection(connection)

    @property
    def has_waiting(self) -> bool:
        """Return whether a request waits or is served."""
        return bool(
            self.requests.qsize()
            or len(self.registry.queue)
            or any(served.live for served in self._models)
        )

    @property
    def report(self) -> dict[str, Any]:
        """The cache figures of the model whose request has started last."""
        return {"backend": None} if self.model is None else self.model.report

    def health_report(self) -> tuple[int, dict[str, Any]]:
        """Status and body for GET /health."""
        status, body = self.health.report(self.generation_available(), self.has_waiting)
        return status, body | store_report(self.registry) | self.step_driver.condition.report()

    def give_up(self, error: Exception) -> None:
        """Fail all requests, while the generation thread hangs or after it has failed for good."""
        self._stop = True
        for item in [*self._live, *self.registry.queue.clear(), *self.requests.queue]:
            item.fail(error)

    def stop_and_join(self) -> None:
        """End the generation thread.

        A thread that hangs in loading a model is abandoned: it has nothing to save.
        """
        self.prompts.close()
        self._stop = True
        until = time.monotonic() + self._config.stop_seconds
        while self._generation_thread.is_alive():
            self._generation_thread.join(STOP_LOOKS_SECONDS)
            swap = self.registry.swap
            if swap is not None and swap.stage in LOADS and time.monotonic() > until:
                log.error("%s is still being loaded; the server ends without it", swap.load)
                return

    def wait_until_loaded(self) -> None:
        """Return when the default model, if there is one, is ready.

        Raises BlockpoolError if it cannot be loaded.
        """
        error = self._started.get()
        if error is not None:
            self.stop_and_join()
            raise BlockpoolError(
                f"Cannot serve {self.cli_args.model}: {type(error).__name__}: {error}"
            ) from error

    # -- the thread --------------------------------------------------------------------------------

    def _run_generate(self) -> None:
        """Take arrivals and step an engine, until the server stops.

        Ends at once if the default model cannot be loaded.
        """
        error = self._load_default()
        self._generation_failed = error is not None
        self._started.put(error)
        stream = mx.default_stream(mx.default_device())
        while not (self._stop or self._generation_failed):
            try:
                self._take_arrivals()
                stalls = self.health.is_stalled(self.has_waiting)
                self._drop_left()
                self.registry.make_plan()
                self._start_waiting(stream)
                self._change_models()
                self._step()
                if stalls and self.health.is_stalled(self.has_waiting):
                    self._drop_stalled()
            except BaseException as error:
                # The top of the thread: not even an exit that some model's code asks for may end
                # it.
                self._recover(error)
        self._shut_down()

    def _recover(self, error: BaseException) -> None:
        """Handle an exception: fail the running requests, or all requests if that fails or the
        thread was to exit.
        """
        self.step_driver.lose(error)
        log.exception("generation failed for %d requests", len(self._live), exc_info=error)
        cause = f"{type(error).__name__}: {error}"
        try:
            if not isinstance(error, Exception):
                raise error
            for served in self._models:
                served.fail(RuntimeError(f"The batch failed: {cause}"))
        except BaseException:
            log.exception("the generation thread starts again")
            self.health.restarts += 1
            self._fail_all(RuntimeError(f"The generation thread failed: {cause}"))

    @property
    def _models(self) -> list[LoadedModel]:
        return list(self.registry.loaded.values())

    @property
    def _live(self) -> list[Reply]:
        return [reply for served in self._models for reply in served.live.values()]

    def _load_default(self) -> Exception | None:
        try:
            self.step_driver.begin()
            key = self.registry.catalog.default
            if key is None:
                return None
            self.registry.check_files(key)
            threading.Thread(
                target=self.preparation.load, args=[key], name="tokenizer", daemon=True
            ).start()
            swap = self.registry.begin_with(key)
            while not self._stop and self.registry.advance() is None:
                pass
            if key in self.registry.loaded:
                self._choose(self.registry.loaded[key])
            return swap.error
        except Exception as error:
            # wait_until_loaded() raises whatever is wrong with a model's files.
            if isinstance(error, GroupLostError):
                self.step_driver.lose(error)
            return error

    def _take_arrivals(self) -> None:
        """Take what has arrived.

        An idle thread waits for the first request, and briefly for others that are being prepared.
        """
        idle = not (self._live or self.registry.queue or self.registry.swap)
        computes = any(served.live and not served.is_blocked for served in self._models)
        wait = self.step_driver.nap_seconds if idle else 0.0 if computes else CHANGE_SECONDS
        until = time.monotonic()
        # Later arrivals wait for the next turn: a chain of jobs must not delay a step.
        left = self.requests.qsize()
        try:
            while left > 0 or wait > 0:
                self._arrive(self.requests.get(block=wait > 0, timeout=wait))
                left -= 1
                if idle:
                    idle, until = False, time.monotonic() + self._config.join_seconds
                wait = max(until - time.monotonic(), 0) if self._preparing else 0.0
        except Empty:
            pass

    def _arrive(self, item: Any) -> None:
        if isinstance(item, Job):
            self.health.doing("a job")
            item.run(self.requests)
        elif isinstance(item, Reply):
            self.registry.enqueue(item)
        else:
            self.registry.take(item)

    def _drop_left(self) -> None:
        """Drop waiting requests and commands whose clients are gone, or whose model could not be
        loaded in time.
        """
        for place in self.registry.queue:
            item = place.item
            if item.is_left:
                self.registry.queue.remove(place)
                self.step_driver.drop(place.key, item)
                item.leave()
            elif item.sequence is None and place.key not in self.registry.loaded:
                seconds = self.registry.config.wait_seconds
                if self.registry.queue.clock() - place.arrived > seconds:
                    self.registry.queue.remove(place)
                    item.fail(
                        LoadError(
                            f"{place.key.model} could not be loaded within {seconds:g} seconds. "
                            "Try again later."
                        )
                    )

    def _drop_stalled(self) -> None:
        """Fail all requests after a turn that has computed nothing for too long, so that the
        next ones are served.
        """
        seconds = self.health.stall_seconds
        log.error("nothing was computed for %g seconds; all requests have failed", seconds)
        self.health.restarts += 1
        self.health.mark()
        self._fail_all(
            UnavailableError(
                f"Nothing was computed for {seconds:g} seconds while the request waited. Try again."
            )
        )

    def _fail_all(self, error: Exception) -> None:
        for served in self._models:
            served.fail_all(error)
        for item in self.registry.queue.clear():
            item.fail(error)
        self.registry.abort()

    def _shut_down(self) -> None:
        while not self.requests.empty():
            self._arrive(self.requests.get())
        self.step_driver.end()
        self._fail_all(UnavailableError(STOPS))
        # Models and caches must be dropped on this thread, under its stream.
        self.registry.speeds.remember_saved()
        self.registry.close()

    # -- models ------------------------------------------------------------------------------------

    def _change_models(self) -> None:
        """Continue the change of models; fail the requests for a model that cannot be loaded."""
        if not self.registry.begin():
            return
        self.health.doing("loading a model")
        self.maps.stop()
        swap = self.registry.advance()
        self.health.mark()
        if swap is None:
            return
        self._state_machine_cache.clear()  # its parsers refer to tokenizers
        for key in (swap.load, swap.unload):
            if key is not None:
                self.forms.drop(key)
        used_last = max(self._models, key=lambda served: served.used, default=None)
        if used_last is not None:
            self._choose(used_last)
        if swap.error is not None:
            for item in self.registry.queue.clear(swap.load):
                item.fail(swap.error)

    def _choose(self, served: LoadedModel) -> None:
        """Set the attributes by which mlx-lm's code finds the model."""
        self.model = served
        self.model_provider = served.provider
        self.prompt_cache = served.sequential

    # -- requests ----------------------------------------------------------------------------------

    def _start_waiting(self, stream: mx.Stream) -> None:
        """Start requests in the order of the queue.

        One that needs its model for itself waits until the model is idle.
        """
        passed: set[Any] = set()
        while (place := self.registry.queue.next(self.registry.usages(), passed)) is not None:
            served, item = self.registry.loaded[place.key], place.item
            try:
                if isinstance(item, LoadCommand):
                    self.registry.answer_load(item)
                elif not self._start(served, item, stream):
                    passed.add(place.key)
                    continue
                self.health.mark()
            except (Exception, SystemExit) as error:
                # A template or a model failed on a client's input. (Some model files call exit().)
                log.debug("request refused: %s: %s", type(error).__name__, error)
                item.fail(
                    error
                    if isinstance(error, Exception)
                    else RuntimeError(f"The model's code called exit(): {error}")
                )
            self.registry.queue.remove(place)

    def _start(self, served: LoadedModel, reply: Reply, stream: mx.Stream) -> bool:
        """Start or resume one request.

        Returns False if it needs the model to itself and others are running.
        """
        self._choose(served)
        served.open_engine()
        alone = served.engine is None or reply.request.prepared.images is not None
        if alone and served.live:
            return False
        served.join(self._models)
        if reply.sequence is not None:
            served.resume(reply)
        else:
            self._begin(served, reply, alone, stream)
        self.registry.use(served, reply.request.options.owner, reply.request.options.keep_seconds)
        return True

    def _begin(self, served: LoadedModel, reply: Reply, alone: bool, stream: mx.Stream) -> None:
        provider, default = served.provider, self._config.alone_tokens if alone else None
        reply.request.tokenizer = provider.tokenizer
        check_sampling(reply.args, provider.tokenizer, served.vocab_size)
        reply.args = fit(
            reply.args, reply.request.prepared.tokens, served.capacity(), served.positions, default
        )
        if alone:
            self._serve_alone(served, reply, stream)
        else:
            stop, text_sm = self._make_state_machine(
                provider.model_key, provider.tokenizer, reply.args.stop_words
            )
            served.insert(reply, stop, text_sm)

    def _serve_alone(self, served: LoadedModel, reply: Reply, stream: mx.Stream) -> None:
        """Serve a request through mlx-lm's sequential path."""
        self.health.doing("a request alone")
        serve_alone(self, served, reply, stream)
        self.health.idle()
        self._report()
        # Requests that have arrived meanwhile are served before the next choice of this one.
        self._take_arrivals()
        self.registry.queue.move_to_end(
            lambda item: (
                isinstance(item, Reply) and item is not reply and item.request is reply.request
            )
        )

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Return the tokenized prompt to mlx-lm's sequential path."""
        return tokenized(request.prepared)

    # -- a step of an engine -----------------------------------------------------------------------

    def _step(self) -> None:
        """Step the model that has used the least time and can compute.

        Blocked models check their reads from disk.
        """
        busy = [served for served in self._models if served.live]
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._report()
        if not busy:
            self._rest()
            return
        self.health.doing(STEPS)
        blocked = [served for served in busy if served.is_blocked]
        turn = min(
            (served for served in busy if served not in blocked),
            key=lambda served: served.spent,
            default=None,
        )
        for served in [*blocked, *([] if turn is None else [turn])]:
            try:
                if self.step_driver.step(served):
                    self.health.mark()
            except GroupError:
                raise
            except Exception as error:
                # Fail only this model's requests.
                log.exception("generation failed for %d requests", len(served.live))
                served.fail(RuntimeError(f"The batch failed: {type(error).__name__}: {error}"))
            if served.has_met_limits:
                # The limits that all replies with the same grammar share.
                self.forms.drop(served.key)
                served.has_met_limits = False
            if not served.live:
                served.update_report()

    def _rest(self) -> None:
        if self.registry.swap is None and not self.has_waiting:
            self.health.idle()
        elif self.registry.swap is None:
            self.health.doing("waiting for a model")
        self.step_driver.idle(self._models, rests=True)
        self.registry.speeds.catch_up()

    def _report(self) -> None:
        """Update the figures of all models.

        While some are busy, idle ones write in the background; else _rest() does it.
        """
        self._reported = time.monotonic()
        self.forms.drop_idle(self.registry.queue.clock())
        if self._live:
            self.step_driver.idle(self._models)
        for served in self._models:
            served.update_report()
