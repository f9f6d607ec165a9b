"""The generation thread: takes requests, batches them over the pool, sends tokens back.

mlx-lm's BatchGenerator computes, mlx-lm's ResponseGenerator tokenizes and serves what cannot be batched; this decides when a
request starts and what is kept of it. A request's failure is that request's failure: the thread goes on.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from queue import Empty, Queue
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.server import (
    GenerationContext,
    Response,
    ResponseGenerator,
    _format_top_logprobs,
    _image_parts,
    _make_logits_processors,
    _make_sampler,
)

from ..errors import BlockpoolError, PoolExhaustedError
from .prompt_cache import ServerPromptCache
from .provider import BlockpoolModelProvider
from .requests import Live, Waiting, check_sampling, cut_segments, fit, text_of

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.1
# Fewer tokens than these are computed again rather than waited for.
SHARED_TOKENS = 64


class BlockpoolGenerator(ResponseGenerator):  # type: ignore[misc]
    """mlx-lm's ResponseGenerator with admission by blocks and a loop that survives."""

    prompt_cache: ServerPromptCache

    def __init__(self, model_provider: BlockpoolModelProvider, prompt_cache: ServerPromptCache) -> None:
        self._waiting: deque[Waiting] = deque()
        self._live: dict[int, Live] = {}
        self._batch: BatchGenerator | None = None
        self._opened: Any = None
        self._vocab_size = 0
        self._may_admit = True
        self._started: Queue[Exception | None] = Queue()
        super().__init__(model_provider, prompt_cache)

    def wait_until_loaded(self) -> None:
        """Return when the default model, if there is one, is ready. Raises BlockpoolError if it cannot be loaded."""
        error = self._started.get()
        if error is not None:
            self.stop_and_join()
            raise BlockpoolError(f"Cannot serve {self.cli_args.model}: {type(error).__name__}: {error}") from error

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _generate(self) -> None:
        stream = mx.default_stream(mx.default_device())
        self._started.put(self._load_default())
        while not self._stop:
            self._take_arrivals()
            try:
                self._admit(stream)
                if self._live:
                    self._step()
            except Exception as error:
                # The top of the thread: whatever went wrong, it was these requests and not the next ones.
                log.exception("generation failed for %d requests", len(self._live))
                self._fail_all(error)
        self._shut_down()

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
        busy = bool(self._live or self._waiting)
        try:
            while True:
                self._waiting.append(Waiting(*self.requests.get(block=not busy, timeout=None if busy else IDLE_SECONDS)))
                self._may_admit = busy = True
        except Empty:
            pass

    def _fail_all(self, error: Exception) -> None:
        for live in self._live.values():
            live.fail(error)
        self._live.clear()
        self._may_admit = True
        self._close_batch()
        self.prompt_cache.release_all()
        self.prompt_cache.update_report()

    def _shut_down(self) -> None:
        self._fail_all(RuntimeError("The server is shutting down."))
        for waiting in self._waiting:
            waiting.fail(RuntimeError("The server is shutting down."))
        # Model and caches must go on this thread, under its stream.
        self._let_go()
        self.model_provider.reset()
        gc.collect()

    # -- models --------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Give a newly loaded model its pool."""
        provider = self.model_provider
        if provider.model is self._opened:
            return
        self._opened = provider.model
        self.prompt_cache.open(provider)
        self._vocab_size = provider.model(mx.zeros((1, 1), mx.int32)).shape[-1]

    def _let_go(self) -> None:
        """Refer to the loaded model and its pool no longer: both must be gone before the next ones take memory."""
        self._close_batch()
        self.prompt_cache.close()
        self._opened = None

    def _close_batch(self) -> None:
        if self._batch is not None:
            self._batch.close()
            self._batch = None

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self, stream: mx.Stream) -> None:
        """Start waiting requests, first come first served, as long as there is room."""
        while self._waiting and self._may_admit:
            waiting = self._waiting[0]
            try:
                started = self._start(waiting, stream)
            except Exception as error:
                # A client's input met a template, tokenizer or model that could not take it.
                log.info("request refused: %s: %s", type(error).__name__, error)
                waiting.fail(error)
                started = True
            if started:
                self._waiting.popleft()
            else:
                # Until a live request ends or leaves something to share.
                self._may_admit = False

    def _start(self, waiting: Waiting, stream: mx.Stream) -> bool:
        """Start one request; False if it has to wait for those that are live."""
        args = waiting.args
        if not self.model_provider.has(args.model):
            if self._live:
                return False
            self.model_provider.check(args.model)
            self._let_go()
            self.model_provider.load(args.model.model, args.model.adapter, args.model.draft)
        self._open()
        batchable = self.prompt_cache.batches and self._is_batchable(args) and not any(_image_parts(waiting.request.messages))
        if not batchable and self._live:
            return False
        tokenizer = self.model_provider.tokenizer
        if waiting.tokenized is None:
            waiting.tokenized = self._tokenize(tokenizer, waiting.request, args)
            check_sampling(args, tokenizer, self._vocab_size)
        waiting.args = args = fit(args, waiting.tokenized[0], self.prompt_cache.capacity())
        self.prompt_cache.max_tokens = args.max_tokens
        if not batchable:
            self._serve_single((waiting.queue, waiting.request, args), stream)
            return True
        if self._is_being_computed(waiting.tokenized[0]):
            return False
        try:
            self._insert(waiting)
        except PoolExhaustedError:
            if self._live:
                return False
            raise
        return True

    def _is_being_computed(self, prompt: list[int]) -> bool:
        """Whether a live request is about to leave enough of this prompt's beginning to wait for it."""
        by_chunk = self.prompt_cache.keeps_chunks
        shared = max((live.leaves(prompt, by_chunk) for live in self._live.values()), default=0)
        return shared - self.prompt_cache.known_tokens(prompt) >= SHARED_TOKENS

    def _insert(self, waiting: Waiting) -> None:
        assert waiting.tokenized is not None
        prompt, segments, types, initial_state, _ = waiting.tokenized
        args, provider, tokenizer = waiting.args, self.model_provider, self.model_provider.tokenizer
        stop_sequences, text_sm = self._make_state_machine(provider.model_key, tokenizer, args.stop_words)
        caches, rest = self.prompt_cache.fetch_nearest_cache(provider.model_key, prompt)
        cached = len(prompt) - len(rest)
        log.info("prompt of %d tokens: %s", len(prompt), self.prompt_cache.lookup or f"{cached} cached")
        segments, types = cut_segments(segments, types, cached)
        context = GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_sm,
            initial_state=initial_state,
            prompt=prompt,
            prompt_cache_count=cached,
        )
        if self._batch is None:
            self._batch = BatchGenerator(
                provider.model,
                completion_batch_size=self.cli_args.decode_concurrency,
                prefill_batch_size=self.cli_args.prompt_concurrency,
                prefill_step_size=self.cli_args.prefill_step_size,
                stream=mx.default_stream(mx.default_device()),
            )
        (uid,) = self._batch.insert_segments(
            segments=[segments],
            max_tokens=[args.max_tokens],
            caches=[caches],
            all_tokens=[prompt[:cached]],
            samplers=[_make_sampler(args, tokenizer)],
            logits_processors=[_make_logits_processors(args)],
            stop_sequences=[stop_sequences],
        )
        self._live[uid] = Live(waiting.queue, context, tokenizer, tokenizer.detokenizer, types[::-1], args.top_logprobs)
        waiting.queue.put(context)
        self.prompt_cache.update_report()

    # -- a step of the batch -------------------------------------------------------------------------------------------

    def _step(self) -> None:
        assert self._batch is not None
        prompt_responses, generation_responses = self._batch.next()
        for response in prompt_responses:
            self._on_prompt(response)
        for response in generation_responses:
            try:
                self._on_token(response)
            except Exception as error:
                # A reply that cannot be put into words is one request's failure, not the batch's.
                log.exception("request %d failed", response.uid)
                self._drop(response, error)
        for uid in [uid for uid, live in self._live.items() if live.context._should_stop]:
            self._cancel(uid)

    def _on_prompt(self, response: Any) -> None:
        live = self._live[response.uid]
        live.queue.put(response.progress)
        live.in_prefill = not response.end_of_prompt
        if response.end_of_prompt:
            return
        if response.end_of_segment or self.prompt_cache.keeps_chunks:
            kinds = live.segment_types
            kind = kinds.pop() if response.end_of_segment and kinds else "user"
            caches, tokens = self._batch.extract_cache([response.uid])[response.uid]  # type: ignore[union-attr]
            self.prompt_cache.keep(self.model_provider.model_key, tokens[:], caches, kind)
            self._may_admit = True

    def _on_token(self, response: Any) -> None:
        live = self._live[response.uid]
        live.queue.put(
            Response(
                text_of(live.detokenizer, response),
                response.token,
                response.logprobs[response.token].item(),
                response.finish_reason,
                _format_top_logprobs(response.logprobs, live.top_logprobs, live.tokenizer),
            )
        )
        if response.finish_reason is not None:
            # Live until it is kept, so that a failure to keep it reaches its client.
            self._keep_finished(response.all_tokens, response.prompt_cache)
            del self._live[response.uid]
            live.queue.put(None)

    def _drop(self, response: Any, error: Exception) -> None:
        """End one request with its error; nothing of it is kept."""
        self._may_admit = True
        self._live.pop(response.uid).fail(error)
        removed = self._batch.remove([response.uid], return_prompt_caches=True)  # type: ignore[union-attr]
        self.prompt_cache.release(response.prompt_cache or removed[response.uid][0])

    def _cancel(self, uid: int) -> None:
        """The client is gone; what was computed for it stays known."""
        del self._live[uid]
        self._may_admit = True
        caches, tokens = self._batch.remove([uid], return_prompt_caches=True)[uid]  # type: ignore[union-attr]
        if tokens:
            self._keep_finished(tokens, caches)

    def _keep_finished(self, tokens: list[int], caches: list[Any]) -> None:
        self.prompt_cache.insert_cache(self.model_provider.model_key, tokens[:], caches, cache_type="assistant")
        self._may_admit = True
