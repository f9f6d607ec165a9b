"""The event log of a server: its last events in order, for any number of readers, and what each
reader may see of them.

An append costs the same with no reader and with many: a reader has its own position in the ring,
and one that is too slow loses the events that were overwritten. Any thread may append and read; a
reader holds the lock only to copy a few events.

A reader sees requests as `/v1/cache/explain` shows them: with named keys those of its key, without
names the requests of all, of which those that named no agent have neither their id nor a name that
is derived from the chat. Tokens are only counted.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ...config import HistoryConfig
from ...prefix.changes import (
    DISK,
    MEMORY,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    Change,
    Changes,
    stored,
)
from ...prefix.index import KVIndex
from ...prefix.salts import mark_of, salt_marked
from ...prefix.trie import Node
from ...store.hashing import TOKEN_BYTES
from ..access import own_name
from ..bodies import Json
from ..request import RequestOptions
from .counts import ModelCounts

# The most edges of one change.
LONGEST = 256
# Events that a reader takes at a time.
TAKEN = 256
# The kinds of events of blocks. All others are named where they happen: in request_watch.py and
# models/registry.py.
BLOCK_KINDS: dict[type[Change], str] = {
    BlocksStored: "blocks_stored",
    BlocksRemoved: "blocks_removed",
    AllCleared: "all_cleared",
}


class Who(NamedTuple):
    """Whose request it is, as its events show it.

    `owner`: the name of its key, if keys have names.
    """

    id: str
    agent: str | None
    owner: str | None


class Event(NamedTuple):
    """`number` grows by one with each event. `time` is in seconds since 1970; `model` is the id of
    a model.

    who:  of an event of a request; None for others. what: a change of blocks, or the fields for
          clients.
    """

    number: int
    time: float
    model: str
    kind: str
    what: Change | Json
    who: Who | None


class EventLog:
    """A ring of events. `first` is the number of the first event of this process, `end` that of the
    next one.

    Numbers begin with the time at which the server started, in microseconds, so that none of an
    earlier process is used again.
    `models`: by id, what each model that was requested or loaded until now appends with.
    """

    def __init__(self, kept: int = HistoryConfig.events) -> None:
        self.first = self.end = time.time_ns() // 1000
        self.is_closed = False
        self.models: dict[str, ModelEvents] = {}
        self._ring: list[Any] = [None] * kept
        self._changing = threading.Condition(threading.Lock())

    def of_model(self, model: str) -> ModelEvents:
        """The log as this model appends to it."""
        if model not in self.models:
            with self._changing:
                # A new dict, for threads that read the old one.
                self.models = {
                    **self.models,
                    model: self.models.get(model) or ModelEvents(self, model),
                }
        return self.models[model]

    def append(self, model: str, kind: str, what: Change | Json, who: Who | None = None) -> None:
        with self._changing:
            self._ring[self.end % len(self._ring)] = Event(
                self.end, time.time(), model, kind, what, who
            )
            self.end += 1
            self._changing.notify_all()

    def close(self) -> None:
        """Append no more events: readers take what is left and end."""
        with self._changing:
            self.is_closed = True
            self._changing.notify_all()

    @property
    def oldest(self) -> int:
        """The number of the oldest event that the log still has."""
        return max(self.first, self.end - len(self._ring))

    def wait(self, number: int, seconds: float) -> bool:
        """Wait until there is an event with this number or a later one, or the log is closed.

        Returns whether there is one.
        """
        with self._changing:
            self._changing.wait_for(lambda: self.end > number or self.is_closed, seconds)
            return self.end > number

    def read(self, number: int) -> tuple[int, list[Event]]:
        """Return how many of the events from `number` on were overwritten, and the next ones, at
        most TAKEN.
        """
        with self._changing:
            lost = max(0, self.oldest - number)
            first = number + lost
            return lost, [
                self._ring[n % len(self._ring)] for n in range(first, min(self.end, first + TAKEN))
            ]


def publish(index: KVIndex, changes: Changes) -> None:
    """Append what an index holds, and from now on what changes in it."""
    for change in changes_of(index.trie):
        changes.append(change)
    index.changes = changes


class ModelEvents:
    """The log as one model appends to it. `counts`: the model's."""

    def __init__(self, log: EventLog, model: str) -> None:
        self._log = log
        self.model = model
        self.counts = ModelCounts()

    def append(self, change: Change, /) -> None:
        """Append a change of blocks: the method that an index calls."""
        self.add(BLOCK_KINDS[type(change)], change)

    def add(self, kind: str, what: Change | Json, who: Who | None = None) -> None:
        self._log.append(self.model, kind, what, who)


class EventReader:
    """A position in a log. `next`: the number of the event that it reads next. For one thread.

    after: the number of the event that was read last, perhaps from an earlier process; by default
    the next event is read first.
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

    def take(self) -> tuple[int, list[Event]]:
        """Return how many events were lost, and the next events, at most TAKEN."""
        lost, events = self._log.read(self.next)
        self.next += lost + len(events)
        return lost, events


# -- what clients see ------------------------------------------------------------------------------


def changes_of(nodes: Iterable[Node]) -> Iterator[BlocksStored]:
    """Nodes of a trie, each after its parent, as changes of one chain each, in which they follow
    each other in a tier.
    """
    open_chains: dict[str, list[Node]] = {MEMORY: [], DISK: []}
    for node in nodes:
        for tier, is_there in ((MEMORY, node.in_memory), (DISK, node.on_disk)):
            if not is_there:
                continue
            chain = open_chains[tier]
            if chain and (chain[-1] is not node.parent or len(chain) == LONGEST):
                yield stored(chain, tier)
                open_chains[tier] = chain = []
            chain.append(node)
    yield from (stored(chain, tier) for tier, chain in open_chains.items() if chain)


def who_of(options: RequestOptions) -> Who:
    """A request as its events show it."""
    if options.owner is not None:
        # Only the owner sees it.
        return Who(
            options.id, None if options.name is None else own_name(options.name), options.owner
        )
    if options.agent is not None:
        return Who(options.id, options.agent, None)
    # The id of a request without an agent gives access to its text, which its sender alone may
    # have.
    return Who(
        f"anonymous_{hashlib.blake2b(options.id.encode(), digest_size=12).hexdigest()}", None, None
    )


class EventView(NamedTuple):
    """What a reader may see.

    `owner`: the name of its key. `is_private`: names share no prefixes; each sees its own blocks.
    """

    owner: str | None = None
    is_private: bool = False

    def sees(self, salt: bytes) -> bool:
        """Return whether the reader may see blocks under a salt."""
        return not self.is_private or (
            self.owner is not None and salt == salt_marked(mark_of(salt), self.owner)
        )

    def packet(self, event: Event) -> bytes:
        """An event as text/event-stream; empty for one that the reader may not see."""
        what = event.what
        if isinstance(what, AllCleared):
            data: Json = {}
        elif not isinstance(what, dict):
            if not self.sees(what.salt):
                return b""
            data = fields_of(what)
        elif event.who is None:
            data = what
        elif event.who.owner == self.owner:
            data = {"id": event.who.id, **what}
        else:
            return b""
        return packet(event.number, event.kind, data, event.model, event.time)


def packet(number: int, kind: str, data: Json, model: str | None, seconds: float) -> bytes:
    """Format an event as text/event-stream."""
    body = json.dumps({"kind": kind, "time": round(seconds, 3), "model": model, **data})
    return f"event: {kind}\nid: {number}\ndata: {body}\n\n".encode()


def fields_of(what: BlocksStored | BlocksRemoved) -> Json:
    """A change of blocks as clients see it."""
    hashes = [digest.hex() for digest in what.hashes]
    if isinstance(what, BlocksRemoved):
        return {"hashes": hashes, "tier": what.tier}
    return {
        "hashes": hashes,
        "parent": None if what.parent is None else what.parent.hex(),
        "tokens": sum(map(len, what.edges)) // TOKEN_BYTES,
        "blocks": [list(ids) for ids in what.blocks],
        "tier": what.tier,
    }
