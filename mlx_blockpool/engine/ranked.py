"""RankedEngine: the engine of one rank of several that run a model together.

Each rank has all of it: sequences, block tables, prefixes. They stay alike because all take the same steps after the same facts,
at the same times of the group's clock, with tokens that rank 0 draws:

    outgoing()   rank 0: the facts since the last exchange, which it sends to all ranks
    apply(facts) all: change the engine by them, between an exchange and the next step
    next()       all: one step
    is_steady    all: further steps may follow without an exchange
    fingerprint  all: equal on all ranks, or they disagree

Samplers, processors and forms are on rank 0 alone. What only they know, an error or a forced run, becomes a fact too. Until the
next exchange the sequence goes on as on the other ranks. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from zlib import crc32

import mlx.core as mx
from mlx_lm.generate import StopSequences

from ..config import EngineConfig, RankConfig
from ..errors import GroupError, GroupLostError
from ..kv.parts import sequence_of
from ..ranks.facts import Append, Cancel, Fact, Fail, Insert, Resume
from ..ranks.group import Ranks
from ..ranks.head import TurnClock
from .caches import PooledCaches
from .engine import BlockPoolBatchEngine, Extracted
from .masks import Forced
from .request import Event, Failed, Request
from .sequence import Sequence
from .verify import Emitted


class RankedEngine(BlockPoolBatchEngine):
    """A BlockPoolBatchEngine on each of `ranks`. On rank 0 insert(), cancel() and resume() take effect with the next apply().

    suspended: the requests that suspend() of an earlier engine of this model took out, by their uids. resume() takes them out.
    """

    def __init__(
        self,
        model: Any,
        caches: PooledCaches,
        config: EngineConfig | None,
        ranks: Ranks,
        clock: TurnClock,
        suspended: dict[int, Sequence] | None = None,
    ) -> None:
        super().__init__(model, caches, config, ranks, clock)
        caches.prefix.use_clock(clock)
        self._prefix = caches.prefix
        self._turn_clock = clock
        self._suspended = {} if suspended is None else suspended
        # No uid comes twice, so that those of suspended requests still name them.
        self._uids = max(self._suspended, default=0)
        # Of the turn before: whether it was one of prefill, its time, and whether prompts and the batch both waited.
        self._last_turn: tuple[bool, float, bool] | None = None
        # Rank 0: facts that are not sent yet, the requests of those that are not applied yet, and what a step has found.
        self._noted: list[Fact] = []
        self._coming: dict[int, Request] = {}
        self._errors: dict[int, Exception] = {}
        self._runs: dict[Sequence, tuple[int, list[int]]] = {}

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def insert_all(self, requests: Collection[Request], caches: Collection[list[Any] | None] | None = None) -> list[int]:
        assert self.ranks.rank == 0, "requests come to rank 0"
        if caches is not None and any(own is not None for own in caches):
            raise ValueError("Several ranks take no caches with a request: each has its own part of them.")
        for request in requests:
            request.check(self.caches.capacity())
        inserts = [_insert_of(self._uids + i, request, self.clock()) for i, request in enumerate(requests, 1)]
        self._noted += inserts
        self._uids += len(inserts)
        self._coming |= {fact.uid: request for fact, request in zip(inserts, requests, strict=True)}
        return [fact.uid for fact in inserts]

    def cancel(self, uid: int) -> None:
        self._noted.append(Cancel(uid))

    def resume(self, sequence: Sequence) -> int:
        self._uids += 1
        self._noted.append(Resume(self._uids, sequence.uid))
        self._coming[self._uids] = sequence.request
        return self._uids

    def outgoing(self) -> list[Fact]:
        """The facts since the last call, to be sent with the next exchange and applied behind it; none on other ranks than 0."""
        facts, self._noted = self._noted, []
        runs, self._runs = self._runs, {}
        facts += [Fail(uid) for uid in self._errors]
        # A run begins where its sequence was when the form was looked at.
        return facts + [Append(each.uid, tuple(run)) for each, (at, run) in runs.items() if each.computed == at]

    def lease_for(self, step_seconds: float, config: RankConfig) -> int:
        """How many steps may follow the next exchange, if one takes so long: fewer where new facts are about to come."""
        forms = (sequence.request.form for sequence in self.sequences)
        if self._noted or not self.is_steady or any(form is not None for form in forms):
            return 1
        return max(1, min(config.most_turns, int(config.lease_seconds / max(step_seconds, 1e-6))))

    def __len__(self) -> int:
        return super().__len__() + len(self._coming)

    @property
    def is_blocked(self) -> bool:
        return not (self._noted or self._events) and super().is_blocked

    # -- all ranks -----------------------------------------------------------------------------------------------------

    def apply(self, facts: Iterable[Fact]) -> None:
        """Change the engine by facts about its requests, in their order; other facts are not its own. Raises as next() does.

        What happens by that comes with the events of the next step, or with take_events().
        """
        forced: Forced = {}
        with self._together():
            for fact in facts:
                if isinstance(fact, Insert):
                    self._insert(fact)
                elif isinstance(fact, Resume):
                    self._resume(fact)
                elif isinstance(fact, Cancel):
                    self._suspended.pop(fact.uid, None)
                    super().cancel(fact.uid)
                elif isinstance(fact, Fail):
                    self._fail_on_all(fact.uid)
                elif isinstance(fact, Append):
                    forced |= {member: list(fact.tokens) for member in self._batch.members if member.uid == fact.uid}
            super()._jump(forced)

    @property
    def is_steady(self) -> bool:
        """True if all that is due is another step of decode, for which nothing has to be agreed on. Equal on all ranks."""
        return bool(self._batch.members) and not self._prefilling and not self.caches.is_restoring

    def next(self) -> list[Event]:
        """One step. Raises GroupLostError in place of any error: the ranks cannot know how far each other has come then."""
        if self._last_turn is not None:
            # By the group's clock: ranks that measured by themselves would take different turns.
            was_prefill, began, both_waited = self._last_turn
            self._turns.account(was_prefill, self.clock() - began, both_waited)
        with self._together():
            events = super().next()
        self._turn_clock.step()
        return events

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # The others may wait in a collective that this rank does not come to, or in the one that it would come to next.
            self.ranks.leave()
            if isinstance(error, Exception) and not isinstance(error, GroupLostError):
                raise GroupLostError(None, f"{type(error).__name__}: {error}") from error
            raise

    def reset(self) -> list[int]:
        dropped = sorted({*super().reset(), *self._coming})
        self._noted, self._coming, self._errors, self._runs, self._last_turn = [], {}, {}, {}, None
        return dropped

    def take_events(self) -> list[Event]:
        """The events that no step has returned yet, of an engine that takes no further step."""
        events, self._events = self._events, []
        return events

    def suspend(self) -> list[Sequence]:
        assert not self._coming, f"{len(self._coming)} requests are not applied yet"
        suspended = super().suspend()
        self._suspended |= {sequence.uid: sequence for sequence in suspended}
        return suspended

    def extract_cache(self, uids: Collection[int]) -> dict[int, Extracted]:
        raise GroupError("Each of several ranks has its own part of a cache. Copies of it cannot be taken out.")

    def fingerprint(self) -> int:
        """Of the time, the sequences, their block tables and all that is cached, in memory and on disk; 32 bits.

        Of ids and counts alone, and of parts that are kept up to date where they change: it is taken before each turn.
        """
        found = [int(self.clock() * 1e6), len(self._prefilling), len(self._suspended), self.caches.is_restoring]
        for each in self.sequences:
            found += each.uid, each.computed, len(each.tokens), each.tokens[each.computed - 1], each.preemptions
            found += len(each.pins), len(each.breakpoints), -1 if each.agreed is None else each.agreed
            blocks = None if each.caches is None else sequence_of(each.caches)
            found += [] if blocks is None else [table.digest for table in blocks.tables]
        return crc32(repr(found + self._prefix.figures()).encode())

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _account(self, is_prefill: bool, seconds: float) -> None:
        # The next turn knows how long this one took.
        self._last_turn = is_prefill, self.clock(), bool(self._prefilling and len(self._batch))

    def _postprocess_tokens(self, emitted: list[Emitted], failed: dict[Sequence, Exception], seconds: float) -> None:
        for sequence, error in failed.items():
            self._errors.setdefault(sequence.uid, error)
        super()._postprocess_tokens(emitted, {}, seconds)

    def _emit(self, sequence: Sequence, token: int, logprobs: mx.array | None) -> bool:
        is_last = super()._emit(sequence, token, logprobs)
        if sequence.uid in self._errors:
            # All ranks count the token, and no client gets it.
            self._events.pop()
            if is_last:
                self._events.append(Failed(sequence.uid, self._errors.pop(sequence.uid)))
        return is_last

    def _jump(self, forced: Forced) -> None:
        least = max(self.config.forced_tokens, len(self._batch))
        self._runs = {each: (each.computed, run) for each, run in forced.items() if len(run) >= least}

    # -- facts ---------------------------------------------------------------------------------------------------------

    def _insert(self, fact: Insert) -> None:
        request = self._coming.pop(fact.uid, None) or _request_of(fact)
        for other in self.waiting:
            # As on rank 0, choices have one list of tokens.
            if fact.group is not None and other.request.group == fact.group and other.request.tokens == request.tokens:
                request = replace(request, tokens=other.request.tokens)
        self._wait([Sequence(fact.uid, request, fact.due)])

    def _resume(self, fact: Resume) -> None:
        self._coming.pop(fact.uid, None)
        sequence = self._suspended.pop(fact.was)
        sequence.uid = fact.uid
        self._wait([sequence])

    def _fail_on_all(self, uid: int) -> None:
        """End a request with the error that rank 0 has met."""
        error = self._errors.pop(uid, None) or GroupError("The request has failed on rank 0.")
        for sequence in [each for each in self.sequences if each.uid == uid]:
            if sequence in self._prefilling:
                self._prefilling.remove(sequence)
            elif sequence in self._batch.members:
                self._batch.leave([sequence])
            self.caches.abandon(sequence)
            self._end(sequence, error)


def _insert_of(uid: int, request: Request, due: float) -> Insert:
    """The fact of a request."""
    return Insert(
        uid=uid,
        tokens=tuple(request.tokens),
        max_tokens=request.max_tokens,
        stop=tuple(_sequences_of(request.stop)),
        breakpoints=tuple(request.breakpoints),
        agent=request.agent,
        noted_as=request.noted_as,
        pins=tuple(request.pins),
        retention=request.retention,
        group=request.group,
        priority=request.priority,
        salt=request.salt,
        due=due,
    )


def _request_of(fact: Insert) -> Request:
    """The request of a fact: all of it but what draws its tokens."""
    return Request(
        tokens=list(fact.tokens),
        max_tokens=fact.max_tokens,
        stop=StopSequences(fact.stop),
        breakpoints=fact.breakpoints,
        agent=fact.agent,
        noted_as=fact.noted_as,
        pins=fact.pins,
        retention=fact.retention,
        group=fact.group,
        priority=fact.priority,
        salt=fact.salt,
    )


def _sequences_of(stop: StopSequences) -> Iterator[tuple[int, ...]]:
    """The sequences that a tree of mlx-lm's was made of; its nodes also have the sequences that end there within longer ones."""
    nodes, found = [stop._root], dict[tuple[int, ...], None]()
    while nodes:
        node = nodes.pop()
        if "__match__" in node:
            found[node["__match__"][0]] = None
        nodes += [child for token, child in node.items() if token not in ("__fail__", "__match__")]
    return iter(found)
