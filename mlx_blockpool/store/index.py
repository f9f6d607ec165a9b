"""Which record files there are and how lately each was used. Knows names and sizes, no disk. Owned by the generation thread.

A name is the path of a file below the store's folder. The files are the only truth; this is rebuilt from them at start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable


class Index:
    """Sizes in bytes, in the order of use; `nbytes` is their sum."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        return self._sizes[name]

    def add(self, name: str, size: int) -> None:
        """A file that is there, or is about to be; used last."""
        self.remove(name)
        self._sizes[name] = size
        self.nbytes += size

    def remove(self, name: str) -> None:
        self.nbytes -= self._sizes.pop(name, 0)

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
