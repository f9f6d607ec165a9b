"""One request on its way through the generation thread: what it asked for, and whether it can be served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx

from ..config import WHAT_FITS, EngineConfig
from ..engine.decode import mend_random_state
from ..engine.request import Running, Token
from ..errors import RequestTooLargeError, TooManyPositionsError
from ..mlx_lm_compat import GenerationContext, Response, format_top_logprobs, make_logits_processors
from .explained import Explained
from .replies import Reply
from .sampling import make_sampler


@dataclass
class Waiting:
    """A request that was not started. `tokenized` is filled in once."""

    queue: Reply
    request: Any
    args: Any
    tokenized: tuple[Any, ...] | None = None

    def fail(self, error: Exception) -> None:
        # Without its traceback, whose frames hold caches and with them blocks.
        self.queue.put(error.with_traceback(None))


@dataclass
class Live:
    """A request that the engine has."""

    queue: Reply
    context: Any
    tokenizer: Any
    detokenizer: Any
    top_logprobs: int
    explained: Explained | None = None
    is_begun: bool = False

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for the rest of the reply."""
        return self.queue.is_hung_up or bool(self.context._should_stop)

    def begin(self, cached: int) -> None:
        """Let the client's thread answer, which is told of progress from now on; `cached` tokens need not be computed."""
        self.context.prompt_cache_count = cached
        if not self.is_begun:
            self.is_begun = True
            self.queue.put(self.context)

    def fail(self, error: Exception) -> None:
        self.queue.put(error.with_traceback(None))

    def tell(self, event: Token) -> None:
        """Send a token to the client, with the text that it adds."""
        self.queue.put(
            Response(
                text_of(self.detokenizer, event),
                event.token,
                event.logprobs[event.token].item(),
                event.finish_reason,
                format_top_logprobs(event.logprobs, self.top_logprobs, self.tokenizer),
            )
        )
        if event.finish_reason is not None:
            self.queue.put(None)


@dataclass
class Suspended:
    """A request whose model had to go before its reply has ended: it goes on once the model is there again."""

    running: Running
    live: Live

    def fail(self, error: Exception) -> None:
        self.live.fail(error)


class Marking:
    """A client's queue that notes when something was put on it: the sequential path makes progress in no other way.

    The reply's context waits for what comes next: by then its prompt was looked up, which `started` is told. Where the client
    has hung up, a prefill ends with ConnectionAbortedError and a reply with the token that was computed last.
    """

    def __init__(self, queue: Reply, mark: Callable[[], None], started: Callable[[Any], None]) -> None:
        self._queue = queue
        self._mark = mark
        self._started = started
        self._context: Any = None
        self._told: Any = None

    def put(self, item: Any) -> None:
        self._mark()
        if isinstance(item, GenerationContext):
            self._context = self._told = item
            return
        if self._queue.is_hung_up:
            self._leave(item)
        context, self._context = self._context, None
        if context is not None and not isinstance(item, Exception):
            self._started(context)
            self._queue.put(context)
        # An error's traceback holds the frames that hold the caches.
        self._queue.put(item.with_traceback(None) if isinstance(item, Exception) else item)

    def _leave(self, item: Any) -> None:
        if isinstance(item, tuple):
            raise ConnectionAbortedError("the client hung up")
        if self._told is not None:
            self._told.stop()


def fit(args: Any, prompt: list[int], capacity: int | None, positions: int | None = None, default: int | None = None) -> Any:
    """The arguments with max_tokens lowered to what fits behind the prompt in the pool and in the model's positions.

    `default`: the most for a request that names no max_tokens; None: whatever fits. Raises ValueError for an empty prompt and
    RequestTooLargeError where not one token fits behind it.
    """
    if not prompt:
        raise ValueError("Found an empty prompt; needed at least one token.")
    if positions is not None and len(prompt) + 1 > positions:
        raise TooManyPositionsError(len(prompt) + 1, positions)
    if capacity is not None and len(prompt) + 1 > capacity:
        raise RequestTooLargeError(len(prompt) + 1, capacity)
    most = [limit - len(prompt) for limit in (capacity, positions) if limit is not None]
    if args.max_tokens >= WHAT_FITS:
        most += [default] if default is not None else [] if most else [EngineConfig.endless_tokens]
    return replace(args, max_tokens=min([args.max_tokens, *most]))


def check_sampling(args: Any, tokenizer: Any, vocab_size: int) -> None:
    """Try the request's sampler and processors on made-up logits: what they refuse must not fail a whole batch.

    Raises ValueError.
    """
    outside = [i for i in args.logits.logit_bias or {} if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(f"logit_bias has token ids {outside[:5]}; needed ids from 0 to {vocab_size - 1}.")
    if args.top_logprobs > vocab_size:
        raise ValueError(f"top_logprobs is {args.top_logprobs}; the vocabulary has {vocab_size} tokens.")
    logits = mx.zeros((1, vocab_size))
    tokens = mx.array([0])
    try:
        for process in make_logits_processors(args):
            logits = process(tokens, logits)
        mx.eval(make_sampler(args, tokenizer)(logits))
    except Exception:
        mend_random_state()
        raise


def marks_of(segments: list[list[int]], types: list[str]) -> list[tuple[int, str]]:
    """Where each segment of a prompt ends, in tokens, and what it is."""
    return list(zip(accumulate(len(segment) for segment in segments), types, strict=True))


def text_of(detokenizer: Any, response: Token) -> str:
    """The text that a token adds. The token that stops a reply is not part of it."""
    if response.finish_reason != "stop":
        detokenizer.add_token(response.token)
    if response.finish_reason is not None:
        detokenizer.finalize()
    return str(detokenizer.last_segment)
