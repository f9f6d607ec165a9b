"""Reply: one request on the generation thread, and the queue on which its reply goes to the
socket's thread.

The generation thread puts, and the socket's thread takes.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import replace
from itertools import accumulate
from queue import Queue
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.generate import StopSequences

from ..config import WHAT_FITS, EngineConfig
from ..drafts.draft import Prediction
from ..drafts.index import SuffixIndex
from ..engine.request import KIND, Request, Token
from ..engine.sequence import Sequence
from ..mlx_lm_compat import GenerationContext, Response, make_logits_processors
from ..prefix.lookup import Lookup
from ..ranks.group import as_loss
from .prompts.job import check_length
from .sampling import make_sampler
from .watch.event_log import ModelEvents
from .watch.explain import Explained
from .watch.request_watch import RequestWatch

# mlx takes seeds of 64 bits.
SEEDS = 2**64


# Pairs of a choice's index and the next part of its reply.
Choices: TypeAlias = Generator[tuple[int, Any], None, None]


class Reply:
    """A choice for a request, from its arrival at the generation thread to the end of the reply.

    It puts pairs of `index` and an item on the queue `parts`. The items are mlx-lm's
    GenerationContext, then (done, total) tokens of the prompt and a Response for each token, then
    None; or the exception that ends the reply.

    request, args: as the socket's thread has prepared them; max_tokens is lowered to what fits when
    the request starts.
    context:       what mlx-lm's handler reads of the reply; None until the request starts.
    sequence:      where a request that had to leave its engine continues; None for other requests.
    is_hung_up:    the client is gone, so that the generation thread drops the request.
    watch:         writes its progress into the log.
    """

    def __init__(
        self,
        request: Any,
        args: Any,
        watch: RequestWatch,
        parts: Queue[tuple[int, Any]],
        index: int = 0,
    ) -> None:
        self.request = request
        self.args = args
        self.watch = watch
        self.context: GenerationContext | None = None
        self.sequence: Sequence | None = None
        self.is_hung_up = self.is_begun = False
        self._index, self._parts = index, parts
        self._detokenizer: Any = None
        self._ends: Collection[int] = ()

    def put(self, item: Any) -> None:
        self._parts.put((self._index, item))

    @property
    def explained(self) -> Explained | None:
        """The explanation to write the use of the cache into; None for a choice after the first,
        and without an explanation.
        """
        found: Explained | None = None if self._index else self.request.explained
        return found

    @property
    def is_left(self) -> bool:
        """Return whether no client reads the rest of the reply."""
        return self.is_hung_up or self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Return whether the client's thread has stopped reading the reply."""
        return self.context is not None and self.context._should_stop

    def leave(self) -> None:
        """The generation thread drops the request, because no client reads the rest of its
        reply.
        """
        self.watch.ended("abort" if self.is_hung_up else "stop")

    def fail(self, error: Exception) -> None:
        self.watch.ended("abort" if isinstance(error, ConnectionError) else "error")
        # Without its traceback, whose frames hold caches and with them blocks.
        self.put(as_loss(error).with_traceback(None))

    def start(
        self,
        tokenizer: Any,
        text_sm: Any,
        stop: StopSequences,
        needs_checkpoints: bool,
        salt: bytes,
    ) -> Request:
        """The request as the engine takes it.

        `needs_checkpoints`: its caches can be resumed only where a checkpoint was made.
        """
        options, prepared = self.request.options, self.request.prepared
        self._detokenizer, self._ends = tokenizer.detokenizer, tokenizer.eos_token_ids
        self.context = GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_sm,
            initial_state=prepared.initial_state,
            prompt=prepared.tokens,
        )
        form = None if self.request.compiled is None else self.request.compiled.copy()
        if form is not None:
            # A forced token has no logprobs of others.
            form.jumps = not (self.args.logprobs or self.args.top_logprobs > 0)
        breakpoints = list(zip(accumulate(prepared.segments), prepared.types, strict=True))
        if needs_checkpoints:
            breakpoints = sorted(
                {
                    **{end: KIND for end, _ in prepared.breakpoints},
                    **dict(prepared.checkpoints or ()),
                }.items()
            )
        return Request(
            self.context.prompt,
            self.args.max_tokens,
            make_sampler(self.args, tokenizer),
            make_logits_processors(self.args),
            stop,
            breakpoints,
            options.agent,
            noted_as=options.conversation,
            pins=prepared.breakpoints if options.may_pin else [],
            retention=options.retention,
            group=options.id if self.request.choices > 1 else None,
            priority=options.priority,
            salt=salt,
            form=form,
            prediction=self._prediction(),
        )

    def _prediction(self) -> Prediction | None:
        """What the client expects this choice to be; all choices share one text.

        Returns None if it expects nothing.
        """
        if not self.request.prediction:
            return None
        counted = self.request.predictions
        own = Prediction(
            counted[0].text if counted else SuffixIndex(self.request.prepared.prediction)
        )
        counted.append(own)
        return own

    def begin(self, cached: int) -> None:
        """Let the client's thread answer: progress and tokens follow.

        `cached` tokens of the prompt need not be computed.
        """
        assert self.context is not None
        self.context.prompt_cache_count = cached
        if not self.is_begun:
            self.is_begun = True
            self.put(self.context)

    def started(self, served: Any, cached: int, lookup: Lookup | None) -> None:
        """Note that the request has its caches in the LoadedModel `served`, explain its use of the
        cache, and let the client's thread answer.

        `lookup` explains the `cached` tokens; None for mlx-lm's own caches.
        """
        if self.explained is not None:
            prompt = self.request.prepared.tokens
            self.explained.start(served, self.request.options.salt, prompt, cached, lookup)
        self.watch.started(cached, lookup)
        self.begin(cached)

    def emit(self, event: Token) -> None:
        """Send a token to the client, with the text that it adds."""
        logprobs = event.logprobs
        self.put(
            Response(
                text_of(self._detokenizer, event, self._ends),
                event.token,
                0.0 if logprobs is None else logprobs[event.token].item(),
                event.finish_reason,
                () if logprobs is None else most_likely(logprobs, self.args.top_logprobs),
            )
        )
        if event.finish_reason is not None:
            self.put(None)


def replies_to(
    request: Any, args: Any, events: ModelEvents, parts: Queue[tuple[int, Any]]
) -> list[Reply]:
    """The replies to all choices of a request, which put their items on `parts`. `events`: the log
    of its model.

    A seed counts up from choice to choice, so that they differ. The ids of all choices but the
    first end with their number.
    """
    replies = []
    for index in range(request.choices):
        options, own = request.options, args
        if index:
            options = replace(options, id=f"{options.id}-{index}")
        if index and args.seed is not None:
            seed = args.seed + index
            own = replace(args, seed=seed if seed < SEEDS else seed - SEEDS)
        watch = RequestWatch(events, options, len(request.prepared.tokens))
        replies.append(Reply(request, own, watch, parts, index))
    return replies


def fit(
    args: Any,
    prompt: Collection[int],
    capacity: int | None,
    positions: int | None = None,
    default: int | None = None,
) -> Any:
    """The arguments with max_tokens lowered to what fits after the prompt in the pool and in the
    model's positions.

    `default`: the limit for a request that names no max_tokens, or None for whatever fits. Raises
    ValueError for an empty prompt and RequestTooLargeError where not one token fits after it.
    """
    if not prompt:
        raise ValueError("The prompt is empty. Send at least one token.")
    check_length(len(prompt) + 1, capacity, positions)
    most = [limit - len(prompt) for limit in (capacity, positions) if limit is not None]
    if args.max_tokens >= WHAT_FITS:
        most += [default] if default is not None else [] if most else [EngineConfig.endless_tokens]
    return replace(args, max_tokens=min([args.max_tokens, *most]))


def text_of(detokenizer: Any, response: Token, ends: Collection[int]) -> str:
    """The text that a token adds. `ends`: the tokens that end a turn, which add none.

    The last token of a stop word adds its text: the reply parser finds the word there.
    """
    if response.token not in ends:
        detokenizer.add_token(response.token)
    if response.finish_reason is not None:
        detokenizer.finalize()
    return str(detokenizer.last_segment)


def most_likely(logprobs: mx.array, count: int) -> tuple[dict[str, Any], ...]:
    """The `count` most likely tokens, in no order, in the shape of mlx-lm's top_tokens without
    their text.

    mlx sorts the whole vocabulary for it: thirty times as long as numpy takes on a CPU, for each
    token of each reply.
    """
    if count <= 0:
        return ()
    values = np.array(logprobs.astype(mx.float32), copy=False)
    tokens = np.argpartition(values, -min(count, len(values)))[-count:].tolist()
    return tuple({"id": token, "logprob": float(values[token])} for token in tokens)
