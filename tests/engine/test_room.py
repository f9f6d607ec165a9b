"""Room: who has to go when blocks are short, how it comes back, and what is refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from engine.engines import (
    Told,
    assert_nothing_held,
    assert_stock,
    bytes_of,
    drive,
    make_engine,
    serve,
    stock_model,
    words,
)
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from thorough import only, tried

from mlx_blockpool.engine import caches as caches_module
from mlx_blockpool.engine.request import Request, Started
from mlx_blockpool.errors import PoolExhaustedError, RequestTooLargeError
from mlx_blockpool.server.sampling import OwnRandomness

RAGGED = only(["llama", "gemma3_text", "gpt_oss"], "gemma3_text")


@pytest.fixture
def little_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request starts with room for one token, so that short replies run out of it."""
    monkeypatch.setattr(caches_module, "BLOCK_TOKENS", 1)


def near_the_end_of_a_block(seed: int, before: int = 2) -> tuple[int, ...]:
    return words(seed, 256 - before)


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.usefixtures("little_promised")
def test_five_sequences_in_room_for_two_all_say_what_stock_says(name: str) -> None:
    engine, prefix = make_engine(name, bytes_of(name, 300) * 2)
    prompts = [near_the_end_of_a_block(i, before=i + 2) for i in range(5)]
    uids, told = serve(engine, prompts, 20)
    for uid, prompt in zip(uids, prompts, strict=True):
        assert told.reasons[uid] == "length"
        assert_stock(name, prompt, told.tokens[uid])
    assert engine.counts["swapped_out"] == engine.counts["swapped_in"] > 0
    assert engine.counts["tokens"] == 100, "no token is told twice"
    assert_nothing_held(prefix)


@pytest.mark.usefixtures("little_promised")
def test_the_youngest_goes_first_and_the_others_lose_nothing() -> None:
    engine, prefix = make_engine("llama", bytes_of("llama", 256, 3), decode_share=0.0)
    uids = [engine.insert(Request(near_the_end_of_a_block(i, before=6), 16)) for i in range(3)]
    seen: list[list[int]] = []

    def look(_: Any) -> None:
        live = sorted(r.uid for r in engine.live)
        if not seen or seen[-1] != live:
            seen.append(live)

    told = drive(engine, after=look)
    assert [uid for uid in told.tokens if told.reasons[uid] == "length"] == uids
    # 4 blocks; at the boundary each of three needs a second one.
    assert seen[:2] == [uids, uids[:2]]
    ends = [e.uid for e in told.order if getattr(e, "finish_reason", None)]
    assert ends == uids
    assert_nothing_held(prefix)


@pytest.mark.usefixtures("little_promised")
def test_a_swapped_out_request_starts_before_those_that_came_after_it() -> None:
    engine, _ = make_engine("llama", bytes_of("llama", 256, 2), decode_share=0.0)
    first, second = (
        engine.insert(Request(near_the_end_of_a_block(i, before=8), 30)) for i in range(2)
    )
    late: list[int] = []

    def come(_: Any) -> None:
        if engine.counts["swapped_out"] and not late:
            assert [r.uid for r in engine.live] == [first]
            late.append(engine.insert(Request(words(9, 300), 3)))

    told = drive(engine, after=come)
    ends = [e.uid for e in told.order if getattr(e, "finish_reason", None)]
    assert ends == [first, second, *late], "the late one is short and would have ended first"
    assert [e.uid for e in told.order if isinstance(e, Started)] == [first, second, *late], (
        "started is told once"
    )


@pytest.mark.usefixtures("little_promised")
def test_waiting_requests_stay_in_the_order_of_their_arrival() -> None:
    engine, _ = make_engine("llama", bytes_of("llama", 256, 1))
    uids = [engine.insert(Request(near_the_end_of_a_block(i), 12)) for i in range(4)]
    for _ in range(200):
        engine.next()
        waiting = [r.uid for r in engine.scheduler.waiting]
        assert waiting == sorted(waiting)
        if engine.counts["swapped_out"]:
            break
    assert [r.uid for r in engine.scheduler.waiting] == uids[1:]
    told = drive(engine)
    assert [e.uid for e in told.order if getattr(e, "finish_reason", None)] == uids


def test_what_never_fits_is_refused_with_both_figures() -> None:
    engine, prefix = make_engine("llama", bytes_of("llama", 512))
    with pytest.raises(RequestTooLargeError) as caught:
        engine.insert(Request(words(1, 500), 13))
    assert (caught.value.needed, caught.value.capacity) == (513, 512)
    assert len(engine) == 0
    (uid,), told = serve(engine, [words(1, 500)], 12)
    assert_stock("llama", words(1, 500), told.tokens[uid])
    assert len(told.tokens[uid]) == 12
    assert_nothing_held(prefix)


def test_who_was_swapped_out_waits_until_the_others_have_a_block_to_spare() -> None:
    """Or it would come back into the block that the first needs soon, and go again."""
    engine, _ = make_engine("llama", bytes_of("llama", 256, 2))
    for tokens, max_tokens in ((250, 300), (20, 100), (20, 200)):
        engine.insert(Request(words(tokens + max_tokens, tokens), max_tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches_module, "BLOCK_TOKENS", 1)
        told = drive(engine)
    assert told.failed == {}
    assert (engine.counts["swapped_out"], engine.counts["swapped_in"]) == (1, 1)


def test_a_request_as_large_as_the_pool_can_be_swapped_out_and_ends() -> None:
    """What was drawn and not told when it went is not counted twice when it comes back."""
    engine, prefix = make_engine("llama", bytes_of("llama", 768))
    # The second is older and comes late, so that the third has to go when it needs its last block.
    requests = [
        Request(words(1, 10), 150, agent="a"),
        Request(words(2, 5), 240, agent="a"),
        Request(words(3, 200), 568),
    ]
    uids = [engine.insert(request) for request in requests]
    produced: list[int] = []

    def note(told: Told) -> None:
        if engine.counts["swapped_out"] and not produced:
            produced.append(len(told.tokens[uids[2]]))

    told = drive(engine, after=note)
    assert produced == [512 - 200]
    assert engine.counts["swapped_out"] == engine.counts["swapped_in"] == 1
    assert (told.failed, len(told.tokens[uids[2]])) == ({}, 568)
    assert_stock("llama", requests[2].tokens, told.tokens[uids[2]])
    assert_nothing_held(prefix)


@pytest.mark.usefixtures("little_promised")
def test_a_request_alone_takes_back_what_its_own_checkpoints_took() -> None:
    name = "gemma3_text"
    engine, prefix = make_engine(name, bytes_of(name, 768))
    prompt = words(3, 500)
    (uid,), told = serve(engine, [prompt], 40, breakpoints=[(256, "system"), (400, "user")])
    assert told.failed == {}
    assert_stock(name, prompt, told.tokens[uid])
    assert len(told.tokens[uid]) == 40
    assert_nothing_held(prefix)


def pin_a_prompt(engine: Any, prefix: Any, tokens: int) -> tuple[int, ...]:
    prompt = words(50, tokens)
    serve(engine, [prompt], 1)
    prefix.pin(prompt)
    return prompt


def test_three_agents_resume_before_what_they_replace_in_memory_for_a_dozen_states() -> None:
    """The checkpoint after what is replaced gives way first, although it is the later one."""
    engine, prefix = make_engine("lfm2")
    prefix.arena.state_bytes = 12 * prefix.arena.spec.fixed_bytes_per_agent()
    chats, ends = {agent: list(words(9, 100)) for agent in range(3)}, dict.fromkeys(range(3), 0)
    for turn in range(5):
        for agent, chat in chats.items():
            chat += words(10 * agent + turn, 60)
            replaced = words(100 + 10 * agent + turn, 20)
            end, whole = len(chat), len(chat) + len(replaced)
            marks = [(100, "system"), (end, "user"), (whole, "assistant")]
            (uid,), told = serve(engine, [[*chat, *replaced, 1, 2]], breakpoints=marks)
            if turn:
                assert told.started[uid].cached == ends[agent]
            ends[agent] = end
            chat += told.tokens[uid]
    prefix.check()


def test_a_request_that_finds_all_blocks_pinned_fails_alone_and_the_next_one_is_served() -> None:
    engine, prefix = make_engine("llama", bytes_of("llama", 512))
    pinned = pin_a_prompt(engine, prefix, 300)
    small = words(7, 8)
    agents = [
        engine.insert(Request(words(6, 300), 5, agent="a")),
        engine.insert(Request(words(8, 300), 5, agent="a")),
    ]
    told = drive(engine)
    assert sorted(told.failed) == agents, (
        "the second request of an agent is not forgotten when the first one fails"
    )
    assert all(
        isinstance(e, PoolExhaustedError) and e.__traceback__ is None for e in told.failed.values()
    )
    prefix.unpin(pinned)
    (uid,), told = serve(engine, [small], 5)
    assert_stock("llama", small, told.tokens[uid])
    assert_nothing_held(prefix)


@pytest.mark.usefixtures("little_promised")
def test_a_request_whose_next_block_is_pinned_away_fails_alone() -> None:
    engine, prefix = make_engine("llama", bytes_of("llama", 512))
    pinned = pin_a_prompt(engine, prefix, 100)
    prompt = near_the_end_of_a_block(1)
    (uid,), told = serve(engine, [prompt], 20)
    assert isinstance(told.failed[uid], PoolExhaustedError)
    assert_stock("llama", prompt, told.tokens[uid])
    assert 0 < len(told.tokens[uid]) < 20
    prefix.unpin(pinned)
    (uid,), told = serve(engine, [prompt], 20)
    assert len(told.tokens[uid]) == 20
    assert_nothing_held(prefix)


def certain_draws(
    name: str, prompt: tuple[int, ...], seed: int, count: int, penalty: dict[str, Any]
) -> list[int]:
    """What mlx-lm draws alone after mx.random.seed(seed), up to a draw that the order of float
    additions could decide.
    """
    near: list[bool] = []
    draw = make_sampler(temp=1.0)

    def sampler(logprobs: mx.array) -> mx.array:
        """One number of the seed falls between two sums of probabilities, as
        mx.random.categorical has it.
        """
        _, key = mx.random.split(mx.random.state[0])
        sums, thrown = mx.cumsum(mx.exp(logprobs), axis=-1), mx.random.uniform(shape=(1,), key=key)
        near.append(mx.abs(sums - thrown).min().item() < 1e-5)
        token = draw(logprobs)
        assert near[-1] or token.item() == mx.sum(sums < thrown).item()
        return token

    model, processors = stock_model(name), make_logits_processors(**penalty)
    mx.random.seed(seed)
    steps = generate_step(
        mx.array(prompt), model, max_tokens=count, sampler=sampler, logits_processors=processors
    )
    tokens = [token for token, _ in steps]
    return tokens[: near.index(True)] if True in near else tokens


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.usefixtures("little_promised")
@tried(2, 20)
@given(seed=st.integers(0, 2**31))
def test_a_swapped_out_request_goes_on_with_the_same_draws(name: str, seed: int) -> None:
    """A seed draws after the swap what it would have drawn without, and processors see all
    tokens.
    """
    penalty = {"repetition_penalty": 1.3, "repetition_context_size": 40}
    prompts = [near_the_end_of_a_block(i, before=3 + i) for i in range(3)]
    engine, prefix = make_engine(name, bytes_of(name, 256, 2))
    uids = []
    for i, prompt in enumerate(prompts):
        own = OwnRandomness(seed + i)
        sampler = lambda logprobs, own=own: own.categorical(logprobs, 1.0)  # noqa: E731
        uids.append(engine.insert(Request(prompt, 16, sampler, make_logits_processors(**penalty))))
    told = drive(engine)
    assert engine.counts["swapped_out"] > 0
    for i, prompt in enumerate(prompts):
        expected = certain_draws(name, prompt, seed + i, 16, penalty)
        assert expected == told.tokens[uids[i]][: len(expected)]
    assert_nothing_held(prefix)


def test_a_request_waits_for_room_that_is_lent() -> None:
    engine, prefix = make_engine("llama", bytes_of("llama", 600))
    lent, prompt = prefix.lend(500), words(8, 500)
    uid, told = engine.insert(Request(prompt, 3)), Told()
    told.take(engine.next())
    assert (told.failed, engine.is_blocked) == ({}, True)
    prefix.discard(lent)
    drive(engine, told)
    assert_stock("llama", prompt, told.tokens[uid])
    assert_nothing_held(prefix)
    with pytest.raises(RequestTooLargeError):
        prefix.lend(10_000)
