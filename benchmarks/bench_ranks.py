"""A decode step of two ranks on this machine: ours beside mlx-lm's generate on the same shards, and
the collectives of each.

Starts its ranks itself: mlx.launch keeps a core busy that they compute on. A llama model of random
weights is split by its heads (tensor); both systems decode one sequence in blocks of steps, in
random order. A ring on one machine computes on both cores, and its collectives wait for the
scheduler: times say something only while nothing else runs, counts always do.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import mlx.core as mx
from measure import llama, options_parser, report
from mlx_lm.generate import generate_step, generation_stream

from mlx_blockpool.config import EngineConfig, RankConfig
from mlx_blockpool.engine.opening import open_caches
from mlx_blockpool.engine.request import Request, Token
from mlx_blockpool.ranks import facts
from mlx_blockpool.ranks.driver import GroupDriver
from mlx_blockpool.ranks.group import Joined, Sent
from mlx_blockpool.ranks.head import Act, Head, TurnClock

LAYERS, QUICK_LAYERS = (16, 24), (4,)
PROMPT = [7 * i % 500 + 3 for i in range(300)]
# Steps of one system before the other one's turn; the first is not counted, as it waits for what
# the other has left.
STEPS = 6
CONFIG = RankConfig()


class Counted(Joined):
    """The ranks, with the number of their collectives beside those of the model."""

    def __init__(self, group: Any, kind: str) -> None:
        super().__init__(group, kind)
        self.calls: Counter[str] = Counter()

    def exchange(self, head: Head, mail: bytes = b"") -> list[Sent]:
        self.calls["exchanges"] += 1
        return super().exchange(head, mail)

    def least(self, values: Sequence[int]) -> list[int]:
        self.calls["votes"] += 1
        return super().least(values)

    def draw(self, tokens: mx.array | None, count: int, after: mx.array) -> mx.array:
        self.calls["draws"] += 1
        return super().draw(tokens, count, after)


class Ours:
    """Our engine on one rank, with exchanges as the server has them.

    `tokens`: those of the sequence, on rank 0.
    """

    def __init__(self, model: Any, ranks: Counted, max_tokens: int) -> None:
        self.tokens: list[int] = []
        self._ranks = ranks
        self._clock = TurnClock()
        caches = open_caches(model, 100_000_000, ranks=ranks)
        self._driver = GroupDriver(model, caches, EngineConfig(), ranks, self._clock)  # type: ignore[arg-type]
        if ranks.rank == 0:
            self._driver.insert(Request(PROMPT, max_tokens))
        self._left, self._seconds = 0, CONFIG.lease_seconds

    def step(self) -> None:
        start = time.perf_counter()
        if not (self._left and self._driver.is_steady):
            self._exchange()
        self._left -= 1
        self.tokens += [event.token for event in self._driver.next() if isinstance(event, Token)]
        self._seconds = time.perf_counter() - start

    def _exchange(self) -> None:
        is_first = self._ranks.rank == 0
        turns = self._driver.lease_for(self._seconds, CONFIG) if is_first else 0
        now, step = int(time.monotonic() * 1e6), int(self._seconds * 1e6)
        mail = facts.write(("", fact) for fact in self._driver.outgoing()) if is_first else b""
        sent = self._ranks.exchange(
            Head(Act.STEP, now, step, turns, fingerprint=self._driver.fingerprint()), mail
        )
        assert len({each.head.fingerprint for each in sent}) == 1, "the ranks disagree"
        self._clock.begin(sent[0].head)
        self._driver.apply(fact for _, fact in facts.read(sent[0].mail))
        self._left = sent[0].head.turns


def readings(systems: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each system, in every round."""
    found: dict[str, list[float]] = {name: [] for name in systems}
    # On all ranks the same order.
    order = random.Random(1)
    for _ in range(rounds):
        for name in order.sample(sorted(systems), len(systems)):
            times = [time.perf_counter()]
            for _ in range(STEPS):
                systems[name]()
                times.append(time.perf_counter())
            found[name].append(
                statistics.mean(after - before for before, after in list(pairwise(times))[1:])
            )
    return found


def bench(args: Any, ranks: Counted, layers: int, rounds: int) -> None:
    """One model. Both systems have written the same tokens, or their logits were that close."""
    models = [llama(256, layers, 8, 4) for _ in range(2)]
    for model in models:
        model.shard(ranks.group)
    ours = Ours(models[0], ranks, STEPS * (rounds + 2) + 100)
    stock, wrote = generate_step(mx.array(PROMPT), models[1], max_tokens=-1), []
    for _ in range(STEPS):
        ours.step()
        wrote.append(next(stock)[0])
    before = Counter(ranks.calls)
    found = readings({"ours": ours.step, "stock": lambda: wrote.append(next(stock)[0])}, rounds)
    if ranks.rank:
        return
    steps = STEPS * rounds
    counts = {
        f"{name}_per_step": round((ranks.calls[name] - before[name]) / steps, 3)
        for name in ("exchanges", "draws", "votes")
    }
    same = next(
        (at for at, pair in enumerate(zip(ours.tokens, wrote, strict=False)) if pair[0] != pair[1]),
        len(wrote),
    )
    report(
        args,
        "ranks",
        f"a decode step of {ranks.size} ranks, {layers} layers",
        ours_step_ms=round(statistics.median(found["ours"]) * 1e3, 2),
        stock_step_ms=round(statistics.median(found["stock"]) * 1e3, 2),
        ratio=round(
            statistics.median(b / a for a, b in zip(found["ours"], found["stock"], strict=True)), 3
        ),
        layer_collectives_per_step=2 * layers,
        **counts,
        rounds=rounds,
        same_tokens=same,
    )


def start_ranks(count: int) -> int:
    """Run this benchmark once for each rank. Returns the highest status."""
    with ExitStack() as held, tempfile.NamedTemporaryFile("w", suffix=".json") as hosts:
        listening = [
            held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        json.dump([[f"127.0.0.1:{each.getsockname()[1]}"] for each in listening], hosts)
        hosts.flush()
        held.close()
        environment = {**os.environ, "MLX_HOSTFILE": hosts.name}
        ranks = [
            subprocess.Popen([sys.executable, *sys.argv], env={**environment, "MLX_RANK": str(i)})
            for i in range(count)
        ]
        return max(rank.wait() for rank in ranks)


def main() -> int:
    parser = options_parser(__doc__ or "")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    if "MLX_RANK" not in os.environ:
        return start_ranks(args.ranks)
    ranks = Counted(mx.distributed.init(strict=True, backend="ring"), "tensor")
    # Both systems in one stream: collectives of two would come in another order on each rank.
    with mx.stream(generation_stream):
        for layers in QUICK_LAYERS if args.quick else LAYERS:
            bench(args, ranks, layers, 3 if args.quick else args.rounds)
        # One that ends while another computes would be lost for it.
        mx.synchronize(generation_stream)
        ranks.exchange(Head(Act.STOP))
    return 0


if __name__ == "__main__":
    sys.exit(main())
