"""The requests that wait for models, in the order in which they are due, grouped so that one swap of models serves many.

Knows keys, times and order. Does not know models or requests. Owned by the generation thread.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...engine.sequence import delay_of


@dataclass(frozen=True)
class QueueEntry:
    """`item` needs the model `key` and has waited since `arrived`, in seconds of the queue's clock.

    `due`: when it arrived, as if that had been later or earlier by its `priority`. `agent`: whose it is; None: no agent's.
    """

    key: Any
    item: Any
    arrived: float
    due: float
    priority: int = 0
    agent: str | None = None


@dataclass(frozen=True)
class ModelUsage:
    """The use of a loaded model. Times are seconds of the queue's clock.

    busy:    it has live requests.
    ready:   when it was loaded.
    used:    when a request of it last started or ended.
    closed:  it is to be unloaded, and requests that arrived after this time do not start; None: it stays.
    """

    key: Any
    busy: bool
    ready: float
    used: float
    closed: float | None = None

    def takes(self, entry: QueueEntry) -> bool:
        return entry.key == self.key and (self.closed is None or entry.arrived <= self.closed)


@dataclass(frozen=True)
class Plan:
    """Load `load`, and before that unload `unload`: once it is not busy, or now if it `must` go. None: nothing."""

    load: Any = None
    unload: Any = None
    must: bool = False


class ModelQueue:
    """The requests of loaded models start in the order in which they are due; they overtake the others for `patience` seconds.

    The oldest of the others decides which model is loaded next. It replaces the least recently used model that has been idle for
    `linger` seconds. If none has, the least recently used model goes after `patience`: as soon as it is not busy, and after
    `drain` seconds more in any case. Until then it starts every request that arrives for it. A model that was just loaded stays
    for `patience`, so that each swap serves requests and every model gets its turn.
    """

    def __init__(
        self, patience: float, linger: float = 0.0, clock: Callable[[], float] = time.monotonic, drain: float = 0.0
    ) -> None:
        self.patience = patience
        self.drain = drain
        self.linger = linger
        self.clock = clock
        # In the order in which they are due.
        self._entries: list[QueueEntry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueueEntry]:
        return iter(list(self._entries))

    def add(self, key: Any, item: Any, priority: int = 0, agent: str | None = None) -> None:
        """Let an item wait; it overtakes no earlier one of its agent."""
        arrived = self.clock()
        self._insert(QueueEntry(key, item, arrived, arrived + delay_of(priority), priority, agent))

    def go_behind(self, moves: Callable[[Any], bool]) -> None:
        """Let the items for which `moves` is true wait behind all others, and the items of their agents with them."""
        moved = [entry for entry in self._entries if moves(entry.item)]
        agents = {(entry.key, entry.agent) for entry in moved if entry.agent is not None}
        moved += [entry for entry in self._entries if entry not in moved and (entry.key, entry.agent) in agents]
        now = self.clock()
        for entry in moved:
            self.remove(entry)
        for entry in moved:
            self._insert(replace(entry, due=now + delay_of(entry.priority)))

    def _insert(self, entry: QueueEntry) -> None:
        if entry.agent is not None:
            of_agent = (each.due for each in reversed(self._entries) if (each.key, each.agent) == (entry.key, entry.agent))
            entry = replace(entry, due=max(entry.due, next(of_agent, entry.due)))
        insort(self._entries, entry, key=lambda each: each.due)

    def remove(self, entry: QueueEntry) -> None:
        """Remove the entry of an item, also after go_behind() has replaced it."""
        index = next((i for i, other in enumerate(self._entries) if other.item is entry.item), None)
        if index is not None:
            del self._entries[index]

    def clear(self, key: Any = None) -> list[Any]:
        """Remove the entries of one model, or all (None). Returns their items."""
        removed = [entry.item for entry in self._entries if key in (None, entry.key)]
        self._entries = [entry for entry in self._entries if key not in (None, entry.key)]
        return removed

    def next(self, models: Sequence[ModelUsage], passed: Collection[Any] = ()) -> QueueEntry | None:
        """The entry that is due first of those that may start and whose model is none of `passed`."""
        may_start = (e for e in self._entries if e.key not in passed and any(usage.takes(e) for usage in models))
        return next(may_start, None)

    def plan(self, models: Sequence[ModelUsage], has_room: Callable[[Any], bool]) -> Plan:
        """The next change of models. `has_room`: whether a model can be loaded beside the loaded ones."""
        loaded = {usage.key for usage in models}
        others = (entry for entry in self._entries if entry.key not in loaded)
        first = min(others, key=lambda entry: entry.arrived, default=None)
        if first is None:
            return Plan()
        if has_room(first.key):
            return Plan(first.key)
        now = self.clock()
        idle = [usage for usage in models if self.is_idle(usage) and now - usage.used >= self.linger]
        if idle:
            return Plan(first.key, min(idle, key=lambda usage: usage.used).key)
        # One that is not busy goes before one that is.
        last = min(models, key=lambda usage: (usage.busy, usage.used))
        waited = now - max(first.arrived, last.ready)
        if waited < self.patience:
            return Plan()
        return Plan(first.key, last.key, must=last.busy and waited >= self.patience + self.drain)

    def is_idle(self, usage: ModelUsage) -> bool:
        """Return whether a model neither has requests nor gets one of those that wait."""
        return not usage.busy and not any(map(usage.takes, self._entries))
