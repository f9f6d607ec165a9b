"""Single-stream decode and prefill through pooled caches against mlx-lm's own, in one run.

Proves that no slab was copied: the address of a slab before and after, and the peak of memory over
the decode.
"""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import numpy as np
from measure import interleave, llama, options, report
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.attach import bind
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.kv.prompt_cache import make_prompt_cache


def filled(model: Any, caches: list[Any], context: int) -> list[Any]:
    """Caches that hold `context` random tokens, without the prefill."""
    for cache in caches:
        heads, dim = model.layers[0].self_attn.n_kv_heads, model.layers[0].self_attn.head_dim
        keys, values = mx.random.normal((2, 1, heads, context, dim)).astype(
            model.layers[0].self_attn.k_proj.weight.dtype
        )
        cache.update_and_fetch(keys, values)
    mx.eval([c.state for c in caches])
    return caches


def decode_seconds(model: Any, caches: list[Any], steps: int) -> float:
    """Seconds per token in mlx-lm's own pipelined loop."""
    tokens = generate_step(mx.array([7]), model, max_tokens=steps + 4, prompt_cache=caches)
    for _ in range(3):
        next(tokens)
    start = time.perf_counter()
    for _ in range(steps):
        next(tokens)
    return (time.perf_counter() - start) / steps


def prefill_seconds(model: Any, caches: list[Any], prompt: mx.array, step: int) -> float:
    start = time.perf_counter()
    for i in range(0, prompt.size, step):
        model(prompt[None, i : i + step], cache=caches)
        mx.eval([c.state for c in caches])
    return time.perf_counter() - start


def address(arena: KVArena) -> list[int]:
    """Addresses of all slab buffers."""
    return [np.asarray(memoryview(a.view(mx.uint8))).ctypes.data for a in arena.arrays()]


def bench_decode(args: Any, context: int, steps: int, rounds: int) -> None:
    ours, stock = llama(256, 4, 4, 2), llama(256, 4, 4, 2)
    arena = open_pool(ours, 2 * 4 * 2 * 64 * 4 * (context + 4096) * 2, attach=False)
    bind(ours)
    mine, theirs = (
        filled(ours, make_prompt_cache(ours, arena), context),
        filled(stock, stock_prompt_cache(stock), context),
    )
    decode_seconds(ours, mine, 4)
    before, base = address(arena), mx.get_active_memory()
    mx.reset_peak_memory()
    peaks: list[int] = []

    def run_ours() -> float:
        mx.reset_peak_memory()
        seconds = decode_seconds(ours, mine, steps)
        peaks.append(mx.get_peak_memory() - base)
        return seconds

    median = interleave(
        {"ours": run_ours, "stock": lambda: decode_seconds(stock, theirs, steps)}, rounds
    )
    moved = before != address(arena)
    assert not moved, "a slab was copied during decode"
    report(
        args, "cache", f"decode at {context}",
        ours_ms=round(median["ours"] * 1e3, 3), stock_ms=round(median["stock"] * 1e3, 3),
        ratio_tokens_per_second=round(median["stock"] / median["ours"], 3),
        slabs_moved=moved, num_runs=len(mine[0].sequence.tables[0].runs),
        extra_bytes_at_peak=max(peaks), slab_bytes=arena.arrays()[0].nbytes,
    )  # fmt: skip


def bench_prefill(args: Any, context: int, rounds: int) -> None:
    # On a CPU of some GFLOP/s a longer prompt takes a smaller model.
    size = (256, 4, 4, 2) if context <= 4096 else (64, 2, 2, 1)
    ours, stock = llama(*size), llama(*size)
    arena = open_pool(ours, 2 * 4 * 2 * 64 * 4 * (context + 4096) * 2, attach=False)
    bind(ours)
    prompt = mx.random.randint(0, 2000, (context,))
    mx.eval(prompt)
    step = min(2048, context)
    median = interleave(
        {
            "ours": lambda: prefill_seconds(ours, make_prompt_cache(ours, arena), prompt, step),
            "stock": lambda: prefill_seconds(stock, stock_prompt_cache(stock), prompt, step),
        },
        rounds,
    )
    report(
        args, "cache", f"prefill of {context}, hidden {size[0]}",
        ours_ms=round(median["ours"] * 1e3, 1), stock_ms=round(median["stock"] * 1e3, 1),
        ratio_tokens_per_second=round(median["stock"] / median["ours"], 3),
    )  # fmt: skip


if __name__ == "__main__":
    args = options(__doc__ or "")
    contexts = (256, 1024) if args.quick else (256, 1024, 4096, 16384)
    for context in contexts:
        bench_decode(args, context, steps=20 if args.quick else 60, rounds=3 if args.quick else 15)
    for context in contexts[:1] if args.quick else contexts:
        bench_prefill(args, context, rounds=5 if context < 4096 else 3)
