"""The nodes of a trie as changes: for the log once a model is loaded, and for a reader that has lost events.

A snapshot is made in parts, between steps of the generation thread, while the trie keeps changing. The events since before its
first part, applied after it, make it exact: the last change of an edge decides whether the edge is there. So one snapshot serves
all readers for a while, however many ask for one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from ...prefix.changes import DISK, MEMORY, BlocksStored, Changes, stored
from ...prefix.index import KVIndex
from ...prefix.trie import Node
from ..jobs import run_on_generation_thread
from .events import KINDS, Sight, blocks_of, packet

# The most edges of one change.
LONGEST = 256
# Edges that are checked between two steps.
AT_ONCE = 500
# From one snapshot for readers to the next: at least this long, and this many times as long as a snapshot takes.
LEAST_SECONDS = 0.25
REST = 100


def publish(index: KVIndex, changes: Changes) -> None:
    """Append what an index holds, and from now on what changes in it."""
    for change in changes_of(index.trie):
        changes.append(change)
    index.changes = changes


def held(generator: Any) -> Iterator[tuple[str, BlocksStored]]:
    """Yield what the loaded models of a generator hold, each by its id. For other threads than the generation thread."""
    for served in list(generator.registry.loaded.values()):
        walk = run_on_generation_thread(generator, partial(Walk.of, served))
        while walk is not None and not walk.is_over:
            yield from ((served.events.model, change) for change in run_on_generation_thread(generator, walk.next))


@dataclass(frozen=True)
class Snapshot:
    """All blocks as of the event `number` or later. `parts`: its events as bytes, each with the salt of its blocks."""

    number: int
    time: float
    parts: tuple[tuple[bytes, bytes], ...]

    def seen_by(self, sight: Sight) -> list[bytes]:
        """The events that a reader may see."""
        return [data for salt, data in self.parts if sight.sees(salt)]


class Snapshots:
    """The last snapshot of a server. Any thread may take it; those that come while it is made wait for it."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._making = threading.Lock()
        self._last: Snapshot | None = None
        self._due = 0.0

    def take(self) -> Snapshot:
        """A snapshot that the events in the log complete. Raises UnavailableError if the generation thread has ended."""
        log = self._generator.registry.log
        with self._making:
            last, start = self._last, time.monotonic()
            if last is not None and start < self._due and log.oldest <= last.number + 1:
                return last
            self._last = last = self._make(log.end - 1)
            end = time.monotonic()
            self._due = end + max(LEAST_SECONDS, REST * (end - start))
            return last

    def _make(self, number: int) -> Snapshot:
        now, changes = time.time(), held(self._generator)
        parts = ((each.salt, packet(number, KINDS[BlocksStored], blocks_of(each), model, now)) for model, each in changes)
        return Snapshot(number, now, tuple(parts))


class Walk:
    """The nodes of an index, some at a time."""

    def __init__(self, index: KVIndex) -> None:
        self._stack = [child for root in index.trie.roots() for child in root.children]

    @staticmethod
    def of(served: Any) -> Walk | None:
        """The walk through a loaded model's index; None for one without."""
        return None if served.prefix is None else Walk(served.prefix.index)

    @property
    def is_over(self) -> bool:
        return not self._stack

    def next(self) -> list[BlocksStored]:
        """The next AT_ONCE nodes as changes."""
        return list(changes_of(islice(self._nodes(), AT_ONCE)))

    def _nodes(self) -> Iterator[Node]:
        while self._stack:
            node = self._stack.pop()
            self._stack += node.children
            if not node.removed and node.merged_into is None:
                yield node


def changes_of(nodes: Iterable[Node]) -> Iterator[BlocksStored]:
    """Nodes, each after its parent, as changes of one chain each."""
    for tier, chain in _chains(nodes):
        yield stored(chain, tier)


def _chains(nodes: Iterable[Node]) -> Iterator[tuple[str, list[Node]]]:
    """The longest chains in which the nodes follow each other, for each tier that they are in."""
    open_chains: dict[str, list[Node]] = {MEMORY: [], DISK: []}
    for node in nodes:
        for tier, is_there in ((MEMORY, node.residency.in_memory), (DISK, node.residency.on_disk)):
            if not is_there:
                continue
            chain = open_chains[tier]
            if chain and (chain[-1] is not node.parent or len(chain) == LONGEST):
                yield tier, chain
                open_chains[tier] = chain = []
            chain.append(node)
    yield from ((tier, chain) for tier, chain in open_chains.items() if chain)
