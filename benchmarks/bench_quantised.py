"""Keys and values in 8 bits against mlx-lm's quantised caches and against the same pool
unquantised, in one run.

Decode of one sequence, steps of a batch of mixed lengths, and prefill with its peak of memory.
mlx-lm does not batch quantised
caches: its sequences run one after another. `_cpu` is processor time, to which a second core counts
and which other processes hardly change. The counter of paths proves what ran, and the addresses of
the slabs that none was copied.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from measure import llama, options, report
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache

from mlx_blockpool.config import KVBits, PoolConfig
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.attach import bind
from mlx_blockpool.kv.build import describe
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.prompt_cache import batch_of, make_prompt_cache
from mlx_blockpool.spec import blocks_for

KINDS = ("ours", "plain", "stock")
BITS, DIM, CHUNK = 8, 64, 512
MIXED = [500, 600, 1024, 1500, 2048, 300, 4000, 800]
# (hidden size, layers, heads, kv heads)
Size = tuple[int, int, int, int]


class System:
    """One model and its caches: `ours` in 8 bits, `plain` in a pool as the model computes them,
    `stock` in mlx-lm's 8 bits.

    `room`: tokens that are decoded or prefilled after the contexts.
    """

    def __init__(self, kind: str, dtype: str, size: Size, contexts: list[int], room: int) -> None:
        self.dtype, self.layers, self.kv_heads = getattr(mx, dtype), size[1], size[3]
        self.model = llama(*size, self.dtype, head_dim=DIM)
        self.arena = (
            None
            if kind == "stock"
            else self._pool(kind == "ours", [c + room for c in contexts or [0]])
        )
        self.sequences = [self.filled(context) for context in contexts]
        self.batch = batch_of(self.sequences) if self.arena and len(contexts) > 1 else []

    def _pool(self, quantised: bool, tokens: list[int]) -> KVArena:
        spec = describe(self.model).with_bits(KVBits(BITS, BITS, DIM) if quantised else None)
        pool_bytes = 2 * sum(map(blocks_for, tokens)) * spec.bytes_per_block(spec.groups[0])
        arena = KVArena(spec, pool_bytes, PoolConfig(preallocate=True))
        arena.capabilities = Capabilities(ragged=bool(bind(self.model)))
        return arena

    def caches(self) -> list[Any]:
        if self.arena is None:
            return [QuantizedKVCache(DIM, BITS) for _ in range(self.layers)]
        return make_prompt_cache(self.model, self.arena)

    def filled(self, context: int) -> list[Any]:
        """Caches that hold `context` random tokens, without the prefill."""
        caches = self.caches()
        for cache in caches:
            cache.update_and_fetch(
                *mx.random.normal((2, 1, self.kv_heads, context, DIM)).astype(self.dtype)
            )
        mx.eval([c.state for c in caches])
        return caches

    def decode(self, steps: int) -> None:
        """Tokens of the first sequence in mlx-lm's own loop."""
        for _ in generate_step(
            mx.array([7]), self.model, max_tokens=steps, prompt_cache=self.sequences[0]
        ):
            pass

    def step(self, steps: int) -> None:
        """Tokens of all sequences: in a batch, or one after another."""
        waiting = None
        for _ in range(steps):
            following = (
                [self.model(mx.array([[7]] * len(self.sequences)), cache=self.batch)]
                if self.batch
                else [self.model(mx.array([[7]]), cache=caches) for caches in self.sequences]
            )
            # As mlx-lm does: a step is encoded while the one before it runs.
            mx.async_eval(following)
            mx.eval(waiting)
            waiting = following
        mx.eval(waiting)

    def prefill(self, prompt: mx.array) -> None:
        caches = self.caches()
        for i in range(0, prompt.size, CHUNK):
            self.model(prompt[None, i : i + CHUNK], cache=caches)
            mx.eval([c.state for c in caches])


def addresses(arena: KVArena) -> list[int]:
    return [np.asarray(memoryview(a.view(mx.uint8))).ctypes.data for a in arena.arrays()]


def in_turns(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, dict[str, float]]:
    """For each of several runs, taken in turns: the median seconds of the processor and on the
    clock, and its peak in bytes.
    """
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            mx.clear_cache()
            mx.reset_peak_memory()
            before, wall, cpu = mx.get_active_memory(), time.perf_counter(), time.process_time()
            runs[name]()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            found[name].append((cpu, wall, mx.get_peak_memory() - before))
    medians = {
        name: map(statistics.median, zip(*readings, strict=True))
        for name, readings in found.items()
    }
    return {
        name: dict(zip(("cpu", "wall", "peak"), figures, strict=True))
        for name, figures in medians.items()
    }


def speeds(taken: dict[str, dict[str, float]], per: int = 1) -> dict[str, float]:
    """Milliseconds of each system, and how often as fast as each other one ours is: on the
    clock, and in processor time.
    """
    found: dict[str, float] = {}
    for clock, suffix in (("wall", ""), ("cpu", "_cpu")):
        found |= {f"{name}{suffix}_ms": round(t[clock] / per * 1e3, 2) for name, t in taken.items()}
        others = {
            name: t[clock] / taken["ours"][clock] for name, t in taken.items() if name != "ours"
        }
        found |= {f"ratio_{name}{suffix}": round(ratio, 3) for name, ratio in others.items()}
    return found


def bench_decode(args: Any, dtype: str, contexts: list[int], steps: int, rounds: int) -> None:
    systems = {
        kind: System(kind, dtype, (256, 4, 8, 4), contexts, (rounds + 1) * steps) for kind in KINDS
    }
    arena = systems["ours"].arena
    assert arena is not None
    before, alone = addresses(arena), len(contexts) == 1
    runs = {kind: partial(s.decode if alone else s.step, steps) for kind, s in systems.items()}
    in_turns(runs, 1)
    arena.decode.path_counts.clear()
    taken = in_turns(runs, rounds)
    assert addresses(arena) == before, "a slab was copied during decode"
    needed = {} if alone else {"ragged": rounds * steps * systems["ours"].layers}
    assert arena.decode.path_counts == needed, (
        f"{arena.decode.path_counts} != {needed}: another path ran"
    )
    case = f"decode at {contexts[0]}" if alone else f"a batch of {len(contexts)} of mixed lengths"
    report(
        args,
        "quantised",
        f"{case}, {dtype}",
        bits=BITS,
        **speeds(taken, steps),
        counts=needed,
        **{
            f"{kind}_held_mb": round(sum(c.nbytes for own in s.sequences for c in own) / 1e6, 2)
            for kind, s in systems.items()
        },
    )


def bench_prefill(args: Any, dtype: str, context: int, rounds: int) -> None:
    # A chunk evaluates the caches, and with them the attention of every layer but the last.
    systems = {kind: System(kind, dtype, (128, 2, 2, 2), [], context) for kind in KINDS}
    prompt = mx.random.randint(0, 2000, (context,))
    mx.eval(prompt)
    taken = in_turns({kind: partial(s.prefill, prompt) for kind, s in systems.items()}, rounds)
    peaks = {f"{kind}_peak_mb": round(t["peak"] / 1e6, 1) for kind, t in taken.items()}
    report(
        args,
        "quantised",
        f"prefill of {context}, {dtype}",
        bits=BITS,
        chunk=CHUNK,
        **speeds(taken),
        **peaks,
    )


if __name__ == "__main__":
    args = options(__doc__ or "")
    scale, rounds, steps = (16, 1, (5, 2)) if args.quick else (1, 7, (20, 4))
    for dtype, count in zip(("float32", "bfloat16"), steps, strict=True):
        bench_decode(args, dtype, [4096 // scale], count, rounds)
        bench_decode(args, dtype, [context // scale for context in MIXED], count, rounds)
    for dtype, context in (("float32", 8192), ("float32", 16384), ("bfloat16", 8192)):
        bench_prefill(args, dtype, context // scale, 1)
