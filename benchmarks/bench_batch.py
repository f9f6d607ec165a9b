"""Decode of a batch with contexts of mixed length, and joining and leaving it, against mlx-lm's
padded batch, in one run.

Both run in mlx-lm's own BatchGenerator. The counter proves the path: every attend of every step was
the ragged one. On a CPU the attention of a batch is divided between cores, mlx-lm's is not; `one
stream` is ours without that.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import mlx.core as mx
from measure import interleave, llama, options, report
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from mlx_blockpool.kv.attach import bind
from mlx_blockpool.kv.batch_cache import PooledBatchCache
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.decode_policy import default_streams
from mlx_blockpool.kv.prompt_cache import batch_of, make_prompt_cache

MIXED = [500, 600, 1024, 1500, 2048, 300, 4000, 800]


def filled(caches: list[Any], context: int, heads: int, dim: int) -> list[Any]:
    for cache in caches:
        cache.update_and_fetch(*mx.random.normal((2, 1, heads, context, dim)))
    mx.eval([c.state for c in caches])
    return caches


class System:
    """One way of batching: its model, and how it makes caches."""

    def __init__(self, pooled: bool, contexts: list[int], size: tuple[int, int, int, int]) -> None:
        self.model = llama(*size)
        self.contexts = contexts
        self.layers = size[1]
        self.heads, self.dim = size[3], size[0] // size[2]
        pool_bytes = 3 * sum(contexts) * 2 * size[1] * size[3] * self.dim * 4
        self.pool = open_pool(self.model, pool_bytes, attach=False) if pooled else None
        if self.pool is not None:
            self.pool.capabilities = Capabilities(ragged=bool(bind(self.model)))

    def caches(self, context: int) -> list[Any]:
        made = (
            stock_prompt_cache(self.model)
            if self.pool is None
            else make_prompt_cache(self.model, self.pool)
        )
        return filled(made, context, self.heads, self.dim)

    def batch(self, contexts: list[int]) -> BatchGenerator:
        generator = BatchGenerator(
            self.model, max_tokens=10_000, prefill_batch_size=len(contexts) + 1
        )
        generator.insert(
            [[7]] * len(contexts), caches=[self.caches(context) for context in contexts]
        )
        for _ in range(3):
            generator.next_generated()
        return generator

    def step_seconds(self, steps: int, streams: int | None = None) -> float:
        """Seconds of one decode step of the whole batch; its path is checked."""
        if self.pool is not None:
            self.pool.decode.streams = streams or default_streams()
        generator = self.batch(self.contexts)
        found = isinstance(generator._generation_batch.prompt_cache[0], PooledBatchCache)
        assert found == (self.pool is not None), "the other path ran"
        if self.pool is not None:
            self.pool.decode.path_counts.clear()
        start = time.perf_counter()
        for _ in range(steps):
            generator.next_generated()
        taken = (time.perf_counter() - start) / steps
        if self.pool is not None:
            needed = {"ragged": steps * self.layers}
            assert self.pool.decode.path_counts == needed, (
                f"{self.pool.decode.path_counts} != {needed}: another path ran"
            )
        return taken

    def stall_seconds(self) -> float:
        """Seconds that one sequence's joining and leaving adds to a batch of the others, as each
        engine does it.
        """
        batch = self.batch(self.contexts)._generation_batch.prompt_cache
        late = self.caches(self.contexts[0])
        start = time.perf_counter()
        joins = [type(own).merge([own]) for own in late] if self.pool is None else batch_of([late])
        for cache, own in zip(batch, joins, strict=True):
            cache.extend(own)
            cache.filter(list(range(len(self.contexts))))
        mx.eval([c.state for c in batch])
        return time.perf_counter() - start


def bench(
    args: Any,
    case: str,
    contexts: list[int],
    size: tuple[int, int, int, int],
    steps: int,
    rounds: int,
) -> None:
    ours, stock = System(True, contexts, size), System(False, contexts, size)
    assert ours.pool is not None
    runs = {
        "ours": ours.step_seconds,
        "one": lambda steps: ours.step_seconds(steps, streams=1),
        "stock": stock.step_seconds,
    }
    step = interleave({name: functools.partial(run, steps) for name, run in runs.items()}, rounds)
    counts = dict(ours.pool.decode.path_counts)
    stall = interleave({"ours": ours.stall_seconds, "stock": stock.stall_seconds}, rounds)
    report(
        args,
        "batch",
        case,
        sequences=len(contexts),
        utilisation=round(sum(contexts) / len(contexts) / max(contexts), 2),
        ours_step_ms=round(step["ours"] * 1e3, 1),
        stock_step_ms=round(step["stock"] * 1e3, 1),
        ratio_step=round(step["stock"] / step["ours"], 2),
        ratio_one_stream=round(step["stock"] / step["one"], 2),
        streams=default_streams(),
        path_counts=counts,
        ours_stall_ms=round(stall["ours"] * 1e3, 2),
        stock_stall_ms=round(stall["stock"] * 1e3, 2),
        ratio_stall=round(stall["stock"] / stall["ours"], 1),
    )


if __name__ == "__main__":
    args = options(__doc__ or "")
    size, steps, rounds = ((128, 2, 8, 4), 5, 2) if args.quick else ((256, 6, 8, 4), 20, 7)
    scale = 8 if args.quick else 1
    bench(args, "mixed lengths", [c // scale for c in MIXED], size, steps, rounds)
    bench(args, "equal lengths", [2000 // scale] * 8, size, steps, rounds)
    bench(args, "a batch of one", [4000 // scale], size, steps, rounds)
