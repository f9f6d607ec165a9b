"""Allocating and freeing blocks for all layer groups. There is no stock system to compare with:
mlx-lm has no pool.

The figure to hold is the seed's: the blocks of 8k tokens in under 1 ms.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from measure import options, report

from mlx_blockpool.kv.pool import BlockPool
from mlx_blockpool.plugins import spec_from_config
from mlx_blockpool.spec import ModelCacheSpec, blocks_for

GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 3840,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
}


def one_sequence(pool: BlockPool, tokens: int) -> tuple[float, float]:
    """Seconds to take the blocks of one sequence in every group, and to give them back."""
    start = time.perf_counter()
    tables = [pool.open_table(g) for g in range(len(pool.spec.groups))]
    for table in tables:
        wanted = blocks_for(tokens)
        pool.extend(table, wanted if table.max_blocks is None else min(wanted, table.max_blocks))
    taken = time.perf_counter()
    for table in tables:
        pool.release(table)
    return taken - start, time.perf_counter() - taken


def bench(args: Any, name: str, spec: ModelCacheSpec, rounds: int) -> None:
    pool = BlockPool(spec, 64 * 10**9)
    others = [pool.open_table(0) for _ in range(20)]
    for i, table in enumerate(others):
        pool.extend(table, min(5 + i, table.max_blocks or 100))
    readings = [one_sequence(pool, 8192) for _ in range(rounds)]
    allocate, release = (statistics.median(column) for column in zip(*readings, strict=True))
    blocks = sum(spec.blocks(8192, group.layer) for group in spec.groups)
    report(
        args,
        "pool",
        f"{name}: blocks of 8k tokens, all groups",
        allocate_us=round(allocate * 1e6, 1),
        free_us=round(release * 1e6, 1),
        blocks=blocks,
        ns_per_block=round((allocate + release) / blocks * 1e9),
        worst_allocate_us=round(max(a for a, _ in readings) * 1e6, 1),
    )
    pool.check()


if __name__ == "__main__":
    args = options(__doc__ or "")
    for name, config in (("llama 8B", LLAMA), ("gemma3 12B", GEMMA)):
        bench(args, name, spec_from_config(config, name), 200 if args.quick else 5000)
