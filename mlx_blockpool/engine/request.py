"""Requests to the engine, and its events. Knows token ids; no caches and no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences

from ..drafts.draft import Prediction
from ..errors import RequestTooLargeError
from ..forms.form import ReplyForm
from ..prefix.salts import SHARED

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

KIND = "user"


@dataclass(frozen=True)
class Request:
    """A prompt to continue from.

    tokens:      the prompt, at least one token.
    max_tokens:  the most tokens to generate, at least one.
    sampler:     logprobs [1, vocabulary] -> token [1]; None: the most likely one. A sampler with a
                 state, as seeds have, has a method skip(draws): a form has left this many draws
                 without a choice.
    processors:  mlx-lm's logits processors, called with all tokens so far.
    stop:        mlx-lm's stop sequences.
    breakpoints: (tokens, kind) of each beginning of the prompt that is worth caching by itself,
    such as the system prompt.
    agent:       requests with the same name run one after the other, in the order of their arrival.
    noted_as:    the name under which its end is noted; None: that of the agent.
    pins:        (tokens, seconds) of each beginning of the prompt that stays in memory for
                 `seconds` after each use.
    retention:   how long its prefixes stay on disk: see RetentionPolicy.
    group:       requests of one group are choices for the same prompt: the first computes it, the
                 others begin where it ends, and to their agent they are one. None: it is the only
                 one.
    priority:    requests of lower values start earlier and are preempted later: see delay_of() in
                 sequence.py.
    salt:        of its prefixes, 32 bytes: only requests with the same salt share them. Empty: all
                 without one.
    form:        the form that the reply must have; None: any token may come. It belongs to this
                 request alone.
    prediction:  what the client expects the reply to be, which is drafted from; None: nothing. It
                 counts for this request alone.
    """

    tokens: Sequence[int]
    max_tokens: int = 128
    sampler: Sampler | None = None
    processors: Sequence[LogitsProcessor] = ()
    stop: StopSequences = field(default_factory=StopSequences)
    breakpoints: Sequence[tuple[int, str]] = ()
    agent: str | None = None
    noted_as: str | None = None
    pins: Sequence[tuple[int, float]] = ()
    retention: str | None = None
    group: str | None = None
    priority: int = 0
    salt: bytes = SHARED
    form: ReplyForm | None = None
    prediction: Prediction | None = None

    def __post_init__(self) -> None:
        if self.form is not None:
            self.form.max_tokens = self.max_tokens

    @property
    def name(self) -> str | None:
        """The name under which its end is noted."""
        return self.noted_as or self.agent

    def check(self, capacity: int | None) -> None:
        """Raises ValueError for an empty prompt, and RequestTooLargeError for more tokens than a
        sequence can have.
        """
        if not self.tokens or self.max_tokens < 1:
            given = f"{len(self.tokens)} prompt tokens and max_tokens {self.max_tokens}"
            raise ValueError(f"The request has {given}. Give at least one of each.")
        if capacity is not None and len(self.tokens) + self.max_tokens > capacity:
            raise RequestTooLargeError(len(self.tokens) + self.max_tokens, capacity)


@dataclass(frozen=True)
class Restoring:
    """The request waits for tokens of its prompt that come from disk: `done` of the `total` that
    it starts with are there.
    """

    uid: int
    done: int
    total: int


@dataclass(frozen=True)
class RestoreBegun:
    """Reading `tokens` of the request's prompt from disk has begun, which are `n_bytes`."""

    uid: int
    tokens: int
    n_bytes: int


@dataclass(frozen=True)
class RestoreEnded:
    """The request no longer waits for the disk. `tokens` of its prompt and `n_bytes` were read."""

    uid: int
    tokens: int
    n_bytes: int


@dataclass(frozen=True)
class Swapped:
    """The request has lost its caches to others and waits for them or, where it `is_in`, has
    them back.
    """

    uid: int
    is_in: bool


@dataclass(frozen=True)
class Started:
    """The request has caches now; `cached` tokens of its prompt need not be computed.

    `why` explains that.
    """

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
    """One generated token, the logprobs [vocabulary] it was drawn from, and "stop" or "length" with
    the last one.

    logprobs: None for a token that its form forced, which was not drawn: its logprob is 0.
    """

    uid: int
    token: int
    logprobs: mx.array | None
    finish_reason: str | None


@dataclass(frozen=True)
class Failed:
    """The request has ended with an error, and no other with it."""

    uid: int
    error: Exception


Event = RestoreBegun | Restoring | RestoreEnded | Swapped | Started | Progress | Token | Failed
