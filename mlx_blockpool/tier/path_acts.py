"""PathActs: what is done to cached paths beside requests: they are pinned, saved, brought back or taken out; records that stay.

In a group every rank does the same between the same two steps: rank 0 proposes a fact, and all ranks apply it behind the next
exchange. One rank alone applies it at once. Knows paths by their hashes; no agents. Owned by the generation thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import PoolExhaustedError
from ..prefix.index import Pin as HeldPin
from ..prefix.resume import pin_of
from ..prefix.trie import PrefixRef
from ..prefix.uncache import Uncached, kept_hashes, uncache
from ..ranks.facts import BringBack, Discard, Gather, GatherEnd, GatherPart, PathName, Pin, Save, Spare, Uncache, Unpin, WriteOut
from ..ranks.group import ALONE, Ranks
from ..ranks.head import Head
from ..store.paths import FOLDERS
from ..store.record import Key
from .cache import TieredPrefixCache
from .pieces import CachePieces
from .restore import RestoreJob

# Takes the result of a fact; None: it is not applied any more.
Then: TypeAlias = Callable[[Any], object]
GatherFact: TypeAlias = Gather | GatherPart | GatherEnd
PathFact: TypeAlias = Pin | Unpin | Uncache | BringBack | Save | WriteOut | Discard | Spare | GatherFact


@dataclass(frozen=True)
class TakenOut:
    """What Uncache has taken out of the cache, and the hashes of the records that the rest of the path may need."""

    uncached: Uncached
    kept: set[bytes]


class PathActs:
    """The acts on the paths of `prefix`. `pins`: those without an end, by name; None: beyond the limits of pins."""

    def __init__(self, prefix: TieredPrefixCache, ranks: Ranks = ALONE) -> None:
        self.prefix = prefix
        self.ranks = ranks
        self.pins: dict[str, HeldPin | None] = {}
        self._spared: set[bytes] = set()
        self._gathered: dict[int, CachePieces] = {}
        self._proposed: list[PathFact] = []
        self._waiting: deque[Then] = deque()

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def propose(self, fact: PathFact, then: Then = lambda result: None) -> None:
        """Have all ranks apply a fact. `then` gets what apply() returns, or None if the model is unloaded before."""
        if self.ranks.size == 1:
            then(self.apply(fact))
        else:
            self._proposed.append(fact)
            self._waiting.append(then)

    def outgoing(self) -> list[PathFact]:
        """The facts that were proposed since the last call, to be sent with the next exchange."""
        facts, self._proposed = self._proposed, []
        return facts

    def close(self) -> None:
        """Answer those that wait for facts which are not applied any more, and let go what is being read."""
        while self._gathered:
            self._gathered.popitem()[1].close()
        while self._waiting:
            self._waiting.popleft()(None)

    # -- all ranks -----------------------------------------------------------------------------------------------------

    def take(self, fact: PathFact) -> None:
        """Apply a fact that an exchange has brought, and answer rank 0's caller, who has proposed it."""
        result = self.apply(fact)
        if self.ranks.rank == 0:
            self._waiting.popleft()(result)

    def apply(self, fact: PathFact) -> Any:
        """Pin: whether the path is pinned. Uncache: what was taken out. BringBack, Gather...: see below. All others: True."""
        if isinstance(fact, Pin):
            return self._pin(fact.name, ref_of(fact.path))
        if isinstance(fact, Uncache):
            return self._uncache(ref_of(fact.path), fact.own)
        if isinstance(fact, BringBack):
            return self._bring_back(ref_of(fact.path))
        if isinstance(fact, GatherFact):
            return self._gather(fact)
        if isinstance(fact, Unpin):
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
        taken = uncache(self.prefix.index, path, own)
        if self.prefix.stored is not None:
            self.prefix.stored.write_behind(0)
        return TakenOut(taken, kept_hashes(self.prefix.index, path))

    def _bring_back(self, path: PrefixRef) -> RestoreJob | PoolExhaustedError | bool:
        """The restore that has begun, the error if it has no room, or False if there is nothing to read."""
        try:
            return self.prefix.bring_back(path) or False
        except PoolExhaustedError as error:
            return error

    def _gather(self, fact: GatherFact) -> Any:
        """Gather: this rank's pieces and how many tokens they are, or False: nothing is in memory. GatherPart: of each rank."""
        if isinstance(fact, GatherPart):
            piece = self._gathered[fact.number].piece(fact.name, fact.head)
            return [sent.mail for sent in self.ranks.exchange(Head(), piece)]
        if isinstance(fact, GatherEnd):
            pieces = self._gathered.pop(fact.number, None)
            if pieces is not None:
                pieces.close()
            return True
        found = CachePieces.of_path(self.prefix.arena, self.prefix.index, ref_of(fact.path))
        if found is None:
            return False
        self._gathered[fact.number] = found[0]
        return found

    def _change_disk(self, fact: Save | WriteOut | Discard | Spare) -> None:
        stored = self.prefix.stored
        if stored is None:
            return
        if isinstance(fact, Save):
            match = self.prefix.index.trie.find(ref_of(fact.path))
            stored.note_path(match.path, match.tokens)
            for node in match.path:
                for checkpoint in list(node.residency.checkpoints.values()):
                    stored.checkpoints.note(node, checkpoint)
        elif isinstance(fact, WriteOut):
            stored.write_behind(at_once=True)
        elif isinstance(fact, Discard):
            stored.store.remove(Key(*key) for key in fact.keys)
        else:
            self._spared = (self._spared | set(fact.hashes)) - set(fact.no_more)
            stored.store.pinned = {Key(kind, digest) for digest in self._spared for kind in FOLDERS}


def name_of(path: PrefixRef) -> PathName:
    """A path as facts name it."""
    return PathName(tuple(path.hashes), path.tokens, path.salt)


def ref_of(path: PathName) -> PrefixRef:
    """A path that a fact names."""
    return PrefixRef(path.hashes, path.tokens, path.salt)
