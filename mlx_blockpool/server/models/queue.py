"""The requests that wait for models, in the order in which they are due, grouped so that one swap
of models serves many.

Clients' commands to load models wait here too; CommandBackoff says how long a model must be idle
before them. Knows keys, times and order. Does not know models or requests. Owned by the generation
thread.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ...engine.sequence import delay_of


class Claim(Enum):
    """Which loaded models may be unloaded for an item that waits for its own model.

    REQUEST:  any model, in turn.
    GUEST:    no model. The model of the item is loaded only while no other one is.
    COMMAND:  a client waits for its command. Any model, except those that have to be idle first
              (ModelUsage.rest).
    UNWAITED: no client waits for its command. Only models that have been idle for long enough.
    """

    REQUEST = "request"
    GUEST = "guest"
    COMMAND = "command"
    UNWAITED = "unwaited command"

    @staticmethod
    def of_request(may_load: bool) -> Claim:
        return Claim.REQUEST if may_load else Claim.GUEST


@dataclass(frozen=True)
class QueueEntry:
    """`item` needs the model `key` and has waited since `arrived`, in seconds of the queue's clock.

    `due`: when it arrived, as if that had been later or earlier by its `priority`. `agent`: the
    name of its agent, if it has one.
    `claim`: which models may be unloaded for it.
    """

    key: Any
    item: Any
    arrived: float
    due: float
    priority: int = 0
    agent: str | None = None
    claim: Claim = Claim.REQUEST


@dataclass(frozen=True)
class ModelUsage:
    """The use of a loaded model. Times are seconds of the queue's clock.

    busy:    it has live requests.
    ready:   when it was loaded.
    used:    when a request of it last started or ended.
    closed:  it is to be unloaded, and requests that arrived after this time do not start. None if
             it stays loaded.
    rest:    for how many seconds it has to be idle before a command may unload it; 0: it may be
             busy.
    """

    key: Any
    busy: bool
    ready: float
    used: float
    closed: float | None = None
    rest: float = 0.0

    def takes(self, entry: QueueEntry) -> bool:
        return entry.key == self.key and (self.closed is None or entry.arrived <= self.closed)


@dataclass(frozen=True)
class SwapPlan:
    """Load `load`, and before that unload `unload`: once it is not busy, or now if it `must` go.
    Either may be None.

    `by_command`: for a command, and not for a request.
    """

    load: Any = None
    unload: Any = None
    must: bool = False
    by_command: bool = False


@dataclass(eq=False)
class ModelQueue:
    """The requests of loaded models start in the order in which they are due; they overtake the
    others for `patience` seconds.

    The oldest of the others decides which model is loaded next. It replaces the least recently used
    model that has been idle for `linger` seconds. If none has, the least recently used model goes
    after `patience`: as soon as it is not busy, and after `drain` seconds more in any case. Until
    then it starts every request that arrives for it. A model that was just loaded stays for
    `patience`, so that each swap serves requests and every model gets its turn. A command that has
    to wait for a model to be idle lets later requests pass.
    """

    patience: float
    linger: float = 0.0
    clock: Callable[[], float] = time.monotonic
    drain: float = 0.0

    def __post_init__(self) -> None:
        # In the order in which they are due.
        self._entries: list[QueueEntry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueueEntry]:
        return iter(list(self._entries))

    def add(
        self,
        key: Any,
        item: Any,
        priority: int = 0,
        agent: str | None = None,
        claim: Claim = Claim.REQUEST,
    ) -> None:
        """Let an item wait; it overtakes no earlier one of its agent."""
        arrived = self.clock()
        self._insert(
            QueueEntry(key, item, arrived, arrived + delay_of(priority), priority, agent, claim)
        )

    def move_to_end(self, moves: Callable[[Any], bool]) -> None:
        """Move the items for which `moves` is true to the end of the queue, with the other items
        of their agents.
        """
        moved = [entry for entry in self._entries if moves(entry.item)]
        agents = {(entry.key, entry.agent) for entry in moved if entry.agent is not None}
        moved += [
            entry
            for entry in self._entries
            if entry not in moved and (entry.key, entry.agent) in agents
        ]
        now = self.clock()
        for entry in moved:
            self.remove(entry)
        for entry in moved:
            self._insert(replace(entry, due=now + delay_of(entry.priority)))

    def _insert(self, entry: QueueEntry) -> None:
        if entry.agent is not None:
            of_agent = (
                each.due
                for each in reversed(self._entries)
                if (each.key, each.agent) == (entry.key, entry.agent)
            )
            entry = replace(entry, due=max(entry.due, next(of_agent, entry.due)))
        insort(self._entries, entry, key=lambda each: each.due)

    def remove(self, entry: QueueEntry) -> None:
        """Remove the entry of an item, also after move_to_end() has replaced it."""
        index = next((i for i, other in enumerate(self._entries) if other.item is entry.item), None)
        if index is not None:
            del self._entries[index]

    def clear(self, key: Any = None) -> list[Any]:
        """Remove the entries of one model, or all (None). Returns their items."""
        removed = [entry.item for entry in self._entries if key in (None, entry.key)]
        self._entries = [entry for entry in self._entries if key not in (None, entry.key)]
        return removed

    def next(self, models: Sequence[ModelUsage], passed: Collection[Any] = ()) -> QueueEntry | None:
        """The entry that is due first of those that may start and whose model is none of
        `passed`.
        """
        may_start = (
            e
            for e in self._entries
            if e.key not in passed and any(usage.takes(e) for usage in models)
        )
        return next(may_start, None)

    def plan(self, models: Sequence[ModelUsage], fits: Callable[[Any], bool]) -> SwapPlan:
        """The next change of models.

        `fits`: whether a model can be loaded in addition to the loaded ones.
        """
        loaded = {usage.key for usage in models}
        others = [
            each
            for each in self._entries
            if each.key not in loaded and (each.claim is not Claim.GUEST or not loaded)
        ]
        others.sort(key=lambda entry: entry.arrived)
        # The plan is the same for all commands of a kind: of many that wait, the first is enough.
        first = {(entry.key, entry.claim): entry for entry in reversed(others)}
        for entry in sorted(first.values(), key=lambda entry: entry.arrived):
            plan = self._plan_for(entry, models, fits)
            if plan != SwapPlan() or entry.claim is Claim.REQUEST:
                return plan
        return SwapPlan()

    def _plan_for(
        self, first: QueueEntry, models: Sequence[ModelUsage], fits: Callable[[Any], bool]
    ) -> SwapPlan:
        """The change of models that an entry needs now; an empty plan if it has to wait."""
        by_command = first.claim in (Claim.COMMAND, Claim.UNWAITED)
        if fits(first.key):
            return SwapPlan(first.key, by_command=by_command)
        now = self.clock()
        may_go = [usage for usage in models if not by_command or self.is_rested(usage)]
        idle = [
            usage for usage in may_go if self.is_idle(usage) and now - usage.used >= self.linger
        ]
        if idle:
            return SwapPlan(
                first.key, min(idle, key=lambda usage: usage.used).key, by_command=by_command
            )
        if first.claim is Claim.UNWAITED or not may_go:
            return SwapPlan()
        # One that is not busy goes before one that is.
        last = min(may_go, key=lambda usage: (usage.busy, usage.used))
        waited = now - max(first.arrived, last.ready)
        if waited < self.patience:
            return SwapPlan()
        return SwapPlan(
            first.key, last.key, last.busy and waited >= self.patience + self.drain, by_command
        )

    def is_idle(self, usage: ModelUsage) -> bool:
        """Return whether a model neither has requests nor gets one of those that wait.

        Commands for it do not count.
        """
        return not usage.busy and not any(
            entry.claim is Claim.REQUEST and usage.takes(entry) for entry in self._entries
        )

    def is_rested(self, usage: ModelUsage) -> bool:
        """Return whether a command may unload a model: it need not be idle first, or has been
        for long enough.
        """
        return not usage.rest or (self.is_idle(usage) and self.clock() - usage.used >= usage.rest)


class CommandBackoff:
    """Counts how often models that commands have unloaded are loaded again. All times are seconds
    of `clock`.

    A model that is loaded again within `most` seconds after a command has unloaded it has to be
    idle for `first` seconds before another command may unload it, twice as long after each further
    time, and never longer than `most`. A model that is loaded again later starts over, and unloads
    that requests cause change nothing.
    """

    def __init__(self, first: float, most: float, clock: Callable[[], float]) -> None:
        self._first = first
        self._most = most
        self._clock = clock
        self._unloaded: dict[Any, float] = {}
        self._seconds: dict[Any, float] = {}

    def note_unload(self, key: Any) -> None:
        """Note that a command has unloaded a model."""
        self._unloaded[key] = self._clock()

    def note_load(self, key: Any) -> None:
        """Note that a model is loaded."""
        unloaded = self._unloaded.pop(key, None)
        if unloaded is None:
            return
        before = self._seconds.pop(key, 0.0)
        if self._clock() - unloaded <= self._most:
            self._seconds[key] = min(max(self._first, 2 * before), self._most)

    def seconds(self, key: Any) -> float:
        """How long a model has to be idle before a command may unload it; 0: a command need not
        wait for that.
        """
        return self._seconds.get(key, 0.0)
