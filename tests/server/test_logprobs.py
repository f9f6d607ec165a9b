"""Log probabilities in OpenAI's shapes: mlx-lm's own numbers, in batches, whole and as streams,
in each of its protocols.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import openai
import pytest
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
)

from mlx_blockpool.forms.token_bytes import bytes_of
from mlx_blockpool.server.api.logprobs import LOWEST, Logprobs
from mlx_blockpool.server.replies import most_likely
from server.scripted import Say
from server.serving import Client, at_once, stock_server
from server.test_choices import chat, complete, said

pytestmark = pytest.mark.server("--pool-bytes 20MB --prefill-step-size 128", model="agent")

NEAR = 1e-4


def near(found: list[float], needed: list[float]) -> bool:
    return len(found) == len(needed) and all(
        math.isclose(a, b, abs_tol=NEAR) for a, b in zip(found, needed, strict=True)
    )


def test_the_numbers_are_those_of_stock_in_a_batch_too(
    agent: Path, server: Client, gpt: openai.OpenAI
) -> None:
    asked: Any = {"messages": said("Say it."), "max_tokens": 10, "temperature": 0.0}
    with stock_server(agent) as stock:
        own = stock.send("/v1/chat/completions", {**asked, "logprobs": True})[1]["choices"][0][
            "logprobs"
        ]["content"]
        top = stock.send("/v1/chat/completions", {**asked, "top_logprobs": 4})[1]["choices"][0][
            "logprobs"
        ]["content"]
    answers = at_once(
        [lambda: chat(gpt, "Say it.", max_tokens=10, logprobs=True, top_logprobs=4)] * 3
    )
    for answer in answers:
        found = answer.choices[0].logprobs.content
        assert [entry.id for entry in found] == [entry["id"] for entry in own]
        assert near([entry.logprob for entry in found], [entry["logprob"] for entry in own])
        for entry, needed in zip(found, top, strict=True):
            ranked = sorted(needed["top_logprobs"], key=lambda other: -other["logprob"])
            assert near(
                [other.logprob for other in entry.top_logprobs],
                [other["logprob"] for other in ranked],
            )
            assert {other.id for other in entry.top_logprobs} == {other["id"] for other in ranked}
            # Greedy: the most likely token is the one that was taken.
            assert (entry.top_logprobs[0].token, entry.top_logprobs[0].bytes) == (
                entry.token,
                entry.bytes,
            )
        shown = b"".join(bytes(entry.bytes) for entry in found).decode()
        assert shown.startswith(answer.choices[0].message.content)


def test_a_stream_has_each_token_once(gpt: openai.OpenAI) -> None:
    asked: Any = {"max_tokens": 10, "logprobs": True, "top_logprobs": 2, "n": 2}
    whole = chat(gpt, "Stream it.", **asked)
    found: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chat(gpt, "Stream it.", stream=True, **asked):
        for choice in chunk.choices:
            found[choice.index] += [entry.to_dict() for entry in choice.logprobs.content]
    assert found == {
        choice.index: [entry.to_dict() for entry in choice.logprobs.content]
        for choice in whole.choices
    }
    assert not any("logprobs" in choice.to_dict() for choice in chat(gpt, "Stream it.").choices)


def test_completions_have_lists(server: Client, gpt: openai.OpenAI) -> None:
    (choice,) = complete(gpt, logprobs=2).choices
    found = choice.logprobs
    assert (
        len(found.tokens)
        == len(found.token_logprobs)
        == len(found.top_logprobs)
        == len(found.text_offset)
        == 12
    )
    assert "".join(found.tokens).startswith(choice.text)
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(12)]
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())
        assert 1 <= len(top) <= 3
    streamed = [
        chunk.choices[0].logprobs
        for chunk in complete(gpt, logprobs=2, stream=True)
        if chunk.choices
    ]
    assert [token for lists in streamed for token in lists.tokens] == found.tokens
    assert [offset for lists in streamed for offset in lists.text_offset] == found.text_offset
    # As mlx-lm's own clients ask for them.
    status, answer = server.send(
        "/v1/completions", {"prompt": "Once", "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    )
    content = answer["choices"][0]["logprobs"]["content"]
    assert (status, [len(entry["top_logprobs"]) for entry in content]) == (200, [1, 1])
    assert server.send("/v1/completions", {"prompt": "Once", "logprobs": 21})[0] == 400
    assert server.send("/v1/chat/completions", {"messages": said("A"), "logprobs": 2})[0] == 400


@pytest.mark.parametrize("text", ["Plain words.", "<think>Hm, so.</think>Plain words."])
def test_a_response_has_those_of_its_text(gpt: openai.OpenAI, say: Say, text: str) -> None:
    say(text)
    asked: Any = {"model": "default_model", "input": "Say it.", "max_output_tokens": 60}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = gpt.responses.create(**asked)
    part = response.output[-1].content[0]  # type: ignore[union-attr]
    assert (part.text, response.top_logprobs) == ("Plain words.", 2)
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}
    deltas: list[Any] = []
    for event in gpt.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            deltas += event.logprobs
        if event.type == "response.output_text.done":
            assert "".join(entry.token for entry in event.logprobs) == "Plain words."
    assert "".join(entry.token for entry in deltas) == "Plain words."
    assert (
        gpt.responses.create(**{**asked, "include": [], "top_logprobs": 0})
        .output[-1]
        .content[0]
        .logprobs
        == []
    )  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "written", "needed"),
    [
        (BPEStreamingDetokenizer, "\u0120pool", b" pool"),
        (BPEStreamingDetokenizer, "\u00c3", b"\xc3"),
        (BPEStreamingDetokenizer, "<|im_end|>", b"<|im_end|>"),
        (SPMStreamingDetokenizer, "\u2581pool", b" pool"),
        (SPMStreamingDetokenizer, "<0xE2>", b"\xe2"),
        (NaiveStreamingDetokenizer, "pool", b"decoded"),
        (BPEStreamingDetokenizer, None, b""),
    ],
)
def test_the_bytes_of_tokens(kind: type, written: str | None, needed: bytes) -> None:
    tokenizer = SimpleNamespace(
        detokenizer=kind.__new__(kind),
        convert_ids_to_tokens=lambda tokens: [written],
        decode=lambda tokens: "decoded",
    )
    assert bytes_of(tokenizer, [7]) == [needed]
    logprobs = Logprobs(tokenizer, 0)
    logprobs.add(SimpleNamespace(token=7, logprob=-math.inf, top_tokens=()))
    (entry,) = logprobs.drain()
    assert (entry["bytes"], entry["logprob"], logprobs.drain()) == (list(needed), LOWEST, [])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_most_likely_tokens_are_those_of_a_whole_sort(dtype: mx.Dtype) -> None:
    logprobs = mx.random.permutation(mx.arange(-100.0, 0.0)).astype(dtype)
    order = mx.argsort(-logprobs).tolist()
    for count in (0, 1, 5, 100, 120):
        found = sorted(most_likely(logprobs, count), key=lambda token: -token["logprob"])
        assert found == [
            {"id": token, "logprob": -1.0 - i} for i, token in enumerate(order[:count])
        ]
