"""DecodePolicy: on which path a step runs, by what the paths cost.

ragged: each member reads its own runs. shared: members whose tables begin with the same blocks read
those once, together.
kernel: one kernel reads the runs of all members where they lie, and those that members share once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx

from ..kernel.launch import Launcher, device_launcher
from .cost_model import PathCosts
from .shares import Cluster


def device() -> str:
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def default_streams() -> int:
    """Two where mlx runs on a CPU that has them: it uses one core for each stream.

    More than two were not measured.
    """
    return min(2, os.cpu_count() or 1) if mx.default_device() == mx.cpu else 1


@dataclass
class DecodePolicy:
    """How the decode steps of one pool run.

    path:         auto, or the one path that a batch decodes on.
    costs:        of each layer group that was measured.
    streams:      how many streams the attention of a batch is divided between; more than one on a
                  CPU with several cores.
    path_counts:  each attend of a batch, per layer and step, under the path that it took.
    launch:       what runs kernels on this device, or None.
    """

    path: str
    costs: dict[int, PathCosts] = field(default_factory=dict)
    streams: int = field(default_factory=default_streams)
    path_counts: Counter[str] = field(default_factory=Counter)
    launch: Launcher | None = field(default_factory=lambda: device_launcher())

    def choose(
        self,
        group: int,
        sizes: Sequence[int],
        clusters: Sequence[Cluster],
        counts: Sequence[int] | None = None,
        has_kernel: bool = False,
    ) -> str:
        """The path of a step of a layer group, the same every time; `sizes` are the tokens that
        each member reads.

        counts: rows of each member; by default its next token. Groups that were not measured take
        the ragged path, whose kernels are those of a single sequence. has_kernel: whether the
        kernel of this group is trusted.
        """
        if (self.path == "shared" and not clusters) or (self.path == "kernel" and not has_kernel):
            return "ragged"
        if self.path != "auto":
            return self.path
        costs = self.costs.get(group)
        if costs is None:
            return "ragged"
        found = costs.by_path(sizes, clusters, counts)
        if not has_kernel:
            del found["kernel"]
        return min(found, key=lambda path: found[path])

    def may_share(self, group: int, has_kernel: bool = False) -> bool:
        """Whether members that begin with the same blocks may read those once."""
        if self.path == "kernel":
            return has_kernel
        return self.path == "shared" or (self.path == "auto" and group in self.costs)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within this context attention is not counted in path_counts."""
        counts = dict(self.path_counts)
        try:
            yield
        finally:
            self.path_counts.clear()
            self.path_counts.update(counts)
