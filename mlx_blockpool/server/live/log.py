"""EventLog: the last events of one server, in order, for any number of readers.

An append costs the same with no reader and with many: a reader keeps its own place in the ring, and one that is too slow loses
the events that were overwritten. Any thread may append and read; only the lock of an append is ever waited for.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from ...prefix.changes import Change
from .events import Happening
from .tally import Tally

# The last events that a reader can resume from.
KEPT = 8192
# Events that a reader takes at a time.
TAKEN = 256


class Event(NamedTuple):
    """`number` grows by one with each event. `time` is in seconds since 1970; `model` is the id of a model."""

    number: int
    time: float
    model: str
    what: Happening


class ModelEvents:
    """The log as one model appends to it. `tally`: the model's counts."""

    def __init__(self, log: EventLog, model: str) -> None:
        self._log = log
        self.model = model
        self.tally = Tally()

    def append(self, what: Happening | Change, /) -> None:
        self._log.append(self.model, what)


class EventLog:
    """A ring of events. `first` is the number of the first event of this process, `end` that of the next one.

    Numbers begin with the time at which the server started, in microseconds, so that no number of an earlier process comes again.
    `models`: what each model that was named until now appends with, by the model's id.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.first = self.end = time.time_ns() // 1000
        self.is_closed = False
        self.models: dict[str, ModelEvents] = {}
        self._kept = kept
        self._ring: list[Event | None] = [None] * kept
        self._changing = threading.Condition(threading.Lock())
        self._num_waiting = 0

    def of(self, model: str) -> ModelEvents:
        found = self.models.get(model)
        if found is None:
            with self._changing:
                found = self.models.get(model) or ModelEvents(self, model)
                # A new dict, for threads that read the old one.
                self.models = {**self.models, model: found}
        return found

    def append(self, model: str, what: Happening) -> None:
        with self._changing:
            number = self.end
            self._ring[number % self._kept] = Event(number, time.time(), model, what)
            self.end = number + 1
            if self._num_waiting:
                self._changing.notify_all()

    def close(self) -> None:
        """No more events will come: readers take what is left and end."""
        with self._changing:
            self.is_closed = True
            self._changing.notify_all()

    @property
    def oldest(self) -> int:
        """The number of the oldest event that is kept."""
        return max(self.first, self.end - self._kept)

    def get(self, number: int) -> Event | None:
        """The event with this number; None if it was overwritten."""
        event = self._ring[number % self._kept]
        return event if event is not None and event.number == number else None

    def wait(self, number: int, seconds: float) -> bool:
        """Wait until there is an event with this number or a later one, or the log is closed. Returns whether there is one."""
        with self._changing:
            if self.end <= number and not self.is_closed:
                self._num_waiting += 1
                try:
                    self._changing.wait(seconds)
                finally:
                    self._num_waiting -= 1
            return self.end > number


class Reader:
    """A place in a log. `next`: the number of the event that it reads next. For one thread.

    after: the number of the event that was read last, perhaps from an earlier process; None: begin with the next event.
    """

    def __init__(self, log: EventLog, after: int | None = None) -> None:
        self._log = log
        self.next = log.end if after is None else after + 1
        # Other numbers are those of another process.
        if not log.first <= self.next <= log.end:
            self.next = log.first - 1

    def wait(self, seconds: float) -> bool:
        """Wait for an event. Returns whether there is one to take."""
        return self._log.wait(self.next, seconds)

    def skip(self) -> None:
        """Go on with the event that comes next."""
        self.next = self._log.end

    def take(self) -> tuple[int, list[Event]]:
        """Return how many events were lost, and the next events, at most TAKEN."""
        lost = max(0, self._log.oldest - self.next)
        self.next += lost
        events: list[Event] = []
        for number in range(self.next, min(self._log.end, self.next + TAKEN)):
            event = self._log.get(number)
            if event is None:
                # It was overwritten just now: the next take() counts it.
                break
            events.append(event)
        self.next += len(events)
        return lost, events
