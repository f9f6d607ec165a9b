"""DecodeBatch: the sequences that decode together, and the forward pass that computes a token of each, or several.

A step is encoded before the one before it is read, so that the device never waits for Python. A step that verifies drafts is not:
what is drafted depends on the tokens before it. Of several ranks, which compute the same batch together, rank 0 draws: samplers,
processors and forms are there alone.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from itertools import takewhile
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer

from ..kv.alone import UnsettledBatch
from ..kv.parts import batch_of, begin_rows, commit_rows, member_of
from ..ranks.group import ALONE, Ranks
from .draws import draw, ids
from .masks import Forced
from .prefill import Chunk
from .sequence import Sequence
from .verify import Drafts, Emitted, Rows, Verified, accept


class DecodeBatch:
    """The sequences that decode together, and their layer caches side by side.

    `merges`: caches are merged as their classes do it; without that the batch holds one sequence at most.
    """

    def __init__(self, model: Any, merges: bool, ranks: Ranks = ALONE) -> None:
        self.model = model
        self.merges = merges
        self.ranks = ranks
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
        """Caches with what a sequence has computed, which continue on their own."""
        if sequence not in self.members:
            return copy.deepcopy(sequence.caches or [])
        i = self.members.index(sequence)
        return [layer.extract(i) for layer in self._layers] if self.merges else copy.deepcopy(self._layers)

    def suspend(self, sequence: Sequence) -> None:
        """Let a member go in such a way that it can join again: with the token that was drawn and not emitted yet."""
        i = self.members.index(sequence)
        assert self._inputs is not None
        if sequence.computed == len(sequence.tokens):
            sequence.tokens.append(ids(self._inputs)[i])
        sequence.logprobs = self._logprobs[i]
        if sequence.logprobs is not None:
            mx.eval(sequence.logprobs)
        self.leave([sequence])

    def append(self, runs: Forced, together: bool) -> None:
        """Append forced tokens to members and compute them, several runs `together` if they may be padded.

        They take the place of the draws in flight, which can only have come to the first token of each run.
        """
        self.leave(runs)
        for member, run in runs.items():
            member.tokens += run
            skip = getattr(member.request.sampler, "skip", None)
            if skip is not None:
                skip(len(run) - 1)
        rows = [(member, member.prefill_end) for member in runs if member.in_prefill]
        for chunk in [rows] if together and rows else [[row] for row in rows]:
            Chunk(chunk).run(self.model, self.merges)
        for member in runs:
            self.join(member)

    def run(self) -> tuple[list[Emitted], dict[Sequence, Exception], Forced]:
        """Compute one token of each member.

        Returns the tokens drawn by the step before; the members that have failed, each with its error; and what forms force
        behind those tokens. A failed member's token is returned only in a group: no other rank than 0 knows of failures and
        forms, and all have to emit the same tokens.
        """
        inputs, logprobs = self._inputs, self._logprobs
        assert inputs is not None
        logits = self.model(inputs[:, None], cache=self._layers)[:, -1, :]
        failed: dict[Sequence, Exception] = {}
        forced: Forced = {}
        contexts: list[mx.array] = []
        tokens: mx.array | None = None
        if self.ranks.rank == 0:
            drawn = draw(logits, inputs, self.members, self._contexts)
            tokens, self._logprobs = drawn.tokens, list(drawn.logprobs)
            failed, forced, contexts = drawn.failed, drawn.forced, drawn.contexts
        else:
            self._logprobs = [mx.zeros(0)] * len(self.members)
        self._inputs = self.ranks.draw(tokens, len(self.members), logits)
        mx.async_eval(self._inputs, self._logprobs, contexts)  # type: ignore[no-untyped-call]
        mx.eval(inputs, [row for row in logprobs if row is not None])
        emitted: list[Emitted] = []
        for member, token, row in zip(self.members, ids(inputs), logprobs, strict=True):
            member.compute(token)
            if row is not None and (member not in failed or self.ranks.size > 1):
                emitted.append((member, token, row))
        return emitted, failed, forced

    def known(self) -> list[int]:
        """The next token of each member. Waits for the step in flight."""
        assert self._inputs is not None
        mx.eval(self._inputs, [row for row in self._logprobs if row is not None])
        return ids(self._inputs)

    @property
    def emitting(self) -> list[bool]:
        """Of each member, whether its next token is to be emitted; not if it is the last one of the prompt."""
        return [row is not None for row in self._logprobs]

    def possible(self, tokens: Iterable[int]) -> list[int]:
        """The tokens up to the first that the model does not know: sources of plugins may guess any number."""
        vocabulary = next((row.shape[-1] for row in self._logprobs if row is not None), 0)
        return list(takewhile(range(vocabulary).__contains__, tokens))

    def verify(self, drafts: Drafts, least_forced: int) -> Verified:
        """Compute the next token of each member with those drafted behind it, as rows, and keep what it accepts: see accept().

        Room for all of them is reserved. Returns what run() does, of each member one token and the accepted ones.
        """
        members = self._rows(drafts)
        begin_rows(self._layers, [len(rows.tokens) for rows in members])
        inputs = mx.array([token for rows in members for token in rows.tokens], mx.uint32)
        logits = self.model(inputs[:, None], cache=self._layers)[:, -1, :]
        verified = accept(logits, members, least_forced)
        commit_rows(self._layers, [rows.kept for rows in members])
        return self._go_on(members, verified)

    def verify_alone(self, drafts: Drafts, least_forced: int) -> Verified:
        """verify() for caches that have no rows: members with drafts are computed one by one, and the others side by side."""
        members = self._rows(drafts)
        unsettled = UnsettledBatch(self.model, self._layers, [rows.tokens for rows in members], self.merges)
        verified = accept(unsettled.logits, members, least_forced)
        self._layers = unsettled.settle([rows.kept for rows in members])
        return self._go_on(members, verified)

    def _rows(self, drafts: Drafts) -> list[Rows]:
        """The rows of a verification. Waits for the step in flight."""
        found: list[Rows] = []
        start = 0
        for member, token, logprobs, buffer in zip(self.members, self.known(), self._logprobs, self._contexts, strict=True):
            tokens = [token, *drafts.get(member, ())]
            found.append(Rows(member, tokens, logprobs, buffer, start))
            start += len(tokens)
        return found

    def _go_on(self, members: Collection[Rows], verified: Verified) -> Verified:
        self._inputs = mx.array([rows.following for rows in members], mx.uint32)
        self._logprobs = [rows.logprobs for rows in members]
        return verified
