"""Drafts from the request's own text: a model that edits files by itself (editor.py), with drafts
and without, in one run.

Edits: tokens a forward, acceptance, the measured cost curve, the speed against no drafts, and the
bound: the speed that the curve allows where each forward takes the best number of those drafted
tokens that are accepted. Fresh text, of which the prompt has nothing: the speed against no drafts
there. Replies of both are compared with the text that the model has to write.

`hybrid` has a state in addition, so that its drafts are verified in a padded forward, and rolled
back. There the tokens a forward are also counted with drafts of a fixed length, which no cost
changes: of each reply alone, and of all together.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import editor
import mlx.core as mx
from edits import Work, edits, prose
from measure import options, report
from mlx_lm.generate import StopSequences

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.drafts.curve import CostCurve
from mlx_blockpool.drafts.drafter import Drafter
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request, Token
from mlx_blockpool.kv.attach import bind
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.measuring import measure_curve
from mlx_blockpool.tier.cache import TieredPrefixCache

MODES = ("off", "auto")
POOL_BYTES = 2 * 10**8
# Of replies that are written one at a time, in tokens.
LENGTHS = [200, 400, 600, 1000, 2000]
# Steps that are measured at a time where the text is fresh.
SLICE = 10


class System:
    """A new pool and engine over a model. Nothing that another one has computed is known here."""

    def __init__(self, model: Any, drafts: str | int, curve: CostCurve | None = None) -> None:
        bind(model)
        self.arena = open_pool(model, POOL_BYTES, attach=False)
        self.arena.capabilities = (
            Capabilities(ragged=True, verifies="padded", pads_states=True)
            if isinstance(model, editor.Hybrid)
            else Capabilities(ragged=True, verifies="rows")
        )
        caches = PooledCaches(TieredPrefixCache(self.arena))
        caches.curve = curve
        self.engine = BlockPoolBatchEngine(
            model, caches, EngineConfig(drafts=drafts, decode_share=0)
        )
        self.replies: dict[int, list[int]] = {}

    def start(self, works: list[Work]) -> None:
        """Compute the prompts, and the first token of each reply."""
        stop = StopSequences([(editor.END,)])
        requests = [Request(work.prompt, len(work.reply), stop=stop) for work in works]
        self.replies = {uid: [] for uid in self.engine.insert_all(requests)}
        while not all(self.replies.values()):
            self.step()

    def step(self) -> int:
        """Run one step. Returns the number of tokens that it emitted."""
        tokens = [event for event in self.engine.next() if isinstance(event, Token)]
        for event in tokens:
            self.replies[event.uid].append(event.token)
        return len(tokens)

    def check(self, works: list[Work]) -> None:
        for work, reply in zip(works, self.replies.values(), strict=True):
            assert reply == work.reply, f"{work.name}: the model has not written what it should"


def timed(run: Callable[[], int]) -> tuple[int, float, float]:
    """What `run` returns, and its seconds on the clock and of processors."""
    wall, busy = time.perf_counter(), time.process_time()
    return run(), time.perf_counter() - wall, time.process_time() - busy


def ratio(seconds: dict[str, list[float]]) -> float:
    """The median speed with drafts against that without, of measurements side by side."""
    return statistics.median(
        off / auto for off, auto in zip(seconds["off"], seconds["auto"], strict=True)
    )


# -- the bound -------------------------------------------------------------------------------------


def accepted_runs(work: Work, most: int) -> list[int]:
    """Behind each token of a reply, how many of the tokens that would be drafted there are the
    reply's next ones.
    """
    drafter = Drafter(work.prompt)
    drafter.catch_up(len(work.prompt))
    runs = []
    for number, token in enumerate(work.reply):
        draft = drafter.propose(token, most).tokens
        following = work.reply[number + 1 : number + 1 + len(draft)]
        runs.append(
            next(
                (i for i, (a, b) in enumerate(zip(draft, following, strict=False)) if a != b),
                len(following),
            )
        )
        drafter.observe((token,))
    return runs


def bound(runs: list[list[int]], curve: CostCurve) -> float:
    """The speed against no drafts of a batch that drafts, in each forward, the best number of
    tokens that will be accepted.

    Best is what is worth most less its seconds, where a token is worth some seconds: those that
    make the batch end first.
    """
    plain = sum(
        curve.plain_seconds(sum(len(run) > step for run in runs))
        for step in range(max(map(len, runs)))
    )
    worths = [curve.plain_seconds(len(runs)) * 0.9**i for i in range(40)]
    return plain / min(_seconds(runs, curve, worth) for worth in worths)


def behind(works: list[Work], curve: CostCurve) -> CostCurve:
    """The curve of a batch behind its contexts, half of each reply included."""
    contexts = [len(work.prompt) + len(work.reply) // 2 for work in works]
    return curve.at_context(sum(contexts) // len(contexts), len(works))


def _seconds(runs: list[list[int]], curve: CostCurve, worth: float) -> float:
    """Seconds of a batch of which each forward takes the drafted tokens that maximise their
    `worth` less its seconds.
    """
    at, taken = [0] * len(runs), 0.0
    while live := [i for i, run in enumerate(runs) if at[i] < len(run)]:
        # Those that have most to go draft first, so that all end together.
        order = sorted(live, key=lambda i: at[i] - len(runs[i]))
        most = sum(runs[i][at[i]] for i in live)
        costs = [
            curve.plain_seconds(len(live)),
            *(curve.seconds(len(live) + n) for n in range(1, most + 1)),
        ]
        left = max(range(most + 1), key=lambda n: n * worth - costs[n])
        taken += costs[left]
        for i in order:
            run = min(left, runs[i][at[i]])
            at[i], left = at[i] + 1 + run, left - run
    return taken


# -- cases -----------------------------------------------------------------------------------------


def bench_edits(
    args: Any, name: str, model: Any, batches: list[list[Work]], curve: CostCurve
) -> None:
    wall: dict[str, list[float]] = {mode: [] for mode in MODES}
    busy: dict[str, list[float]] = {mode: [] for mode in MODES}
    counts: Counter[str] = Counter()
    decoded = forwards = 0
    for turn, works in enumerate(batches):
        for mode in MODES if turn % 2 else MODES[::-1]:
            system = System(model, mode, curve)
            system.start(works)
            before = system.engine.counts.copy()

            def finish(system: System = system) -> int:
                while len(system.engine):
                    system.step()
                return 0

            _, seconds, processor = timed(finish)
            system.check(works)
            wall[mode].append(seconds)
            busy[mode].append(processor)
            if mode == "auto":
                decoded += system.engine.counts["tokens"] - before["tokens"]
                forwards += system.engine.counts["decode_steps"] - before["decode_steps"]
                counts.update(system.engine.counts)
    most = EngineConfig().most_drafted
    bounds = [
        bound([accepted_runs(work, most) for work in works], behind(works, curve))
        for works in batches
    ]
    shares = [
        off / auto / allowed for off, auto, allowed in zip(*wall.values(), bounds, strict=True)
    ]
    drafted, accepted = (
        sum(n for what, n in counts.items() if what.startswith(f"{verb} "))
        for verb in ("drafted", "accepted")
    )
    report(
        args,
        "drafts",
        f"edits, {name}",
        replies=sum(map(len, batches)),
        tokens=decoded,
        tokens_per_forward=round(decoded / forwards / len(batches[0]), 2),
        verifications=counts["verifications"],
        acceptance=round(accepted / max(1, drafted), 3),
        curve=in_plain_steps(curve),
        bound=round(statistics.median(bounds), 2),
        speed=round(ratio(wall), 2),
        speed_processor=round(ratio(busy), 2),
        reached=round(statistics.median(shares), 2),
    )


def bench_accepted(args: Any, name: str, model: Any, works: list[Work], most: int) -> None:
    """Tokens of a reply that one forward brings, with up to `most` drafted ones in each."""

    def tokens_per_forward(together: list[Work]) -> float:
        system = System(model, most)
        system.start(together)
        decoded = forwards = 0
        while len(system.engine):
            # Each reply that a forward is for counts.
            forwards += len(system.engine)
            decoded += system.step()
        system.check(together)
        return decoded / forwards

    alone = [tokens_per_forward([work]) for work in works]
    report(
        args,
        "drafts",
        f"edits, {name}, {most} drafted tokens",
        alone=round(statistics.mean(alone), 2),
        together=round(tokens_per_forward(works), 2),
    )


def slice_of(system: System) -> tuple[int, float, float]:
    """The tokens of the next steps, and their seconds."""
    return timed(lambda: sum(system.step() for _ in range(SLICE)))


def bench_fresh(args: Any, name: str, model: Any, works: list[Work], curve: CostCurve) -> None:
    systems = {mode: System(model, mode, curve) for mode in MODES}
    for system in systems.values():
        system.start(works)
    wall: dict[str, list[float]] = {mode: [] for mode in MODES}
    busy: dict[str, list[float]] = {mode: [] for mode in MODES}
    turn = 0
    while True:
        turn += 1
        found = {mode: slice_of(systems[mode]) for mode in (MODES if turn % 2 else MODES[::-1])}
        if not all(len(system.engine) == len(works) for system in systems.values()):
            break
        for mode, (tokens, seconds, processor) in found.items():
            wall[mode].append(seconds / tokens)
            busy[mode].append(processor / tokens)
    for system in systems.values():
        while len(system.engine):
            system.step()
        system.check(works)
    counts = systems["auto"].engine.counts
    report(
        args,
        "drafts",
        f"fresh text, {name}",
        tokens=sum(len(work.reply) for work in works),
        slices=len(wall["auto"]),
        verifications=counts["verifications"],
        drafted=counts["drafted context"],
        accepted=counts["accepted context"],
        ratio=round(ratio(wall), 3),
        ratio_processor=round(ratio(busy), 3),
    )


def in_plain_steps(curve: CostCurve) -> dict[str, float]:
    """What forwards with so many rows take, in plain steps of one sequence."""
    return {str(rows): round(seconds / curve.plain_seconds(1), 2) for rows, seconds in curve.rows}


if __name__ == "__main__":
    args = options(__doc__ or "")
    lengths, fours, fresh, seconds = (
        ([30], [30] * 4, 30, 1.0) if args.quick else (LENGTHS, [600] * 8, 400, 20.0)
    )
    works, manual = edits(lengths), prose(fresh, 4)
    short = edits(fours)
    batches = [short[start : start + 4] for start in range(0, len(short), 4)]
    cases = [
        ("bfloat16", mx.bfloat16, None),
        ("float32", mx.float32, None),
        ("4-bit weights", mx.bfloat16, 4),
    ]
    for name, dtype, bits in cases[:1] if args.quick else cases:
        model = editor.new_model(dtype, bits)
        curve = measure_curve(model, System(model, "off").arena, seconds)
        chosen = works if name == "bfloat16" else works[:3]
        bench_edits(args, f"{name}, one at a time", model, [[work] for work in chosen], curve)
        bench_fresh(args, f"{name}, one at a time", model, manual[:1], curve)
        if name == "bfloat16":
            bench_edits(args, f"{name}, batches of 4", model, batches, curve)
            bench_fresh(args, f"{name}, batches of 4", model, manual, curve)
    model = editor.Hybrid(mx.bfloat16)
    curve = measure_curve(model, System(model, "off").arena, seconds)
    # The same replies, one at a time and together.
    bench_edits(args, "hybrid, one at a time", model, [[work] for work in short[:4]], curve)
    bench_edits(args, "hybrid, batches of 4", model, batches[:1], curve)
    bench_fresh(args, "hybrid, batches of 4", model, manual, curve)
    for most in (4, 8):
        bench_accepted(args, "hybrid", model, short[:4], most)
