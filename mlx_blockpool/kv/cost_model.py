"""PathCosts: what the attention of a layer group costs on each decode path, fitted to measured
steps.

Knows counts of tokens, no arrays and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..drafts.curve import remembered_seconds
from ..spec import BLOCK_TOKENS
from .shares import Cluster

# Rounds of descent; six unknowns need fewer.
DESCENTS = 2000

# Costs that are no further apart count as equal: measuring is not more exact.
NEAR = 0.02


class Shape(NamedTuple):
    """Members that begin with the same `shared` tokens, and how many tokens each of them reads
    beyond those.

    rows: tokens of each member that are computed in one forward.
    """

    shared: int
    own: tuple[int, ...]
    rows: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.shared + own for own in self.own)


class KernelWork(NamedTuple):
    """What the kernel has to do: rows that attend, tokens that are read once for all of them,
    and the tokens of each row.
    """

    rows: int
    tokens: int
    by_rows: int


class PathTimes(NamedTuple):
    """The seconds that a shape took on the ragged path, and the others as multiples of that."""

    shape: Shape
    seconds: float
    ratios: dict[str, float]


# How many costs each path has.
AMOUNTS = {"shared": 6, "kernel": 4, "rows": 3, "kernel_rows": 4}


@dataclass(frozen=True)
class PathCosts:
    """Seconds of one layer.

    read:    of a member that reads alone, in addition to its tokens.
    token:   of each token that it reads.
    shared:  of members that read together, by shared_amounts().
    kernel:  of a step of the kernel, by kernel_amounts().
    rows:    of several rows of each member, where each member reads alone, by row_amounts();
             kernel_rows: of the kernel.

    Empty for a path that was not measured.
    """

    read: float
    token: float
    shared: tuple[float, ...]
    kernel: tuple[float, ...] = ()
    rows: tuple[float, ...] = ()
    kernel_rows: tuple[float, ...] = ()

    @staticmethod
    def from_json(found: Any) -> PathCosts:
        """Remembered costs: one for each amount, or none. Raises as remembered_seconds()."""
        paths = {name: tuple(map(remembered_seconds, found[name])) for name in AMOUNTS}
        if any(len(costs) not in (0, AMOUNTS[name]) for name, costs in paths.items()):
            raise ValueError(f"costs of {AMOUNTS}, or none")
        return PathCosts(
            remembered_seconds(found["read"]), remembered_seconds(found["token"]), **paths
        )

    def of_ragged(self, sizes: Sequence[int]) -> float:
        return self.read * len(sizes) + self.token * sum(sizes)

    def of_cluster(self, shape: Shape) -> float:
        return _product(self.shared, shared_amounts(shape)) if self.shared else math.inf

    def of_kernel(self, work: KernelWork) -> float:
        return _product(self.kernel, kernel_amounts(work)) if self.kernel else math.inf

    def rows_ratio(self, sizes: Sequence[int], work: KernelWork) -> float:
        """What the kernel costs for several rows of each member, as a multiple of what reading
        alone does.
        """
        alone = _product(self.rows, row_amounts(sizes, work.by_rows)) if self.rows else 0.0
        return (
            _product(self.kernel_rows, kernel_amounts(work)) / alone
            if alone and self.kernel_rows
            else math.inf
        )

    def by_path(
        self, sizes: Sequence[int], clusters: Sequence[Cluster], counts: Sequence[int] | None = None
    ) -> dict[str, float]:
        """What a step costs on each path that it can take; a little less on the ragged one: others
        have to be clearly cheaper.

        sizes: tokens that each member reads. counts: rows of each member, whose paths compare as
        they do for one row.
        """
        rows = counts or [1] * len(sizes)
        by_rows = sum(count * size for count, size in zip(rows, sizes, strict=True))
        work = KernelWork(
            sum(rows), sum(sizes) - sum(c.saved for c in clusters) * BLOCK_TOKENS, by_rows
        )
        alone = self.of_ragged(sizes)
        found = {"ragged": (1 - NEAR) * alone}
        found["kernel"] = (
            self.of_kernel(work) if counts is None else alone * self.rows_ratio(sizes, work)
        )
        if clusters:
            clustered = {i for c in clusters for i in c.members}
            unshared = [size for i, size in enumerate(sizes) if i not in clustered]
            found["shared"] = self.of_ragged(unshared) + sum(
                self.of_cluster(_shape(c, sizes)) for c in clusters
            )
        return found


def shared_amounts(shape: Shape) -> tuple[float, ...]:
    """The cluster, its members, tokens that are read together, the same for each member, own
    tokens, and places of own scores:
    shorter members have theirs padded.
    """
    members = len(shape.own)
    return (
        1,
        members,
        shape.shared,
        members * shape.shared,
        sum(shape.own),
        members * max(shape.own),
    )


def kernel_amounts(work: KernelWork) -> tuple[float, ...]:
    """The step, its rows, tokens that are read, and what all rows compute with."""
    return 1, *work


def row_amounts(sizes: Sequence[int], by_rows: int) -> tuple[float, ...]:
    """The members, their tokens, and the tokens of each row."""
    return len(sizes), sum(sizes), by_rows


def _shape(cluster: Cluster, sizes: Sequence[int]) -> Shape:
    shared = cluster.blocks * BLOCK_TOKENS
    return Shape(shared, tuple(sizes[i] - shared for i in cluster.members))


def kernel_work(shape: Shape) -> KernelWork:
    """What a step of a shape is for the kernel."""
    return KernelWork(
        shape.rows * len(shape.own), shape.shared + sum(shape.own), shape.rows * sum(shape.sizes)
    )


def fitted(times: Sequence[PathTimes]) -> PathCosts:
    """The costs that come closest to measured times, in percent of each.

    Other paths are fitted by their ratio to the ragged one: a machine that is slower for some
    milliseconds is so for both.
    """
    single, several = (
        [t for t in times if t.shape.rows == 1],
        [t for t in times if t.shape.rows > 1],
    )
    read, token = least_squares(
        [(1.0 * len(t.shape.own), 1.0 * sum(t.shape.sizes)) for t in single],
        [t.seconds for t in single],
    )
    alone = PathCosts(read, token, ())

    def of(path: str, amounts: Callable[[Shape], tuple[float, ...]]) -> tuple[float, ...]:
        taken = [t for t in single if path in t.ratios]
        return _fit(
            [amounts(t.shape) for t in taken],
            [t.ratios[path] * alone.of_ragged(t.shape.sizes) for t in taken],
        )

    amounts = [row_amounts(t.shape.sizes, kernel_work(t.shape).by_rows) for t in several]
    rows = _fit(amounts, [t.seconds for t in several])
    seconds = [
        t.ratios["kernel"] * _product(rows, each) for t, each in zip(several, amounts, strict=True)
    ]
    return replace(
        alone,
        shared=of("shared", shared_amounts),
        kernel=of("kernel", lambda shape: kernel_amounts(kernel_work(shape))),
        rows=rows,
        kernel_rows=_fit([kernel_amounts(kernel_work(t.shape)) for t in several], seconds),
    )


def _fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """least_squares() of what was measured; empty if nothing was."""
    return tuple(least_squares(rows, values)) if rows else ()


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The x >= 0 with the least sum of (row x / value - 1)^2, by descent along one coordinate
    after the other.
    """
    scaled = np.asarray(rows, float) / np.asarray(values, float)[:, None]
    gram, needed = scaled.T @ scaled, scaled.sum(axis=0)
    found = np.zeros(len(needed))
    for _ in range(DESCENTS):
        for i in np.flatnonzero(gram.diagonal()):
            found[i] = max(0.0, found[i] + (needed[i] - gram[i] @ found) / gram[i, i])
    return [float(seconds) for seconds in found]


def _product(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
