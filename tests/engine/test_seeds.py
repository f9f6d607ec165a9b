"""Seeds: a request with one draws in a batch what mlx-lm draws alone, token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from engine.engines import VOCABULARY, assert_stock, drive, make_engine, stock_model, words
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler as stock_sampler
from thorough import only

from mlx_blockpool.engine.request import Request
from mlx_blockpool.server.sampling import make_sampler

NEWLINE, END = 17, 42
TOKENIZER = SimpleNamespace(encode=lambda _: [NEWLINE], eos_token_ids={END})
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 0.0,
    "top_k": 0,
    "min_p": 0.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
}
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.05},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    {
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.01,
        "xtc_probability": 0.3,
        "xtc_threshold": 0.05,
        "temperature": 1.3,
    },
]


def sampler(seed: int | None, **sampling: Any) -> Any:
    return make_sampler(
        SimpleNamespace(seed=seed, sampling=SimpleNamespace(**{**DEFAULTS, **sampling})), TOKENIZER
    )


def alone(name: str, prompt: tuple[int, ...], seed: int, count: int, **sampling: Any) -> list[int]:
    """What mlx-lm's server does with a seed and one request."""
    wanted = {**DEFAULTS, **sampling}
    temperature = wanted.pop("temperature")
    model = stock_model(name)
    mx.random.seed(seed)
    draw = stock_sampler(temperature, xtc_special_tokens=[NEWLINE, END], **wanted)
    return [
        token for token, _ in generate_step(mx.array(prompt), model, max_tokens=count, sampler=draw)
    ]


@pytest.mark.parametrize("name", only(["llama", "gemma3_text", "gpt_oss", "qwen2"], "gpt_oss"))
def test_every_sampling_draws_in_a_batch_what_it_draws_alone(name: str) -> None:
    engine, _ = make_engine(name)
    prompts = [words(i, 20 + 31 * i) for i in range(len(SAMPLINGS))]
    uids = []
    for i, (prompt, sampling) in enumerate(zip(prompts, SAMPLINGS, strict=True)):
        uids.append(engine.insert(Request(prompt, 12, sampler(1000 + i, **sampling))))
        # Somebody without a seed draws from mlx's own state all the time.
        engine.insert(Request(prompt[1:], 9, sampler(None)))
    told = drive(engine)
    for i, (uid, prompt, sampling) in enumerate(zip(uids, prompts, SAMPLINGS, strict=True)):
        assert told.tokens[uid] == alone(name, prompt, 1000 + i, 12, **sampling), sampling


def test_the_same_seed_says_the_same_beside_others_and_another_one_something_else() -> None:
    engine, _ = make_engine("llama")
    prompt = words(1, 50)
    for seed in (7, 7, 8):
        engine.insert(Request(prompt, 20, sampler(seed)))
    told = drive(engine)
    assert told.tokens[1] == told.tokens[2] == alone("llama", prompt, 7, 20)
    assert told.tokens[3] == alone("llama", prompt, 8, 20)
    assert told.tokens[3] != told.tokens[1]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_draws_that_are_skipped_leave_the_state_that_draws_would_have_left(
    sampling: dict[str, Any],
) -> None:
    drawing, skipping = sampler(7, **sampling), sampler(7, **sampling)
    logprobs = mx.log(mx.softmax(mx.random.normal((1, VOCABULARY), key=mx.random.key(1))))
    for _ in range(5):
        drawing(logprobs)
    skipping.skip(5)
    assert [drawing(logprobs).item() for _ in range(5)] == [
        skipping(logprobs).item() for _ in range(5)
    ]


def test_a_greedy_request_beside_seeded_ones_stays_greedy() -> None:
    engine, _ = make_engine("llama")
    prompt = words(1, 50)
    engine.insert(Request(prompt, 10, sampler(7)))
    engine.insert(Request(prompt, 10, sampler(7, temperature=0.0)))
    engine.insert(Request(prompt, 10))
    told = drive(engine)
    assert_stock("llama", prompt, told.tokens[2])
    assert_stock("llama", prompt, told.tokens[3])


def test_a_seed_that_arrives_late_or_finds_its_prompt_cached_draws_the_same() -> None:
    engine, _ = make_engine("llama")
    prompt = words(1, 300)
    engine.insert(Request(words(2, 40), 30, sampler(1)))
    drive(engine, after=lambda told: len(told.tokens.get(1, [])) == 5)
    engine.insert(Request(prompt, 10, sampler(9)))
    told = drive(engine)
    engine.insert(Request(prompt, 10, sampler(9)))
    again = drive(engine)
    assert again.started[3].cached == 299
    assert told.tokens[2] == again.tokens[3] == alone("llama", prompt, 9, 10)
    assert max(told.tokens[2]) < VOCABULARY
