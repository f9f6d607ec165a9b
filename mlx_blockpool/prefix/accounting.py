"""Which agent owns the bytes of each cached block and checkpoint: the one that computed it first.

Knows owners and sizes; not what takes the bytes. Owned by the generation thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

# The owner of what all requests without an agent compute.
ANONYMOUS = "anonymous"


class Accounting:
    """Bytes by owner. What came from disk has no owner: None."""

    def __init__(self) -> None:
        # In the order of use: (account, bytes).
        self._borne: dict[Hashable, tuple[str | None, int]] = {}
        self._sums: Counter[str | None] = Counter()

    def bear(self, what: Hashable, n_bytes: int, account: str | None) -> None:
        """Account for something new; what has an owner already keeps it."""
        if what not in self._borne:
            self._borne[what] = account, n_bytes
            self._sums[account] += n_bytes

    def use(self, what: Hashable) -> None:
        """It was used: it is the last of its owner's in the order of use."""
        if what in self._borne:
            self._borne[what] = self._borne.pop(what)

    def drop(self, what: Hashable) -> None:
        """It is not cached any more."""
        account, n_bytes = self._borne.pop(what)
        self._sums[account] -= n_bytes
        if not self._sums[account]:
            del self._sums[account]

    def owner_of(self, what: Hashable) -> str | None:
        """The owner; None also for what is not accounted for."""
        return self._borne.get(what, (None, 0))[0]

    def of(self, account: str) -> Iterator[Hashable]:
        """All that an owner has, the one used longest ago first."""
        return (what for what, (whose, _) in self._borne.items() if whose == account)

    def nbytes(self, account: str) -> int:
        return self._sums[account]

    def largest(self, count: int) -> dict[str, int]:
        """Bytes of the `count` owners that have most, the largest first."""
        named = ((account, n_bytes) for account, n_bytes in self._sums.items() if account is not None)
        return dict(sorted(named, key=lambda item: (-item[1], item[0]))[:count])

    def check(self, sizes: Mapping[Hashable, int]) -> None:
        """Everything in `sizes` is accounted for, once. Raises AssertionError."""
        borne = {what: n_bytes for what, (_, n_bytes) in self._borne.items()}
        assert borne == dict(sizes), (
            f"{len(borne)} things are accounted for; {len(sizes)} are cached; {sum(borne.values())} bytes"
        )
        sums: Counter[str | None] = Counter()
        for account, n_bytes in self._borne.values():
            sums[account] += n_bytes
        assert +sums == +self._sums, f"owners add up to {dict(sums)}, found {dict(self._sums)}"
