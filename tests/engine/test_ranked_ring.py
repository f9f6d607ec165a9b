"""Random schedules on a ring of two processes, with a part of every layer or a stage each:
alike, and as the whole model.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine.engines import Told, assert_nothing_held, drive
from engine.forms import PERSON, STOP, form_of
from engine.ranked_engines import Plan, follow, rank_of
from kv.test_rings import small
from ranks.rings import on_ring

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.opening import open_caches
from mlx_blockpool.engine.request import Request
from mlx_blockpool.ranks.driver import GroupDriver
from mlx_blockpool.ranks.group import Ranks

pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("ranks")]

CONFIG = EngineConfig(prefill_tokens=64)
# Room for 7 blocks of each rank, and requests that need up to 2.
POOL_BYTES = {"llama": 7 * 256 * 32 * 4, "qwen2": 7 * 256 * 256 * 4}


class Crowd(Plan):
    """Eight requests, of which two keep a form, one's client hangs up, and one's sampler raises."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        system = [rng.randrange(1, 120) for _ in range(300)]
        self.prompts = [
            system[: rng.randrange(100, 300)] + [rng.randrange(1, 120) for _ in range(50)]
            for _ in range(8)
        ]
        self.due = sorted(rng.randrange(60) for _ in self.prompts)
        self.most = [rng.randrange(5, 60) for _ in self.prompts]
        self.hangs_up = rng.randrange(1, 30)
        self.uids: list[int] = []
        self.left: list[int] = []

    def request(self, number: int) -> Request:
        if number < 2:
            return Request(self.prompts[number], 100, form=form_of(PERSON), stop=STOP)
        return Request(self.prompts[number], self.most[number], breaking if number == 3 else None)

    def come(self, driver: GroupDriver, turn: int) -> bool:
        while len(self.uids) < len(self.due) and self.due[len(self.uids)] <= turn:
            self.uids.append(driver.insert(self.request(len(self.uids))))
        if len(self.uids) > 2 and turn == self.due[2] + self.hangs_up:
            driver.cancel(self.uids[2])
            self.left.append(self.uids[2])
        return len(self.uids) < len(self.due)

    def take(self, told: Told, events: list[Any]) -> None:
        told.take([event for event in events if event.uid not in self.left])


def breaking(_: Any) -> Any:
    raise KeyError("somebody else's code")


def test_parts_stay_alike_and_reply_as_the_whole_model() -> None:
    first, second = on_ring(parts)
    assert first == second
    assert first is not None
    assert all(len(set(trace)) > 50 for trace in first)


def test_stages_stay_alike_and_reply_as_the_whole_model() -> None:
    first, second = on_ring(stages, kind="pipeline")
    assert first == second
    assert first is not None
    assert all(len(set(trace)) > 50 for trace in first)


def parts(ranks: Ranks) -> list[list[str]]:
    model = small("llama")
    model.shard(ranks.group)
    return crowds("llama", model, ranks, range(2))


def stages(ranks: Ranks) -> list[list[str]]:
    model = small("qwen2")
    model.model.pipeline(ranks.group)
    return crowds("qwen2", model, ranks, range(2, 3))


def crowds(name: str, model: Any, ranks: Ranks, seeds: range) -> list[list[str]]:
    """What is alike after each step of a schedule for each seed."""
    found = []
    for seed in seeds:
        caches = open_caches(model, POOL_BYTES[name], ranks=ranks)
        assert isinstance(caches, PooledCaches)
        plan = Crowd(seed)
        rank = follow(rank_of(ranks, model, caches, CONFIG), plan)
        assert_nothing_held(rank.prefix)
        if ranks.rank == 0:
            check(name, plan, rank.told)
        assert rank.engine.counts["jumps"] > 0
        assert sum(counts.evicted for counts in rank.prefix.pool.counts()) > 0
        found.append(rank.trace)
    return found


def check(name: str, plan: Crowd, told: Told) -> None:
    whole = BlockPoolBatchEngine.open(small(name), 40_000_000, CONFIG)
    assert list(told.failed) == [plan.uids[3]]
    for number, uid in enumerate(plan.uids):
        if number != 3:
            alone = whole.insert(plan.request(number))
            expected = drive(whole).tokens[alone]
            count = len(told.tokens.get(uid, [])) if uid in plan.left else len(expected)
            assert told.tokens.get(uid, []) == expected[:count]
