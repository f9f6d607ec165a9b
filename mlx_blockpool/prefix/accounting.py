"""Whose account each known block and each checkpoint is on: that of whoever computed it first.

Knows names and sizes; what it is that takes them, it does not. Owned by the generation thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

# The one account of all requests that name no agent.
ANONYMOUS = "anonymous"


class Accounting:
    """Bytes by account. What nobody is known to have computed, as it came from disk, is on none: its account is None."""

    def __init__(self) -> None:
        # In the order of use: (account, bytes).
        self._borne: dict[Hashable, tuple[str | None, int]] = {}
        self._sums: Counter[str | None] = Counter()

    def bear(self, what: Hashable, n_bytes: int, account: str | None) -> None:
        """Charge for something new; what is charged already stays on the account where it is."""
        if what not in self._borne:
            self._borne[what] = account, n_bytes
            self._sums[account] += n_bytes

    def use(self, what: Hashable) -> None:
        """It was used: among those of its account it is the last."""
        if what in self._borne:
            self._borne[what] = self._borne.pop(what)

    def drop(self, what: Hashable) -> None:
        """It is not there any more."""
        account, n_bytes = self._borne.pop(what)
        self._sums[account] -= n_bytes
        if not self._sums[account]:
            del self._sums[account]

    def owner_of(self, what: Hashable) -> str | None:
        """None also for what is not charged at all."""
        return self._borne.get(what, (None, 0))[0]

    def of(self, account: str) -> Iterator[Hashable]:
        """All that is on an account, the one used longest ago first."""
        return (what for what, (whose, _) in self._borne.items() if whose == account)

    def nbytes(self, account: str) -> int:
        return self._sums[account]

    def largest(self, count: int) -> dict[str, int]:
        """Bytes of the `count` largest accounts, the largest first."""
        named = ((account, n_bytes) for account, n_bytes in self._sums.items() if account is not None)
        return dict(sorted(named, key=lambda item: (-item[1], item[0]))[:count])

    def check(self, sizes: Mapping[Hashable, int]) -> None:
        """Exactly what there is, `sizes`, is charged, once. Raises AssertionError."""
        borne = {what: n_bytes for what, (_, n_bytes) in self._borne.items()}
        assert borne == dict(sizes), f"{len(borne)} things are charged, there are {len(sizes)}; {sum(borne.values())} bytes"
        sums: Counter[str | None] = Counter()
        for account, n_bytes in self._borne.values():
            sums[account] += n_bytes
        assert +sums == +self._sums, f"accounts add up to {dict(sums)}, found {dict(self._sums)}"
