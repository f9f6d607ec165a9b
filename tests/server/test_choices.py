"""Several choices for one prompt: n and best_of, whole and as streams, in batches and one after
the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mlx_blockpool.server.replies import Reply
from mlx_blockpool.server.sequential import SequentialReply
from server.scripted import CALL, SYSTEM, Say, openai_client
from server.serving import Client, at_once, blockpool_server, stock_server, until
from server.test_openai import TOOL

pytestmark = pytest.mark.server("--pool-bytes 20MB --prefill-step-size 128", model="agent")

PROMPT = "Once upon a time there was a pool. " * 3


def said(text: str) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def chat(gpt: openai.OpenAI, text: str, **options: Any) -> Any:
    return gpt.chat.completions.create(
        **{"model": "default_model", "messages": said(text), "max_tokens": 12, **options}
    )


def complete(gpt: openai.OpenAI, **options: Any) -> Any:
    return gpt.completions.create(
        **{"model": "default_model", "prompt": PROMPT, "max_tokens": 12, **options}
    )


def texts(answer: Any) -> list[str]:
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    return [
        choice.message.content if hasattr(choice, "message") else choice.text
        for choice in answer.choices
    ]


def streamed(chunks: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """The text and the finish reason of each choice, and the usage."""
    told: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            told[choice.index] = told.get(choice.index, "") + (text or "")
            if choice.finish_reason is not None:
                assert (
                    reasons.setdefault(choice.index, choice.finish_reason) == choice.finish_reason
                )
    return told, reasons, usage


def computed(server: Client) -> int:
    """Tokens of prompts that were computed until now."""
    return sum(
        served.engine.counts["prompt_tokens"]
        for served in server.generator.registry.loaded.values()
    )


def test_greedy_choices_are_stocks_reply_and_compute_the_prompt_once(
    agent: Path, server: Client, gpt: openai.OpenAI
) -> None:
    with stock_server(agent) as running, openai_client(running) as stock:
        needed, needed_text = chat(stock, "One?"), complete(stock)
    before = computed(server)
    answer = chat(gpt, "One?", n=3)
    assert texts(answer) == texts(needed) * 3
    usage, whole = answer.usage, needed.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.prompt_tokens,
        3 * whole.completion_tokens,
    )
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    # The last token of a prompt is the first of each decode.
    assert (
        computed(server) - before
        == usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens - 1
    )
    told, reasons, usage = streamed(
        chat(gpt, "One?", n=3, stream=True, stream_options={"include_usage": True})
    )
    assert told == dict(enumerate(texts(answer)))
    assert reasons == {i: choice.finish_reason for i, choice in enumerate(answer.choices)}
    assert (usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (
        answer.usage.completion_tokens,
        answer.usage.prompt_tokens - 1,
    )
    assert texts(complete(gpt, n=2)) == texts(needed_text) * 2
    assert streamed(complete(gpt, n=2, stream=True))[0] == dict(enumerate(texts(needed_text) * 2))


def test_choices_share_the_tokens_of_their_prompt(
    gpt: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[int]] = []
    start = Reply.start

    def watched(self: Reply, *args: Any) -> Any:
        request = start(self, *args)
        prompts.append(request.tokens)
        return request

    monkeypatch.setattr(Reply, "start", watched)
    chat(gpt, "Zero?", n=3)
    assert [prompt is prompts[0] for prompt in prompts] == [True] * 3


def test_drawn_choices_differ_and_are_those_of_seeds_that_count_up(gpt: openai.OpenAI) -> None:
    drawn: Any = {"temperature": 1.0, "max_tokens": 8}
    assert len(set(texts(chat(gpt, "Two?", n=4, **drawn)))) > 1
    choices = texts(chat(gpt, "Two?", n=3, seed=7, **drawn))
    assert choices == [texts(chat(gpt, "Two?", seed=seed, **drawn))[0] for seed in (7, 8, 9)]
    largest = 2**64 - 1
    assert (
        texts(chat(gpt, "Two?", n=2, seed=largest, **drawn))[1]
        == texts(chat(gpt, "Two?", seed=0, **drawn))[0]
    )


def test_the_best_choices_have_the_highest_mean_logprob(gpt: openai.OpenAI) -> None:
    drawn: Any = {"temperature": 1.0, "seed": 3, "max_tokens": 6}
    every = complete(gpt, n=5, logprobs=0, **drawn)
    means = [
        sum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens)
        for choice in every.choices
    ]
    ranked = sorted(range(5), key=lambda index: -means[index])
    best = complete(gpt, n=2, best_of=5, **drawn)
    assert texts(best) == [texts(every)[index] for index in ranked[:2]]
    assert best.usage.to_dict() | {"prompt_tokens_details": None} == every.usage.to_dict() | {
        "prompt_tokens_details": None
    }


@pytest.mark.parametrize("streams", [False, True])
def test_a_choice_that_fails_leaves_the_others_alone(
    well: Client, gpt: openai.OpenAI, fourth_word_fails: Callable[[Exception], None], streams: bool
) -> None:
    needed = texts(chat(gpt, "Three?"))[0]
    fourth_word_fails(RuntimeError("no such word"))
    answer = chat(gpt, "Three?", n=3, stream=streams)
    if streams:
        told, reasons, _ = streamed(answer)
    else:
        told = {choice.index: choice.message.content for choice in answer.choices}
        reasons = {choice.index: choice.finish_reason for choice in answer.choices}
        (failed,) = [choice for choice in answer.choices if choice.finish_reason == "error"]
        assert failed.error["message"] == "no such word"
    assert sorted(reason == "error" for reason in reasons.values()) == [False, False, True]
    assert [told[i] for i, reason in reasons.items() if reason != "error"] == [needed] * 2


def test_each_choice_calls_for_itself(gpt: openai.OpenAI, say: Say) -> None:
    say(f"Let me see.{CALL}{CALL}")
    answer = chat(gpt, "Four?", n=2, tools=[TOOL], max_tokens=400, parallel_tool_calls=False)
    calls = [choice.message.tool_calls for choice in answer.choices]
    assert [len(of_choice) for of_choice in calls] == [1, 1]
    assert calls[0][0].id != calls[1][0].id


def test_choices_of_one_agent_are_one_request_to_it(well: Client, gpt: openai.OpenAI) -> None:
    assert len(chat(gpt, "Five?", n=3, user="ann").choices) == 3
    well.settle()
    agents = {agent["name"]: agent for agent in well.send("/v1/agents")[1]["agents"]}
    assert agents["ann"]["running"] == agents["ann"]["waiting"] == 0
    listed = [
        each for each in well.send("/v1/cache/explain")[1]["requests"] if each["agent"] == "ann"
    ]
    assert len(listed) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"n": 33}, "n: Input should be less than or equal to 32; found 33"),
        ({"n": 3, "best_of": 2}, "best_of: Input should be at least n, which is 3; found 2"),
        ({"best_of": 2, "stream": True}, "best_of: the best choices are known at their ends"),
        ({"best_of": 33}, "best_of: Input should be less than or equal to 32"),
    ],
)
def test_counts_of_choices_have_limits(server: Client, body: dict[str, Any], words: str) -> None:
    status, answer = server.send("/v1/completions", {"prompt": "A", "max_tokens": 1, **body})
    assert (status, words in answer["error"]["message"]) == (400, True), answer


@pytest.fixture(scope="module")
def sequential(agent: Path) -> Iterator[Client]:
    """A server that serves one request after the other, by mlx-lm's sequential path."""
    with blockpool_server(agent, "--draft-model", str(agent)) as running:
        yield running


def test_models_without_batches_make_one_choice_after_the_other(sequential: Client) -> None:
    with openai_client(sequential) as gpt:
        alone = texts(chat(gpt, "Six?"))
        assert sequential.generator.model.engine is None
        assert texts(chat(gpt, "Six?", n=2)) == alone * 2
        told, reasons, _ = streamed(chat(gpt, "Six?", n=2, stream=True, temperature=1.0, seed=5))
        assert told == dict(
            enumerate(texts(chat(gpt, "Six?", seed=seed, temperature=1.0))[0] for seed in (5, 6))
        )
        assert set(reasons) == {0, 1}


def test_without_batches_requests_take_turns_choice_by_choice(
    sequential: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, put = sequential.generator, SequentialReply.put
    first, arrived = threading.Event(), threading.Event()
    began: list[int] = []

    def watched(self: SequentialReply, item: Any) -> None:
        """The first choice ends when the other request has arrived."""
        first.set()
        if not arrived.is_set():
            # The other choices of the same request may be in the queue as well.
            until(
                lambda: any(
                    isinstance(each, Reply) and each.request.choices == 1
                    for each in list(generator.requests.queue)
                )
            )
            arrived.set()
        put(self, item)

    def begin(self: Reply, cached: int) -> None:
        began.append(self.request.choices)
        return begins(self, cached)

    begins = Reply.begin
    monkeypatch.setattr(SequentialReply, "put", watched)
    monkeypatch.setattr(Reply, "begin", begin)

    def come_later() -> Any:
        first.wait()
        return sequential.chat(said("Eight?"), max_tokens=2)

    answer, _ = at_once(
        [lambda: sequential.chat(said("Seven?"), max_tokens=2, n=3, user="ann"), come_later]
    )
    assert len(answer["choices"]) == 3
    assert began == [3, 1, 3, 3]
