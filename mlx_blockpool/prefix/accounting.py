"""Which agent owns the bytes of each cached block and checkpoint: the one that computed it first.

Knows owners and sizes; not what takes the bytes. Owned by the generation thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from zlib import crc32

# The owner of what all requests without an agent compute.
ANONYMOUS = "anonymous"


class Accounting:
    """Bytes by owner. What came from disk has no owner: None.

    digest:  a number of who owns how much, in whatever order that came.
    """

    def __init__(self) -> None:
        # In the order of use: (owner, bytes).
        self._charges: dict[Hashable, tuple[str | None, int]] = {}
        self._sums: Counter[str | None] = Counter()
        self.digest = 0

    def charge(self, item: Hashable, n_bytes: int, owner: str | None) -> str | None:
        """Account for a new item; one that has an owner keeps it. Returns the owner."""
        if item in self._charges:
            return self._charges[item][0]
        self._charges[item] = owner, n_bytes
        self._add(owner, n_bytes)
        return owner

    def use(self, item: Hashable) -> None:
        """Make an item the most recently used of its owner."""
        if item in self._charges:
            self._charges[item] = self._charges.pop(item)

    def release(self, item: Hashable) -> None:
        """Stop accounting for an item that is no longer cached."""
        owner, n_bytes = self._charges.pop(item)
        self._add(owner, -n_bytes)
        if not self._sums[owner]:
            del self._sums[owner]

    def _add(self, owner: str | None, n_bytes: int) -> None:
        self._sums[owner] += n_bytes
        self.digest += n_bytes * crc32((owner or "").encode())

    def owner_of(self, item: Hashable) -> str | None:
        """The owner; None too for an item that is not accounted for."""
        return self._charges.get(item, (None, 0))[0]

    def of(self, owner: str) -> Iterator[Hashable]:
        """The items of an owner, the least recently used first."""
        return (item for item, (found, _) in self._charges.items() if found == owner)

    def nbytes(self, owner: str) -> int:
        return self._sums[owner]

    def largest(self, count: int) -> dict[str, int]:
        """Bytes of the `count` owners that have most, the largest first."""
        named = ((owner, n_bytes) for owner, n_bytes in self._sums.items() if owner is not None)
        return dict(sorted(named, key=lambda item: (-item[1], item[0]))[:count])

    def check(self, sizes: Mapping[Hashable, int]) -> None:
        """Everything in `sizes` is accounted for, once. Raises AssertionError."""
        charged = {item: n_bytes for item, (_, n_bytes) in self._charges.items()}
        assert charged == dict(sizes), f"{len(charged)} items are accounted for; {len(sizes)} are cached"
        sums: Counter[str | None] = Counter()
        for owner, n_bytes in self._charges.values():
            sums[owner] += n_bytes
        assert +sums == +self._sums, f"owners add up to {dict(sums)}; {dict(self._sums)} are counted"
