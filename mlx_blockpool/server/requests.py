"""One request on its way through the generation thread: what it asked for, and whether it can be served."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from mlx_lm.generate import StopSequences

from ..config import WHAT_FITS, EngineConfig
from ..engine.request import KIND, Request, Token
from ..engine.sequence import Sequence
from ..errors import RequestTooLargeError, TooManyPositionsError
from ..mlx_lm_compat import GenerationContext, Response, format_top_logprobs, make_logits_processors
from .breakpoints import pins_of
from .explain import Explained
from .replies import Reply
from .sampling import make_sampler


@dataclass
class Waiting:
    """A request that was not started. `tokenized` is filled in once."""

    queue: Reply
    request: Any
    args: Any
    tokenized: tuple[Any, ...] | None = None

    def context(self, tokenizer: Any, text_sm: Any) -> GenerationContext:
        """What mlx-lm's handler needs to know of the reply; its cached tokens are filled in when the request starts."""
        assert self.tokenized is not None
        prompt, _, _, initial_state, _ = self.tokenized
        return GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_sm,
            initial_state=initial_state,
            prompt=prompt,
        )

    def engine_request(self, tokenizer: Any, stop: StopSequences, needs_marks: bool, salt: bytes) -> Request:
        """The request as the engine takes it. `needs_marks`: its caches can be resumed only where a checkpoint was made."""
        assert self.tokenized is not None
        options = self.request.options
        return Request(
            self.tokenized[0],
            self.args.max_tokens,
            make_sampler(self.args, tokenizer),
            make_logits_processors(self.args),
            stop,
            self._marks(needs_marks),
            options.agent,
            noted_as=options.conversation,
            pins=pins_of(self.request),
            retention=options.retention,
            salt=salt,
        )

    def _marks(self, needs_marks: bool) -> list[tuple[int, str]]:
        """(tokens, kind) of the beginnings of the prompt that are worth a checkpoint."""
        assert self.tokenized is not None
        _, segments, types, *_ = self.tokenized
        if not needs_marks:
            return list(zip(accumulate(len(segment) for segment in segments), types, strict=True))
        pinned = {end: KIND for end, _ in pins_of(self.request)}
        return sorted({**pinned, **dict(self.request.prepared.checkpoints or ())}.items())

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

    sequence: Sequence
    live: Live

    def fail(self, error: Exception) -> None:
        self.live.fail(error)


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


def text_of(detokenizer: Any, response: Token) -> str:
    """The text that a token adds. The token that stops a reply is not part of it."""
    if response.finish_reason != "stop":
        detokenizer.add_token(response.token)
    if response.finish_reason is not None:
        detokenizer.finalize()
    return str(detokenizer.last_segment)
