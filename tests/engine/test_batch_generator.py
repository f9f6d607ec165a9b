"""The engine in place of mlx-lm's BatchGenerator: lists of requests, given caches, removal,
extracts and figures.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from engine.engines import attached, open_prefix, stock_model
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from thorough import only

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request, Started, Token
from mlx_blockpool.errors import RequestTooLargeError

NAMES = ["llama", "gemma3_text", "lfm2"]


def open_engine(name: str) -> BlockPoolBatchEngine:
    # Prompts first, however fast the machine is.
    config = EngineConfig(prefill_tokens=64, decode_share=0)
    return BlockPoolBatchEngine(attached(name)[0], PooledCaches(open_prefix(name)), config)


def prompt(seed: int, count: int) -> list[int]:
    return [(seed * 31 + i * 7 + i * i) % 120 for i in range(count)]


def reply(name: str, tokens: list[int], count: int, caches: list[Any] | None = None) -> list[int]:
    """What mlx-lm answers, on its own caches or on those given."""
    model = stock_model(name) if caches is None else attached(name)[0]
    return [
        token
        for token, _ in generate_step(
            mx.array(tokens), model, max_tokens=count, prompt_cache=caches
        )
    ]


def drive(
    engine: BlockPoolBatchEngine, steps: int | None = None
) -> tuple[dict[int, list[int]], dict[int, int]]:
    """The tokens of each request, and how many of each prompt were known."""
    told: dict[int, list[int]] = {}
    cached: dict[int, int] = {}
    while len(engine) and steps != 0:
        steps = None if steps is None else steps - 1
        for event in engine.next():
            if isinstance(event, Token):
                told.setdefault(event.uid, []).append(event.token)
            elif isinstance(event, Started):
                cached[event.uid] = event.cached
    return told, cached


def assert_nothing_held(engine: BlockPoolBatchEngine) -> None:
    prefix = engine.caches.prefix  # type: ignore[union-attr]
    prefix.check()
    assert [(c.held, c.reserved) for c in prefix.pool.settle()] == [(0, 0)] * len(
        prefix.arena.spec.groups
    )


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (Request([]), ValueError),
        (Request([1], max_tokens=0), ValueError),
        (Request([1] * 100, max_tokens=10**9), RequestTooLargeError),
    ],
)
def test_a_list_is_taken_whole_or_not_at_all(wrong: Request, error: type[Exception]) -> None:
    engine = open_engine("llama")
    with pytest.raises(error):
        engine.insert_all([Request([1, 2]), Request([3, 4]), wrong])
    with pytest.raises(ValueError, match="caches for 1 requests"):
        engine.insert_all([Request([1, 2]), Request([3, 4])], [None])
    assert len(engine) == 0
    assert engine.insert_all([Request([1, 2]), Request([3, 4])]) == [1, 2]
    assert engine.insert(Request([5])) == 3


@pytest.mark.sampled
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_given_caches_are_gone_on_from_and_stay_as_they_are(name: str, pooled: bool) -> None:
    engine = open_engine(name)
    known, rest = prompt(1, 330), prompt(2, 30)
    model = attached(name)[0]
    prefix = engine.caches.prefix  # type: ignore[union-attr]
    caches = prefix.acquire(known, 40).caches if pooled else stock_prompt_cache(model)
    model(mx.array([known]), cache=caches)
    uids = engine.insert_all(
        [Request([*known, *rest], 6), Request([*known, 7], 6)], [caches, caches]
    )
    told, cached = drive(engine)
    assert [told[uid] for uid in uids] == [
        reply(name, [*known, *rest], 6),
        reply(name, [*known, 7], 6),
    ]
    assert [cached[uid] for uid in uids] == [330, 330]
    assert reply(name, [9], 6, caches) == reply(name, [*known, 9], 6), (
        "the caller's caches are as they were"
    )
    del caches
    assert_nothing_held(engine)


def test_given_caches_that_hold_none_or_all_of_a_prompt_are_refused() -> None:
    engine = open_engine("llama")
    caches = stock_prompt_cache(attached("llama")[0])
    with pytest.raises(ValueError, match="hold 0 of 3 prompt tokens"):
        engine.insert(Request([1, 2, 3]), caches)
    attached("llama")[0](mx.array([[1, 2, 3]]), cache=caches)
    with pytest.raises(ValueError, match="hold 3 of 3 prompt tokens"):
        engine.insert(Request([1, 2, 3]), caches)
    assert len(engine) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_request_is_removed_in_the_middle_of_its_prompt(name: str) -> None:
    engine = open_engine(name)
    long, other = prompt(1, 400), prompt(2, 20)
    removed, stays = engine.insert(Request(long, 6)), engine.insert(Request(other, 6))
    waits = engine.insert(Request(prompt(3, 10), 6))
    while not any(r.uid == removed and 0 < r.computed < 399 for r in engine.live):
        drive(engine, 1)
    extracted = engine.remove([removed, 99], return_prompt_caches=True)
    assert list(extracted) == [removed]
    caches, held = extracted.pop(removed)
    assert 0 < len(held) < 399
    assert held == long[: len(held)]
    told, _ = drive(engine)
    assert removed not in told
    assert told.keys() >= {waits}
    assert len(engine) == 0
    assert stays != removed
    assert reply(name, long[len(held) :], 6, caches) == reply(name, long, 6)
    del caches, extracted
    assert_nothing_held(engine)


@pytest.mark.parametrize("name", only(NAMES, "lfm2"))
def test_an_extract_in_mid_reply_goes_on_by_itself(name: str) -> None:
    engine = open_engine(name)
    prompts = [prompt(1, 300), prompt(2, 280)]
    uids = engine.insert_all([Request(tokens, 30) for tokens in prompts])
    told: dict[int, list[int]] = {}
    while min(len(told.get(uid, [])) for uid in uids) < 4:
        for uid, tokens in drive(engine, 1)[0].items():
            told.setdefault(uid, []).extend(tokens)
    extracted = engine.extract_cache(uids)
    for uid, tokens in drive(engine)[0].items():
        told.setdefault(uid, []).extend(tokens)
    for uid, tokens in zip(uids, prompts, strict=True):
        assert told[uid] == reply(name, tokens, 30), "the batch did not notice"
        caches, held = extracted[uid]
        assert held == [*tokens, *told[uid]][: len(held)]
        assert len(held) > len(tokens)
        assert reply(name, [9], 5, caches) == reply(name, [*held, 9], 5)
    del caches
    extracted.clear()
    assert_nothing_held(engine)


def test_figures_are_those_of_the_block() -> None:
    engine = open_engine("llama")
    engine.insert(Request(prompt(1, 100), 5))
    with engine.stats() as whole:
        with engine.stats() as first:
            drive(engine)
        engine.insert(Request(prompt(2, 51), 3))
        drive(engine)
    assert (first.prompt_tokens, first.generation_tokens) == (99, 5)
    assert (whole.prompt_tokens, whole.generation_tokens) == (149, 8)
    assert whole.generation_steps >= first.generation_steps >= 5
    assert 0 < whole.prompt_time + whole.decode_time <= whole.wall_time
