"""What logits processors are given, and what probabilities are told."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from engine.engines import drive, make_engine, serve, stock_model, words
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.sample_utils import make_logits_processors
from thorough import only

from mlx_blockpool.engine.request import Request

RAGGED = only(["llama", "gemma3_text", "gpt_oss"], "gemma3_text", "gpt_oss")


@pytest.mark.parametrize("name", RAGGED)
def test_processors_get_all_tokens_so_far_cached_ones_too(name: str) -> None:
    prompts = [words(1, 300), (*words(1, 300), *words(2, 30)), words(3, 3)]
    engine, _ = make_engine(name)
    serve(engine, [words(1, 300)], 2)
    seen: list[list[int]] = []

    def look(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    uids = [
        engine.insert(Request(p, 6, processors=[look] if i == 1 else ()))
        for i, p in enumerate(prompts)
    ]
    told = drive(engine)
    assert told.started[uids[1]].cached in (299, 300)
    reply = told.tokens[uids[1]]
    assert seen[:6] == [[*prompts[1], *reply[:i]] for i in range(6)]


@pytest.mark.parametrize("name", RAGGED)
def test_penalties_are_those_of_mlx_lms_own_batch(name: str) -> None:
    prompts = [words(1, 300), (*words(1, 300), *words(2, 30)), words(3, 3)]
    penalty: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "repetition_context_size": 400,
        "logit_bias": {3: 1.0},
    }
    stock = BatchGenerator(stock_model(name), max_tokens=10)
    uids = stock.insert(
        [list(p) for p in prompts],
        logits_processors=[make_logits_processors(**penalty) for _ in prompts],
    )
    expected: dict[int, list[int]] = {uid: [] for uid in uids}
    while any(len(tokens) < 10 for tokens in expected.values()):
        for response in stock.next()[1]:
            expected[response.uid].append(response.token)
    engine, _ = make_engine(name)
    serve(engine, [words(1, 300)], 2)
    _, told = serve(engine, prompts, 10, processors=make_logits_processors(**penalty))
    assert [told.tokens[uid] for uid in sorted(told.tokens)] == list(expected.values())


@pytest.mark.parametrize("name", RAGGED)
def test_logprobs_are_those_of_single_stock_sequences(name: str) -> None:
    engine, _ = make_engine(name)
    prompts = [words(i, count) for i, count in enumerate([1, 40, 310])]
    uids, told = serve(engine, prompts, 6)
    for uid, prompt in zip(uids, prompts, strict=True):
        for (token, logprobs), found in zip(
            generate_step(mx.array(prompt), stock_model(name), max_tokens=6),
            told.logprobs[uid],
            strict=True,
        ):
            assert mx.allclose(logprobs, found, atol=1e-4, rtol=0)
            assert int(token) == mx.argmax(found).item()
