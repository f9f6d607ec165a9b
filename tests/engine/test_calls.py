"""What a decode step costs in Python, counted."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
from engine.engines import make_engine, words
from models import make_model

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.tier.cache import TieredPrefixCache

STEPS = 10


@pytest.mark.parametrize(("members", "most"), [(1, 450), (8, 900)])
def test_a_step_makes_few_calls(members: int, most: int) -> None:
    """Of Python and C functions, the model's own 262 among them; with Python 3.11, as later
    versions count no comprehensions.
    """
    model = make_model("llama", num_hidden_layers=6)
    engine = BlockPoolBatchEngine(
        model, PooledCaches(TieredPrefixCache(open_pool(model, 40_000_000))), EngineConfig()
    )
    engine.caches.prefix.arena.decode.streams = 1
    for seed in range(members):
        engine.insert(Request(words(seed, 40 + 7 * seed), 1000))
    while len(engine.scheduler.batch) < members:
        engine.next()
    for _ in range(3):
        engine.next()
    counts: Counter[Any] = Counter()

    def count(frame: Any, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            counts[frame.f_code.co_qualname if event == "call" else function] += 1

    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            engine.next()
    finally:
        sys.setprofile(None)
    assert 0 < counts.total() <= most * STEPS, counts.most_common(20)


def test_a_step_that_ends_a_block_is_worked_out_anew() -> None:
    """The steps of one sequence over two ends of blocks: each is another object."""
    engine, prefix = make_engine("llama")
    engine.insert(Request(words(1, 250), 300))
    found: list[Any] = []
    while len(engine):
        engine.next()
        if prefix.arena.steps[0] is not None and prefix.arena.steps[0] not in found:
            found.append(prefix.arena.steps[0])
    assert len(found) == 3
