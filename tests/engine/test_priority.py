"""Priority: who starts first, whose prompt is computed first, who is preempted first, and that
nobody waits for ever.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine.engines import (
    Told,
    assert_nothing_held,
    assert_stock,
    bytes_of,
    drive,
    make_engine,
    words,
)

from mlx_blockpool.engine import caches as caches_module
from mlx_blockpool.engine.request import Request, Started
from mlx_blockpool.ranks.head import TurnClock


def started(told: Told) -> list[int]:
    return [event.uid for event in told.order if isinstance(event, Started)]


def insert(engine: Any, priorities: list[int], **more: Any) -> list[int]:
    """A request of each priority, in this order of arrival."""
    return [
        engine.insert(Request(words(i, 20), 3, priority=p, **more))
        for i, p in enumerate(priorities, 1)
    ]


def test_lower_values_start_first_and_equal_ones_in_their_order() -> None:
    engine, prefix = make_engine("llama", max_members=1)
    uids = insert(engine, [1, 0, 5, -1, 0])
    assert started(drive(engine)) == [uids[i] for i in (3, 1, 4, 0, 2)]
    assert_nothing_held(prefix)


def test_nobody_waits_for_ever() -> None:
    engine, _ = make_engine("llama", max_members=1)
    engine.clock = clock = TurnClock()
    low, *high = insert(engine, [1000, -1000])

    def crowd(_: Told) -> bool:
        # One of the highest priority is always there.
        clock.now += 1
        if not any(sequence.uid in high for sequence in engine.scheduler.waiting):
            high.extend(insert(engine, [-1000]))
        return low not in [sequence.uid for sequence in engine.scheduler.waiting]

    told = drive(engine, after=crowd)
    assert 10 < len(high) < 140
    assert started(told)[-1] == low


def test_the_requests_of_one_agent_keep_their_order() -> None:
    engine, _ = make_engine("llama")
    uids = insert(engine, [1, -1], agent="ann")
    told = drive(engine)
    assert started(told) == uids


def test_a_preempted_request_goes_before_the_next_one_of_its_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caches_module, "BLOCK_TOKENS", 1)
    engine, _ = make_engine("llama", bytes_of("llama", 256, 2), decode_share=0.0)
    engine.insert(Request(words(1, 250), 16))
    first = engine.insert(Request(words(2, 250), 16, priority=1, agent="ann"))
    told = drive(engine, after=lambda told: first in told.started)
    second = engine.insert(Request(words(3, 20), 3, priority=-1, agent="ann"))
    told = drive(engine, told)
    assert engine.counts["swapped_out"] > 0
    assert [uid for uid in told.reasons if uid in (first, second)] == [first, second]


def test_a_request_that_waits_for_its_agent_keeps_no_other_waiting() -> None:
    engine, _ = make_engine("llama", max_members=4)
    engine.clock = clock = TurnClock()
    engine.insert_all([Request(words(1, 20), 12, group="many") for _ in range(3)])
    engine.insert(Request(words(2, 20), 12, agent="ann"))
    told = drive(engine, after=lambda _: len(engine.live) == 4)
    engine.insert(Request(words(3, 20), 3, priority=1, agent="ann"))
    clock.now += 60
    newcomer = engine.insert(Request(words(4, 20), 3))
    told.take(engine.next())
    assert newcomer in told.started


def test_the_prompt_of_a_lower_value_is_computed_first() -> None:
    engine, _ = make_engine("llama", prefill_rows=1)
    first, second = (
        engine.insert(Request(words(i, 400), 1, priority=p)) for i, p in ((1, 1), (2, 0))
    )
    told = drive(engine)
    ends = {
        uid: told.order.index(
            next(e for e in told.order if e.uid == uid and getattr(e, "done", 0) == 400)
        )
        for uid in (first, second)
    }
    assert ends[second] < ends[first]


def test_the_highest_value_is_preempted_first_however_old_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caches_module, "BLOCK_TOKENS", 1)
    engine, prefix = make_engine("llama", bytes_of("llama", 256, 3), decode_share=0.0)
    prompts = [words(i, 250) for i in range(3)]
    uids = [
        engine.insert(Request(prompt, 16, priority=p))
        for prompt, p in zip(prompts, (1, 0, 0), strict=True)
    ]
    gone: list[int] = []

    def look(_: Told) -> None:
        gone.extend(
            sequence.uid
            for sequence in engine.scheduler.waiting
            if sequence.preemptions and sequence.uid not in gone
        )

    told = drive(engine, after=look)
    assert gone[0] == uids[0]
    for uid, prompt in zip(uids, prompts, strict=True):
        assert_stock("llama", prompt, told.tokens[uid])
    assert_nothing_held(prefix)
