"""ModelCounts: what one model has done since the server started, through all its loads. Cheap
enough for every token.

The generation thread writes it, and any thread reads it. Only `num_begun` is written by socket
threads, under a lock.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

# vLLM's buckets, in seconds, so that its dashboards show the same.
FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
BETWEEN_TOKENS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
REQUEST = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Steps over which the time of a decode path is averaged: the last ones, and for comparison.
LAST_STEPS, LONG = 64, 4096


class Buckets:
    """A histogram.

    `counts`: the observations up to each of the bounds, and those above the last.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Drift:
    """Compares the last steps of one decode path with those before, by averages of the seconds
    for each member.
    """

    def __init__(self) -> None:
        self._num = 0
        self._last = self._long = 0.0

    def observe(self, seconds: float) -> None:
        self._num += 1
        self._last += (seconds - self._last) / min(self._num, LAST_STEPS)
        self._long += (seconds - self._long) / min(self._num, LONG)

    @property
    def ratio(self) -> float:
        """1.0: steps take as long as they did."""
        return self._last / self._long if self._long else 1.0


class ModelCounts:
    """num_begun, num_ended, num_running: requests; those begun that neither run nor have ended
    wait.

    ended:       requests by the reason of their end.      prompt_tokens: of requests that have
                 started.
    hits:        tokens of prompts by the tier that had them. misses, missed_tokens: by the cause,
                 where not all were cached.
    computed_tokens, computing: tokens of prompts that were computed, and the seconds of that.
    swaps:       preempted and resumed sequences.          steps:       seconds of chunks of prefill
                 and of decode steps.
    forced_tokens, jumps: tokens that a form forced and that were computed together, and how often
    that happened.
    drafted, accepted: tokens of drafts that were verified, and those that were accepted, by source.
    verifications: forwards that verified drafts.
    paths:       how often the model's batches took each decode path. drifts: of the times of these
                 paths.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self.num_begun = self.num_ended = self.num_running = 0
        self.prompt_tokens = self.generated_tokens = self.forced_tokens = self.jumps = (
            self.verifications
        ) = 0
        self.restored_tokens = self.restored_bytes = self.num_restores = 0
        self.computed_tokens, self.computing = 0, 0.0
        self.ended: Counter[str] = Counter()
        self.hits: Counter[str] = Counter(memory=0, disk=0)
        self.misses: Counter[str] = Counter()
        self.missed_tokens: Counter[str] = Counter()
        self.swaps: Counter[str] = Counter({"out": 0, "in": 0})
        self.first_token, self.between_tokens = Buckets(FIRST_TOKEN), Buckets(BETWEEN_TOKENS)
        self.whole, self.queued = Buckets(REQUEST), Buckets(REQUEST)
        self.steps = {"prefill": Buckets(STEP), "decode": Buckets(STEP)}
        self.paths: Mapping[str, int] = {}
        self.drifts: dict[str, Drift] = {}
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        # The engine's counts and `paths` after the last step.
        self._engine: Mapping[str, int] = {}
        self._paths: dict[str, int] = {}

    @property
    def num_waiting(self) -> int:
        return max(0, self.num_begun - self.num_ended - self.num_running)

    @property
    def seconds_saved(self) -> float:
        """Cached tokens of prompts times the measured seconds of a computed one."""
        return self.hits.total() * self.computing / max(1, self.computed_tokens)

    def begin_request(self) -> None:
        with self._changing:
            self.num_begun += 1

    def count_step(self, counts: Mapping[str, int], seconds: float) -> None:
        """Count a step of `seconds`.

        `counts`: those of the engine, which begin at zero with a new engine.
        """
        new = Counter(counts)
        new.subtract(self._engine)
        if min(new.values(), default=0) < 0:
            new = Counter(counts)
        self._engine = dict(counts)
        self.jumps += new["jumps"]
        if new["verifications"]:
            self.verifications += new["verifications"]
            for name, count in new.items():
                what, _, source = name.partition(" ")
                if source and count:
                    (self.drafted if what == "drafted" else self.accepted)[source] += count
        if new["chunks"]:
            self.steps["prefill"].observe(seconds)
            # A mixed step has a row for each token, those of replies included.
            tokens, rows = new["prompt_tokens"], new["tokens"] if new["mixed"] else 0
            self.computed_tokens += tokens
            self.computing += seconds * tokens / max(1, tokens + rows)
        elif new["decode_steps"]:
            self.steps["decode"].observe(seconds)
            taken = [path for path, count in self.paths.items() if count != self._paths.get(path)]
            self._paths |= self.paths
            # Others have computed more than a token of each member.
            if not (new["jumps"] or new["verifications"]):
                for path in taken:
                    self.drifts.setdefault(path, Drift()).observe(seconds / max(1, new["tokens"]))
