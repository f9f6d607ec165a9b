"""Which record files there are and how lately each was used. Knows names and sizes, no disk. Owned by the generation thread.

A name is the path of a file below the store's folder. The files are the only truth; this is rebuilt from them at start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator


class Index:
    """Sizes in bytes, in the order of use; `nbytes` is their sum."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self.nbytes = 0

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

    def victims(self, surplus: int, spared: Collection[str] = ()) -> list[str]:
        """The files used longest ago that make `surplus` bytes of room together; none if those that may go are not enough."""
        found: list[str] = []
        for name, size in self._sizes.items():
            if surplus <= 0:
                break
            if name not in spared:
                found.append(name)
                surplus -= size
        return found if surplus <= 0 else []
