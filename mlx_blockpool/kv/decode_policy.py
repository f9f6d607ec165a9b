"""DecodePolicy: how decode steps run, and over counts and block ids how their work is divided.

ragged: each member reads its own runs. shared: members whose tables begin with the same blocks read those once, together.
padded: keys and values of all members are gathered into one padded array.
kernel: one kernel reads the runs of all members where they lie, and those that members share once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise, takewhile

import mlx.core as mx

from ..kernel.launch import Launcher, device_launcher
from ..spec import BLOCK_TOKENS
from .path_costs import KernelWork, PathCosts, Shape


@dataclass(frozen=True)
class Cluster:
    """Members, by their place in the batch, whose block tables begin with the same `blocks` full blocks."""

    members: tuple[int, ...]
    blocks: int

    @property
    def saved(self) -> int:
        """Blocks that are not read again if these members read theirs together."""
        return (len(self.members) - 1) * self.blocks


@dataclass(frozen=True)
class Share:
    """A part of one layer's attention that waits for no other: some members and their kv heads [start, end)."""

    members: tuple[int, ...]
    cost: float
    heads: tuple[int, int]


def device() -> str:
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def default_streams() -> int:
    """Two where mlx runs on a CPU that has them: it uses one core for each stream. More than two were not measured."""
    return min(2, os.cpu_count() or 1) if mx.default_device() == mx.cpu else 1


# Costs that are no further apart count as equal: measuring is not more exact.
NEAR = 0.02


@cache
def nominal(kv_heads: int) -> PathCosts:
    """The costs of layers that were not measured: a member costs what 100 tokens do, and nothing is saved.

    Only how work is divided between streams depends on them.
    """
    token = 1e-7 * kv_heads
    return PathCosts(100 * token, token, (0.0, 100 * token, 0.0, token, token, 0.0))


@dataclass
class DecodePolicy:
    """How the decode steps of one pool run.

    path:         auto, or the one path that a batch decodes on.
    costs:        of each layer group that was measured.
    streams:      how many streams the attention of a batch is divided between; more than one on a CPU with several cores.
    synchronous:  whether a step must have ended before the next one writes, or mlx would copy slabs.
    path_counts:  each attend of a batch, per layer and step, under the path that it took.
    launch:       what runs kernels on this device; None: nothing does.
    trusted:      the layer groups whose kernel was tried here, and was right.
    no_kernel:    why other groups do without it, in words.
    """

    path: str
    costs: dict[int, PathCosts] = field(default_factory=dict)
    streams: int = field(default_factory=default_streams)
    synchronous: bool = False
    path_counts: Counter[str] = field(default_factory=Counter)
    launch: Launcher | None = field(default_factory=lambda: device_launcher())
    trusted: frozenset[int] = frozenset()
    no_kernel: dict[int, str] = field(default_factory=dict)

    def choose(self, group: int, sizes: Sequence[int], clusters: Sequence[Cluster], counts: Sequence[int] | None = None) -> str:
        """The path of a step of a layer group, by the same answer every time; `sizes` are the tokens that each member reads.

        counts: rows of each member; None: its next token. What was not measured takes the ragged path, whose kernels are those of
        a single sequence.
        """
        if (self.path == "shared" and not clusters) or (self.path == "kernel" and group not in self.trusted):
            return "ragged"
        if self.path != "auto":
            return self.path
        costs = self.costs.get(group)
        if costs is None:
            return "ragged"
        found = costs_of_paths(costs, sizes, clusters, counts)
        if group not in self.trusted:
            del found["kernel"]
        return min(found, key=lambda path: found[path])

    def may_share(self, group: int) -> bool:
        """Whether members that begin with the same blocks may read those once."""
        if self.path == "kernel":
            return group in self.trusted
        return self.path == "shared" or (self.path == "auto" and group in self.costs)

    def costs_of(self, group: int, kv_heads: int) -> PathCosts:
        """What the work of a layer group is divided by between streams."""
        return self.costs.get(group) or nominal(kv_heads)


def costs_of_paths(
    costs: PathCosts, sizes: Sequence[int], clusters: Sequence[Cluster], counts: Sequence[int] | None = None
) -> dict[str, float]:
    """What a step costs on each path that it can take. Of ragged a little is taken off: others have to be clearly cheaper.

    counts: rows of each member; they are never gathered, and other paths are to each other as they are for one row.
    """
    rows = counts or [1] * len(sizes)
    by_rows = sum(count * size for count, size in zip(rows, sizes, strict=True))
    work = KernelWork(sum(rows), sum(sizes) - sum(c.saved for c in clusters) * BLOCK_TOKENS, by_rows)
    alone = costs.of_ragged(sizes)
    found = {"ragged": (1 - NEAR) * alone}
    found["kernel"] = costs.of_kernel(work) if counts is None else alone * costs.rows_ratio(sizes, work)
    if counts is None and len(sizes) > 1:
        found["padded"] = costs.of_padded(sizes)
    if clusters:
        clustered = {i for c in clusters for i in c.members}
        apart = [size for i, size in enumerate(sizes) if i not in clustered]
        found["shared"] = costs.of_ragged(apart) + sum(costs.of_cluster(_shape(c, sizes)) for c in clusters)
    return found


def _shape(cluster: Cluster, sizes: Sequence[int]) -> Shape:
    shared = cluster.blocks * BLOCK_TOKENS
    return Shape(shared, tuple(sizes[i] - shared for i in cluster.members))


def find_clusters(tables: Sequence[list[int]]) -> list[Cluster]:
    """The clusters, each member in one at most, that save the most blocks; `tables` are the ids of each member's full blocks.

    Where some members of a cluster share more with each other, either all stay together on what all share, or they part and
    each smaller cluster reads its own longer prefix.
    """
    return _part(tables, range(len(tables)), 0)


def _part(tables: Sequence[list[int]], members: Sequence[int], depth: int) -> list[Cluster]:
    by_block: dict[int, list[int]] = {}
    for i in members:
        if len(tables[i]) > depth:
            by_block.setdefault(tables[i][depth], []).append(i)
    return [c for together in by_block.values() if len(together) > 1 for c in _best(tables, together)]


def _best(tables: Sequence[list[int]], members: list[int]) -> list[Cluster]:
    # Whatever the smallest and the largest begin with, all that lie between them begin with.
    low, high = min(tables[i] for i in members), max(tables[i] for i in members)
    whole = Cluster(tuple(members), sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))))
    parts = _part(tables, members, whole.blocks)
    return parts if sum(p.saved for p in parts) > whole.saved else [whole]


def divide(shares: Sequence[Share], streams: int) -> list[list[Share]]:
    """The shares for each of `streams` streams that run at the same time, nearly equal in cost.

    What is larger than one stream's part is divided by its heads first.
    """
    fair = sum(s.cost for s in shares) / streams
    pieces = [p for s in shares for p in (_by_heads(s, streams) if s.cost > 1.2 * fair else [s])]
    loads: list[list[Share]] = [[] for _ in range(streams)]
    costs = [0.0] * streams
    for piece in sorted(pieces, key=lambda p: -p.cost):
        least = costs.index(min(costs))
        loads[least].append(piece)
        costs[least] += piece.cost
    return [sorted(load, key=lambda p: (p.members, p.heads)) for load in loads]


def _by_heads(share: Share, parts: int) -> list[Share]:
    first, last = share.heads
    heads = last - first
    parts = min(parts, heads)
    cuts = [first + heads * i // parts for i in range(parts + 1)]
    return [replace(share, heads=(a, b), cost=share.cost * (b - a) / heads) for a, b in pairwise(cuts)]
