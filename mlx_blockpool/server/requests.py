"""One request on its way through the generation thread: what it asked for, and whether it can be served."""

from __future__ import annotations

from dataclasses import dataclass, replace
from queue import Queue
from typing import Any

import mlx.core as mx
from mlx_lm.server import _make_logits_processors, _make_sampler

from ..errors import RequestTooLargeError


@dataclass
class Waiting:
    """A request that was not started. `tokenized` is filled in once."""

    queue: Queue[Any]
    request: Any
    args: Any
    tokenized: tuple[Any, ...] | None = None

    def fail(self, error: Exception) -> None:
        # Without its traceback, whose frames hold caches and with them blocks.
        self.queue.put(error.with_traceback(None))


@dataclass
class Live:
    """A request in the batch."""

    queue: Queue[Any]
    context: Any
    tokenizer: Any
    detokenizer: Any
    segment_types: list[str]
    top_logprobs: int
    in_prefill: bool = True

    def leaves(self, prompt: list[int], by_chunk: bool) -> int:
        """How many tokens of another prompt this one's prefill is about to leave behind; 0 where waiting would not pay.

        A prefix that is kept at the end of a segment only comes with all that stands behind it.
        """
        shared = common_prefix(prompt, self.context.prompt) if self.in_prefill else 0
        return shared if by_chunk or 2 * shared >= len(self.context.prompt) else 0

    def fail(self, error: Exception) -> None:
        self.queue.put(error.with_traceback(None))


def fit(args: Any, prompt: list[int], capacity: int | None) -> Any:
    """The arguments with max_tokens lowered to what the pool can hold behind the prompt.

    Raises ValueError for an empty prompt and RequestTooLargeError where not one token fits behind it.
    """
    if not prompt:
        raise ValueError("Found an empty prompt; needed at least one token.")
    if capacity is None:
        return args
    if len(prompt) + 1 > capacity:
        raise RequestTooLargeError(len(prompt) + 1, capacity)
    return replace(args, max_tokens=min(args.max_tokens, capacity - len(prompt)))


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
    for process in _make_logits_processors(args):
        logits = process(tokens, logits)
    mx.eval(_make_sampler(args, tokenizer)(logits))


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two prompts have in common from the first on."""
    if a[: len(b)] == b[: len(a)]:
        return min(len(a), len(b))
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def cut_segments(segments: list[list[int]], types: list[str], cached: int) -> tuple[list[list[int]], list[str]]:
    """What is left of a prompt's segments behind its first `cached` tokens."""
    rest, kinds = [], []
    for segment, kind in zip(segments, types, strict=True):
        left = segment[cached:]
        cached = max(0, cached - len(segment))
        if left:
            rest.append(left)
            kinds.append(kind)
    return rest, kinds


def text_of(detokenizer: Any, response: Any) -> str:
    """The text that a token adds. The token that stops a reply is not part of it."""
    if response.finish_reason != "stop":
        detokenizer.add_token(response.token)
    if response.finish_reason is not None:
        detokenizer.finalize()
    return str(detokenizer.last_segment)
