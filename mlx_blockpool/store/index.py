"""Which record files there are, how lately each was used, and who has to go. Knows names and sizes, no disk.

A name is the path of a file below the store's folder. The files are the only truth; this is rebuilt from them at start.
Owned by the generation thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator


class Index:
    """Sizes in bytes, in the order of use; `nbytes` is their sum, to be at most `limit`. `pinned` files never have to go."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.pinned: Collection[str] = frozenset()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        # Used since take_touched(), in the order of use.
        self._touched: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[str]:
        """Names, the one used longest ago first."""
        return iter(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        return self._sizes[name]

    def add(self, name: str, size: int) -> None:
        """A file that is there, or is about to be; used last."""
        self.remove(name)
        self._sizes[name] = size
        self.nbytes += size

    def remove(self, name: str) -> int:
        """Returns its size; 0 if it was not there."""
        size = self._sizes.pop(name, 0)
        self.nbytes -= size
        return size

    def put_back(self, name: str, size: int) -> None:
        """A file that could not be removed: it is the first to go."""
        if name not in self._sizes:
            self.add(name, size)
            self._sizes.move_to_end(name, last=False)

    def arrange(self, names: Iterable[str]) -> None:
        """Let these files, the one that is to go last given first, take each other's places in the order of use."""
        given = [name for name in names if name in self._sizes]
        ordered, found = set(given), reversed(given)
        self._sizes = OrderedDict((n, self._sizes[n]) for n in (next(found) if n in ordered else n for n in list(self._sizes)))

    def touch(self, names: Iterable[str]) -> None:
        """Used now, the first of them last of all: a path is given from its beginning, which outlives its end."""
        for name in reversed(list(names)):
            if name in self._sizes:
                self._sizes.move_to_end(name)
                self._touched.pop(name, None)
                self._touched[name] = None

    @property
    def pinned_bytes(self) -> int:
        return sum(self._sizes.get(name, 0) for name in self.pinned)

    @property
    def has_touched(self) -> bool:
        return bool(self._touched)

    def take_touched(self) -> list[str]:
        """What is still there of the files touched since the last call, the one used longest ago first."""
        touched, self._touched = self._touched, {}
        return [name for name in touched if name in self._sizes]

    def room_for(self, size: int, spared: Collection[str] = ()) -> list[str] | None:
        """The files used longest ago that must go for `size` bytes more; None if those that may go are not enough."""
        surplus = self.nbytes + size - self.limit
        found = self._oldest(surplus, spared)
        return found if sum(self._sizes[name] for name in found) >= surplus else None

    def surplus(self) -> list[str]:
        """The files used longest ago that are over the limit together, or all that may go."""
        return self._oldest(self.nbytes - self.limit, ())

    def _oldest(self, n_bytes: int, spared: Collection[str]) -> list[str]:
        found: list[str] = []
        for name, size in self._sizes.items():
            if n_bytes <= 0:
                break
            if name not in spared and name not in self.pinned:
                found.append(name)
                n_bytes -= size
        return found
