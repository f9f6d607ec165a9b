"""The forward passes of an engine: compute_chunk() for prompts, DecodeBatch and DecodeSteps for the
sequences that decode.

A decode step is encoded before the one before it is read, so that the device never waits for
Python. A step that verifies drafts is not: what is drafted depends on the tokens before it, and
each of its rows costs time. So DecodeSteps first checks if drafts would pay if the tokens in flight
are those that were guessed; only then they are read. Drafts and forced runs use free blocks and
preempt no sequence. Knows nothing of prompts that wait. Owned by the generation thread.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial
from itertools import accumulate, takewhile
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer

from ..config import EngineConfig, FormConfig
from ..drafts.draft import Draft
from ..drafts.drafting import Drafting
from ..errors import PoolExhaustedError
from ..kv.pending_tokens import PendingRows, PendingTokens, first_rows, padded_forward
from ..kv.prediction_head import NO_STATES, head_of, states_of
from ..kv.prompt_cache import (
    batch_of,
    begin_chunks,
    end_chunks,
    member_of,
    state_caches,
)
from .caches import Caches
from .sampling import Draw, Forced, draw, fits, ids
from .sequence import Sequence
from .verify import Decoded, Drafts, Rows, accept

log = logging.getLogger(__name__)

# Prompts that are computed together, each up to a position.
Chunk: TypeAlias = list[tuple[Sequence, int]]
# The most tokens that are copied of what has followed a prompt before.
MOST_FOLLOWING = 2048
# A number of forced tokens that no run has.
NEVER = 1 << 30


def compute_chunk(model: Any, chunk: Chunk, ragged: bool) -> int:
    """Compute the tokens [computed, end) of each row. Returns their number.

    Several rows, of a `ragged` batch, are padded on the right; caches ignore the padding.
    """
    assert ragged or len(chunk) == 1, "this model runs one sequence at a time"
    tokens = [row.tokens[row.computed : end] for row, end in chunk]
    caches = [row.caches or [] for row, _ in chunk]
    layers = batch_of(caches) if ragged else caches[0]
    states = states_of(model)
    states.begin(states.stack(row.hidden for row, _ in chunk))
    padded_forward(model, tokens, layers)
    longest = max(map(len, tokens))
    hidden = states.at([i * longest + len(own) - 1 for i, own in enumerate(tokens)])
    mx.eval([layer.state for layer in layers], hidden)
    for i, (row, end) in enumerate(chunk):
        row.computed = end
        row.hidden = None if hidden is None else hidden[i : i + 1]
        if ragged:
            row.caches = member_of(layers, i)
    # The state of one row is a copy: not evaluated, it would retain those of all rows.
    copies = [state_caches(row.caches or []) for row, _ in chunk if ragged]
    mx.eval([cache.saved_arrays() for found in copies for cache in found.values()])
    return sum(map(len, tokens))


class DecodeDebt:
    """The seconds of decode steps that are due before running replies wait again.

    `share`: the part of the time that they get.
    """

    def __init__(self, share: float) -> None:
        self._ratio = share / (1 - share)
        self.seconds = 0.0

    @property
    def is_due(self) -> bool:
        return self.seconds > 0

    def add_wait(self, seconds: float) -> None:
        """Count seconds for which running replies have waited."""
        self.seconds += seconds * self._ratio

    def pay(self, seconds: float) -> None:
        """Count the seconds of a decode step."""
        self.seconds -= seconds


class DecodeBatch:
    """The sequences that decode together, and their layer caches in one batch.

    `ragged`: without that the batch holds one sequence at most, and the sequence's own caches.
    """

    def __init__(self, model: Any, ragged: bool, draw: Draw = draw) -> None:
        self.model = model
        self.ragged = ragged
        self._draw = draw
        self.members: list[Sequence] = []
        self._layers: list[Any] = []
        # The next token to be computed of each member.
        self._inputs: mx.array | None = None
        # Of a model with a head: the hidden states [members, n, dim] before the tokens of each
        # member that are computed again, and before its next one.
        self._states = states_of(model)
        self._before: mx.array | None = None

    def __len__(self) -> int:
        return len(self.members)

    @property
    def has_first_token_pending(self) -> bool:
        """True if a member's first token is computed and not emitted yet."""
        return any(member.is_new for member in self.members)

    def join(self, sequence: Sequence) -> None:
        """Add a sequence of which all tokens but the last are computed."""
        assert sequence.caches is not None
        assert sequence.computed == sequence.prefill_end, (
            f"{sequence.computed} tokens computed of {sequence.prefill_end}"
        )
        assert self.ragged or not self.members, (
            "a second sequence of a model that runs one at a time"
        )
        own = batch_of([sequence.caches]) if self.ragged else sequence.caches
        if self.members:
            for layer, joining in zip(self._layers, own, strict=True):
                layer.extend(joining)
        else:
            self._layers = own
        self._before = self._states.stack(
            [*([self._before] if self.members else []), sequence.hidden]
        )
        sequence.hidden = None
        following = mx.array(sequence.tokens[-1:], mx.uint32)
        self._inputs = (
            following if self._inputs is None else mx.concatenate([self._inputs, following])
        )
        if sequence.request.processors:
            sequence.buffer = TokenBuffer(sequence.tokens[:-1])
        self.members.append(sequence)

    def leave(self, leaving: Collection[Sequence]) -> None:
        """Let members go, each with its caches."""
        if not leaving:
            return
        keep = [i for i, member in enumerate(self.members) if member not in leaving]
        for i, member in enumerate(self.members):
            if member in leaving:
                member.caches = member_of(self._layers, i) if self.ragged else self._layers
                member.rolled_back, member.logprobs, member.buffer = 0, None, None
                member.hidden = None if self._before is None else self._before[i : i + 1, :1]
        self._layers = self._layers if keep else []
        for layer in self._layers:
            layer.filter(keep)
        assert self._inputs is not None
        self._inputs = self._inputs[mx.array(keep)] if keep else None
        if self._before is not None:
            self._before = self._before[mx.array(keep)] if keep else None
        self.members = [self.members[i] for i in keep]

    def extract(self, sequence: Sequence) -> list[Any]:
        """Caches with what a sequence has computed, which continue on their own."""
        if sequence not in self.members:
            return copy.deepcopy(sequence.caches or [])
        i = self.members.index(sequence)
        return (
            [layer.extract(i) for layer in self._layers]
            if self.ragged
            else copy.deepcopy(self._layers)
        )

    def suspend(self, sequence: Sequence) -> None:
        """Let a member go in such a way that it can join again: with the token that was drawn
        and not emitted yet.
        """
        assert self._inputs is not None
        if sequence.computed + sequence.rolled_back == len(sequence.tokens):
            sequence.tokens.append(ids(self._inputs)[self.members.index(sequence)])
        logprobs = sequence.logprobs
        mx.eval(logprobs)
        self.leave([sequence])
        sequence.logprobs = logprobs

    def append(self, runs: Forced, together: bool) -> None:
        """Append forced tokens to members and compute them, several runs `together` if they may be
        padded.

        They take the place of the draws in flight, which can only have come to the first token of
        each run.
        """
        self.leave(runs)
        for member, run in runs.items():
            member.tokens += run
            skip = getattr(member.request.sampler, "skip", None)
            if skip is not None:
                skip(len(run) - 1)
        rows = [(member, member.prefill_end) for member in runs if member.in_prefill]
        for chunk in [rows] if together and rows else [[row] for row in rows]:
            compute_chunk(self.model, chunk, self.ragged)
        for member in runs:
            self.join(member)

    def compute_rolled_back(self) -> None:
        """Compute what was accepted and rolled back, of one member after another."""
        for member in [member for member in self.members if member.rolled_back]:
            self.suspend(member)
            compute_chunk(self.model, [(member, member.prefill_end)], self.ragged)
            self.join(member)

    def run(self, chunk: Chunk | None = None) -> Decoded:
        """Compute one token of each member, and a chunk of prompts in the same forward. Emits the
        tokens that the step before has drawn.
        """
        inputs, logprobs = self._inputs, [member.logprobs for member in self.members]
        assert inputs is not None
        if chunk:
            logits, self._before = self._logits_with(chunk, inputs, [1] * len(self.members))
        else:
            if self._states is not NO_STATES:
                # In each step: a call would be felt.
                self._states.begin(self._before)
            logits = self.model(inputs[:, None], cache=self._layers)[:, -1, :]
            self._before = self._states.last
        drawn = self._draw(logits, inputs, self.members)
        self._inputs, following = drawn.tokens, list(drawn.logprobs)
        mx.async_eval(  # type: ignore[no-untyped-call]
            self._inputs, following, drawn.contexts, self._before
        )
        mx.eval(inputs, logprobs)
        decoded = Decoded(failed=drawn.failed, forced=drawn.forced)
        for member, token, row, drawn_from in zip(
            self.members, ids(inputs), logprobs, following, strict=True
        ):
            member.logprobs = drawn_from
            member.compute(token)
            if row is not None and member not in drawn.failed:
                decoded.emitted.append((member, token, row))
        return decoded

    def _logits_with(
        self, chunk: Chunk | None, inputs: mx.array, counts: list[int]
    ) -> tuple[mx.array, mx.array | None]:
        """The logits [rows, vocabulary] and the hidden states of the members' rows, counts[i] of
        member i, in one forward with a chunk's tokens as further rows, which are computed when this
        returns.
        """
        states = self._states
        if not chunk:
            states.begin(self._before, counts)
            return self.model(inputs[:, None], cache=self._layers)[:, -1, :], states.last
        tokens = [row.tokens[row.computed : end] for row, end in chunk]
        caches = [batch_of([row.caches or []]) for row, _ in chunk]
        lengths = [len(own) for own in tokens]
        begin_chunks(self._layers, caches, lengths)
        states.begin(
            states.stack([self._before, *(row.hidden for row, _ in chunk)]),
            [*counts, *lengths],
        )
        rows = mx.concatenate([inputs, *(mx.array(own, mx.uint32) for own in tokens)])
        logits = first_rows(self.model, rows[:, None], self._layers, inputs.size)
        end_chunks(self._layers)
        ends = [inputs.size + end - 1 for end in accumulate(lengths)]
        before, hidden = states.at(range(inputs.size)), states.at(ends)
        mx.eval(logits, [layer.state for layer in self._layers], before, hidden)
        for i, (row, end) in enumerate(chunk):
            row.computed = end
            row.hidden = None if hidden is None else hidden[i : i + 1]
        return logits[:, -1, :], before

    def guess(self, count: int) -> list[list[int]]:
        """`count` tokens after the next one of each member, as the model's head guesses them.
        Blocks for them are reserved. Waits for the step in flight.
        """
        head, before = head_of(self.model), self._before
        assert head is not None, "the model has no head"
        assert before is not None, "no state is known"
        tokens = [
            [*member.tokens[member.computed : member.computed + member.rolled_back], token]
            for member, token in zip(self.members, self.known(), strict=True)
        ]
        return head.guess(tokens, before, count, self._layers[-1])

    def known(self) -> list[int]:
        """The next token of each member. Waits for the step in flight."""
        assert self._inputs is not None
        mx.eval(self._inputs, [member.logprobs for member in self.members])
        return ids(self._inputs)

    def possible(self, tokens: Iterable[int]) -> list[int]:
        """The tokens up to the first outside the model's vocabulary, as those of a prompt may
        be.
        """
        rows = (member.logprobs for member in self.members)
        vocabulary = next((row.shape[-1] for row in rows if row is not None), 0)
        return list(takewhile(range(vocabulary).__contains__, tokens))

    @property
    def is_rolled_back(self) -> bool:
        """True if accepted tokens of a member are computed again, by verify()."""
        return bool([member for member in self.members if member.rolled_back])

    def verify(
        self, drafts: Drafts, least_forced: int, by_rows: bool, chunk: Chunk | None = None
    ) -> Decoded:
        """Compute the next token of each member with those drafted after it, and accept its drafts:
        see accept(). With `by_rows` a chunk of prompts is computed in the same forward; otherwise a
        member with a state is rolled back where some of its drafts are rejected: its accepted ones
        are computed again by the next forward.

        Blocks for all of them are reserved. Emits one token of each member and its accepted ones.
        Waits for the step in flight.
        """
        members: list[Rows] = []
        start = 0
        for member, token in zip(self.members, self.known(), strict=True):
            computed, again = member.computed, member.rolled_back
            tokens = member.tokens[computed : computed + again]
            tokens += [token, *drafts.get(member, ())]
            members.append(Rows(member, tokens, start, kept=again))
            start += len(tokens)
            member.computed += again
        pending = (
            PendingRows(
                self._layers, [rows.tokens for rows in members], partial(self._logits_with, chunk)
            )
            if by_rows
            else PendingTokens(
                self.model, self._layers, [rows.tokens for rows in members], self._before
            )
        )
        decoded = accept(pending.logits, members, least_forced)
        held = pending.accept([rows.kept for rows in members])
        self._before = pending.before
        for rows, count in zip(members, held, strict=True):
            rows.member.rolled_back = rows.kept - count
            rows.member.computed -= rows.member.rolled_back
        self._inputs = mx.array([rows.following for rows in members], mx.uint32)
        return decoded


class DecodeSteps:
    """`drafting`: the drafters' common part; None where nothing is drafted, and `off` says why.

    counts: the engine's, with verifications, the forwards over drafts, guesses, those of the head,
    and the tokens `drafted <source>` and `accepted <source>`.
    has_head: the model has a prediction head.
    """

    def __init__(
        self,
        config: EngineConfig,
        caches: Caches,
        counts: Counter[str],
        has_head: bool = False,
    ) -> None:
        self.counts = counts
        self._caches = caches
        self._has_head = has_head
        self._config = config
        # What the passes over forced tokens owe to the members that waited for them.
        self._debt = DecodeDebt(config.decode_share)
        self.drafting: Drafting | None = None
        self.off: str | None = None
        self.decide()

    def decide(self) -> None:
        """Decide whether to draft, by what was measured. Call it again when more was measured."""
        config, caches = self._config, self._caches
        self.off = _why_off(config, caches)
        if self.off is None and self.drafting is None:
            self.drafting = Drafting(
                config.drafts,
                config.most_drafted,
                caches.curve,
                self.counts,
                padded=caches.capabilities.verifies != "rows",
                has_head=self._has_head,
            )
        elif self.off is not None and config.drafts != "off":
            log.info("Nothing is drafted: %s", self.off)

    def start(self, sequence: Sequence) -> None:
        """Draft for a sequence that has joined the batch."""
        if self.drafting is not None and sequence.drafter is None:
            request, known = sequence.request, sequence.tokens[: sequence.emitted]
            following = self._caches.following(sequence, MOST_FOLLOWING)
            sequence.drafter = self.drafting.drafter(
                known, request.agent, request.salt, following, request.prediction
            )

    def remember_reply(self, sequence: Sequence) -> None:
        """Remember the reply of a sequence that has ended, for its agent's next one."""
        agent = sequence.request.agent
        if self.drafting is not None and agent is not None:
            self.drafting.replies.remember(agent, sequence.request.salt, sequence.generated(0))

    def run(self, batch: DecodeBatch, chunk: Chunk | None = None) -> Decoded:
        """One step of the batch: its run(), or its verify() where drafts pay; with a chunk of
        prompts where the model mixes them.
        """
        if self._caches.capabilities.verifies == "alone" and len(batch) > 1:
            # A verification computes one number of tokens for all members: nothing is drafted here,
            # as a forward for each number would take about as long as one for all.
            batch.compute_rolled_back()
            return batch.run(chunk)
        drafts = {} if self.drafting is None else self._choose(batch, self.drafting)
        if not drafts and not batch.is_rolled_back:
            return batch.run(chunk)
        found = {member: list(draft.tokens) for member, draft in drafts.items()}
        # Next to other members, and in batches that are not ragged, a forced run may stay without a
        # pass, so that its tokens are drafted like any others.
        appends = len(batch) == 1 and self._caches.ragged
        least_forced = self._least_forced(batch) if appends else NEVER
        by_rows = self._caches.capabilities.verifies == "rows"
        decoded = batch.verify(found, least_forced, by_rows, chunk)
        self.counts["verifications"] += 1
        for member, draft in drafts.items():
            if member.drafter is not None:
                member.drafter.verified(draft, decoded.accepted[member])
        return decoded

    def jumps(self, batch: DecodeBatch, forced: Forced, prompts_wait: bool = False) -> Forced:
        """The runs of forced tokens that are worth a pass after the step, with blocks reserved for
        them.

        Where every member has one, all of them are in the pass, if that many fit into one pass.
        Otherwise the other members wait for it: it has to pay by what forwards were measured to
        cost, gets no more than its share of the time, and none while prompts wait for theirs.
        """
        least, each = (
            self._least_forced(batch),
            FormConfig.most_forced_together // max(1, len(batch)),
        )
        found = {
            member: run
            for member, run in forced.items()
            if member in batch.members and len(run) >= least
        }
        is_for_all = len(found) == len(batch) and each >= least
        if is_for_all:
            found = {member: run[:each] for member, run in found.items()}
        else:
            found = {} if prompts_wait or self._debt.is_due else self._paying(batch, found)
        runs: Forced = {}
        for member, run in found.items():
            if len(run) >= least and fits(run, runs) and self._reserve_run(member, len(run)):
                runs[member] = run
        return {} if is_for_all and len(runs) < len(found) else runs

    def _reserve_run(self, member: Sequence, tokens: int) -> bool:
        if not self._caches.ragged:
            return False
        try:
            self._caches.ensure_next_blocks([member], tokens)
        except PoolExhaustedError:
            return False
        return True

    def _paying(self, batch: DecodeBatch, forced: Forced) -> Forced:
        """The beginnings of forced runs that gain their members more than the other members
        lose.
        """
        if self.drafting is None or not forced:
            return {}
        counts = [len(forced.get(member, ())) for member in batch.members]
        lengths = self.drafting.forced_lengths([member.drafter for member in batch.members], counts)
        return {
            member: forced[member][:count]
            for member, count in zip(batch.members, lengths, strict=True)
            if count
        }

    def account(self, seconds: float, others_waited: bool = False) -> None:
        """Note the seconds of a step of all members, or of a pass over forced tokens for which
        others have waited.
        """
        if others_waited:
            self._debt.add_wait(seconds)
        elif self._debt.is_due:
            self._debt.pay(seconds)

    def _least_forced(self, batch: DecodeBatch) -> int:
        return max(self._config.forced_tokens, len(batch))

    def _choose(self, batch: DecodeBatch, drafting: Drafting) -> dict[Sequence, Draft]:
        """The drafts of those members for which they pay in this step."""
        # Nothing is drafted after the last token of a prompt: its drafter has seen that token.
        for member in batch.members:
            self.start(member)
        drafters = [None if member.logprobs is None else member.drafter for member in batch.members]
        again = [member.rolled_back for member in batch.members]
        if not drafting.expects(drafters, again):
            return {}
        known = batch.known()
        # A member that is rolled back again and again gets fewer drafts, so that its tokens stay
        # within what one forward computes of a member.
        most = max(drafting.most, self._config.most_drafted)
        left = [
            min(member.left_to_emit() - 1, max(0, most - member.rolled_back))
            for member in batch.members
        ]
        guesses = min(drafting.num_guesses(drafters, again), max(left))
        if guesses > 0:
            self._guess(batch, drafting, guesses)
        chosen: dict[Sequence, Draft] = {}
        for member, token, draft in zip(
            batch.members, known, drafting.propose(drafters, known, left, again), strict=True
        ):
            length = member.until_end([token, *batch.possible(draft.tokens)]) - 1
            if length and self._caches.reserve_rows(member, 1 + length):
                chosen[member] = draft.first(length)
        return chosen

    def _guess(self, batch: DecodeBatch, drafting: Drafting, count: int) -> None:
        """Let the head guess `count` tokens for each member, if there are blocks for them."""
        if not all(self._caches.reserve_rows(each, 1 + count) for each in batch.members):
            return
        start = time.perf_counter()
        found = batch.guess(count)
        drafting.note_guesses(len(batch), count, time.perf_counter() - start)
        self.counts["guesses"] += count
        for member, token, guessed in zip(batch.members, batch.known(), found, strict=True):
            if member.drafter is not None and member.drafter.head is not None:
                member.drafter.head.propose(token, guessed)


def _why_off(config: EngineConfig, caches: Caches) -> str | None:
    """Why nothing is drafted, or None if drafts are on."""
    if config.drafts == "off":
        return "drafts are off"
    if caches.no_drafts is not None:
        return caches.no_drafts
    if caches.capabilities.verifies is None:
        return (
            "the model does not compute several tokens of a sequence as it computes them one by one"
        )
    if config.drafts == "auto" and caches.curve is None:
        why = caches.unmeasurable.get("curve")
        if why is not None:
            return f"it was not measured what forwards cost: {why}"
        return (
            "it is measured later what forwards cost"
            if caches.is_unmeasured
            else "it was not measured what forwards cost"
        )
    return None
