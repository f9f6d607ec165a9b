"""In-flight sharing: what several requests begin with is computed once, also where they arrive
together.
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
    serve,
    words,
)
from thorough import only

from mlx_blockpool.engine import scheduler
from mlx_blockpool.engine.request import Request, Started

RAGGED = only(["llama", "gemma3_text", "gpt_oss", "llama K8V8", "gemma3_text K4V4"], "gemma3_text")
COMMON = words(1, 500)


def branch(seed: int, tokens: int, common: tuple[int, ...] = COMMON) -> tuple[int, ...]:
    return (*common, seed, *words(1000 + seed, tokens - 1))


def check(name: str, prompts: list[Any], uids: list[int], told: Told) -> None:
    assert told.failed == {}
    for uid, prompt in zip(uids, prompts, strict=True):
        assert told.reasons[uid] == "length"
        assert_stock(name, prompt, told.tokens[uid])


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", RAGGED)
def test_five_that_arrive_together_compute_their_common_beginning_once(
    name: str, rows: int
) -> None:
    engine, prefix = make_engine(name, prefill_rows=rows)
    prompts = [branch(i, 60 + i) for i in range(5)]
    uids, told = serve(engine, prompts)
    # The last token of a prompt is the first of its decode.
    assert engine.counts["prompt_tokens"] == 500 + sum(len(p) - 500 - 1 for p in prompts)
    assert [told.started[uid].cached for uid in uids] == [0, 500, 500, 500, 500]
    assert engine.counts["shared"] == 4
    check(name, prompts, uids, told)
    assert_nothing_held(prefix)


@pytest.mark.parametrize("name", RAGGED)
def test_branches_of_branches_are_computed_once_each(name: str) -> None:
    engine, prefix = make_engine(name)
    left, right = branch(1, 100), branch(2, 206)
    prompts = [
        branch(i, 70, common) for i, common in enumerate([left, right, left, right, left], 10)
    ]
    uids, told = serve(engine, prompts)
    assert engine.counts["prompt_tokens"] == 500 + 100 + 206 + 5 * 69
    assert [told.started[uid].cached for uid in uids] == [0, 500, 600, 706, 600]
    check(name, prompts, uids, told)
    assert_nothing_held(prefix)


@pytest.mark.parametrize("name", RAGGED)
def test_the_same_prompt_five_times_is_computed_once(name: str) -> None:
    engine, prefix = make_engine(name)
    prompts = [branch(1, 80)] * 5
    uids, told = serve(engine, prompts)
    assert engine.counts["prompt_tokens"] == 579
    check(name, prompts, uids, told)
    assert_nothing_held(prefix)


@pytest.mark.parametrize("name", RAGGED)
def test_who_arrives_during_the_prefill_of_its_beginning_waits_for_it(name: str) -> None:
    engine, _ = make_engine(name)
    first = engine.insert(Request(branch(1, 300), 4))
    told = drive(engine, after=lambda _: engine.counts["chunks"] == 2)
    second = engine.insert(Request(branch(2, 80), 4))
    drive(engine, told)
    assert told.started[second].cached == 500
    assert engine.counts["prompt_tokens"] == 799 + 79
    check(name, [branch(1, 300), branch(2, 80)], [first, second], told)


def test_fewer_shared_tokens_than_configured_are_not_waited_for() -> None:
    for shared, waits in ((63, 0), (64, 1)):
        engine, _ = make_engine("llama", shared_tokens=64)
        common = words(1, shared)
        serve(engine, [branch(1, 200, common), branch(2, 200, common)])
        assert engine.counts["shared"] == waits
        assert engine.counts["prompt_tokens"] == shared + 2 * 199 + (0 if waits else shared)


def test_what_is_known_already_is_not_waited_for() -> None:
    engine, _ = make_engine("llama")
    serve(engine, [branch(1, 60)])
    serve(engine, [branch(2, 300), branch(3, 60)])
    assert engine.counts["shared"] == 0


def test_others_pass_the_one_that_waits_for_a_prefix() -> None:
    engine, _ = make_engine("llama")
    for prompt in (branch(1, 200), branch(2, 60), words(7, 30)):
        engine.insert(Request(prompt, 2))
    told = Told()
    told.take(engine.next())
    assert sorted(told.started) == [1, 3]


# -- when the one that computes it does not get there ----------------------------------------------


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("chunks", [1, 2])
def test_who_waits_starts_by_itself_when_the_other_is_cancelled(name: str, chunks: int) -> None:
    engine, prefix = make_engine(name)
    first, second, third = (engine.insert(Request(branch(i, 60), 4)) for i in range(3))
    told = drive(engine, after=lambda _: engine.counts["chunks"] == chunks)
    assert len(engine.scheduler.waiting) == 2
    engine.cancel(first)
    drive(engine, told)
    kept = chunks * 128
    assert told.started[second].cached == kept
    assert engine.counts["prompt_tokens"] == 500 + 2 * 59
    check(name, [branch(1, 60), branch(2, 60)], [second, third], told)
    assert_nothing_held(prefix)


def test_who_waits_starts_by_itself_when_the_other_is_swapped_out() -> None:
    engine, prefix = make_engine("llama")
    first, second = (engine.insert(Request(branch(i, 60), 4)) for i in range(2))
    told = drive(engine, after=lambda _: engine.counts["chunks"] == 2)
    (live,) = engine.live
    engine.scheduler.preempt(live)
    prefix.trim_to(0)
    drive(engine, told)
    check("llama", [branch(0, 60), branch(1, 60)], [first, second], told)
    assert engine.counts["prompt_tokens"] == 256 + 500 + 2 * 59
    assert_nothing_held(prefix)


def test_who_waits_starts_by_itself_when_the_other_fails() -> None:
    engine, prefix = make_engine("llama")
    model, calls = engine.model, iter(range(100))

    def fails_once(*args: Any, **more: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("the third chunk")
        return model(*args, **more)

    engine.model = fails_once
    first, second, third = (engine.insert(Request(branch(i, 60), 4)) for i in range(3))
    told = Told()
    with pytest.raises(RuntimeError, match="the third chunk"):
        drive(engine, told)
    assert engine.reset() == [first]
    drive(engine, told)
    check("llama", [branch(1, 60), branch(2, 60)], [second, third], told)
    assert_nothing_held(prefix)


@pytest.mark.parametrize("salts", [(b"", bytes(32)), (bytes(32), b"\1" * 32)])
def test_nobody_waits_for_a_prefix_under_another_salt(salts: tuple[bytes, bytes]) -> None:
    engine, prefix = make_engine("llama")
    uids = [engine.insert(Request(branch(1, 80), 3, salt=salt)) for salt in (*salts, *salts)]
    told = drive(engine)
    assert [told.started[uid].cached for uid in uids] == [0, 0, 579, 579]
    assert engine.counts["shared"] == 2
    assert engine.counts["prompt_tokens"] == 2 * 579
    for uid in uids:
        assert_stock("llama", branch(1, 80), told.tokens[uid])
    assert_nothing_held(prefix)


@pytest.mark.parametrize(
    "name", only(["llama", "gemma3_text", "gpt_oss", "lfm2", "lfm2 K8V8"], "gemma3_text", "lfm2")
)
@pytest.mark.parametrize("length", [2, 257])
def test_choices_for_one_prompt_compute_it_once_however_short_it_is(name: str, length: int) -> None:
    engine, prefix = make_engine(name)
    prompt = words(length, length)
    uids, told = serve(engine, [prompt] * 3, group="one")
    assert engine.counts["prompt_tokens"] == length - 1
    assert [told.started[uid].cached for uid in uids] == [0, length - 1, length - 1]
    check(name, [prompt] * 3, uids, told)
    assert_nothing_held(prefix)


def test_choices_are_one_request_to_their_agent() -> None:
    engine, prefix = make_engine("llama")
    both = [
        Request(words(5, 40), 6, agent="ann", group=group) for group in ("one", "one", "two", "two")
    ]
    uids = engine.insert_all(both)
    told = drive(engine, after=lambda told: uids[0] in told.tokens)
    # The choices of one request run side by side, and the next request of the agent behind all of
    # them.
    assert {sequence.uid for sequence in engine.live} == set(uids[:2])
    drive(engine, told)
    started = [event.uid for event in told.order if isinstance(event, Started)]
    assert started == uids
    last_of_the_first = max(
        place for place, event in enumerate(told.order) if event.uid in uids[:2]
    )
    assert last_of_the_first < min(
        place for place, event in enumerate(told.order) if event.uid == uids[2]
    )
    assert_nothing_held(prefix)


def test_another_choice_computes_the_prompt_where_the_first_is_cancelled() -> None:
    engine, prefix = make_engine("llama")
    uids = [engine.insert(Request(branch(1, 80), 4, group="one")) for _ in range(3)]
    told = drive(engine, after=lambda _: engine.counts["chunks"] == 2)
    engine.cancel(uids[0])
    drive(engine, told)
    assert engine.counts["prompt_tokens"] == 579
    check("llama", [branch(1, 80)] * 2, uids[1:], told)
    assert_nothing_held(prefix)


def test_choices_fit_where_only_one_fits_at_a_time() -> None:
    prompt = words(9, 250)
    engine, prefix = make_engine("llama", bytes_of("llama", 250 + 60, 1))
    uids = [engine.insert(Request(prompt, 60, group="one")) for _ in range(3)]
    told = drive(engine)
    for uid in uids:
        assert told.reasons[uid] == "length"
        assert_stock("llama", prompt, told.tokens[uid])
    assert_nothing_held(prefix)


def test_choices_are_not_compared_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(scheduler, "common_prefix", lambda *prompts: compared.append(prompts) or 0)
    engine, _ = make_engine("llama")
    prompt = branch(1, 80)
    uids, told = serve(engine, [prompt] * 3, group="one")
    check("llama", [prompt] * 3, uids, told)
    assert engine.counts["prompt_tokens"] == len(prompt) - 1
    assert compared == []
