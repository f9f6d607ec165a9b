"""One token for each sequence of a batch: the forward pass, the draw, and the members of the batch.

A step is encoded before the one before it is read, so that the device never waits for Python.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Collection
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer
from mlx_lm.sample_utils import greedy_sampler

from ..kv.parts import batch_of, member_of
from .sequence import Sequence

# A token that a sequence emits, and the logprobs [vocabulary] that it was drawn from.
Emitted = tuple[Sequence, int, mx.array]


class DecodeBatch:
    """The sequences that decode together, and their layer caches side by side.

    `merges`: caches are merged as their classes do it; without that the batch holds one sequence at most.
    """

    def __init__(self, model: Any, merges: bool) -> None:
        self.model = model
        self.merges = merges
        self.members: list[Sequence] = []
        self._layers: list[Any] = []
        # The next token to be computed of each member; its logprobs where it was drawn and not emitted yet.
        self._inputs: mx.array | None = None
        self._logprobs: list[mx.array | None] = []
        self._contexts: list[TokenBuffer | None] = []

    def __len__(self) -> int:
        return len(self.members)

    @property
    def has_first_token_pending(self) -> bool:
        """True if a member's first token is computed and not emitted yet."""
        return any(member.is_new for member in self.members)

    def join(self, sequence: Sequence) -> None:
        """Take in a sequence of which all tokens but the last are computed."""
        assert sequence.caches is not None
        assert sequence.computed == sequence.prefill_end, f"{sequence.computed} tokens computed of {sequence.prefill_end}"
        assert self.merges or not self.members, "these caches cannot be merged"
        own = batch_of([sequence.caches]) if self.merges else sequence.caches
        if self.members:
            for layer, joining in zip(self._layers, own, strict=True):
                layer.extend(joining)
        else:
            self._layers = own
        following = mx.array(sequence.tokens[-1:], mx.uint32)
        self._inputs = following if self._inputs is None else mx.concatenate([self._inputs, following])
        self._logprobs.append(sequence.logprobs)
        self._contexts.append(TokenBuffer(sequence.tokens[:-1]) if sequence.request.processors else None)
        self.members.append(sequence)
        sequence.logprobs = None

    def leave(self, leaving: Collection[Sequence]) -> None:
        """Let members go, each with its caches."""
        if not leaving:
            return
        keep = [i for i, member in enumerate(self.members) if member not in leaving]
        for i, member in enumerate(self.members):
            if member in leaving:
                member.caches = member_of(self._layers, i) if self.merges else self._layers
        self._layers = self._layers if keep else []
        for layer in self._layers:
            layer.filter(keep)
        assert self._inputs is not None
        self._inputs = self._inputs[mx.array(keep)] if keep else None
        self._logprobs = [self._logprobs[i] for i in keep]
        self._contexts = [self._contexts[i] for i in keep]
        self.members = [self.members[i] for i in keep]

    def extract(self, sequence: Sequence) -> list[Any]:
        """Caches with what a member has computed, which continue on their own."""
        i = self.members.index(sequence)
        return [layer.extract(i) for layer in self._layers] if self.merges else copy.deepcopy(self._layers)

    def suspend(self, sequence: Sequence) -> None:
        """Let a member go in such a way that it can join again: with the token that was drawn and not emitted yet."""
        i = self.members.index(sequence)
        assert self._inputs is not None
        if sequence.computed == len(sequence.tokens):
            sequence.tokens.append(_ids(self._inputs)[i])
        sequence.logprobs = self._logprobs[i]
        if sequence.logprobs is not None:
            mx.eval(sequence.logprobs)
        self.leave([sequence])

    def run(self) -> tuple[list[Emitted], dict[Sequence, Exception]]:
        """Compute one token of each member. Returns the tokens drawn by the step before, and the members that have failed."""
        inputs, logprobs = self._inputs, self._logprobs
        assert inputs is not None
        logits = self.model(inputs[:, None], cache=self._layers)[:, -1, :]
        failed: dict[Sequence, Exception] = {}
        contexts: list[mx.array] = []
        logits = self._process(logits, inputs, contexts, failed)
        found = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self._inputs = self._draw(found, failed)
        self._logprobs = list(found)
        mx.async_eval(self._inputs, self._logprobs, contexts)  # type: ignore[no-untyped-call]
        mx.eval(inputs, [row for row in logprobs if row is not None])
        emitted: list[Emitted] = []
        for member, token, row in zip(self.members, _ids(inputs), logprobs, strict=True):
            if member.computed == len(member.tokens):
                member.tokens.append(token)
            member.computed = len(member.tokens)
            if row is not None and member not in failed:
                emitted.append((member, token, row))
        return emitted, failed

    def _process(
        self, logits: mx.array, inputs: mx.array, contexts: list[mx.array], failed: dict[Sequence, Exception]
    ) -> mx.array:
        if all(context is None for context in self._contexts):
            return logits
        rows = [logits[i : i + 1] for i in range(len(self.members))]
        for i, (member, buffer) in enumerate(zip(self.members, self._contexts, strict=True)):
            if buffer is None:
                continue
            context = buffer.update_and_fetch(inputs[i : i + 1])
            contexts.append(context)
            try:
                for processor in member.request.processors:
                    rows[i] = processor(context, rows[i])
            except Exception as error:
                # A processor is the request's own code: its error fails this request alone.
                failed[member] = error
                rows[i] = logits[i : i + 1]
        return mx.concatenate(rows)

    def _draw(self, logprobs: mx.array, failed: dict[Sequence, Exception]) -> mx.array:
        """Tokens [members] from logprobs [members, vocabulary], in one call where all draw the same way."""
        samplers = [member.request.sampler or greedy_sampler for member in self.members]
        rows: list[mx.array] = []
        if all(sampler is greedy_sampler for sampler in samplers):
            return mx.array(greedy_sampler(logprobs), mx.uint32)
        for i, sampler in enumerate(samplers):
            row = logprobs[i : i + 1]
            try:
                drawn = sampler(row)
            except Exception as error:
                # As above. A request fails once, also where both its processor and its sampler do.
                mend_random_state()
                failed.setdefault(self.members[i], error)
                drawn = greedy_sampler(row)
            rows.append(drawn.astype(mx.uint32))
        return mx.concatenate(rows)


def mend_random_state() -> None:
    """After a sampler has failed: where mlx was compiling it, mlx's random state is left without a value and would stay so."""
    mx.random.seed(secrets.randbits(63))


def _ids(tokens: mx.array) -> list[int]:
    found: list[int] = tokens.tolist()  # type: ignore[assignment]
    return found
