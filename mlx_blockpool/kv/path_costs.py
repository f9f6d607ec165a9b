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
SHARED, PADDED, KERNEL = 6, 3, 4


class Shape(NamedTuple):
    """Members that begin with the same `shared` tokens, and how many tokens each of them reads beyond those."""

    shared: int
    own: tuple[int, ...]

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

    Nothing of a path: not measured.
    """

    read: float
    token: float
    shared: tuple[float, ...]
    padded: tuple[float, ...] = ()
    kernel: tuple[float, ...] = ()

    def of_ragged(self, sizes: Sequence[int]) -> float:
        return self.read * len(sizes) + self.token * sum(sizes)

    def of_cluster(self, shape: Shape) -> float:
        return _product(self.shared, shared_amounts(shape)) if self.shared else math.inf

    def of_padded(self, sizes: Sequence[int]) -> float:
        return _product(self.padded, padded_amounts(sizes)) if self.padded else math.inf

    def of_kernel(self, work: KernelWork) -> float:
        return _product(self.kernel, kernel_amounts(work)) if self.kernel else math.inf

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> PathCosts:
        """Raises ValueError for anything that to_json() did not make."""
        try:
            shared, padded, kernel = (tuple(map(float, found[name])) for name in ("shared", "padded", "kernel"))
            costs = cls(float(found["read"]), float(found["token"]), shared, padded, kernel)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"These are no costs of decode paths: {error!r}.") from error
        are_seconds = all(0 <= seconds < math.inf for seconds in (costs.read, costs.token, *shared, *padded, *kernel))
        counts = zip((shared, padded, kernel), (SHARED, PADDED, KERNEL), strict=True)
        if not are_seconds or any(len(amounts) not in (0, count) for amounts, count in counts):
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


def kernel_work(shape: Shape) -> KernelWork:
    """What a step of a shape is for the kernel."""
    return KernelWork(len(shape.own), shape.shared + sum(shape.own), sum(shape.sizes))


def fitted(readings: Sequence[Reading]) -> PathCosts:
    """The costs that come closest to readings, each of them off by so many percent.

    Other paths are fitted by their ratio to the ragged one: a machine that is slower for some milliseconds is so for both.
    """
    ragged = [(1.0 * len(r.shape.own), 1.0 * sum(r.shape.sizes)) for r in readings]
    read, token = least_squares(ragged, [r.seconds for r in readings])
    alone = PathCosts(read, token, ())

    def of(path: str, amounts: Callable[[Shape], tuple[float, ...]]) -> tuple[float, ...]:
        taken = [r for r in readings if path in r.ratios]
        seconds = [r.ratios[path] * alone.of_ragged(r.shape.sizes) for r in taken]
        return tuple(least_squares([amounts(r.shape) for r in taken], seconds)) if taken else ()

    return replace(
        alone,
        shared=of("shared", shared_amounts),
        padded=of("padded", lambda shape: padded_amounts(shape.sizes)),
        kernel=of("kernel", lambda shape: kernel_amounts(kernel_work(shape))),
    )


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
