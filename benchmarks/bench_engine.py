"""The engine against mlx-lm's BatchGenerator, in one run: steps, starting together, long prefills
next to replies, a small pool; and prompts of a hybrid model together against one after the other.

Counters prove what happened: chunks, prompt tokens computed, sequences swapped out and back.
Replies of both are compared.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
from measure import interleave, llama, options, report
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import lfm2

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request, Token
from mlx_blockpool.kv.attach import bind
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.spec import BLOCK_TOKENS
from mlx_blockpool.tier.cache import TieredPrefixCache

VOCAB = 2048
LENGTHS = [500, 600, 1024, 1500, 2048, 300, 4000, 800]


def hybrid(hidden: int) -> Any:
    """A small LFM2 with random weights: two convolutions with states for each full layer."""
    args = lfm2.ModelArgs(
        model_type="lfm2",
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        norm_eps=1e-5,
        conv_bias=False,
        conv_L_cache=3,
        block_dim=hidden,
        block_ff_dim=3 * hidden,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "conv", "full_attention"] * 2,
        rope_theta=10000.0,
    )
    mx.random.seed(0)
    model = lfm2.Model(args)
    mx.eval(model.parameters())
    return model.eval()


def prompt(length: int, seed: int, common: list[int] | None = None) -> list[int]:
    rng = random.Random(seed)
    return (common or []) + [rng.randrange(VOCAB) for _ in range(length - len(common or []))]


class Ours:
    """A new pool and engine over one model."""

    def __init__(self, model: Any, pool_bytes: int, config: EngineConfig | None = None) -> None:
        bind(model)
        self.arena = open_pool(model, pool_bytes, attach=False)
        self.arena.capabilities = RAGGED
        self.prefix = TieredPrefixCache(self.arena)
        self.engine = BlockPoolBatchEngine(model, PooledCaches(self.prefix), config)

    def insert(self, tokens: list[int], max_tokens: int) -> int:
        return self.engine.insert(Request(tokens, max_tokens))

    def next(self) -> list[tuple[int, int]]:
        """(uid, token) of each token that this step told."""
        return [
            (event.uid, event.token) for event in self.engine.next() if isinstance(event, Token)
        ]


class Stock:
    """mlx-lm's BatchGenerator in the same words."""

    def __init__(self, model: Any) -> None:
        self.generator = BatchGenerator(model)

    def insert(self, tokens: list[int], max_tokens: int) -> int:
        (uid,) = self.generator.insert([tokens], [max_tokens])
        return int(uid)

    def next(self) -> list[tuple[int, int]]:
        return [(r.uid, r.token) for r in self.generator.next()[1]]


def run(
    system: Any, prompts: list[list[int]], max_tokens: int
) -> tuple[list[list[int]], list[float], float]:
    """Replies, seconds to first token of each, and seconds in all."""
    start = time.perf_counter()
    uids = [system.insert(p, max_tokens) for p in prompts]
    replies: dict[int, list[int]] = {uid: [] for uid in uids}
    first: dict[int, float] = {}
    while any(len(reply) < max_tokens for reply in replies.values()):
        for uid, token in system.next():
            replies[uid].append(token)
            first.setdefault(uid, time.perf_counter() - start)
    return [replies[u] for u in uids], sorted(first.values()), time.perf_counter() - start


def filled(system: Any, lengths: list[int]) -> Callable[[int], float]:
    """Compute the prompts; then a function that gives the seconds of one decode step of all of
    them, over some steps.
    """
    uids = [system.insert(prompt(n, i), 10_000) for i, n in enumerate(lengths)]
    told: set[int] = set()
    while len(told) < len(uids):
        told |= {uid for uid, _ in system.next()}

    def seconds(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            assert len(system.next()) == len(uids)
        return (time.perf_counter() - start) / steps

    return seconds


def bench_steps(
    args: Any, model: Any, stock: Any, case: str, lengths: list[int], steps: int, rounds: int
) -> None:
    # Without a share for decode: nobody grows much while the last prompts are computed.
    ours = Ours(model, 10**9, EngineConfig(decode_share=0))
    runs = {
        name: functools.partial(filled(s, lengths), steps)
        for name, s in (("ours", ours), ("stock", Stock(stock)))
    }
    ours.arena.decode.path_counts.clear()
    found = interleave(runs, rounds)
    counted = sum(ours.arena.decode.path_counts.values())
    assert counted == steps * rounds * len(model.layers), (
        f"{counted} attends of a batch: another path ran"
    )
    figures = {f"{name}_ms": round(seconds * 1e3, 2) for name, seconds in found.items()}
    report(
        args,
        "engine",
        case,
        **figures,
        ratio=round(found["stock"] / found["ours"], 3),
        paths=dict(ours.arena.decode.path_counts),
    )


def python_calls(system: Any, members: int, steps: int) -> float:
    """Calls of Python and C functions in a decode step of this many sequences."""
    seconds = filled(system, [40 + 7 * i for i in range(members)])
    seconds(4)
    counts: Counter[str] = Counter()
    sys.setprofile(lambda _frame, event, _arg: counts.update((event,)))
    try:
        seconds(steps)
    finally:
        sys.setprofile(None)
    # Without those of filled() itself.
    return (counts["call"] + counts["c_call"]) / steps


def bench_calls(args: Any, model: Any, stock: Any, members: int) -> None:
    """What a step costs in Python, counted."""
    ours = python_calls(Ours(model, 10**9, EngineConfig(decode_share=0)), members, 20)
    theirs = python_calls(Stock(stock), members, 20)
    report(
        args,
        "engine",
        f"Python calls of a decode step of {members}, {len(model.layers)} layers",
        ours_calls=round(ours),
        stock_calls=round(theirs),
    )


def bench_together(
    args: Any, model: Any, stock: Any, agents: int, system: int, rounds: int
) -> None:
    """Agents that start at the same time on one system prompt."""
    common = prompt(system, 1)
    prompts = [prompt(system + 40 + 10 * i, 2 + i, common) for i in range(agents)]
    needed = system + sum(len(p) - system - 1 for p in prompts)
    ratios, walls = [], []
    for _ in range(rounds):
        ours = Ours(model, 10**9)
        replies, first, wall = run(ours, prompts, 16)
        expected, stock_first, stock_wall = run(Stock(stock), prompts, 16)
        assert replies == expected, "the replies differ"
        computed = ours.engine.counts["prompt_tokens"]
        assert computed == needed, (
            f"{computed} prompt tokens computed != {needed}: the common part once, each tail once"
        )
        ratios.append(first[-1] / stock_first[-1])
        walls.append(wall / stock_wall)
    report(
        args,
        "engine",
        f"{agents} agents start together on {system} tokens",
        prompt_tokens=needed,
        ttft_last_s=round(first[-1], 2),
        stock_ttft_last_s=round(stock_first[-1], 2),
        ttft_of_stock=round(statistics.median(ratios), 3),
        wall_of_stock=round(statistics.median(walls), 3),
    )


def bench_hybrid(args: Any, size: int, system: int, rounds: int) -> None:
    """Prompts of a hybrid model after one cached system prompt, together and one after the
    other.
    """
    model = hybrid(size)
    common = prompt(system, 1)
    prompts = [prompt(system + n, 2 + i, common) for i, n in enumerate((40, 60, 90, 120))]
    chunks: dict[int, int] = {}
    replies: dict[int, list[list[int]]] = {}

    def seconds(rows: int) -> float:
        """Until all prompts are computed."""
        ours = Ours(model, 10**9, EngineConfig(prefill_rows=rows))
        ours.arena.capabilities = replace(RAGGED, pads_states=True)
        ours.engine.insert(Request([*common, 1], 1, breakpoints=[(system, "system")]))
        while len(ours.engine):
            ours.engine.next()
        before, start = ours.engine.counts["chunks"], time.perf_counter()
        for each in prompts:
            ours.insert(each, 8)
        told: dict[int, list[int]] = {}
        taken = 0.0
        while len(ours.engine):
            for uid, token in ours.next():
                told.setdefault(uid, []).append(token)
            if not any(s.in_prefill for s in ours.engine.sequences):
                taken = taken or time.perf_counter() - start
        chunks[rows] = ours.engine.counts["chunks"] - before
        replies[rows] = [told[uid] for uid in sorted(told)]
        return taken

    found = interleave({"together": lambda: seconds(8), "alone": lambda: seconds(1)}, rounds)
    expected = [
        [token for token, _ in generate_step(mx.array(each), model, max_tokens=8)]
        for each in prompts
    ]
    assert replies[8] == replies[1] == expected, "the replies differ"
    report(
        args,
        "engine",
        f"4 prompts of a hybrid after {system} cached tokens",
        forwards=chunks[8],
        forwards_alone=chunks[1],
        ratio_of_forwards=round(chunks[8] / chunks[1], 2),
        ms=round(1e3 * found["together"], 1),
        ratio=round(found["together"] / found["alone"], 2),
    )


def bench_long_prefill(args: Any, model: Any, long: int, step: int) -> None:
    """A short request that arrives during a long prefill: chunks until its first token, and the
    speed of its decode since.
    """

    def run(with_long: bool, most: int) -> tuple[float, int, int]:
        """Tokens per second over four chunks of the long prompt, or over `most` tokens alone;
        chunks to the first one; tokens.
        """
        ours = Ours(model, 10**9, EngineConfig(prefill_tokens=step))
        counts = ours.engine.counts
        if with_long:
            ours.insert(prompt(long, 5), 1)
            ours.next()
        before = counts["chunks"]
        uid = ours.insert(prompt(200, 6), 5000)
        while not any(told == uid for told, _ in ours.next()):
            pass
        chunks, tokens = counts["chunks"] - before, 0
        while with_long and counts["chunks"] == before + chunks:
            ours.next()
        start, until = time.perf_counter(), counts["chunks"] + 4
        while counts["chunks"] < until if with_long else tokens < most:
            tokens += len(ours.next())
        return tokens / (time.perf_counter() - start), chunks, tokens

    _, chunks, tokens = run(True, 0)
    found = interleave(
        {"disturbed": lambda: run(True, 0)[0], "alone": lambda: run(False, tokens)[0]}, 3
    )
    assert chunks <= 3, f"first token after {chunks} chunks > 3"
    report(
        args,
        "engine",
        f"200 tokens during a prefill of {long}",
        chunks_to_first_token=chunks,
        chunk=step,
        tokens_per_s=round(found["disturbed"], 1),
        alone=round(found["alone"], 1),
        speed_kept=round(found["disturbed"] / found["alone"], 2),
    )


def bench_gaps(args: Any, model: Any, streams: int, prompts: list[int], step: int) -> None:
    """The longest time between two tokens of running replies while long prompts are computed: in
    the same forwards, and in turns.
    """
    found: dict[str, dict[str, float]] = {}

    def longest(mixes: bool) -> float:
        ours = Ours(model, 10**9, EngineConfig(prefill_tokens=step))
        ours.engine.caches.capabilities = replace(RAGGED, mixes=mixes)
        filled(ours, [40] * streams)(5)
        before, start = Counter(ours.engine.counts), time.perf_counter()
        left = {ours.insert(prompt(length, length), 1) for length in prompts}
        last = [start] * (streams + 1)
        gaps: list[float] = []
        while left:
            for uid, _ in ours.next():
                left.discard(uid)
                if uid <= streams:
                    now = time.perf_counter()
                    gaps.append(now - last[uid])
                    last[uid] = now
        counts = ours.engine.counts - before
        forwards = counts["chunks"] + counts["decode_steps"] - counts["mixed"]
        assert (counts["mixed"] > 0) == mixes, "another path ran"
        found["mixed" if mixes else "in_turns"] = {
            "seconds": round(time.perf_counter() - start, 2),
            "forwards": forwards,
            "tokens_per_forward": round(counts["decode_steps"] / forwards, 2),
        }
        return max(gaps)

    gaps = interleave({"mixed": lambda: longest(True), "in_turns": lambda: longest(False)}, 3)
    report(
        args,
        "engine",
        f"{streams} replies next to prompts of {' and '.join(map(str, prompts))}",
        longest_gap_ms={name: round(seconds * 1e3, 1) for name, seconds in gaps.items()},
        ratio=round(gaps["mixed"] / gaps["in_turns"], 2),
        **found,
    )


def bench_small_pool(args: Any, model: Any, stock: Any, length: int, tokens: int) -> None:
    """A pool for two of five sequences: all end, with the tokens that each gets alone in mlx-lm."""
    prompts = [prompt(length, 20 + i) for i in range(5)]
    probe = open_pool(model, 10**9, attach=False)
    size = sum(probe.spec.bytes_per_block(group) for group in probe.spec.groups)
    blocks = -(-(length + tokens) // 256)
    ours = Ours(model, size * (2 * blocks + 1))
    replies, _, wall = run(ours, prompts, tokens)
    expected = [run(Stock(stock), [p], tokens)[0][0] for p in prompts]
    assert replies == expected, "the replies differ"
    counts = ours.engine.counts
    assert counts["swapped_out"] == counts["swapped_in"] > 0, (
        f"nothing was swapped out: {dict(counts)}"
    )
    ours.prefix.check()
    report(
        args,
        "engine",
        "a pool for two of five",
        wall_s=round(wall, 2),
        equal_replies=True,
        **counts,
    )


def bench_waste(args: Any, model: Any, lengths: list[int]) -> None:
    """Allocated minus used tokens of sequences in decode, from the block tables themselves."""
    ours = Ours(model, 10**9, EngineConfig(decode_share=0))
    filled(ours, lengths)
    live = ours.engine.live
    tables = [(running.caches or [])[0].sequence.tables for running in live]
    tokens = [len(r.tokens) for r in live]
    allocated = BLOCK_TOKENS * len({block for (own,) in tables for block in own.ids})
    # BatchKVCache.merge() allocates the length of the longest sequence for each.
    padded = len(tokens) * max(tokens)
    report(
        args,
        "engine",
        f"{len(lengths)} agents of {lengths[0]} to {lengths[-1]} tokens",
        waste=round(1 - sum(tokens) / allocated, 4),
        padded_waste=round(1 - sum(tokens) / padded, 4),
        ratio=round(padded / allocated, 2),
    )


if __name__ == "__main__":
    args = options(__doc__ or "")
    quick = args.quick
    size = (128, 2, 4, 2) if quick else (256, 6, 4, 4)
    model, stock = llama(*size), llama(*size)
    small, small_stock = llama(128, 2, 4, 2), llama(128, 2, 4, 2)
    shrink, steps, rounds = (8, 10, 1) if quick else (1, 25, 5)
    bench_steps(
        args,
        model,
        stock,
        "decode step of 8, mixed lengths",
        [n // shrink for n in LENGTHS],
        steps,
        rounds,
    )
    bench_steps(
        args, model, stock, "decode step of 8, equal lengths", [1000 // shrink] * 8, steps, rounds
    )
    bench_steps(args, model, stock, "decode step of 1", [2000 // shrink], 4 * steps, rounds)
    for members in (8, 1):
        bench_calls(args, model, stock, members)
    bench_together(args, model, stock, *((3, 300, 1) if quick else (5, 1500, 2)))
    bench_hybrid(args, 128 if quick else 512, 256 if quick else 2048, 1 if quick else 5)
    bench_long_prefill(args, small, 2048 if quick else 8192, 256 if quick else 512)
    bench_gaps(args, small, 2 if quick else 8, [768] if quick else [2048, 7680], 512)
    bench_small_pool(args, small, small_stock, 100, 600)
    bench_waste(args, small, [300, 600, 900] if quick else [2000, 3500, 5000, 6500, 8000])
