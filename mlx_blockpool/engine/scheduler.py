"""Scheduler: which requests hold caches, and whether prompts or replies are computed next.

A sequence is in one of three places:

    waiting        it has no caches; ordered by when it is due, its arrival shifted by its priority
    prefilling     its prompt is computed in chunks
    batch.members  it decodes

schedule() takes these decisions before each step:

    admit    Requests with fewer live sequences start first, then those that are due. Requests of
             one agent run in the order of their arrival. A prompt waits for a live prefill that is
             about to compute its beginning, and for records on disk; meanwhile others pass it. A
             request that has the most live sequences is preempted for one that would have fewer.
    chunk    While prompts and replies both wait, decode gets `decode_share` of the time: chunks are
             computed in one forward with the next tokens of replies, as many as that leaves time
             for, or in turns with them where the model does not mix them. Of the prompts with the
             lowest priority value the one goes first of which the least is left to compute. One
             that later ones pass is aged: the oldest gets a token for each `aged_tokens` of
             theirs, a chunk at a time. Others share a forward only where that was measured to make
             no first token later on average.
    reserve  Each reply's next token gets its block. If the pool has none, restores end first, then
             sequences are preempted: of the highest priority value, of the request with the most
             live sequences, the youngest.

A preempted sequence waits in its old place, and continues from what is still cached of it. Knows no
model and no arrays. Owned by the generation thread.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from itertools import accumulate, islice
from operator import sub

from ..config import EngineConfig
from ..errors import PoolExhaustedError
from ..prefix.trie import common_prefix
from .caches import Caches, Opened
from .decode import Chunk, DecodeBatch, DecodeDebt
from .request import KIND, Event, Failed, Started, Swapped
from .sequence import Sequence

log = logging.getLogger(__name__)


class Scheduler:
    """The sequences of an engine.

    `events`: what has happened to them since the engine has last taken the events.
    """

    def __init__(
        self,
        config: EngineConfig,
        caches: Caches,
        batch: DecodeBatch,
        counts: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.caches = caches
        self.batch = batch
        self.counts = counts
        self.clock = clock
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.events: list[Event] = []
        # Whether something has changed since waiting sequences could not start.
        self.may_admit = True
        self._debt = DecodeDebt(config.decode_share)
        # The tokens that the oldest prompt is owed by later ones that have passed it.
        self._owed = 0.0
        # Of the last two steps: the sequences that decoded, and whether prompts were computed.
        self.last_steps = ((0, False), (0, False))
        # The seconds of a step without prompts, by the sequences that decode.
        self._plain: dict[int, float] = {}
        # The most tokens of prompts in one forward with replies, and the least that this may be:
        # parts of the grid.
        self._least = config.prefill_tokens
        while self._least > config.mixed_tokens and self._least % 2 == 0:
            self._least //= 2
        self._most = self._least if config.decode_share else config.prefill_tokens

    @property
    def live(self) -> list[Sequence]:
        """The sequences that have caches."""
        return [*self.prefilling, *self.batch.members]

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.live, *self.waiting]

    @property
    def mixes(self) -> bool:
        """Whether the next chunk is computed in one forward with the tokens of replies."""
        return self.caches.capabilities.mixes and bool(self.batch.members)

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def add(self, sequences: Collection[Sequence]) -> None:
        """Let sequences wait, in the order in which they are due."""
        for sequence in sequences:
            insort(self.waiting, sequence, key=lambda each: each.place)
        self.may_admit = True

    def schedule(self, seconds: float) -> Chunk:
        """Admit sequences. Returns the next chunk of prompts, or an empty one if only replies are
        next. The blocks of replies are reserved, unless a chunk is next and `mixes` is False.

        `seconds`: how long the last step took.
        """
        self._account(seconds)
        self.may_admit |= self.caches.advance(idle=not self.live)
        if self.may_admit:
            self._admit()
        has_chunk = bool(self.prefilling) and not self._are_replies_first
        if self.mixes or not has_chunk:
            self._reserve_next_blocks()
        chunk = self._next_chunk() if has_chunk and self.prefilling else []
        step = len(self.batch.members) if self.mixes or not chunk else 0, bool(chunk)
        self.last_steps = self.last_steps[1], step
        return chunk

    @property
    def _are_replies_first(self) -> bool:
        """Whether a prompt waits for a step of the replies alone."""
        members = len(self.batch)
        return bool(members) and (
            self._debt.is_due
            or self.batch.has_first_token_pending
            or (self.mixes and members not in self._plain and self.config.decode_share > 0)
        )

    # -- admit -------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting sequences.

        One that waits for its agent, for a prefix or for the disk lets others pass.
        """
        self.may_admit = False
        first = {
            each.request.agent: each for each in sorted(self.sequences, key=lambda each: -each.uid)
        }
        for sequence in in_turn(self.waiting, self.live):
            agent = sequence.request.agent
            if (
                agent is not None
                and first[agent] is not sequence
                and not sequence.is_choice_with(first[agent])
            ):
                continue
            if self._is_full and preemption_victim(self.live, sequence) is None:
                break
            if self._awaits_prefix(sequence) or not self.caches.is_ready(sequence):
                continue
            if not self._start(sequence):
                break

    @property
    def _is_full(self) -> bool:
        return len(self.live) >= (self.config.max_members if self.caches.ragged else 1)

    def _awaits_prefix(self, sequence: Sequence) -> bool:
        """Return whether a prefill is about to compute the beginning of this prompt, and add a
        breakpoint where that ends.

        It has to be `shared_tokens` more than are cached. Choices wait for the whole prompt.
        """
        for other in self.prefilling:
            shared = _still_shared(sequence, other)
            least = 1 if sequence.is_choice_with(other) else self.config.shared_tokens
            if shared < least:
                continue
            if shared not in other.breakpoints:
                if (
                    shared - self.caches.cached_tokens(sequence.tokens, sequence.policy.salt)
                    < least
                ):
                    continue
                other.breakpoints[shared] = KIND
            self.counts["shared"] += not sequence.has_waited
            sequence.has_waited = True
            return True
        return False

    def _start(self, sequence: Sequence) -> bool:
        """Give a sequence its caches. Returns False if it has to wait for blocks."""
        try:
            opened = self._open(sequence)
        except PoolExhaustedError as error:
            if self.live or self.caches.are_blocks_coming:
                return False
            self._fail(sequence, error)
            return True
        self.waiting.remove(sequence)
        sequence.start(opened.caches, opened.cached, self.counts["prompt_tokens"])
        if sequence.preemptions:
            self.counts["swapped_in"] += 1
            self.events.append(Swapped(sequence.uid, is_in=True))
        else:
            self.events.append(Started(sequence.uid, opened.cached, opened.lookup))
        if sequence.in_prefill:
            self.prefilling.append(sequence)
        else:
            self.join(sequence)
        return True

    def _open(self, sequence: Sequence) -> Opened:
        """Open caches, preempting requests with more live sequences where necessary.

        Raises PoolExhaustedError.
        """
        while (victim := preemption_victim(self.live, sequence)) is not None:
            with suppress(PoolExhaustedError):
                if not self._is_full:
                    return self.caches.open(sequence, self.live)
            self.preempt(victim)
        return self.caches.open(sequence, self.live)

    # -- chunk -------------------------------------------------------------------------------------

    def _account(self, seconds: float) -> None:
        """Count the time of the last step: while prompts and replies both wait, chunks are a
        debt that decode steps pay.

        Where chunks go with replies their size follows the time, and the debt is what the smallest
        ones take beyond the share of replies.
        """
        (before, had_chunk), (members, has_chunk) = self.last_steps
        # The forward of a step without prompts ends in the next step. One that is disturbed counts
        # less, as longer chunks would follow.
        if members and not has_chunk and not had_chunk and before == members:
            known = self._plain.get(members, seconds)
            self._plain[members] = min(seconds, (known + seconds) / 2)
        plain = self._plain.get(members, seconds)
        if not (self.prefilling and self.batch.members):
            self._debt.seconds = 0.0
        elif has_chunk and members:
            share = self.config.decode_share
            seconds -= 0.0 if had_chunk else self._plain.get(before, 0.0)
            if seconds * share > plain:
                self._most = max(self._least, self._most // 2)
                self._debt.add_wait(seconds - plain)
                self._debt.pay(plain)
            elif (2 * seconds - plain) * share <= plain:
                self._most = min(self.config.prefill_tokens, 2 * self._most)
        elif has_chunk:
            self._debt.add_wait(seconds)
        else:
            self._debt.pay(plain if self.mixes else seconds)

    def _next_chunk(self) -> Chunk:
        """The prompts that are computed next, each up to the end of its own chunk: all of them
        next to replies no more tokens than these have time for.
        """
        tokens = self.config.prefill_tokens
        rows = self.config.prefill_rows if self.caches.ragged else 1
        chunk = choose(
            sorted(self.prefilling, key=self._rank),
            tokens,
            rows,
            self.caches.pads_prompts,
            self.caches.forward_seconds,
        )
        if self.mixes:
            parts = [(sequence, chunk_end(sequence, self._most)) for sequence, _ in chunk]
            left = accumulate((end - each.computed for each, end in parts), sub, initial=self._most)
            rests = islice(left, 1, None)
            chunk = [part for part, rest in zip(parts, rests, strict=True) if rest >= 0]
        self._age(chunk)
        return chunk

    def _rank(self, sequence: Sequence) -> tuple[bool, int, int, int]:
        """Prompts are computed in this order."""
        left = sequence.prefill_end - sequence.computed
        is_owed = self._owed >= self.config.prefill_tokens and sequence is self.prefilling[0]
        return not is_owed, sequence.request.priority, left, sequence.uid

    def _age(self, chunk: Chunk) -> None:
        """Count what the oldest prompt is owed by those that have started after it.

        Prompts that start together owe each other nothing: shortest first is best for them.
        """
        oldest, (first, _) = self.prefilling[0], chunk[0]
        computed = {sequence: end - sequence.computed for sequence, end in chunk}
        if oldest in computed:
            self._owed = max(0.0, self._owed - computed[oldest])
        elif first.started > oldest.started:
            self._owed += sum(computed.values()) / self.config.aged_tokens

    def join(self, sequence: Sequence) -> None:
        """Move a sequence whose prompt is computed into the batch."""
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        self.batch.join(sequence)

    # -- reserve and preempt -----------------------------------------------------------------------

    def _reserve_next_blocks(self) -> None:
        while self.batch.members:
            try:
                self.caches.ensure_next_blocks(self.batch.members)
                return
            except PoolExhaustedError:
                if self.caches.end_restores():
                    continue
                # Also the last one: when it starts again, its own checkpoints may be evicted.
                self.preempt(first_to_preempt(self.live))

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's caches, and let it wait in its old place.

        Its blocks stay cached until the pool needs them.
        """
        self.withdraw(sequence)
        sequence.preemptions += 1
        sequence.computed = 0
        self.add([sequence])
        self.counts["swapped_out"] += 1
        self.events.append(Swapped(sequence.uid, is_in=False))

    def withdraw(self, sequence: Sequence) -> None:
        """Remove a sequence that has not ended, in such a way that it can start again.

        What it computed stays cached.
        """
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        elif sequence in self.batch.members:
            self.batch.suspend(sequence)
        else:
            self.waiting = [each for each in self.waiting if each is not sequence]
        self.caches.end_restore(sequence)
        if sequence.caches is not None:
            self._release(sequence)
        self.may_admit = True

    def finish(self, ended: Collection[Sequence], failed: Mapping[Sequence, Exception]) -> None:
        """Remove sequences that have ended. What they computed is cached, unless they have failed.

        The other choices for their prompts wait as if they had arrived now: other requests go
        first.
        """
        self.prefilling = [each for each in self.prefilling if each not in ended]
        self.batch.leave([each for each in ended if each in self.batch.members])
        self.may_admit = True
        for sequence in ended:
            choices = [each for each in self.waiting if each.is_choice_with(sequence)]
            self.waiting = [each for each in self.waiting if each not in choices]
            for each in choices:
                each.requeue(self.clock())
            self.add(choices)
            if sequence in failed:
                self.caches.discard(sequence)
                self._fail(sequence, failed[sequence])
            else:
                self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Cache what a sequence has computed and take its caches back.

        A failure is logged and fails no request.
        """
        try:
            self.caches.release(sequence, "assistant")
        except Exception:
            # The code of models and the prefix cache may raise anything, and the reply does not
            # depend on it.
            log.exception("request %d could not be cached", sequence.uid)
            self.caches.discard(sequence)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        # Without its traceback, whose frames hold caches and with them blocks.
        self.events.append(Failed(sequence.uid, error.with_traceback(None)))
        self.may_admit = True
        self.waiting = [each for each in self.waiting if each is not sequence]


def in_turn(waiting: Collection[Sequence], live: Collection[Sequence]) -> list[Sequence]:
    """The waiting sequences as they start: of each request one after the other, the requests
    with the fewest live ones first.
    """
    counts = _counts(live)

    def turn(sequence: Sequence) -> int:
        counts[sequence.request_key] += 1
        return counts[sequence.request_key]

    return sorted(waiting, key=turn)


def preemption_victim(live: Collection[Sequence], for_: Sequence) -> Sequence | None:
    """The live sequence that is preempted for a waiting one: the youngest of the request that has
    the most.

    Returns None if no request would then still have at least as many as that of `for_`, or only
    requests that go before it.
    """
    counts = _counts(live)
    least, priority = counts[for_.request_key] + 2, for_.request.priority
    crowding = [
        each
        for each in live
        if counts[each.request_key] >= least and each.request.priority >= priority
    ]
    return max(crowding, key=lambda each: (counts[each.request_key], each.uid), default=None)


def first_to_preempt(live: Collection[Sequence]) -> Sequence:
    """The live sequence that is preempted when the pool has no block for the next tokens."""
    counts = _counts(live)
    return max(live, key=lambda each: (each.request.priority, counts[each.request_key], each.uid))


def _counts(live: Collection[Sequence]) -> Counter[int | str]:
    """How many live sequences each request has."""
    return Counter(each.request_key for each in live)


def chunk_end(sequence: Sequence, step: int) -> int:
    """Where the next chunk of a prompt ends: on the grid of `step` tokens, at a breakpoint, or at
    the end of the prompt.

    The grid is absolute, so that cold and warm runs of a prompt are computed in the same shapes.
    """
    grid = (sequence.computed // step + 1) * step
    return min(
        sequence.prefill_end, grid, *(at for at in sequence.breakpoints if at > sequence.computed)
    )


def choose(
    prefilling: Iterable[Sequence],
    step: int,
    rows: int = 1,
    pads: bool = False,
    seconds: Callable[[int], float] = float,
) -> Chunk:
    """The next chunk of the first prompt, and those of others that share its forward.

    Another joins if first tokens do not come later for it on average, by the `seconds` of a forward
    with a number of tokens: where it takes hardly longer for both, as for a few tokens on a GPU. At
    most `rows` prompts and `step` tokens, padding included; unless `pads`, only those whose chunks
    have as many tokens.
    """
    chosen: Chunk = []
    longest, cost = 0, 0.0
    for sequence in prefilling:
        end = chunk_end(sequence, step)
        length = end - sequence.computed
        longer, count = max(longest, length), len(chosen) + 1
        together = seconds(count * longer)
        is_alike = pads or length == longest
        fits = count <= rows and count * longer <= step and is_alike
        if not chosen or (fits and together <= cost + seconds(length) / count):
            chosen.append((sequence, end))
            longest, cost = longer, together
    return chosen


def _still_shared(sequence: Sequence, other: Sequence) -> int:
    """The tokens that two prompts have in common, if the prefill of `other` has not come to
    their end; else 0.
    """
    if sequence.policy.salt != other.policy.salt:
        return 0
    prompt = sequence.request.tokens
    # Choices have one list of tokens, which may be long.
    alike = (
        len(prompt)
        if prompt is other.request.tokens
        else common_prefix(sequence.tokens, other.tokens)
    )
    shared = min(alike, sequence.prefill_end, other.prefill_end)
    return shared if shared > other.computed else 0
