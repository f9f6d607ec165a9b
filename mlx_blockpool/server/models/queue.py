"""Who waits for which model: requests in the order of their arrival, grouped so that a swap of models serves many.

Knows keys, times and order. Does not know models or requests. Owned by the generation thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class QueueEntry:
    """Something in the line that needs the model `key`; it has been there since `arrived`, in seconds of the line's clock."""

    key: Any
    item: Any
    arrived: float


@dataclass(frozen=True)
class ModelUsage:
    """What a loaded model is at, in seconds of the line's clock.

    busy:    it has live requests.
    ready:   since then it is loaded.
    used:    when a request of it started or ended last.
    closed:  it is to go: what came later than this does not start. None: it stays.
    """

    key: Any
    busy: bool
    ready: float
    used: float
    closed: float | None = None

    def takes(self, place: QueueEntry) -> bool:
        return place.key == self.key and (self.closed is None or place.arrived <= self.closed)


@dataclass(frozen=True)
class Plan:
    """`load` is to be loaded; first `unload` has to go, once it is not busy, or now where it `must`. None: nothing."""

    load: Any = None
    unload: Any = None
    must: bool = False


class ModelQueue:
    """First come, first served among those whose models are loaded; they pass the others for `patience` seconds at most.

    The oldest of the others says what is loaded next. In place of it goes the model used longest ago that has had nothing to do
    for `linger` seconds, or where none has, after `patience`, the one used longest ago: as soon as it is not busy, and after
    `drain` seconds more in any case. Until then it starts all that comes for it. A model that was just loaded stays for
    `patience`: so everyone's turn comes, and no swap is for nothing.
    """

    def __init__(
        self, patience: float, linger: float = 0.0, clock: Callable[[], float] = time.monotonic, drain: float = 0.0
    ) -> None:
        self.patience = patience
        self.drain = drain
        self.linger = linger
        self.clock = clock
        self._places: list[QueueEntry] = []

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[QueueEntry]:
        return iter(self._places)

    def add(self, key: Any, item: Any) -> None:
        self._places.append(QueueEntry(key, item, self.clock()))

    def remove(self, place: QueueEntry) -> None:
        self._places = [other for other in self._places if other is not place]

    def clear(self, key: Any = None) -> list[Any]:
        """Take out all that wait for a model, or all (None). Returns what they are."""
        taken = [place.item for place in self._places if key in (None, place.key)]
        self._places = [place for place in self._places if key not in (None, place.key)]
        return taken

    def next(self, models: Sequence[ModelUsage], passed: Collection[Any] = ()) -> QueueEntry | None:
        """Who may start now, of those whose model is none of `passed`."""
        for place in self._places:
            if place.key not in passed and any(use.takes(place) for use in models):
                return place
        return None

    def plan(self, models: Sequence[ModelUsage], has_room: Callable[[Any], bool]) -> Plan:
        """What is to change for those whose model is not loaded. `has_room`: a model can be loaded beside those that are."""
        loaded = {use.key for use in models}
        first = next((place for place in self._places if place.key not in loaded), None)
        if first is None:
            return Plan()
        if has_room(first.key):
            return Plan(first.key)
        return self._swap(models, first)

    def _swap(self, models: Sequence[ModelUsage], first: QueueEntry) -> Plan:
        now = self.clock()
        idle = [use for use in models if not use.busy and not any(map(use.takes, self._places))]
        rested = [use for use in idle if now - use.used >= self.linger]
        if rested:
            return Plan(first.key, min(rested, key=lambda use: use.used).key)
        # One that is not busy goes before one that is.
        last = min(models, key=lambda use: (use.busy, use.used))
        waited = now - max(first.arrived, last.ready)
        if waited < self.patience:
            return Plan()
        return Plan(first.key, last.key, must=last.busy and waited >= self.patience + self.drain)
