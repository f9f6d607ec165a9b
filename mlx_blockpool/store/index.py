"""Index: the record files, in the order of use, and which of them go first. Knows names and sizes,
no disk.

A name is the path of a file below the store's folder. The files are the only truth; the index is
rebuilt from them at start. Owned by the generation thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator


class Index:
    """Sizes in bytes, in the order of use. Their sum `nbytes` may be `limit`, less the `aside` of
    files in quarantine.

    `own_bytes` of it belong to files whose names begin with `own`. Files that are `pinned`, or
    `kept` for a time, are never victims.
    """

    def __init__(self, limit: int, own: str = "") -> None:
        self.limit = limit
        self.own = own
        self.nbytes = self.own_bytes = self.aside = 0
        self.pinned: Collection[str] = frozenset()
        self.kept: Collection[str] = frozenset()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        # Used since take_touched(), in the order of use.
        self._touched: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[str]:
        """Names, the least recently used first."""
        return iter(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        return self._sizes[name]

    def add(self, name: str, size: int) -> None:
        """Add a file that is on disk, or will be, as used last."""
        self.remove(name)
        self._sizes[name] = size
        self._count(name, size)

    def remove(self, name: str) -> int:
        """Returns its size; 0 if it was not in the index."""
        size = self._sizes.pop(name, 0)
        self._count(name, -size)
        return size

    def _count(self, name: str, size: int) -> None:
        self.nbytes += size
        self.own_bytes += size if name.startswith(self.own) else 0

    def put_back(self, name: str, size: int) -> None:
        """A file that could not be removed: it is the next victim."""
        if name not in self._sizes:
            self.add(name, size)
            self._sizes.move_to_end(name, last=False)

    def arrange(self, names: Iterable[str]) -> None:
        """Let these files, the most needed first, take each other's places in the order of use."""
        given = [name for name in names if name in self._sizes]
        ordered, found = set(given), reversed(given)
        self._sizes = OrderedDict(
            (n, self._sizes[n])
            for n in (next(found) if n in ordered else n for n in list(self._sizes))
        )

    def touch(self, names: Iterable[str]) -> None:
        """Used now, the first of them last: a path is given from its beginning, which outlives
        its end.
        """
        for name in reversed(list(names)):
            if name in self._sizes:
                self._sizes.move_to_end(name)
                self._touched.pop(name, None)
                self._touched[name] = None

    @property
    def pinned_bytes(self) -> int:
        """Bytes of files that are never victims."""
        return sum(self._sizes.get(name, 0) for name in {*self.pinned, *self.kept})

    @property
    def has_touched(self) -> bool:
        return bool(self._touched)

    def take_touched(self) -> list[str]:
        """The files touched since the last call that are still in the index, the least recently
        used first.
        """
        touched, self._touched = self._touched, {}
        return [name for name in touched if name in self._sizes]

    def room_for(
        self, size: int, is_spared: Callable[[str], bool] = lambda name: False
    ) -> list[str] | None:
        """The least recently used victims for `size` bytes more; None if there are not enough
        that are not spared.
        """
        found = self._oldest(self.nbytes + size - self._limit, is_spared)
        gone = sum(self._sizes[name] for name in found)
        return found if self.nbytes + size - gone <= self._limit else None

    def surplus(self) -> list[str]:
        """The victims that bring the index back under its limit, or all that there are."""
        return self._oldest(self.nbytes - self._limit, lambda name: False)

    def report(self) -> dict[str, int]:
        """Figures; sizes in bytes."""
        return {
            "records": len(self),
            "bytes": self.nbytes,
            "quarantine_bytes": self.aside,
            "store_bytes": self.limit,
            "model_bytes": self.own_bytes,
            "pinned_bytes": self.pinned_bytes,
        }

    @property
    def _limit(self) -> int:
        return max(0, self.limit - self.aside)

    def _oldest(self, n_bytes: int, is_spared: Callable[[str], bool]) -> list[str]:
        found: list[str] = []
        for name, size in self._sizes.items():
            if n_bytes <= 0:
                break
            if not (name in self.pinned or name in self.kept or is_spared(name)):
                found.append(name)
                n_bytes -= size
        return found
