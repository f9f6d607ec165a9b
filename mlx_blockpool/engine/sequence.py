"""Sequence: how far a request has come in the engine: its tokens, its caches, and where it stops.

kv.sequence.SequenceBlocks is the memory of its caches. Owned by the generation thread.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer
from mlx_lm.sample_utils import greedy_sampler

from ..config import EngineConfig
from ..drafts.drafter import Drafter
from ..prefix.retention import RetentionPolicy
from ..prefix.trie import PrefixRef
from .request import KIND, Request


def delay_of(priority: int) -> float:
    """How much later a request of this priority counts as having arrived, in seconds; below zero:
    earlier.

    Within that time lower values go first. After it those that have waited go first, so that none
    waits for ever.
    """
    most = EngineConfig.most_priority_seconds
    return max(-most, min(most, priority * EngineConfig.priority_seconds))


class Sequence:
    """A request that the engine runs. `uid` is also its place in the order of arrival.

    due:       when it arrived, by the engine's clock, as if that had been later or earlier by its
               priority.
    tokens:    the prompt and what was generated, including the next token to be computed once that
               is drawn.
    computed:  how many of them the caches hold, once the step in flight has run.
    rolled_back: how many of them after those, in a batch, were accepted and are computed again by
               the next step.
    caches:    the layer caches; None while it waits.
    started:   the tokens of prompts that the engine had computed when it started.
    prefix:    the cached beginning of `tokens` that was found last; lookups continue from its end.
    hidden:    the model's hidden state [1, 1, dim] at its last computed token, which a prediction
               head reads; None: not known.
    logprobs:  that its next token was drawn from, where that is not emitted yet; without numbers
               where another process has drawn it.
    buffer:    in a batch the tokens before its next one, for its processors.
    policy:    its retention: how long, and for whom, what it computes stays cached.
    agreed:    how many of `tokens` the ranks of a group have agreed to read from disk before it
               starts; None: they did not vote.
    drafter:    guesses its next tokens, and sees those that are emitted; None: nothing is drafted
                for it.
    is_greedy:      whether its next token is the most likely one, whatever came before.
    preemptions, has_waited: how often it was preempted, and whether it waited for another's
    prefill.
    """

    def __init__(self, uid: int, request: Request, now: float) -> None:
        self.uid = uid
        self.request = request
        self.requeue(now)
        # Choices share the list of their prompt until they start.
        is_choice, given = request.group is not None, request.tokens
        self.tokens = given if is_choice and isinstance(given, list) else list(given)
        self.computed = self.rolled_back = self.started = 0
        self.caches: list[Any] | None = None
        self.prefix: PrefixRef | None = None
        self.hidden: mx.array | None = None
        self.logprobs: mx.array | None = None
        self.buffer: TokenBuffer | None = None
        self.agreed: int | None = None
        self.breakpoints = {
            min(position, self.prefill_end): kind
            for position, kind in request.breakpoints
            if position > 0
        }
        if request.group is not None:
            # Where the other choices begin, also those that start later.
            self.breakpoints.setdefault(self.prefill_end, KIND)
        self.policy = RetentionPolicy(request.agent, request.retention, request.salt)
        # The pins of `request` that are not set yet.
        self.pins = list(request.pins)
        self.drafter: Drafter | None = None
        self.preemptions = 0
        self.has_waited = False
        self._produced = 0
        self._matcher = request.stop.matcher()
        self.is_greedy = (
            request.sampler in (None, greedy_sampler)
            and not request.processors
            and request.form is None
        )

    def requeue(self, now: float) -> None:
        """Reset the arrival time used for scheduling."""
        self.due = now + delay_of(self.request.priority)

    def suspend(self) -> None:
        """Drop what belongs to the trie, the records and the drafts of this engine: it may
        continue with others.
        """
        self.prefix = self.agreed = self.drafter = None

    def start(self, caches: list[Any], computed: int, started: int) -> None:
        """Continue from caches that hold the first `computed` tokens."""
        self.caches, self.computed, self.agreed = caches, computed, None
        self.started, self.hidden = started, None
        if self.tokens is self.request.tokens:
            self.tokens = list(self.tokens)

    @property
    def request_key(self) -> int | str:
        """Identifies the request that this choice belongs to."""
        return self.uid if self.request.group is None else self.request.group

    @property
    def place(self) -> tuple[float, int]:
        """Its place among the sequences that wait for blocks or for their prefill."""
        return self.due, self.uid

    @property
    def prefill_end(self) -> int:
        """All tokens but the last are computed in chunks; the last one goes into the batch."""
        return len(self.tokens) - 1

    @property
    def in_prefill(self) -> bool:
        return self.computed < self.prefill_end

    def generated(self, start: int) -> list[int]:
        """The tokens after the prompt, from the `start`-th of them on."""
        return self.tokens[len(self.request.tokens) + start :]

    @property
    def emitted(self) -> int:
        """How many of its tokens the prompt has or were emitted."""
        return len(self.request.tokens) + self._produced

    @property
    def is_new(self) -> bool:
        """True if nothing was generated yet."""
        return self._produced == 0

    def is_choice_with(self, other: Sequence) -> bool:
        """Return whether both are choices for one prompt."""
        return self.request.group is not None and self.request.group == other.request.group

    def compute(self, token: int) -> None:
        """Count its next token as computed: the last one of `tokens`, or one that was drawn and
        is not among them yet.
        """
        if self.computed == (known := len(self.tokens)):
            self.tokens.append(token)
            known += 1
        self.computed = known

    def until_end(self, tokens: Collection[int]) -> int:
        """How many of the tokens would be emitted if they came next: those up to the one that
        ends the reply.
        """
        matcher = copy.copy(self._matcher)
        for count, token in enumerate(tokens, 1):
            if matcher.advance(token) or count == self.left_to_emit():
                return count
        return len(tokens)

    def left_to_emit(self) -> int:
        """The most tokens that may still be emitted."""
        return self.request.max_tokens - self._produced

    def append_token(self, token: int) -> str | None:
        """Count a generated token as emitted.

        Returns the finish reason, None where more tokens follow.
        """
        self._produced += 1
        if self.drafter is not None:
            self.drafter.observe((token,))
        stopped = self._matcher.advance(token)
        return (
            "stop" if stopped else "length" if self._produced >= self.request.max_tokens else None
        )

    def left_to_produce(self) -> int:
        """Tokens that may still follow `tokens`, of which the last may be drawn and not emitted
        yet.
        """
        return len(self.request.tokens) + self.request.max_tokens - len(self.tokens)
