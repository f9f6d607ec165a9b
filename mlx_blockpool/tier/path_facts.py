"""PathFacts: changes of cached paths apart from requests: they are pinned, saved, restored or
removed, and records retained.

In a group every rank does the same between the same two steps: see SharedPathFacts in
ranks/driver.py. Knows paths by their hashes; no agents. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import PoolExhaustedError
from ..prefix.cache import pin_of
from ..prefix.trie import Node, PinnedPrefix, PrefixRef, records_of
from ..ranks.facts import (
    BringBack,
    Discard,
    PathName,
    PinPath,
    Save,
    Spare,
    Uncache,
    UnpinPath,
    WriteOut,
)
from ..store.record import Key
from .cache import TieredPrefixCache
from .restore import RestoreJob

# Takes the result of a fact, or None if it is not applied any more.
Then: TypeAlias = Callable[[Any], object]
PathFact: TypeAlias = PinPath | UnpinPath | Uncache | BringBack | Save | WriteOut | Discard | Spare


@dataclass(frozen=True)
class TakenOut:
    """What Uncache has taken out of the cache: edges of the trie, blocks of the pool and bytes.

    kept:    edges of the path that others need. hashes: those of the records that these may need.
    """

    nodes: int
    blocks: int
    n_bytes: int
    kept: int
    hashes: set[bytes]


class PathFacts:
    """Applies facts to the paths of `prefix`.

    `pins`: those without an end, by name, or None for one beyond the limits.
    """

    def __init__(self, prefix: TieredPrefixCache) -> None:
        self.prefix = prefix
        self.pins: dict[str, PinnedPrefix | None] = {}
        self._retained: set[bytes] = set()

    def propose(self, fact: PathFact, then: Then = lambda result: None) -> None:
        """Have all ranks apply a fact.

        `then` gets what apply() returns, or None if the model is unloaded before.
        """
        then(self.apply(fact))

    def outgoing(self) -> list[PathFact]:
        """The facts that were proposed since the last call, to be sent with the next exchange;
        none outside of a group.
        """
        return []

    def close(self) -> None:
        """Answer the callers whose facts are not applied any more."""

    def take(self, fact: PathFact) -> None:
        """Apply a fact that an exchange has brought, and answer its caller."""
        self.apply(fact)

    def apply(self, fact: PathFact) -> Any:
        """PinPath: whether the path is pinned.

        Uncache: what was taken out. BringBack: see below. All others: True.
        """
        if isinstance(fact, PinPath):
            return self._pin(fact.name, ref_of(fact.path))
        if isinstance(fact, Uncache):
            return self._uncache(ref_of(fact.path), fact.own)
        if isinstance(fact, BringBack):
            return self._bring_back(ref_of(fact.path))
        if isinstance(fact, UnpinPath):
            self._unpin(fact.name)
        else:
            self._change_disk(fact)
        return True

    def _pin(self, name: str, path: PrefixRef) -> bool:
        pin = pin_of(self.prefix.arena, self.prefix.index.trie.find(path))
        self._unpin(name)
        is_held = self.prefix.retention.pins.hold(pin)
        self.pins[name] = pin if is_held else None
        return is_held

    def _unpin(self, name: str) -> None:
        pin = self.pins.pop(name, None)
        if pin is not None:
            self.prefix.retention.pins.unpin(pin)

    def _uncache(self, path: PrefixRef, own: int) -> TakenOut:
        index = self.prefix.index
        nodes = index.trie.find(path).path
        blocks, n_bytes = self._evictable(), index.nbytes
        needed = set[Node]()
        if own < len(nodes):
            # Checkpoints inside of the first edge go over to one that begins with their tokens.
            needed = {each for each, _ in nodes[own].near_siblings() if each is not nodes[own]}
            index.remove_for_good(nodes[own])
        blocks, n_bytes = blocks - self._evictable(), n_bytes - index.nbytes
        # Their files are removed.
        self.prefix.stored.write_behind(0)
        hashes = {
            key.hash
            for node in needed.union(index.trie.find(path).path)
            for key in records_of(node)
        }
        return TakenOut(len(nodes) - own, blocks, n_bytes, own, hashes)

    def _evictable(self) -> int:
        return sum(counts.evictable for counts in self.prefix.pool.settle())

    def _bring_back(self, path: PrefixRef) -> RestoreJob | PoolExhaustedError | bool:
        """The restore that has begun, the error if it does not fit, or False if there is nothing
        to read.
        """
        try:
            return self.prefix.bring_back(path) or False
        except PoolExhaustedError as error:
            return error

    def _change_disk(self, fact: Save | WriteOut | Discard | Spare) -> None:
        stored = self.prefix.stored
        if isinstance(fact, Save):
            stored.enqueue_path(self.prefix.index.trie.find(ref_of(fact.path)), whole=True)
        elif isinstance(fact, WriteOut):
            stored.write_behind(at_once=True)
        elif isinstance(fact, Discard):
            stored.remove(Key(*key) for key in fact.keys)
        else:
            self._retained = (self._retained | set(fact.hashes)) - set(fact.no_more)
            stored.spare(self._retained)


def name_of(path: PrefixRef) -> PathName:
    """A path as facts name it."""
    return tuple(path.hashes), path.tokens, path.salt


def ref_of(path: PathName) -> PrefixRef:
    """A path that a fact names."""
    return PrefixRef(*path)
