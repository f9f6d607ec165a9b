"""PathCosts: what the attention of a decode step costs on each path, and which path is the cheapest.

Costs are fitted to measured steps (path_measuring.py). Knows counts of tokens, no arrays and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

# Rounds of descent; six unknowns need fewer.
DESCENTS = 2000

# How many amounts each path has.
AMOUNTS = {"shared": 6, "padded": 3, "kernel": 4, "rows": 3, "kernel_rows": 4}


class Shape(NamedTuple):
    """Members that begin with the same `shared` tokens, and how many tokens each of them reads beyond those.

    rows: tokens of each member that are computed in one forward.
    """

    shared: int
    own: tuple[int, ...]
    rows: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.shared + own for own in self.own)


class KernelWork(NamedTuple):
    """What the kernel has to do: rows that attend, tokens that are read once for all of them, and the tokens of each row."""

    rows: int
    tokens: int
    by_rows: int


class Reading(NamedTuple):
    """What a shape cost on the ragged path in seconds, and on others as multiples of that."""

    shape: Shape
    seconds: float
    ratios: dict[str, float]


@dataclass(frozen=True)
class PathCosts:
    """Seconds of one layer.

    read:    of a member that reads alone, beside its tokens.
    token:   of each token that it reads.
    shared:  of members that read together, by shared_amounts().
    padded:  of a step that gathers, by padded_amounts().
    kernel:  of a step of the kernel, by kernel_amounts().
    rows:    of several rows of each member, where each member reads alone, by row_amounts(); kernel_rows: of the kernel.

    Nothing of a path: not measured.
    """

    read: float
    token: float
    shared: tuple[float, ...]
    padded: tuple[float, ...] = ()
    kernel: tuple[float, ...] = ()
    rows: tuple[float, ...] = ()
    kernel_rows: tuple[float, ...] = ()

    def of_ragged(self, sizes: Sequence[int]) -> float:
        return self.read * len(sizes) + self.token * sum(sizes)

    def of_cluster(self, shape: Shape) -> float:
        return _product(self.shared, shared_amounts(shape)) if self.shared else math.inf

    def of_padded(self, sizes: Sequence[int]) -> float:
        return _product(self.padded, padded_amounts(sizes)) if self.padded else math.inf

    def of_kernel(self, work: KernelWork) -> float:
        return _product(self.kernel, kernel_amounts(work)) if self.kernel else math.inf

    def rows_ratio(self, sizes: Sequence[int], work: KernelWork) -> float:
        """What the kernel costs for several rows of each member, as a multiple of what reading alone does."""
        alone = _product(self.rows, row_amounts(sizes, work.by_rows)) if self.rows else 0.0
        return _product(self.kernel_rows, kernel_amounts(work)) / alone if alone and self.kernel_rows else math.inf

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> PathCosts:
        """Raises ValueError for anything that to_json() did not make."""
        try:
            amounts = {name: tuple(map(float, found[name])) for name in AMOUNTS}
            costs = cls(float(found["read"]), float(found["token"]), **amounts)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"These are no costs of decode paths: {error!r}.") from error
        every = (costs.read, costs.token, *(seconds for each in amounts.values() for seconds in each))
        are_seconds = all(0 <= seconds < math.inf for seconds in every)
        if not are_seconds or any(len(amounts[name]) not in (0, count) for name, count in AMOUNTS.items()):
            raise ValueError(f"These are no costs of decode paths: {found!r}.")
        return costs


def shared_amounts(shape: Shape) -> tuple[float, ...]:
    """The cluster, its members, tokens that are read together, the same for each member, own tokens, and places of own scores:
    shorter members have theirs padded."""
    members = len(shape.own)
    return 1, members, shape.shared, members * shape.shared, sum(shape.own), members * max(shape.own)


def padded_amounts(sizes: Sequence[int]) -> tuple[float, ...]:
    """The step, its members, and the places of the array that they are gathered in."""
    return 1, len(sizes), len(sizes) * max(sizes)


def kernel_amounts(work: KernelWork) -> tuple[float, ...]:
    """The step, its rows, tokens that are read, and what all rows compute with."""
    return 1, *work


def row_amounts(sizes: Sequence[int], by_rows: int) -> tuple[float, ...]:
    """The members, their tokens, and the tokens of each row."""
    return len(sizes), sum(sizes), by_rows


def kernel_work(shape: Shape) -> KernelWork:
    """What a step of a shape is for the kernel."""
    return KernelWork(shape.rows * len(shape.own), shape.shared + sum(shape.own), shape.rows * sum(shape.sizes))


def fitted(readings: Sequence[Reading]) -> PathCosts:
    """The costs that come closest to readings, each of them off by so many percent.

    Other paths are fitted by their ratio to the ragged one: a machine that is slower for some milliseconds is so for both.
    """
    by_rows, readings = [r for r in readings if r.shape.rows > 1], [r for r in readings if r.shape.rows == 1]
    ragged = [(1.0 * len(r.shape.own), 1.0 * sum(r.shape.sizes)) for r in readings]
    read, token = least_squares(ragged, [r.seconds for r in readings])
    alone = PathCosts(read, token, ())

    def of(path: str, amounts: Callable[[Shape], tuple[float, ...]]) -> tuple[float, ...]:
        taken = [r for r in readings if path in r.ratios]
        seconds = [r.ratios[path] * alone.of_ragged(r.shape.sizes) for r in taken]
        return tuple(least_squares([amounts(r.shape) for r in taken], seconds)) if taken else ()

    rows, kernel_rows = _fitted_rows(by_rows) if by_rows else ((), ())
    return replace(
        alone,
        rows=rows,
        kernel_rows=kernel_rows,
        shared=of("shared", shared_amounts),
        padded=of("padded", lambda shape: padded_amounts(shape.sizes)),
        kernel=of("kernel", lambda shape: kernel_amounts(kernel_work(shape))),
    )


def _fitted_rows(readings: Sequence[Reading]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What several rows of each member cost where members read alone, and by the kernel."""
    works = [kernel_work(r.shape) for r in readings]
    amounts = [row_amounts(r.shape.sizes, work.by_rows) for r, work in zip(readings, works, strict=True)]
    rows = tuple(least_squares(amounts, [r.seconds for r in readings]))
    seconds = [r.ratios["kernel"] * _product(rows, each) for r, each in zip(readings, amounts, strict=True)]
    return rows, tuple(least_squares([kernel_amounts(work) for work in works], seconds))


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The x >= 0 with the least sum of (row x / value - 1)^2, by descent along one coordinate after the other."""
    scaled = [[a / value for a in row] for row, value in zip(rows, values, strict=True)]
    count = len(scaled[0])
    gram = [[sum(row[i] * row[j] for row in scaled) for j in range(count)] for i in range(count)]
    wanted = [sum(row[i] for row in scaled) for i in range(count)]
    found = [0.0] * count
    for _ in range(DESCENTS):
        for i in range(count):
            slope = wanted[i] - _product(gram[i], found)
            found[i] = max(0.0, found[i] + slope / gram[i][i]) if gram[i][i] else 0.0
    return found


def _product(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
