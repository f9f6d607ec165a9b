"""Prefixes that stay for a time after each use, and those that are pinned in the pool.

Knows pins, sizes and the time; no tokens, no arrays. Owned by the generation thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from .residency import KVIndex
from .trie import Node, Pin


class TimedPins:
    """Pins that end by `clock`, the one that ends soonest first. `changes` counts those that were added and removed."""

    def __init__(self) -> None:
        self.clock = time.monotonic
        self.changes = 0
        self._all: dict[bytes, Pin] = {}
        self._soonest = 0.0

    def __iter__(self) -> Iterator[Pin]:
        return iter(sorted(self._all.values(), key=_end))

    def __len__(self) -> int:
        return len(self._all)

    def add(self, pin: Pin, seconds: float) -> list[Pin]:
        """Let a pin last for `seconds` from now. Returns those it replaces: its old self, and shorter ones that end no later."""
        pin.seconds, pin.until = seconds, self.clock() + seconds
        old = self._all.get(pin.name)
        if old is not None and _end(old) > pin.until:
            pin.seconds, pin.until = old.seconds, old.until
        nodes = {node.latest for node in pin.ref.path}
        replaced = [other for other in self._all.values() if other is old or _is_covered(other, pin, nodes)]
        for other in replaced:
            self.remove(other)
        self.put(pin)
        return replaced

    def put(self, pin: Pin) -> None:
        self._all[pin.name] = pin
        self._soonest = min(self._soonest, _end(pin))
        self.changes += 1

    def remove(self, pin: Pin) -> None:
        if self._all.get(pin.name) is pin:
            del self._all[pin.name]
            self.changes += 1

    def use(self, path: Sequence[Node], hit: int) -> None:
        """The first `hit` tokens of a path were used: the longest pin that ends among them stays for its time again."""
        nodes = set(path)
        used = [pin for pin in self._all.values() if pin.is_in(nodes, hit)]
        longest = max(used, key=lambda pin: pin.ref.tokens, default=None)
        if longest is not None:
            longest.until = max(_end(longest), self.clock() + longest.seconds)

    def expire(self) -> list[Pin]:
        """Remove the pins whose time is over, and return them. Cheap where there are none."""
        now = self.clock()
        if now < self._soonest or not self._all:
            return []
        over = [pin for pin in self._all.values() if _end(pin) <= now]
        for pin in over:
            self.remove(pin)
        self._soonest = min(map(_end, self._all.values()), default=0.0)
        return over

    def clear(self) -> None:
        self._all.clear()
        self.changes += 1


class Pins:
    """What is pinned in memory: of each kind of pin at most `most_bytes` of blocks and `most_state_bytes` of states.

    Pins that end (`timed`) give way, the one that ends soonest first: to later ones beyond the limits, and to requests. Pins
    without an end give way to nothing, and are refused beyond the limits. `num_gave_way` counts pins that made room for requests,
    `num_refused` timed ones that are too large by themselves.
    """

    def __init__(self, known: KVIndex, most_bytes: int, most_state_bytes: int) -> None:
        self.known = known
        self.most_bytes = most_bytes
        self.most_state_bytes = most_state_bytes
        self.timed = TimedPins()
        self._endless: set[Pin] = set()
        self.num_gave_way = self.num_refused = 0

    def __len__(self) -> int:
        """How many can give way."""
        return len(self.timed)

    def pin(self, pin: Pin, seconds: float) -> None:
        """Keep a prefix in memory for `seconds` after each use. Beyond the limits, those that end soonest go."""
        if not pin.ref.path:
            return
        replaced = self.timed.add(pin, seconds)
        self.known.pin(pin)
        self._unpin(replaced)
        if self._is_too_much([pin]):
            self.timed.remove(pin)
            self.known.unpin(pin)
            self.num_refused += 1
        self._limit()

    def hold(self, pin: Pin) -> bool:
        """Keep a prefix in memory until unpin(). Returns False, and keeps nothing, where that is beyond the limits."""
        self.known.pin(pin)
        if self._is_too_much([*self._endless, pin]):
            self.known.unpin(pin)
            return False
        self._endless.add(pin)
        return True

    def unpin(self, pin: Pin) -> None:
        """Take back hold()."""
        self._endless.discard(pin)
        self.known.unpin(pin)

    def use(self, path: Sequence[Node], hit: int) -> None:
        """The first `hit` tokens of a path were used."""
        if self.timed:
            self.timed.use(path, hit)
            # What came back from disk for it counts again.
            self._limit()

    def expire(self) -> None:
        """Unpin those whose time is over."""
        self._unpin(self.timed.expire())

    def release_soonest(self) -> Pin | None:
        """Unpin the one that ends soonest, and return it; None: there is none."""
        soonest = next(iter(self.timed), None)
        if soonest is not None:
            self.timed.remove(soonest)
            self.known.unpin(soonest)
        return soonest

    def put_back(self, released: Iterable[Pin]) -> None:
        """Take release_soonest() back."""
        for pin in released:
            self.timed.put(pin)
            self.known.pin(pin)

    def clear(self) -> None:
        """Unpin all that end by themselves."""
        self._unpin(self.timed)
        self.timed.clear()

    def report(self) -> dict[str, int]:
        """Figures of those that end; sizes in bytes."""
        return {
            "pins": len(self.timed),
            "pinned_bytes": sum(self.known.pinned_bytes(self.timed)),
            "most_pinned_bytes": self.most_bytes + self.most_state_bytes,
            "gave_way": self.num_gave_way,
            "refused": self.num_refused,
        }

    def check(self) -> None:
        """Pins that end are within the limits. Raises AssertionError."""
        found, most = self.known.pinned_bytes(self.timed), (self.most_bytes, self.most_state_bytes)
        assert found[0] <= most[0], f"{found[0]} bytes of blocks are pinned; {most[0]} may be"
        assert found[1] <= most[1], f"{found[1]} bytes of states are pinned; {most[1]} may be"

    def _limit(self) -> None:
        while self._is_too_much(self.timed):
            self.release_soonest()

    def _is_too_much(self, pins: Iterable[Pin]) -> bool:
        n_bytes, states = self.known.pinned_bytes(pins)
        return n_bytes > self.most_bytes or states > self.most_state_bytes

    def _unpin(self, pins: Iterable[Pin]) -> None:
        for pin in pins:
            self.known.unpin(pin)


def _end(pin: Pin) -> float:
    assert pin.until is not None, "a pin without an end"
    return pin.until


def _is_covered(other: Pin, pin: Pin, nodes: set[Node]) -> bool:
    """Whether `pin`, in these nodes, keeps for as long all that `other` keeps."""
    return other.position == pin.position and _end(other) <= _end(pin) and other.is_in(nodes, pin.ref.tokens)
