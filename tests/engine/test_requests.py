"""One request beside others: its order, its end, and its failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from engine.engines import (
    ROOMY,
    Told,
    assert_nothing_held,
    assert_stock,
    bytes_of,
    drive,
    make_engine,
    serve,
    stock_reply,
    words,
)
from mlx_lm.generate import StopSequences
from thorough import only

from mlx_blockpool.engine.request import Request, Started, Token
from mlx_blockpool.errors import PoolExhaustedError

RAGGED = only(["llama", "gemma3_text", "gpt_oss"], "gemma3_text")


# -- order -----------------------------------------------------------------------------------------


def test_requests_of_an_agent_run_one_after_the_other_and_others_pass() -> None:
    engine, _ = make_engine("llama")
    for i, agent in enumerate(["a", "a", "b", None, "a", "b"]):
        engine.insert(Request(words(i, 40), 5, agent=agent))
    told = drive(engine)
    place = {
        (type(e), e.uid): i
        for i, e in enumerate(told.order)
        if isinstance(e, Started) or (e.uid in told.reasons)
    }
    started = {uid: place[Started, uid] for uid in range(1, 7)}
    ended = {e.uid: i for i, e in enumerate(told.order) if isinstance(e, Token) and e.finish_reason}
    for first, second in ((1, 2), (2, 5), (3, 6)):
        assert ended[first] < started[second]
    assert max(started[1], started[3], started[4]) < min(ended.values())


def test_an_agent_goes_on_when_its_first_request_is_cancelled_or_fails() -> None:
    engine, _ = make_engine("llama")

    def fails(_: mx.array) -> mx.array:
        raise ValueError("no draw")

    uids = [
        engine.insert(Request(words(i, 40), 5, sampler, agent="a"))
        for i, sampler in enumerate([None, fails, None])
    ]
    drive(engine, after=lambda told: 1 in told.tokens)
    engine.cancel(uids[0])
    told = drive(engine)
    assert sorted(told.failed) == [uids[1]]
    assert told.reasons == {uids[2]: "length"}


@pytest.mark.parametrize(("tokens", "max_tokens"), [([], 5), ([1], 0), ([1], -1)])
def test_a_request_for_nothing_is_refused(tokens: list[int], max_tokens: int) -> None:
    engine, _ = make_engine("llama")
    with pytest.raises(ValueError, match="at least one of each"):
        engine.insert(Request(tokens, max_tokens))
    assert len(engine) == 0


@pytest.mark.parametrize("name", RAGGED)
def test_a_prompt_of_one_token_needs_no_prefill(name: str) -> None:
    engine, _ = make_engine(name)
    (uid,), told = serve(engine, [[5]], 5)
    assert (engine.counts["chunks"], told.progress) == (0, {})
    assert_stock(name, [5], told.tokens[uid])


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", only(["llama", "gemma3_text"], "gemma3_text"))
def test_cancel_at_every_step_keeps_what_was_computed(name: str) -> None:
    prompt, other = words(1, 400), words(2, 50)
    for step in range(14):
        engine, prefix = make_engine(name, decode_share=0.0)
        uid, beside = engine.insert(Request(prompt, 8)), engine.insert(Request(other, 8))
        told = Told()
        for _ in range(step):
            told.take(engine.next())
        live = [r for r in engine.live if r.uid == uid]
        computed = live[0].computed if live else 408 if uid in told.reasons else 0
        engine.cancel(uid)
        question = (*prompt, *stock_reply(name, prompt).tokens(8), 9)
        assert prefix.look(question).hit == computed
        drive(engine, told)
        assert_stock(name, other, told.tokens[beside])
        assert_stock(name, prompt, told.tokens.get(uid, []))
        assert told.reasons.keys() - {uid} == {beside}
        (again,), told = serve(engine, [question], 3)
        assert told.started[again].cached == computed
        assert_stock(name, question, told.tokens[again])
        assert_nothing_held(prefix)


@pytest.mark.parametrize(
    "name", only(["llama", "gemma3_text", "gpt_oss", "lfm2", "qwen3_5"], "lfm2")
)
@pytest.mark.parametrize("is_small", only([False, True], True))
def test_a_client_that_gives_up_after_a_quarter_of_the_prefill_is_through_after_four(
    name: str, is_small: bool
) -> None:
    """Also where the pool holds little more than the request."""
    prompt, quarter = words(1, 2049), 512
    engine, prefix = make_engine(name, bytes_of(name, 2049 + 8, 2) if is_small else ROOMY)
    for attempt in range(4):
        uid = engine.insert(Request(prompt, 8))
        told = drive(
            engine, after=lambda _, n=attempt: engine.counts["prompt_tokens"] > quarter * n
        )
        assert told.started[uid].cached == quarter * attempt
        drive(
            engine,
            told,
            after=lambda _, n=attempt: engine.counts["prompt_tokens"] >= quarter * (n + 1),
        )
        engine.cancel(uid)
        assert_nothing_held(prefix)
    (uid,), told = serve(engine, [prompt])
    assert told.started[uid].cached == engine.counts["prompt_tokens"] == 2048
    assert_stock(name, prompt, told.tokens[uid])
    assert_nothing_held(prefix)


def test_cancelling_what_is_not_there_changes_nothing() -> None:
    engine, _ = make_engine("llama")
    (uid,), _ = serve(engine, [words(1, 20)])
    engine.cancel(uid)
    engine.cancel(99)
    (uid,), told = serve(engine, [words(1, 20)])
    assert_stock("llama", words(1, 20), told.tokens[uid])


def test_a_stop_sequence_ends_with_its_last_token_and_says_stop() -> None:
    prompt = words(1, 60)
    reply = stock_reply("llama", prompt).tokens(12)
    stop = next(
        i
        for i in range(3, 12)
        if reply[i - 1 : i + 1] not in [reply[j - 1 : j + 1] for j in range(1, i)]
    )
    engine, _ = make_engine("llama")
    wanted = StopSequences([list(reply[stop - 1 : stop + 1]), [200, 201]])
    uids = [engine.insert(Request(prompt, 12, stop=wanted)), engine.insert(Request(prompt, 12))]
    told = drive(engine)
    assert told.tokens[uids[0]] == list(reply[: stop + 1])
    assert told.tokens[uids[1]] == list(reply)
    assert told.reasons == {uids[0]: "stop", uids[1]: "length"}


def test_two_requests_with_the_same_stop_sequences_match_each_their_own() -> None:
    stop = StopSequences([[7, 7]])
    engine, _ = make_engine("llama")
    draws = {1: iter([7, 1, 7, 1]), 2: iter([7, 7, 1, 1]), 3: iter([1, 7, 7, 1])}
    for draw in draws.values():
        engine.insert(
            Request(words(1, 10), 4, lambda _, draw=draw: mx.array([next(draw, 0)]), stop=stop)
        )
    told = drive(engine)
    assert told.tokens == {1: [7, 1, 7, 1], 2: [7, 7], 3: [1, 7, 7]}
    assert told.reasons == {1: "length", 2: "stop", 3: "stop"}


# -- failures --------------------------------------------------------------------------------------


def after(count: int, then: Callable[[], Any]) -> Callable[..., mx.array]:
    """A sampler or processor that works `count` times."""
    calls = iter(range(1000))

    def call(*args: mx.array) -> Any:
        if next(calls) >= count:
            then()
        return args[-1] if len(args) > 1 else mx.argmax(args[-1], axis=-1)

    return call


def no() -> None:
    raise KeyError("somebody else's code")


@pytest.mark.parametrize("who", ["sampler", "processor", "both"])
@pytest.mark.parametrize("count", [0, 3])
def test_a_sampler_or_processor_that_raises_fails_alone_and_once(who: str, count: int) -> None:
    engine, prefix = make_engine("llama")
    sampler = None if who == "processor" else after(count, no)
    processors = [] if who == "sampler" else [after(count, no)]
    prompts = [words(i, 30 + i) for i in range(3)]
    uids = [
        engine.insert(Request(prompts[0], 8)),
        engine.insert(Request(prompts[1], 8, sampler, processors)),
    ]
    uids.append(engine.insert(Request(prompts[2], 8)))
    told = drive(engine)
    assert list(told.failed) == [uids[1]]
    assert (type(told.failed[uids[1]]), told.failed[uids[1]].__traceback__) == (KeyError, None)
    assert len(told.tokens.get(uids[1], [])) == max(0, count - 1)
    for uid, prompt in ((uids[0], prompts[0]), (uids[2], prompts[2])):
        assert len(told.tokens[uid]) == 8
        assert_stock("llama", prompt, told.tokens[uid])
    assert_nothing_held(prefix)


def test_random_numbers_can_be_drawn_after_a_compiled_sampler_has_failed() -> None:
    engine, _ = make_engine("llama")

    @mx.compile
    def draw(logprobs: mx.array) -> mx.array:
        raise ValueError("while compiling")

    compiled = mx.compile(draw, inputs=mx.random.state, outputs=mx.random.state)
    _, told = serve(engine, [words(1, 20)], 4, sampler=compiled)
    assert isinstance(told.failed[1], ValueError)
    assert mx.random.uniform(0, 1).item() >= 0
    _, told = serve(
        engine, [words(1, 20)], 4, sampler=lambda logprobs: mx.random.categorical(logprobs)
    )
    assert list(told.reasons.values()) == ["length"]


class Breaks:
    """A model that raises in call `at`."""

    def __init__(self, model: Any, at: int) -> None:
        self.model = model
        self.left = at

    def __call__(self, *args: Any, **more: Any) -> Any:
        logits = self.model(*args, **more)
        self.left -= 1
        if self.left == -1:
            raise RuntimeError("in the middle")
        return logits


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("at", only(range(7), 0, 4))
def test_a_model_that_raises_takes_the_live_with_it_and_no_block(name: str, at: int) -> None:
    engine, prefix = make_engine(name, max_members=2, decode_share=0.0)
    engine.model = engine.scheduler.batch.model = Breaks(engine.model, at)
    prompts = [words(i, 200) for i in range(3)]
    for prompt in prompts:
        engine.insert(Request(prompt, 3))
    told = Told()
    with pytest.raises(RuntimeError, match="in the middle"):
        drive(engine, told)
    live = engine.live
    gone = engine.reset()
    # Their caches are still referred to, as by the frames of a traceback, and hold nothing.
    assert {r.uid for r in live} <= set(gone)
    assert not set(gone) & set(told.reasons)
    assert_nothing_held(prefix)
    drive(engine, told)
    assert {*gone, *told.reasons} == {1, 2, 3}
    for uid in told.reasons:
        assert_stock(name, prompts[uid - 1], told.tokens[uid])
    uids, told = serve(engine, prompts, 3)
    for uid, prompt in zip(uids, prompts, strict=True):
        assert_stock(name, prompt, told.tokens[uid])
    assert_nothing_held(prefix)


def test_reset_drops_those_that_wait_where_nobody_is_live() -> None:
    engine, _ = make_engine("llama")
    uids = [engine.insert(Request(words(i, 20), 3)) for i in range(2)]
    assert engine.reset() == uids
    assert len(engine) == 0
    assert engine.reset() == []


def test_reset_takes_back_what_was_not_told() -> None:
    engine, _ = make_engine("llama")
    errors = [PoolExhaustedError(1, 0, 0, "full"), RuntimeError("opening"), RuntimeError("opening")]

    def fail(*_: Any) -> Any:
        raise errors.pop(0)

    engine.caches.open = fail  # type: ignore[method-assign]
    first, second = (engine.insert(Request(words(i, 20), 3)) for i in range(2))
    with pytest.raises(RuntimeError, match="opening"):
        engine.next()
    assert engine.reset() == [first]
    with pytest.raises(RuntimeError, match="opening"):
        engine.next()
    assert engine.reset() == [second]
    assert engine.next() == []


def test_close_drops_everything_and_may_be_called_twice() -> None:
    engine, prefix = make_engine("llama", max_members=1)
    for i in range(3):
        engine.insert(Request(words(i, 200), 3))
    engine.next()
    engine.close()
    engine.close()
    assert (len(engine), engine.next()) == (0, [])
    assert_nothing_held(prefix)
