"""What the engine is asked for, what it tells, and how far a request has come. Knows token ids; no caches of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences

from ..prefix.retention import RetentionPolicy
from ..prefix.salts import SHARED
from ..prefix.trie import PrefixRef

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

KIND = "user"


@dataclass(frozen=True)
class Request:
    """A prompt to go on from.

    tokens:      the prompt, at least one token.
    max_tokens:  the most tokens to generate, at least one.
    sampler:     logprobs [1, vocabulary] -> token [1]; None: the most likely one. It may have a state of its own, as seeds do.
    processors:  mlx-lm's logits processors, called with all tokens so far.
    stop:        mlx-lm's stop sequences.
    marks:       (tokens, kind) of each beginning of the prompt that is worth keeping by itself, such as the system prompt.
    agent:       requests with the same name run one after the other, in the order of their arrival.
    noted_as:    the name under which its end is noted; None: that of the agent.
    pins:        (tokens, seconds) of each beginning of the prompt that is to stay in memory for so long after each use.
    retention:   how what it computes is kept on disk: see Terms.
    salt:        it finds, and leaves behind, what is known under this salt alone: 32 bytes; empty: what all requests share.
    """

    tokens: Sequence[int]
    max_tokens: int = 128
    sampler: Sampler | None = None
    processors: Sequence[LogitsProcessor] = ()
    stop: StopSequences = field(default_factory=StopSequences)
    marks: Sequence[tuple[int, str]] = ()
    agent: str | None = None
    noted_as: str | None = None
    pins: Sequence[tuple[int, float]] = ()
    retention: str | None = None
    salt: bytes = SHARED


@dataclass(frozen=True)
class Restoring:
    """The request waits for tokens of its prompt that come from disk: `done` of the `total` that it starts with are there."""

    uid: int
    done: int
    total: int


@dataclass(frozen=True)
class Started:
    """The request has caches now; `cached` tokens of its prompt need not be computed. `why` explains that."""

    uid: int
    cached: int
    why: Any


@dataclass(frozen=True)
class Progress:
    """`done` of the `total` tokens of a prompt are computed."""

    uid: int
    done: int
    total: int


@dataclass(frozen=True)
class Token:
    """One generated token, the logprobs [vocabulary] it was drawn from, and "stop" or "length" with the last one."""

    uid: int
    token: int
    logprobs: mx.array
    finish_reason: str | None


@dataclass(frozen=True)
class Failed:
    """The request has ended with an error, and no other with it."""

    uid: int
    error: Exception


Event = Restoring | Started | Progress | Token | Failed


class Running:
    """A request on its way. `uid` is also its place in the order of arrival.

    tokens:    the prompt and what was generated, the next token to be computed included where it is known.
    computed:  how many of them the caches hold, once the step in flight has run.
    caches:    the layer caches; None while it waits, or while a padded batch has them.
    prefix:    the cached beginning of `tokens` that was found last; lookups go on from its end.
    logprobs:  of tokens[-1] where that was drawn and not told yet.
    terms:     how what is computed of it is kept.
    swaps, has_waited: how often it was swapped out, and whether it waited for another's prefill.
    """

    def __init__(self, uid: int, request: Request) -> None:
        self.uid = uid
        self.request = request
        self.tokens = list(request.tokens)
        self.computed = 0
        self.caches: list[Any] | None = None
        self.prefix: PrefixRef | None = None
        self.logprobs: mx.array | None = None
        self.marks = {min(position, self.prefill_end): kind for position, kind in request.marks if position > 0}
        self.terms = RetentionPolicy(request.agent, request.retention, request.salt)
        # Those that are not pinned yet.
        self.pins = list(request.pins)
        self.swaps = 0
        self.has_waited = False
        self._produced = 0
        self._matcher = request.stop.matcher()

    @property
    def prefill_end(self) -> int:
        """All tokens but the last are computed in chunks; the last one goes into the batch."""
        return len(self.tokens) - 1

    @property
    def in_prefill(self) -> bool:
        return self.computed < self.prefill_end

    @property
    def is_new(self) -> bool:
        """Whether nothing was generated yet."""
        return self._produced == 0

    def tell(self, token: int) -> str | None:
        """Count a generated token. Returns why it is the last one, None if it is not."""
        self._produced += 1
        stopped = self._matcher.advance(token)
        return "stop" if stopped else "length" if self._produced >= self.request.max_tokens else None

    def left_to_produce(self) -> int:
        """Tokens that may still follow `tokens`, of which the last may be drawn and not told yet."""
        return len(self.request.tokens) + self.request.max_tokens - len(self.tokens)
