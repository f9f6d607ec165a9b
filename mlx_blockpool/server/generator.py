"""The generation thread: takes requests off one queue, loads their models, runs the engines' steps, puts tokens on reply queues.

Prompts arrive tokenized. mlx-lm's ResponseGenerator serves one by one what the engine does not take (drafts, images). A request's
failure ends that request alone: the thread continues, and is restarted if it ever dies.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from queue import Empty, Queue
from typing import Any

import mlx.core as mx

from ..config import ServerConfig
from ..engine.stock import GuardedPromptCache
from ..errors import BlockpoolError, GroupError, GroupLostError, LoadError, UnavailableError
from ..mlx_lm_compat import ResponseGenerator
from ..store.agent_files import Agents
from ..store.paths import default_folder
from ..store.spool import Spool
from .access import AccessPolicy, ByteBudget
from .api.responses_kept import KeptResponses
from .explain import Explanations
from .forms import Forms
from .health import Health
from .jobs import Job
from .live.snapshot import Snapshots
from .model import LoadedModel
from .models.provider import BlockpoolModelProvider
from .models.registry import LoadCommand, ModelRegistry
from .normalise import Normalisers
from .page.cache_map import CacheMaps
from .page.hour import Hour
from .prompts.preparation import PromptPreparation, Turns
from .prompts.workers import PromptWorkers
from .ranked.leader import turns_of
from .replies import Choices, HangUps, Reply, fit, replies_to
from .sampling import check_sampling
from .sequential import SequentialCache, serve_alone, tokenized

log = logging.getLogger(__name__)

# How often the thread looks at requests that wait for a disk, and at a model that is being loaded.
CHANGE_SECONDS = 0.005
REPORT_SECONDS = 0.5
STOP_LOOKS_SECONDS = 0.05
STOPS = "The server is shutting down."
# The stages of a change in which nothing is saved.
LOADS = ("checking", "loading", "hashing", "warming")


class BlockpoolGenerator(ResponseGenerator):  # type: ignore[misc]
    """mlx-lm's ResponseGenerator around a registry of models with an engine each.

    generate_choices() runs on the thread of a socket and prepares the prompt there; everything below _run_generate() runs on
    the generation thread.

    model:        the one whose request has started last; mlx-lm reads its `model_provider` and `prompt_cache`.
    normalisers, access, warm_up, responses, spool: for the socket threads, as is `pixels`, the budget for all images.
    explanations: how the last requests used the cache. forms: compiles the forms of requests.
    maps, hour:   what the page shows. snapshots: what readers of events begin with.
    turns:        how the models compute, with other ranks or without. agent_files: those of the store; None without one.
    """

    prompt_cache: SequentialCache
    model_provider: BlockpoolModelProvider
    model: LoadedModel | None = None

    def __init__(self, model_provider: BlockpoolModelProvider, config: ServerConfig, normalisers: Normalisers) -> None:
        store = config.store
        self.access = AccessPolicy(config.access)
        self.explanations = Explanations()
        self.maps = CacheMaps(self)
        self.hour = Hour()
        self.store_config = store
        self.agent_files = None if store is None else Agents(store.folder or default_folder())
        self.warm_up: Any = None
        self.kv_events: threading.Thread | None = None
        self.normalisers = normalisers
        self.responses = KeptResponses()
        self.spool = Spool.of(store)
        self.health = Health(config.engine.stall_seconds)
        self.hang_ups = HangUps()
        self.registry = ModelRegistry(model_provider, config)
        self.snapshots = Snapshots(self)
        self.forms = Forms(config.forms)
        self.prompts = PromptWorkers(config.prompts)
        self.pixels = ByteBudget(config.images.pixel_bytes)
        self.preparation = PromptPreparation(self.prompts, config.images, self.registry, self.forms)
        self.turns = turns_of(self, config)
        self._order = Turns()
        self._config = config.engine
        self._reported = 0.0
        self._started: Queue[Exception | None] = Queue()
        super().__init__(model_provider, SequentialCache(GuardedPromptCache()))

    # -- from any thread -----------------------------------------------------------------------------------------------

    def generate_choices(self, request: Any, generation_args: Any, progress_callback: Any = None) -> Choices:
        """Replace mlx-lm's generate(). Yields pairs of a choice's index and its context, then its Responses.

        The last part of a choice is None or the exception that has ended it, which leaves the others alone. Closing the iterator
        ends what is left. Once the client of `request.connection` hangs up, the last part of each is a ConnectionAbortedError.
        Requests of one agent are queued in the order of their arrival. Raises what ModelRegistry.find() and PromptPreparation
        raise.
        """
        self.preparation.check(request, generation_args)
        args = replace(generation_args, model=self.registry.find(generation_args.model))
        parts: Queue[tuple[int, Any]] = Queue()
        with self._order.turn(request.options.agent):
            args = self.preparation.prepare(request, args)
            replies = replies_to(request, args, self.registry.events_of(args.model), parts)
            for reply in replies:
                self.hang_ups.watch(request.connection, reply)
                self.requests.put(reply)
        try:
            left = set(range(request.choices))
            while left:
                index, part = self.receive(parts)
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

    def receive(self, queue: Queue[Any]) -> Any:
        """The next item that the generation thread puts on a queue. Raises UnavailableError if none can come any more."""
        while True:
            try:
                return queue.get(timeout=1.0)
            except Empty:
                if self._stop or not self.generation_available():
                    raise UnavailableError(STOPS) from None

    @property
    def has_waiting(self) -> bool:
        """Return whether a request waits or is served."""
        return bool(self.requests.qsize() or len(self.registry.queue) or any(served.live for served in self._models))

    @property
    def report(self) -> dict[str, Any]:
        """The cache figures of the model whose request has started last."""
        return {"backend": None} if self.model is None else self.model.report

    def run_command(self, command: LoadCommand, waits: bool) -> None:
        """Have a model loaded or unloaded and, if the client `waits`, return once it is. Raises why it is not."""
        self.requests.put(command)
        error = self.receive(command.queue) if waits else None
        if error is not None:
            raise error

    def give_up(self, error: Exception) -> None:
        """Fail all requests, while the generation thread hangs or after it has failed for good."""
        self._stop = True
        for item in [*self._live, *self.registry.queue.clear(), *self.requests.queue]:
            item.fail(error)

    def stop_and_join(self) -> None:
        """End the generation thread. One that hangs in a model's files is left: nothing of a model that comes is to be saved."""
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
        """Return when the default model, if there is one, is ready. Raises BlockpoolError if it cannot be loaded."""
        error = self._started.get()
        if error is not None:
            self.stop_and_join()
            raise BlockpoolError(f"Cannot serve {self.cli_args.model}: {type(error).__name__}: {error}") from error

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run_generate(self) -> None:
        """Turn after turn until the server stops: take arrivals, start requests, change models, step an engine."""
        self._started.put(self._load_default())
        stream = mx.default_stream(mx.default_device())
        while not self._stop:
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
                # The top of the thread: not even an exit that some model's code asks for may end it.
                self._recover(error)
        self._shut_down()

    def _recover(self, error: BaseException) -> None:
        """After an exception: fail the running requests, or all of them where that fails or the thread was to exit."""
        self.turns.lose(error)
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
            self.turns.begin()
            key = self.registry.catalog.default
            if key is None:
                return None
            self.registry.check_files(key)
            threading.Thread(target=self.preparation.load, args=[key], name="tokenizer", daemon=True).start()
            swap = self.registry.begin_with(key)
            while not self._stop and self.registry.advance() is None:
                pass
            if key in self.registry.loaded:
                self._choose(self.registry.loaded[key])
            return swap.error
        except Exception as error:
            # wait_until_loaded() raises whatever is wrong with a model's files.
            if isinstance(error, GroupLostError):
                self.turns.lose(error)
            return error

    def _take_arrivals(self) -> None:
        """Take what has arrived. An idle thread waits for the first request, and a moment more for others that come with it."""
        idle = not (self._live or self.registry.queue or self.registry.swap)
        computes = any(served.live and not served.is_blocked for served in self._models)
        wait = self.turns.nap_seconds if idle else 0.0 if computes else CHANGE_SECONDS
        until = time.monotonic()
        # What comes meanwhile waits for the next turn: jobs that follow each other must not hold up a step.
        left = self.requests.qsize()
        try:
            while left > 0 or wait > 0:
                self._arrive(self.requests.get(block=wait > 0, timeout=wait))
                left -= 1
                if idle:
                    idle, until = False, time.monotonic() + self._config.join_seconds
                wait = max(until - time.monotonic(), 0)
        except Empty:
            pass

    def _arrive(self, item: Any) -> None:
        if isinstance(item, Job):
            self.health.doing("a job")
            item.run()
        elif isinstance(item, Reply):
            self.registry.queue.add(item.args.model, item, item.request.options.priority, item.request.options.agent)
        elif item.unload:
            self.registry.unload(item)
        else:
            self.registry.queue.add(item.key, item)

    def _drop_left(self) -> None:
        """Drop waiting requests whose clients are gone, or whose model could not be loaded in time."""
        for place in list(self.registry.queue):
            reply = place.item
            if not isinstance(reply, Reply):
                continue
            if reply.is_left:
                self.registry.queue.remove(place)
                self.turns.drop(place.key, reply)
                reply.leave()
            elif reply.sequence is None and place.key not in self.registry.loaded:
                seconds = self.registry.config.wait_seconds
                if self.registry.queue.clock() - place.arrived > seconds:
                    self.registry.queue.remove(place)
                    reply.fail(LoadError(f"{place.key.model} could not be loaded within {seconds:g} seconds. Try again later."))

    def _drop_stalled(self) -> None:
        """Fail all requests after a turn that has computed nothing for too long, so that the next ones are served."""
        seconds = self.health.stall_seconds
        log.error("nothing was computed for %g seconds; all requests have failed", seconds)
        self.health.restarts += 1
        self.health.mark()
        self._fail_all(UnavailableError(f"Nothing was computed for {seconds:g} seconds while the request waited. Try again."))

    def _fail_all(self, error: Exception) -> None:
        for served in self._models:
            served.fail_all(error)
        for item in self.registry.queue.clear():
            item.fail(error)
        self.registry.abort()

    def _shut_down(self) -> None:
        while not self.requests.empty():
            self._arrive(self.requests.get())
        self.turns.end()
        self._fail_all(UnavailableError(STOPS))
        # Models and caches must be dropped on this thread, under its stream.
        self.registry.close()

    # -- models --------------------------------------------------------------------------------------------------------

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
        # They refer to tokenizers.
        self._state_machine_cache.clear()
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
        """Have mlx-lm's own code work with this model."""
        self.model, self.model_provider, self.prompt_cache = served, served.provider, served.sequential

    # -- requests ------------------------------------------------------------------------------------------------------

    def _start_waiting(self, stream: mx.Stream) -> None:
        """Start requests in the order of the queue. One that needs its model to itself waits for all others of that model."""
        passed: set[Any] = set()
        while (place := self.registry.queue.next(self.registry.usages(), passed)) is not None:
            served, item = self.registry.loaded[place.key], place.item
            try:
                if isinstance(item, LoadCommand):
                    self.registry.use(served, item.keep_seconds)
                    item.done()
                elif not self._start(served, item, stream):
                    passed.add(place.key)
                    continue
                self.health.mark()
            except (Exception, SystemExit) as error:
                # A client's input met a template or model that could not take it. (Some model files call exit().)
                log.debug("request refused: %s: %s", type(error).__name__, error)
                item.fail(error if isinstance(error, Exception) else RuntimeError(f"The model's code called exit(): {error}"))
            self.registry.queue.remove(place)

    def _start(self, served: LoadedModel, reply: Reply, stream: mx.Stream) -> bool:
        """Start or resume one request. Returns False if it needs the model to itself and others are running."""
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
        self.registry.use(served, reply.request.options.keep_seconds)
        return True

    def _begin(self, served: LoadedModel, reply: Reply, alone: bool, stream: mx.Stream) -> None:
        provider, default = served.provider, self._config.alone_tokens if alone else None
        reply.request.tokenizer = provider.tokenizer
        check_sampling(reply.args, provider.tokenizer, served.vocab_size)
        reply.args = fit(reply.args, reply.request.prepared.tokens, served.capacity(), served.positions, default)
        if alone:
            self._serve_alone(served, reply, stream)
        else:
            stop, text_sm = self._make_state_machine(provider.model_key, provider.tokenizer, reply.args.stop_words)
            served.insert(reply, stop, text_sm)

    def _serve_alone(self, served: LoadedModel, reply: Reply, stream: mx.Stream) -> None:
        """Through mlx-lm's sequential path."""
        self.health.doing("a request alone")
        serve_alone(self, served, reply, stream)
        self.health.idle()
        self._report()
        # What has arrived meanwhile goes before the next choice of this request.
        self._take_arrivals()
        self.registry.queue.go_behind(reply.is_choice_beside)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Return the tokenized prompt to mlx-lm's sequential path."""
        return tokenized(request.prepared)

    # -- a step of an engine -------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """A step of the model that has had the least time, of those that can compute; blocked models look at their disks."""
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._report()
        busy = [served for served in self._models if served.live]
        if not busy:
            self._rest()
            return
        self.health.doing("prefill and decode")
        blocked = [served for served in busy if served.is_blocked]
        turn = min((served for served in busy if served not in blocked), key=lambda served: served.spent, default=None)
        for served in [*blocked, *([] if turn is None else [turn])]:
            try:
                if self.turns.step(served):
                    self.health.mark()
            except GroupError:
                raise
            except Exception as error:
                # It was the requests of this model, and not the next ones.
                log.exception("generation failed for %d requests", len(served.live))
                served.fail(RuntimeError(f"The batch failed: {type(error).__name__}: {error}"))
            if served.has_met_limits:
                # Of those that all replies in a grammar share.
                self.forms.drop(served.key)
                served.has_met_limits = False
            if not served.live:
                served.update_report()

    def _rest(self) -> None:
        if self.registry.swap is None and not self.has_waiting:
            self.health.idle()
        elif self.registry.swap is None:
            self.health.doing("waiting for a model")
        self.turns.idle(self._models, rests=True)

    def _report(self) -> None:
        """Update the figures of all models; idle ones write behind meanwhile."""
        self._reported = time.monotonic()
        self.turns.idle(self._models)
        for served in self._models:
            served.update_report()
