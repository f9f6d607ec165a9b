"""What decode steps allocate, beside mlx-lm's padded batch: how far memory rises in a step, and
what is taken from the system.

mlx counts bytes, not buffers. What no buffer of an earlier step served is taken from the system:
`new_buffers` counts the steps that took any, by bytes rounded up to a power of two. The first step
finds no buffers, the others those of the steps before.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

import mlx.core as mx
from bench_batch import MIXED, System
from measure import options, report


def churn(system: System, steps: int) -> dict[str, Any]:
    """Figures of `steps` decode steps of a batch; sizes in bytes."""
    generator = system.batch(system.contexts)
    mx.clear_cache()
    rises: list[int] = []
    grown: Counter[int] = Counter()
    for _ in range(steps):
        mx.reset_peak_memory()
        before, held = mx.get_active_memory(), mx.get_active_memory() + mx.get_cache_memory()
        generator.next_generated()
        rises.append(mx.get_peak_memory() - before)
        taken = mx.get_active_memory() + mx.get_cache_memory() - held
        if taken > 0:
            grown[1 << (taken - 1).bit_length()] += 1
    cached = mx.get_cache_memory()
    return {
        "step_bytes": int(statistics.median(rises)),
        "step_bytes_most": max(rises),
        "new_buffers": {str(size): count for size, count in sorted(grown.items())},
        "cache_bytes_after": cached,
    }


def main() -> None:
    args = options(__doc__ or "")
    size, steps = ((128, 2, 8, 4), 40) if args.quick else ((256, 2, 8, 4), 60)
    contexts = [context // (8 if args.quick else 4) for context in MIXED]
    for name, pooled in (("stock", False), ("blockpool", True)):
        report(
            args,
            "churn",
            name,
            steps=steps,
            contexts=contexts,
            **churn(System(pooled, contexts, size), steps),
        )


if __name__ == "__main__":
    main()
