"""GroupDriver: drives the engine of one rank of several that run a model together.

Each rank has all of it: sequences, block tables, prefixes. They stay alike because all take the
same steps after the same facts, at the same times of the group's clock, with tokens that rank 0
draws:

    outgoing()   rank 0: the facts since the last exchange, which it sends to all ranks
    apply(facts) all: change the engine by them, between an exchange and the next step
    next()       all: one step
    is_steady    all: further steps may follow without an exchange
    fingerprint  all: equal on all ranks, or they disagree

Samplers, processors and forms are on rank 0 alone. What they find, an error or a forced run,
becomes a fact too. Until the next exchange the sequence continues as on the other ranks. Owned by
the generation thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from zlib import crc32

import mlx.core as mx
from mlx_lm.generate import StopSequences

from ..config import EngineConfig, RankConfig
from ..engine.caches import PooledCaches
from ..engine.engine import BlockPoolBatchEngine
from ..engine.request import Event, Failed, Request, Token
from ..engine.sampling import Drawn, Forced, draw
from ..engine.sequence import Sequence
from ..errors import GroupError, GroupLostError
from ..kv.prompt_cache import sequence_of
from ..tier.cache import TieredPrefixCache
from ..tier.path_facts import PathFact, PathFacts, Then
from .facts import Append, Cancel, Fact, Fail, Insert, Resume
from .group import Ranks
from .head import TurnClock


class GroupDriver:
    """Drives `engine` on each of `ranks`. On rank 0 insert(), cancel() and resume() take effect
    with the next apply().

    suspended: the requests that suspend() of an earlier driver of this model removed, by their
    uids. resume() takes them out.
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
        caches.no_drafts = "several ranks run the model together"
        caches.prefix.use_clock(clock)
        self.engine = BlockPoolBatchEngine(model, caches, config, clock, self._draw)
        self.ranks = ranks
        self.clock = clock
        self._prefix = caches.prefix
        self._suspended = {} if suspended is None else suspended
        # No uid is used twice, so that those of suspended requests still name them.
        self._uids = max(self._suspended, default=0)
        # Rank 0: facts that are not sent yet, sequences of those that are not applied yet, errors
        # of sequences, and the runs that forms force, each with what its sequence will have
        # computed after the step.
        self._noted: list[Fact] = []
        self._coming: dict[int, Sequence] = {}
        self._errors: dict[int, Exception] = {}
        self._runs: dict[Sequence, tuple[int, list[int]]] = {}

    # -- rank 0 ------------------------------------------------------------------------------------

    def insert(self, request: Request) -> int:
        return self.insert_all([request])[0]

    def insert_all(self, requests: Collection[Request]) -> list[int]:
        """BlockPoolBatchEngine.insert_all() with the next exchange."""
        assert self.ranks.rank == 0, "requests come to rank 0"
        for request in requests:
            request.check(self.engine.caches.capacity())
        inserted = [
            Sequence(self._uids + i, request, self.clock()) for i, request in enumerate(requests, 1)
        ]
        self._uids += len(inserted)
        self._noted += map(_insert_of, inserted)
        self._coming |= {sequence.uid: sequence for sequence in inserted}
        return [sequence.uid for sequence in inserted]

    def cancel(self, uid: int) -> None:
        self._noted.append(Cancel(uid))

    def resume(self, sequence: Sequence) -> int:
        self._uids += 1
        self._noted.append(Resume(self._uids, sequence.uid))
        self._coming[self._uids] = sequence
        return self._uids

    def outgoing(self) -> list[Fact]:
        """The facts since the last call, to be sent with the next exchange and applied after it;
        none on other ranks than 0.
        """
        facts, self._noted = self._noted, []
        facts += [Fail(uid) for uid in self._errors]
        members = self.engine.scheduler.batch.members
        runs: list[Fact] = [
            Append(each.uid, tuple(run))
            for each, (at, run) in self._runs.items()
            if each in members and each.computed == at
        ]
        self._runs = {}
        # Ranks have not measured what a pass costs, so that no member waits for the runs of others:
        # see DecodeSteps.jumps().
        return facts + runs if len(runs) == len(members) else facts

    def lease_for(self, step_seconds: float, config: RankConfig) -> int:
        """How many steps may follow the next exchange, if one takes this long: fewer where new
        facts are about to come.
        """
        forms = (sequence.request.form for sequence in self.engine.sequences)
        if self._noted or not self.is_steady or any(form is not None for form in forms):
            return 1
        return max(1, min(config.most_turns, int(config.lease_seconds / max(step_seconds, 1e-6))))

    # -- all ranks ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.engine) + len(self._coming)

    @property
    def is_blocked(self) -> bool:
        return not (self._noted or self.engine.scheduler.events) and self.engine.is_blocked

    @property
    def is_steady(self) -> bool:
        """True if all that is due is another step of decode, for which nothing has to be agreed on.

        Equal on all ranks.
        """
        scheduler = self.engine.scheduler
        return (
            bool(scheduler.batch.members)
            and not scheduler.prefilling
            and not self.engine.caches.is_restoring
        )

    def apply(self, facts: Iterable[Fact]) -> None:
        """Change the engine by facts about its requests, in their order. Ignores other facts.
        Raises as next() does.

        The events of that come with those of the next step, or with take_events().
        """
        forced: Forced = {}
        with self._together():
            for fact in facts:
                if isinstance(fact, Insert):
                    self.engine.scheduler.add(
                        [
                            self._coming.pop(fact.uid)
                            if fact.uid in self._coming
                            else self._sequence_of(fact)
                        ]
                    )
                elif isinstance(fact, Resume):
                    self._coming.pop(fact.uid, None)
                    sequence = self._suspended.pop(fact.was)
                    sequence.uid = fact.uid
                    self.engine.scheduler.add([sequence])
                elif isinstance(fact, Cancel):
                    self._suspended.pop(fact.uid, None)
                    self.engine.cancel(fact.uid)
                elif isinstance(fact, Fail):
                    self._fail_on_all(fact.uid)
                elif isinstance(fact, Append):
                    members = self.engine.scheduler.batch.members
                    forced |= {
                        member: list(fact.tokens) for member in members if member.uid == fact.uid
                    }
            self.engine.append_forced(forced)

    def next(self) -> list[Event]:
        """One step.

        Raises GroupLostError in place of any error: the ranks cannot know how far each other has
        come then.
        """
        # By rank 0's figure: ranks that measured by themselves would choose other steps.
        self.engine.step_seconds = self.clock.step_seconds
        with self._together():
            events = self.engine.next()
        self.clock.step()
        return self._shown(events)

    def take_events(self) -> list[Event]:
        """The events that no step has returned yet, of an engine that takes no further step."""
        return self._shown(self.engine.scheduler.take_events())

    def reset(self) -> list[int]:
        dropped = sorted({*self.engine.reset(), *self._coming})
        self._noted, self._coming, self._errors, self._runs = [], {}, {}, {}
        return dropped

    def suspend(self) -> list[Sequence]:
        assert not self._coming, f"{len(self._coming)} requests are not applied yet"
        suspended = self.engine.suspend()
        self._suspended |= {sequence.uid: sequence for sequence in suspended}
        return suspended

    def fingerprint(self) -> int:
        """Of the time, the sequences, their block tables and all that is cached, in memory and on
        disk; 32 bits.

        Of ids and counts alone, and of parts that are kept up to date where they change: it is
        taken before each turn.
        """
        engine = self.engine
        found = [
            int(self.clock() * 1e6),
            len(engine.scheduler.prefilling),
            len(self._suspended),
            engine.caches.is_restoring,
        ]
        for each in engine.sequences:
            found += (
                each.uid,
                each.computed,
                len(each.tokens),
                each.tokens[each.computed - 1],
                each.preemptions,
            )
            found += (
                len(each.pins),
                len(each.breakpoints),
                -1 if each.agreed is None else each.agreed,
            )
            blocks = None if each.caches is None else sequence_of(each.caches)
            found += [] if blocks is None else [table.digest for table in blocks.tables]
        return crc32(repr(found + self._prefix.figures()).encode())

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # The others may wait in a collective that this rank does not come to, or in the one
            # that it would come to next.
            self.ranks.leave()
            if isinstance(error, Exception) and not isinstance(error, GroupLostError):
                raise GroupLostError(None, f"{type(error).__name__}: {error}") from error
            raise

    def _draw(self, logits: mx.array, inputs: mx.array, members: list[Sequence]) -> Drawn:
        """The tokens that rank 0 draws, on all ranks.

        Errors and forced runs wait for the next exchange.
        """
        count = len(members)
        if self.ranks.rank:
            return Drawn(self.ranks.draw(None, count, logits), mx.zeros((count, 0)), [], {}, {})
        drawn = draw(logits, inputs, members)
        for sequence, error in drawn.failed.items():
            self._errors.setdefault(sequence.uid, error)
        least = self.engine.config.forced_tokens
        self._runs = {
            each: (each.computed + 1, run)
            for each, run in drawn.forced.items()
            if len(run) >= least
        }
        return replace(
            drawn, tokens=self.ranks.draw(drawn.tokens, count, logits), failed={}, forced={}
        )

    def _shown(self, events: list[Event]) -> list[Event]:
        """The events for clients.

        All ranks count the tokens of a request that has failed on rank 0, and no client gets them.
        """
        shown: list[Event] = []
        for event in events:
            if not isinstance(event, Token) or event.uid not in self._errors:
                shown.append(event)
            elif event.finish_reason is not None:
                shown.append(Failed(event.uid, self._errors.pop(event.uid)))
        return shown

    def _fail_on_all(self, uid: int) -> None:
        """End a request with the error that rank 0 has met."""
        error = self._errors.pop(uid, None) or GroupError("The request has failed on rank 0.")
        for sequence in [each for each in self.engine.sequences if each.uid == uid]:
            self.engine.caches.end_restore(sequence)
            self.engine.scheduler.finish([sequence], {sequence: error})

    def _sequence_of(self, fact: Insert) -> Sequence:
        """The sequence of a fact on another rank than 0: all of it but what draws its tokens."""
        fields = {name: getattr(fact, name) for name in _SENT}
        tokens = list(fact.tokens)
        for other in self.engine.scheduler.waiting:
            # As on rank 0, choices have one list of tokens.
            if (
                fact.group is not None
                and other.request.group == fact.group
                and other.request.tokens == tokens
            ):
                tokens = other.request.tokens
        sequence = Sequence(
            fact.uid, Request(tokens=tokens, stop=StopSequences(fact.stop), **fields), 0.0
        )
        sequence.due = fact.due
        return sequence


class SharedPathFacts(PathFacts):
    """Changes of cached paths in a group: rank 0 proposes a fact, and all ranks apply it after
    the next exchange.
    """

    def __init__(self, prefix: TieredPrefixCache) -> None:
        super().__init__(prefix)
        self._proposed: list[PathFact] = []
        # The callers of rank 0, in the order of their facts.
        self._waiting: deque[Then] = deque()

    def propose(self, fact: PathFact, then: Then = lambda result: None) -> None:
        self._proposed.append(fact)
        self._waiting.append(then)

    def outgoing(self) -> list[PathFact]:
        facts, self._proposed = self._proposed, []
        return facts

    def take(self, fact: PathFact) -> None:
        result = self.apply(fact)
        if self._waiting:
            self._waiting.popleft()(result)

    def close(self) -> None:
        while self._waiting:
            self._waiting.popleft()(None)


# The fields that a fact has of a request as they are.
_SENT = (
    "max_tokens",
    "breakpoints",
    "agent",
    "noted_as",
    "pins",
    "retention",
    "group",
    "priority",
    "salt",
)


def _insert_of(sequence: Sequence) -> Insert:
    """The fact of a request that has arrived now."""
    request = sequence.request
    fields = {name: getattr(request, name) for name in _SENT}
    fields |= {name: tuple(fields[name]) for name in ("breakpoints", "pins")}
    stop = tuple(_sequences_of(request.stop))
    return Insert(
        uid=sequence.uid, tokens=tuple(request.tokens), stop=stop, due=sequence.due, **fields
    )


def _sequences_of(stop: StopSequences) -> Iterator[tuple[int, ...]]:
    """The sequences that a tree of mlx-lm's was made of; its nodes also have the sequences that
    end there within longer ones.
    """
    nodes, found = [stop._root], dict[tuple[int, ...], None]()
    while nodes:
        node = nodes.pop()
        if "__match__" in node:
            found[node["__match__"][0]] = None
        nodes += [child for token, child in node.items() if token not in ("__fail__", "__match__")]
    return iter(found)
