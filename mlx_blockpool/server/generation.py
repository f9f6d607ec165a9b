"""The generation thread: takes requests, puts them into the engine, sends tokens back.

mlx-lm's ResponseGenerator tokenizes, and serves one by one what the engine does not take (drafts, images, quantised caches). A
request's failure is that request's failure: the thread goes on, and starts anew if it ever dies.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from queue import Empty, Queue
from typing import Any

import mlx.core as mx
from mlx_lm.server import GenerationContext, ResponseGenerator, _image_parts, _make_logits_processors

from ..config import EngineConfig
from ..engine.engine import BlockPoolBatchEngine
from ..engine.request import Event, Failed, Progress, Request, Started, Token
from ..errors import BlockpoolError
from .health import Health
from .prompt_cache import ServerPromptCache
from .provider import BlockpoolModelProvider
from .requests import Live, Marking, Waiting, check_sampling, fit, marks_of
from .sampling import make_sampler

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.1
REPORT_SECONDS = 0.5


class BlockpoolGenerator(ResponseGenerator):  # type: ignore[misc]
    """mlx-lm's ResponseGenerator around a BlockPoolBatchEngine."""

    prompt_cache: ServerPromptCache

    def __init__(self, model_provider: BlockpoolModelProvider, prompt_cache: ServerPromptCache, config: EngineConfig) -> None:
        self.health = Health(config.stall_seconds)
        self._config = config
        self._waiting: deque[Waiting] = deque()
        self._live: dict[int, Live] = {}
        self._engine: BlockPoolBatchEngine | None = None
        self._opened: Any = None
        self._vocab_size = 0
        self._reported = 0.0
        self._started: Queue[Exception | None] = Queue()
        super().__init__(model_provider, prompt_cache)

    def wait_until_loaded(self) -> None:
        """Return when the default model, if there is one, is ready. Raises BlockpoolError if it cannot be loaded."""
        error = self._started.get()
        if error is not None:
            self.stop_and_join()
            raise BlockpoolError(f"Cannot serve {self.cli_args.model}: {type(error).__name__}: {error}") from error

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run_generate(self) -> None:
        """Supervise _generate(): whatever ends it, the requests learn of it and the next ones are served."""
        self._started.put(self._load_default())
        while not self._stop:
            try:
                self._generate()
            except BaseException as error:
                # The top of the thread: not even an exit that some model's code asks for may end it.
                log.exception("the generation thread starts anew; %d requests have failed", len(self._live))
                self.health.restarts += 1
                self._fail_all(RuntimeError(f"The generation thread failed: {type(error).__name__}: {error}"))
        self._shut_down()

    def _generate(self) -> None:
        stream = mx.default_stream(mx.default_device())
        while not self._stop:
            self._take_arrivals()
            try:
                self._start_waiting(stream)
                self._step()
            except Exception as error:
                # Whatever went wrong, it was these requests and not the next ones.
                log.exception("generation failed for %d requests", len(self._live))
                self._fail_live(RuntimeError(f"The batch failed: {type(error).__name__}: {error}"))

    def _load_default(self) -> Exception | None:
        try:
            self.model_provider.load_default()
            if self.model_provider.model is not None:
                self._open()
        except Exception as error:
            # Whatever is wrong with a model's files is for wait_until_loaded to tell.
            return error
        return None

    def _take_arrivals(self) -> None:
        """Take what has arrived. An idle thread waits for the first, and a moment more for those that come with it."""
        idle = not (self._live or self._waiting)
        until = time.monotonic()
        try:
            while True:
                wait = IDLE_SECONDS if idle else until - time.monotonic()
                self._waiting.append(Waiting(*self.requests.get(block=wait > 0, timeout=max(wait, 0))))
                if idle:
                    idle, until = False, time.monotonic() + self._config.join_seconds
        except Empty:
            pass

    def _fail_live(self, error: Exception) -> None:
        """Fail those whose caches cannot be trusted after an error: all that had any."""
        uids = self._engine.reset() if self._engine is not None else list(self._live)
        for live in [self._live.pop(uid) for uid in uids if uid in self._live]:
            live.fail(error)
        self.prompt_cache.release_all()
        self._report()

    def _fail_all(self, error: Exception) -> None:
        self._close_engine()
        for live in self._live.values():
            live.fail(error)
        for waiting in self._waiting:
            waiting.fail(error)
        self._live.clear()
        self._waiting.clear()
        self.prompt_cache.release_all()
        self._report()

    def _shut_down(self) -> None:
        self._fail_all(RuntimeError("The server is shutting down."))
        # Model and caches must go on this thread, under its stream.
        self._let_go()
        self.model_provider.reset()
        gc.collect()

    # -- models --------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Give a newly loaded model its pool and its engine."""
        provider = self.model_provider
        if provider.model is not self._opened:
            self.prompt_cache.open(provider)
            self._vocab_size = provider.model(mx.zeros((1, 1), mx.int32)).shape[-1]
            self._opened = provider.model
        caches = self.prompt_cache.caches
        if self._engine is None and caches is not None:
            self._engine = BlockPoolBatchEngine(provider.model, caches, self._config)

    def _let_go(self) -> None:
        """Refer to the loaded model and its pool no longer: both must be gone before the next ones take memory."""
        self._close_engine()
        self.prompt_cache.close()
        self._opened = None

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    # -- requests ------------------------------------------------------------------------------------------------------

    def _start_waiting(self, stream: mx.Stream) -> None:
        """Hand requests on in the order of their arrival. One that needs the model to itself waits for all others."""
        while self._waiting:
            waiting = self._waiting[0]
            try:
                if not self._start(waiting, stream):
                    return
            except (Exception, SystemExit) as error:
                # A client's input met a template, tokenizer or model that could not take it. (Some model files call exit().)
                log.info("request refused: %s: %s", type(error).__name__, error)
                waiting.fail(error if isinstance(error, Exception) else RuntimeError(f"The model's code asked to exit: {error}"))
            self._waiting.popleft()

    def _start(self, waiting: Waiting, stream: mx.Stream) -> bool:
        """Give one request to the engine or serve it; False if it has to wait for those that are live."""
        args = waiting.args
        if not self.model_provider.has(args.model):
            if self._live:
                return False
            self.model_provider.check(args.model)
            self._let_go()
            self.health.doing("loading a model")
            self.model_provider.load(args.model.model, args.model.adapter, args.model.draft)
        self._open()
        alone = self._engine is None or any(_image_parts(waiting.request.messages))
        if alone and self._live:
            return False
        if waiting.tokenized is None:
            waiting.tokenized = self._tokenize(self.model_provider.tokenizer, waiting.request, args)
            check_sampling(args, self.model_provider.tokenizer, self._vocab_size)
        waiting.args = fit(args, waiting.tokenized[0], self.prompt_cache.capacity())
        if alone:
            self._serve_alone(waiting, stream)
        else:
            self._insert(waiting)
        return True

    def _serve_alone(self, waiting: Waiting, stream: mx.Stream) -> None:
        """Through mlx-lm's sequential path, with room for what a draft writes and takes back."""
        self.health.doing("a request alone")
        self.prompt_cache.max_tokens = waiting.args.max_tokens
        self._serve_single((Marking(waiting.queue, self.health.mark), waiting.request, waiting.args), stream)
        self.health.idle()
        self._report()

    def _insert(self, waiting: Waiting) -> None:
        assert waiting.tokenized is not None
        assert self._engine is not None
        prompt, segments, types, initial_state, _ = waiting.tokenized
        args, provider, tokenizer = waiting.args, self.model_provider, self.model_provider.tokenizer
        stop_sequences, text_sm = self._make_state_machine(provider.model_key, tokenizer, args.stop_words)
        context = GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_sm,
            initial_state=initial_state,
            prompt=prompt,
        )
        request = Request(
            prompt,
            args.max_tokens,
            make_sampler(args, tokenizer),
            _make_logits_processors(args),
            stop_sequences,
            marks_of(segments, types),
            getattr(waiting.request, "agent", None),
        )
        uid = self._engine.insert(request)
        self._live[uid] = Live(waiting.queue, context, tokenizer, tokenizer.detokenizer, args.top_logprobs)

    # -- a step of the engine ------------------------------------------------------------------------------------------

    def _step(self) -> None:
        engine = self._engine
        if engine is None or not self._live:
            self.health.idle()
            self.prompt_cache.idle()
            self._report_again()
            return
        self.health.doing("prefill and decode")
        for event in engine.next():
            try:
                self._tell(event)
            except Exception as error:
                # A reply that cannot be put into words is one request's failure, not the batch's.
                log.exception("request %d failed", event.uid)
                engine.cancel(event.uid)
                self._live.pop(event.uid).fail(error)
        self.health.mark()
        for uid in [uid for uid, live in self._live.items() if live.context._should_stop]:
            engine.cancel(uid)
            del self._live[uid]
        if not self._live:
            self._report()
        self._report_again()

    def _tell(self, event: Event) -> None:
        live = self._live[event.uid]
        if isinstance(event, Token):
            live.tell(event)
            if event.finish_reason is not None:
                del self._live[event.uid]
        elif isinstance(event, Progress):
            live.queue.put((event.done, event.total))
        elif isinstance(event, Started):
            log.info("prompt of %d tokens: %s", len(live.context.prompt), event.why or f"{event.cached} cached")
            live.context.prompt_cache_count = event.cached
            live.queue.put(live.context)
        elif isinstance(event, Failed):
            self._live.pop(event.uid).fail(event.error)

    def _report_again(self) -> None:
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._report()

    def _report(self) -> None:
        self._reported = time.monotonic()
        engine = self._engine
        if engine is None:
            self.prompt_cache.update_report()
        else:
            self.prompt_cache.update_report(engine.live, engine.counts)
