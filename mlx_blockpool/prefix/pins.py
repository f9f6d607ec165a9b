"""Known beginnings that are to stay for a time after each use, and those of them that are pinned in the pool.

Knows nodes, sizes and the time; no tokens, no arrays. Owned by the generation thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..store.record import BLOCK, STATE, WINDOW, Key
from .residency import KVIndex
from .trie import Node, Pin


@dataclass(frozen=True)
class Standing:
    """What `end` tokens stand on: the nodes of `path`, and where layers forget, the checkpoint at `position`.

    `node` has that checkpoint; None: there is none.
    """

    path: Sequence[Node]
    end: int
    node: Node | None = None
    position: int = 0

    @property
    def nodes(self) -> list[Node]:
        return [*self.path, *([] if self.node is None or self.node in self.path else [self.node])]

    def is_in(self, nodes: set[Node], end: int) -> bool:
        """Whether it is a beginning of `end` tokens that lie in these nodes, whatever has become of its own."""
        return self.end <= end and self.path[-1].latest in nodes

    def keys(self) -> list[Key]:
        """The records that it stands on, there or not."""
        nodes = [node.latest for node in self.nodes]
        found = [Key(BLOCK, each.hash) for node in nodes for each in (node, *node.superseded)]
        found += [Key(WINDOW, node.hash) for node in nodes if node.end in node.window_records]
        last = self.node and self.node.latest
        if last is not None and last.start < self.position <= last.end:
            found += [Key(kind, last.hash_at(self.position)) for kind in (WINDOW, STATE)]
        return found


@dataclass(eq=False)
class Timed:
    """A beginning that is to stay for `seconds` after its last use, which is until `until`. `name`: the hash of its tokens."""

    name: bytes
    standing: Standing
    seconds: float
    until: float
    pin: Pin | None = field(default=None, repr=False)


class TimedBeginnings:
    """By `clock`, the one that ends soonest first. `changes` counts what came and went."""

    def __init__(self) -> None:
        self.clock = time.monotonic
        self.changes = 0
        self._all: dict[bytes, Timed] = {}
        self._soonest = 0.0

    def __iter__(self) -> Iterator[Timed]:
        return iter(sorted(self._all.values(), key=lambda timed: timed.until))

    def __len__(self) -> int:
        return len(self._all)

    def add(self, standing: Standing, seconds: float) -> tuple[Timed, list[Timed]]:
        """It is used now. Returns it, and what has gone for it: its old self, and beginnings of it that would end no later."""
        last = standing.path[-1]
        name = last.hash_at(standing.end)
        until = self.clock() + seconds
        old = self._all.get(name)
        if old is not None and old.until > until:
            seconds, until = old.seconds, old.until
        timed = Timed(name, standing, seconds, until)
        nodes = {node.latest for node in standing.path}
        gone = [other for other in self._all.values() if other is old or _is_covered(other, timed, nodes)]
        for other in gone:
            self.remove(other)
        self.put(timed)
        return timed, gone

    def put(self, timed: Timed) -> None:
        self._all[timed.name] = timed
        self._soonest = min(self._soonest, timed.until)
        self.changes += 1

    def remove(self, timed: Timed) -> None:
        if self._all.get(timed.name) is timed:
            del self._all[timed.name]
            self.changes += 1

    def use(self, path: Sequence[Node], hit: int) -> None:
        """The first `hit` tokens of a path were used: the longest that ends among them stays for its time again."""
        nodes = set(path)
        used = [timed for timed in self._all.values() if timed.standing.is_in(nodes, hit)]
        longest = max(used, key=lambda timed: timed.standing.end, default=None)
        if longest is not None:
            longest.until = max(longest.until, self.clock() + longest.seconds)

    def expire(self) -> list[Timed]:
        """Those whose time is over, which are gone now; cheap where there is none."""
        now = self.clock()
        if now < self._soonest or not self._all:
            return []
        over = [timed for timed in self._all.values() if timed.until <= now]
        for timed in over:
            self.remove(timed)
        self._soonest = min((timed.until for timed in self._all.values()), default=0.0)
        return over

    def clear(self) -> None:
        self._all.clear()
        self.changes += 1


class PinnedPrompts:
    """What was pinned until it is unpinned, by its tokens."""

    def __init__(self, known: KVIndex) -> None:
        self.known = known
        self._pins: dict[tuple[int, ...], list[Pin]] = {}

    def pin(self, tokens: Sequence[int], standing: Standing) -> None:
        self._pins.setdefault(tuple(tokens), []).append(self.known.pin(standing.nodes, standing.position))

    def unpin(self, tokens: Sequence[int]) -> None:
        """Take back one pin() of the same tokens, if there is any."""
        pins = self._pins.get(tuple(tokens), [])
        if pins:
            self.known.unpin(pins.pop())
        if not pins:
            self._pins.pop(tuple(tokens), None)

    def clear(self) -> None:
        self._pins.clear()


class TimedPins:
    """Timed beginnings that `known` keeps in memory. They take `most_bytes` of blocks and `most_state_bytes` of states at most.

    `num_gave_way` counts those that had to go for requests, `num_refused` those that are too large by themselves.
    """

    def __init__(self, known: KVIndex, most_bytes: int, most_state_bytes: int) -> None:
        self.known = known
        self.most_bytes = most_bytes
        self.most_state_bytes = most_state_bytes
        self.timed = TimedBeginnings()
        self.num_gave_way = self.num_refused = 0

    def __len__(self) -> int:
        return len(self.timed)

    def pin(self, standing: Standing, seconds: float) -> None:
        """Keep a beginning in memory for so long after each use. Where that is too much, those that end soonest go."""
        if not standing.path:
            return
        timed, gone = self.timed.add(standing, seconds)
        timed.pin = self.known.pin(standing.nodes, standing.position)
        self._unpin(gone)
        if self._are_too_much([timed]):
            self.timed.remove(timed)
            self._unpin([timed])
            self.num_refused += 1
        self._limit()

    def use(self, path: Sequence[Node], hit: int) -> None:
        """The first `hit` tokens of a path were used."""
        if self.timed:
            self.timed.use(path, hit)
            # What came back from disk for it counts again.
            self._limit()

    def expire(self) -> None:
        """Let go of those whose time is over."""
        self._unpin(self.timed.expire())

    def release_soonest(self) -> Timed | None:
        """Let go of the one that ends soonest, and return it."""
        soonest: Timed | None = next(iter(self.timed), None)
        if soonest is not None:
            self.timed.remove(soonest)
            self._unpin([soonest])
        return soonest

    def put_back(self, released: Iterable[Timed]) -> None:
        """Take release_soonest() back."""
        for timed in released:
            self.timed.put(timed)
            if timed.pin is not None:
                self.known.pin_again(timed.pin)

    def clear(self) -> None:
        """Let go of all."""
        self._unpin(list(self.timed))
        self.timed.clear()

    def report(self) -> dict[str, int]:
        """Figures; sizes in bytes."""
        n_bytes, states = self._bytes(self.timed)
        return {
            "pins": len(self.timed),
            "pinned_bytes": n_bytes + states,
            "most_pinned_bytes": self.most_bytes + self.most_state_bytes,
            "gave_way": self.num_gave_way,
            "refused": self.num_refused,
        }

    def check(self) -> None:
        """What is pinned for a time is within its limits. Raises AssertionError."""
        found, most = self._bytes(self.timed), (self.most_bytes, self.most_state_bytes)
        assert found[0] <= most[0], f"{found[0]} bytes of blocks are pinned; {most[0]} may be"
        assert found[1] <= most[1], f"{found[1]} bytes of states are pinned; {most[1]} may be"

    def _limit(self) -> None:
        while self._are_too_much(self.timed):
            self.release_soonest()

    def _are_too_much(self, timed: Iterable[Timed]) -> bool:
        return self.is_too_much(each.pin for each in timed if each.pin is not None)

    def is_too_much(self, pins: Iterable[Pin]) -> bool:
        """Whether these pins, timed or not, keep more blocks or more states than may be pinned."""
        n_bytes, states = self.known.pinned_bytes(pins)
        return n_bytes > self.most_bytes or states > self.most_state_bytes

    def _bytes(self, timed: Iterable[Timed]) -> tuple[int, int]:
        return self.known.pinned_bytes([each.pin for each in timed if each.pin is not None])

    def _unpin(self, gone: Iterable[Timed]) -> None:
        for timed in gone:
            if timed.pin is not None:
                self.known.unpin(timed.pin)


def _is_covered(other: Timed, timed: Timed, nodes: set[Node]) -> bool:
    """Whether whatever `other` keeps is kept by `timed`, in these nodes, as long."""
    same_place = other.standing.position == timed.standing.position
    return same_place and other.until <= timed.until and other.standing.is_in(nodes, timed.standing.end)
