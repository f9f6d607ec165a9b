"""Tally: the counts of one model since the server started, through all its loads. Cheap enough for every token.

The generation thread writes it, and any thread reads it. Only `num_begun` is written by socket threads, under a lock.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from ...engine.request import RestoreEnded
from ...prefix.lookup import Lookup

# vLLM's buckets, in seconds, so that its dashboards show the same.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Steps over which the time of a decode path is averaged: lately, and for comparison.
LATELY, LONG = 64, 4096


class Buckets:
    """A histogram. `counts`: the observations up to each of the bounds, and those above the last."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Drift:
    """Compares the last steps of one decode path with those before, by averages of the seconds for each member."""

    def __init__(self) -> None:
        self._num = 0
        self._lately = self._long = 0.0

    def observe(self, seconds: float) -> None:
        self._num += 1
        self._lately += (seconds - self._lately) / min(self._num, LATELY)
        self._long += (seconds - self._long) / min(self._num, LONG)

    @property
    def ratio(self) -> float:
        """1.0: steps take as long as they used to."""
        return self._lately / self._long if self._long else 1.0


class Tally:
    """num_begun, num_ended, num_running: requests; those begun that neither run nor have ended wait.

    ended:       requests by the reason of their end.      queried:     tokens of the prompts that were looked up.
    hits:        tokens of prompts by the tier that had them. misses, missed_tokens: by the cause, where not all were cached.
    swaps:       preempted and resumed sequences.          steps:       seconds of chunks of prefill and of decode steps.
    forced_tokens, jumps: tokens that a form forced and that were computed together, and how often that happened.
    drafted, accepted: tokens of drafts that were verified, and those of them that were accepted, by source.
    verifications: forwards that verified drafts.
    paths:       how often the model's batches took each decode path. drifts: of the times of these paths.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self.num_begun = self.num_ended = self.num_running = 0
        self.prompt_tokens = self.generated_tokens = self.queried = self.forced_tokens = self.jumps = 0
        self.restored_tokens = self.restored_bytes = self.num_restores = 0
        self.ended: Counter[str] = Counter()
        self.hits: Counter[str] = Counter(memory=0, disk=0)
        self.misses: Counter[str] = Counter()
        self.missed_tokens: Counter[str] = Counter()
        self.swaps: Counter[str] = Counter(out=0)
        self.swaps["in"] = 0
        self.first_token, self.between_tokens = Buckets(FIRST_TOKEN), Buckets(BETWEEN_TOKENS)
        self.whole, self.queued = Buckets(REQUEST), Buckets(REQUEST)
        self.steps = {"prefill": Buckets(STEP), "decode": Buckets(STEP)}
        self.paths: Mapping[str, int] = {}
        self.drifts: dict[str, Drift] = {}
        self._paths: dict[str, int] = {}
        self.verifications = 0
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        # Chunks, decode steps and tokens of the engine after the last step, its jumps, and what it has counted of drafts.
        self._counted = 0, 0, 0
        self._jumps = 0
        self._drafts: dict[str, int] = {}

    @property
    def num_waiting(self) -> int:
        return max(0, self.num_begun - self.num_ended - self.num_running)

    def begun(self) -> None:
        with self._changing:
            self.num_begun += 1

    def looked_up(self, tokens: int, cached: int, lookup: Lookup | None) -> None:
        """Count a request that has its caches; `lookup` explains them, None for mlx-lm's own caches."""
        self.prompt_tokens += tokens
        self.queried += tokens
        restored = 0 if lookup is None else min(lookup.restored, cached)
        self.hits["disk"] += restored
        self.hits["memory"] += cached - restored
        if cached < tokens - 1:
            cause = "unknown" if lookup is None else lookup.cause
            self.misses[cause] += 1
            self.missed_tokens[cause] += tokens - cached

    def restored(self, event: RestoreEnded) -> None:
        self.num_restores += 1
        self.restored_tokens += event.tokens
        self.restored_bytes += event.n_bytes

    def stepped(self, counts: Mapping[str, int], seconds: float) -> None:
        """Count a step of `seconds`. `counts`: those of the engine."""
        before, self._counted = self._counted, (counts["chunks"], counts["decode_steps"], counts["tokens"])
        jumps, self._jumps = self._jumps, counts.get("jumps", 0)
        # A new engine begins at zero.
        self.jumps += max(0, self._jumps - jumps)
        verifies = counts.get("verifications", 0) != self._drafts.get("verifications", 0)
        if verifies:
            self._count_drafts(counts)
        if self._counted[0] != before[0]:
            self.steps["prefill"].observe(seconds)
        elif self._counted[1] != before[1]:
            self.steps["decode"].observe(seconds)
            for path, count in self.paths.items():
                if count != self._paths.get(path):
                    self._paths[path] = count
                    if self._jumps != jumps or verifies:
                        # It has computed more than a token of each member.
                        continue
                    self.drifts.setdefault(path, Drift()).observe(seconds / max(1, self._counted[2] - before[2]))

    def _count_drafts(self, counts: Mapping[str, int]) -> None:
        # A new engine begins at zero.
        before = self._drafts if counts.get("verifications", 0) >= self._drafts.get("verifications", 0) else {}
        self._drafts = {
            name: count for name, count in counts.items() if name.startswith(("verifications", "drafted ", "accepted "))
        }
        for name, count in self._drafts.items():
            new = count - before.get(name, 0)
            what, _, source = name.partition(" ")
            if what == "verifications":
                self.verifications += new
            else:
                (self.drafted if what == "drafted" else self.accepted)[source] += new
