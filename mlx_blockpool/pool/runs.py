"""The free blocks of one layer group, as runs of neighbouring ids.

Ids are slab_index * stride + position; a run never crosses from one slab into the next. Does not know who holds the rest.
"""

from __future__ import annotations

from collections.abc import Iterator


class FreeRuns:
    """Disjoint free runs [start, end), none touching another."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self.count = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(sorted(self._ends.items()))

    def __contains__(self, block: int) -> bool:
        return any(start <= block < end for start, end in self._ends.items())

    @property
    def longest(self) -> int:
        return max((end - start for start, end in self._ends.items()), default=0)

    def add(self, start: int, end: int) -> None:
        """Make [start, end) free; it joins its neighbours in the same slab."""
        self.count += end - start
        if start % self.stride and start in self._starts:
            start = self._pop(self._starts[start])[0]
        if end % self.stride and end in self._ends:
            end = self._pop(end)[1]
        self._put(start, end)

    def remove(self, start: int, end: int) -> None:
        """Take the whole run [start, end) away: its slab is given back."""
        assert self._ends.get(start) == end, f"[{start}, {end}) is not one free run: {self._ends}"
        self._pop(start)
        self.count -= end - start

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` ids: those right behind the block `after` where they are free, else where there is most room to grow."""
        assert count <= self.count, f"{count} wanted > {self.count} free"
        ids: list[int] = []
        if after is not None and (after + 1) % self.stride and after + 1 in self._ends:
            ids += self._cut(after + 1, after + 1, count)
        while len(ids) < count:
            start = max(self._ends, key=lambda s: (self._ends[s] - s, -s))
            room = self._ends[start] - start - (count - len(ids))
            # A run that starts behind somebody's block leaves that neighbour half of the room.
            begin = start + room // 2 if room > 0 and start % self.stride else start
            ids += self._cut(start, begin, count - len(ids))
        return ids

    def _cut(self, start: int, begin: int, count: int) -> list[int]:
        start, end = self._pop(start)
        stop = min(begin + count, end)
        if start < begin:
            self._put(start, begin)
        if stop < end:
            self._put(stop, end)
        self.count -= stop - begin
        return list(range(begin, stop))

    def _put(self, start: int, end: int) -> None:
        self._ends[start] = end
        self._starts[end] = start

    def _pop(self, start: int) -> tuple[int, int]:
        end = self._ends.pop(start)
        del self._starts[end]
        return start, end
