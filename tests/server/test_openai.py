"""OpenAI's own client against the chat and completions: stock's replies, usage, tools, errors,
agents, clients that leave.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from models import save_model

from mlx_blockpool.server.api.errors import in_shape
from mlx_blockpool.server.generator import BlockpoolGenerator
from mlx_blockpool.server.request import RequestOptions
from mlx_blockpool.server.scope import agent_of, retention_of
from server.scripted import CALL, LOOK_UP, SYSTEM, Say, anthropic_client, openai_client
from server.serving import Client, at_once, blockpool_server, stock_server

pytestmark = pytest.mark.server("--pool-bytes 20MB --prefill-step-size 128", model="agent")

TOOL: Any = {
    "type": "function",
    "function": {
        "name": LOOK_UP["name"],
        "description": LOOK_UP["description"],
        "parameters": LOOK_UP["input_schema"],
    },
}
SAID: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is a pool?"}]


def chat(gpt: openai.OpenAI, messages: Any = SAID, **options: Any) -> Any:
    return gpt.chat.completions.create(
        **{"model": "default_model", "messages": messages, "max_tokens": 12, **options}
    )


def shown(answer: Any) -> dict[str, Any]:
    """An answer without what differs each time, and without what was cached."""
    told = {
        name: value
        for name, value in answer.to_dict().items()
        if name not in ("id", "created", "system_fingerprint")
    }
    if told.get("usage"):
        told["usage"].pop("prompt_tokens_details", None)
    for call in [
        c
        for choice in told["choices"]
        for c in choice.get("message", choice.get("delta", {})).get("tool_calls", ())
    ]:
        call.pop("id", None)
    return told


def whole(chunks: Any) -> dict[str, Any]:
    """What the chunks of a stream add up to; where one ends and the next begins is the server's
    to choose.
    """
    told: dict[str, Any] = {"text": "", "reasoning": "", "calls": [], "rest": []}
    for chunk in map(shown, chunks):
        for choice in chunk.pop("choices"):
            said = choice.pop("delta", choice)
            told["text"] += said.pop("content", None) or said.pop("text", None) or ""
            told["reasoning"] += said.pop("reasoning", "")
            for call in said.pop("tool_calls", []):
                if call["index"] == len(told["calls"]):
                    told["calls"].append(call)
                else:
                    part = call["function"]["arguments"]
                    told["calls"][call["index"]]["function"]["arguments"] += part
            if said.pop("role", "assistant") != "assistant" or choice.get("finish_reason"):
                told["rest"].append(choice)
        told["rest"] += [chunk] if chunk not in told["rest"] else []
    return told


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


# -- replies ---------------------------------------------------------------------------------------


def asked_of(gpt: openai.OpenAI) -> list[Any]:
    """The answers to requests of each form, streams as their chunks."""
    options: Any = {"model": "default_model", "max_tokens": 12}
    usage = {"include_usage": True}
    text: Any = {"prompt": "Once upon a time", **options}
    return [
        shown(chat(gpt)),
        shown(chat(gpt, stop=["e"])),
        shown(chat(gpt, seed=7, temperature=1.0)),
        shown(chat(gpt, tools=[TOOL])),
        whole(chat(gpt, stream=True)),
        whole(chat(gpt, stream=True, stream_options=usage)),
        shown(gpt.completions.create(**text)),
        [
            shown(chunk)
            for chunk in gpt.completions.create(**text, stream=True, stream_options=usage)
        ],
    ]


@pytest.fixture(scope="module")
def stock(agent: Path) -> Iterator[openai.OpenAI]:
    with stock_server(agent) as running:
        yield openai_client(running)


def test_replies_are_those_of_stock(
    server: Client, gpt: openai.OpenAI, stock: openai.OpenAI
) -> None:
    assert asked_of(gpt) == asked_of(stock)


@pytest.mark.parametrize(
    "text",
    [f"Let me see.{CALL}", f"<think>Hm.</think>Ok.{CALL}{CALL}", "Plain.", " Plain.\n", "", " \n"],
)
def test_tools_and_thinking_are_those_of_stock(
    gpt: openai.OpenAI, stock: openai.OpenAI, say: Say, text: str
) -> None:
    say(text)
    asked: Any = {"tools": [TOOL], "max_tokens": 400}
    answers = [
        (shown(chat(client, **asked)), whole(chat(client, **asked, stream=True)))
        for client in (gpt, stock)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "text",
    [
        f"Let me see.\n{CALL}\n{CALL}\n",
        f"<think>\nHm.\n</think>\n\nOk.\n\n{CALL}",
        "<think>\nHm.\n</think>\n\nOk.\n",
    ],
)
def test_the_text_is_that_of_the_other_protocols(
    server: Client, gpt: openai.OpenAI, say: Say, text: str
) -> None:
    """Space around calls is the template's, which writes its own: the next prompt begins with
    this one and its reply.
    """
    say(text)
    first = chat(gpt, tools=[TOOL], max_tokens=400)
    said = first.choices[0].message.to_dict()
    streamed = whole(chat(gpt, tools=[TOOL], max_tokens=400, stream=True))
    tool = {
        "name": LOOK_UP["name"],
        "description": LOOK_UP["description"],
        "input_schema": LOOK_UP["input_schema"],
    }
    claude = anthropic_client(server).messages.create(
        model="default_model",
        max_tokens=400,
        system=SYSTEM,
        messages=SAID[1:],
        tools=[tool],  # type: ignore[list-item]
    )
    other = "".join(block.text for block in claude.content if block.type == "text")
    assert said["content"] == streamed["text"] == other
    assert said.get("reasoning", "") == streamed["reasoning"] == ("Hm." if "Hm." in text else "")
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "It."}
        for call in said.get("tool_calls", ())
    ]
    if results and "reasoning" not in said:
        second = chat(gpt, [*SAID, said, *results], tools=[TOOL])
        assert cached(second) >= first.usage.prompt_tokens + len(text.rstrip()) - 2 * len(CALL)


def test_choices_of_tools(gpt: openai.OpenAI, say: Say) -> None:
    say(f"{CALL}\n{CALL}")
    add: Any = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
    asked: Any = {"tools": [TOOL, add], "max_tokens": 400}

    def calls(**options: Any) -> list[str]:
        choice = chat(gpt, **asked, **options).choices[0]
        named = [call.function.name for call in choice.message.tool_calls or ()]
        assert choice.finish_reason == ("tool_calls" if named else "stop")
        return named

    assert calls() == calls(tool_choice="auto") == ["look_up"] * 2
    assert calls(parallel_tool_calls=False) == ["look_up"]
    assert calls(tool_choice="none") == []
    # What is said here stands behind the beginning of a call.
    say(f'\n{{"name": "look_up", "arguments": {{"word": "a"}}}}\n</tool_call>\n{CALL}')
    for choice, words in (
        ("required", ["a", "pool"]),
        ({"type": "function", "function": {"name": "look_up"}}, ["a"]),
    ):
        forced = chat(gpt, **asked, tool_choice=choice).choices[0]
        arguments = [call.function.arguments for call in forced.message.tool_calls]
        assert (arguments, forced.finish_reason) == (
            [json.dumps({"word": word}) for word in words],
            "tool_calls",
        )


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"n": 33}, "n", "less than or equal to 32; found 33"),
        ({"n": 0}, "n", "greater than or equal to 1; found 0"),
        ({"n": "2"}, "n", "valid integer"),
        (
            {"response_format": {"type": "structural_tag"}},
            "response_format.type",
            "'text' or 'json_object' or 'json_schema'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "Field required",
        ),
        ({"response_format": "json"}, "response_format", "valid dictionary"),
        (
            {"guided_json": {"properties": {"a": {"not": {}}}}},
            "guided_json.properties.a.not",
            "not",
        ),
        ({"tool_choice": "any"}, "tool_choice", "'auto', 'none' or 'required'; found 'any'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type", "'function'"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
            "not found in tools",
        ),
        ({"tools": {}}, "tools", "valid list"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "valid boolean"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(
    gpt: openai.OpenAI, body: Any, param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gpt.post(
            "/chat/completions", body={"messages": SAID, "max_tokens": 2, **body}, cast_to=object
        )
    assert words in refused.value.body["message"]  # type: ignore[index]
    assert refused.value.body["message"].startswith(f"{param}: ")  # type: ignore[index]


def test_values_that_change_nothing_are_taken(gpt: openai.OpenAI) -> None:
    assert chat(gpt, n=1, response_format={"type": "text"}, tool_choice="none").choices
    assert chat(
        gpt, n=None, response_format=None, tool_choice=None, parallel_tool_calls=None
    ).choices
    nulls = dict.fromkeys(
        (
            "temperature",
            "stop",
            "seed",
            "logprobs",
            "top_logprobs",
            "xtc_threshold",
            "stream_options",
        )
    )
    assert chat(gpt, extra_body=nulls).choices


@pytest.mark.parametrize(
    ("text", "shown"), [("One END two", "One "), ("One EN", "One EN"), ("One <tool", "One <tool")]
)
def test_a_completion_ends_at_a_stop_word_and_keeps_what_only_begins_like_one(
    gpt: openai.OpenAI, say: Say, text: str, shown: str
) -> None:
    say(text)
    asked: Any = {"model": "default_model", "prompt": "Once", "max_tokens": 40, "stop": ["END"]}
    choice = gpt.completions.create(**asked).choices[0]
    assert (choice.text, choice.finish_reason) == (shown, "stop")
    assert whole(gpt.completions.create(**asked, stream=True))["text"] == shown


def test_half_a_call_comes_back_as_text(gpt: openai.OpenAI, say: Say) -> None:
    say(f"Ok.\n{CALL}")
    cut = chat(gpt, tools=[TOOL], max_tokens=20).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    assert cut.message.content == f"Ok.\n{CALL}"[: len(cut.message.content)]
    assert cut.message.content.startswith('Ok.\n<tool_call>\n{"name"')


def test_a_tool_is_called_and_its_result_comes_back(gpt: openai.OpenAI, say: Say) -> None:
    say(f"Let me see.\n{CALL}", "A pool holds blocks.")
    first = chat(gpt, tools=[TOOL], max_tokens=400)
    choice = first.choices[0]
    assert (choice.finish_reason, len(choice.message.tool_calls)) == ("tool_calls", 1)
    call = choice.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "look_up",
        {"word": "pool"},
    )
    turn = choice.message.to_dict()
    result = {"role": "tool", "tool_call_id": call.id, "content": "It holds blocks."}
    second = chat(gpt, [*SAID, turn, result], tools=[TOOL], max_tokens=400)
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == (
        "stop",
        "A pool holds blocks.",
    )
    assert cached(second) > len(SYSTEM)


def test_the_models_are_listed(server: Client, gpt: openai.OpenAI, agent: Path) -> None:
    assert [m.id for m in gpt.models.list()] == [agent.name, "default_model"]
    assert gpt.models.retrieve(agent.name).owned_by == "mlx-blockpool"
    with pytest.raises(openai.NotFoundError) as missing:
        gpt.models.retrieve("no-such-model")
    assert agent.name in missing.value.body["message"]  # type: ignore[index]


def test_several_at_once(server: Client, gpt: openai.OpenAI) -> None:
    async def together() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0
        ) as client:

            async def streamed(i: int) -> str:
                said: Any = [{"role": "user", "content": f"Number {i}"}]
                stream: Any = await client.chat.completions.create(
                    model="default_model", messages=said, max_tokens=8, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(streamed(i) for i in range(6)))

    alone = [
        chat(gpt, [{"role": "user", "content": f"Number {i}"}], max_tokens=8)
        .choices[0]
        .message.content
        for i in range(6)
    ]
    assert asyncio.run(together()) == alone


# -- what was cached -------------------------------------------------------------------------------


def figures(gpt: openai.OpenAI, prompt: str) -> list[tuple[int, int]]:
    """(tokens, cached tokens) of a prompt that is new, of the same again, and of both endpoints
    with and without streams.
    """
    options: Any = {"model": "default_model", "max_tokens": 2}
    streamed = {**options, "stream": True, "stream_options": {"include_usage": True}}
    said: Any = [{"role": "user", "content": prompt}]
    answers = [gpt.chat.completions.create(**options, messages=said) for _ in range(2)]
    answers += [list(gpt.chat.completions.create(**streamed, messages=said))[-1]]
    answers += [gpt.completions.create(**options, prompt=f"{prompt}!") for _ in range(2)]
    answers += [list(gpt.completions.create(**streamed, prompt=f"{prompt}!"))[-1]]
    return [(a.usage.prompt_tokens, cached(a)) for a in answers]


def test_what_was_cached_is_always_said(server: Client, gpt: openai.OpenAI) -> None:
    (long, none), *again = figures(gpt, "Nobody has asked this before. " * 20)
    # Other chats here begin as this one does.
    assert none <= len("<|im_start|>user\nN")
    assert again[:2] == [(long, long - 1)] * 2
    plain = again[2][0]
    assert again[2:] == [(plain, 0), (plain, plain - 1), (plain, plain - 1)]


@pytest.mark.parametrize("pool", [True, False])
def test_what_was_cached_is_said_where_requests_run_alone(
    tmp_path: Path, pool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pool:
        monkeypatch.setattr("mlx_blockpool.server.model_caches.describe", lambda *_: (None, ""))
    model = save_model(tmp_path / "llama", "llama")
    draft = save_model(tmp_path / "draft", "llama", seed=1, num_hidden_layers=1)
    with (
        blockpool_server(model, "--pool-bytes", "20MB", "--draft-model", str(draft)) as alone,
        openai_client(alone) as gpt,
    ):
        (long, none), *again = figures(gpt, "Nobody has asked this before. " * 10)
        alone.settle()
    assert none == 0
    # One token at least is left, and a draft may have to see a few again.
    assert all(long - 8 <= hit < total for total, hit in again[:2])
    assert again[2][1] == 0
    assert all(total - 8 <= hit < total for total, hit in again[3:])


# -- who asks --------------------------------------------------------------------------------------


def test_who_asks_is_named_by_the_header_or_by_the_first_field_there_is() -> None:
    body = {
        "user": "u",
        "agent_id": "a",
        "session_id": "s",
        "prompt_cache_key": "k",
        "safety_identifier": "x",
    }
    named = []
    for name in ("", "prompt_cache_key", "session_id", "agent_id", "user"):
        body.pop(name, None)
        named.append(agent_of(None, body))
    assert named == ["k", "s", "a", "u", None]
    assert agent_of("h", {"user": "u"}) == "h"
    assert agent_of("", {"prompt_cache_key": "", "session_id": None, "user": "u"}) == "u"
    assert agent_of(None, {"user": "u", "agent_id": "a"}, ("session_id", "agent_id")) == "a"


def test_retention_has_two_names() -> None:
    asked = [None, "in_memory", "in-memory", "24h"]
    assert [retention_of({"prompt_cache_retention": name}) for name in asked] == [
        None,
        "memory",
        "memory",
        "day",
    ]
    assert retention_of({}) is None
    for name in ("1h", 24, ["24h"], ""):
        with pytest.raises(ValueError, match="'in_memory' or '24h'"):
            retention_of({"prompt_cache_retention": name})


def test_every_endpoint_tells_the_engine_who_asks(
    server: Client, gpt: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RequestOptions] = []
    generate_choices = BlockpoolGenerator.generate_choices

    def watching(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(request.options)
        return generate_choices(self, request, *args, **kwargs)

    monkeypatch.setattr(BlockpoolGenerator, "generate_choices", watching)
    chat(gpt, max_tokens=1, user="me", prompt_cache_retention="24h")
    chat(gpt, max_tokens=1, user="me", extra_body={"session_id": "s"})
    chat(
        gpt,
        max_tokens=1,
        user="me",
        prompt_cache_key="k",
        extra_headers={"X-Agent-Id": "h"},
        safety_identifier="x",
    )
    chat(gpt, max_tokens=1, safety_identifier="x")
    text = {"prompt": "x", "max_tokens": 1, "user": "me"}
    gpt.completions.create(
        model="default_model", **text, extra_body={"prompt_cache_retention": "in-memory"}
    )  # type: ignore[call-overload]
    gpt.responses.create(
        model="default_model",
        input="x",
        max_output_tokens=1,
        prompt_cache_key="k",
        prompt_cache_retention="24h",
    )
    claude: Any = {
        "model": "default_model",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "x"}],
    }
    messages = anthropic_client(server).messages
    messages.create(**claude, metadata={"user_id": "everybody"})
    messages.create(**claude, extra_body={"agent_id": "a"})
    messages.create(**claude, extra_body={"agent_id": "a"}, extra_headers={"X-Agent-Id": "h"})
    assert [(options.agent, options.retention) for options in seen] == [
        ("me", "day"), ("s", None), ("h", None), (None, None),
        ("me", "memory"), ("k", "day"),
        (None, None), ("a", None), ("h", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "field", ["prompt_cache_key", "session_id", "agent_id", "user", "prompt_cache_retention"]
)
def test_a_name_that_is_no_text_is_refused_by_every_endpoint(
    server: Client, gpt: openai.OpenAI, field: str
) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": SAID},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
    }
    for path, body in bodies.items():
        status, answer = server.send(path, {**body, field: {"a": 1}})
        assert (status, field in answer["error"]["message"]) == (400, True), path
    if field in ("session_id", "agent_id"):
        status, answer = server.send(
            "/v1/messages", {"messages": SAID[1:], "max_tokens": 1, field: 7}
        )
        assert (status, field in answer["error"]["message"]) == (400, True)


# -- errors and clients that leave -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"messages": []}, "messages: Input should not be empty"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1; found 0"),
        ({"temperature": "hot"}, "temperature: Input should be a valid number; found 'hot'"),
        ({"logit_bias": {"99999": 1}}, "logit_bias has token ids"),
        ({"stop": [1]}, r"stop\[0\]: Input should be a valid string; found 1"),
    ],
)
def test_a_bad_request_is_told_in_the_protocols_shape(
    gpt: openai.OpenAI, options: Any, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as bad:
        chat(gpt, **options)
    assert (bad.value.type, bad.value.param, bad.value.code) == (
        "invalid_request_error",
        None,
        None,
    )
    assert isinstance(bad.value.body["message"], str)  # type: ignore[index]


def test_what_programs_look_for_has_a_code(server: Client, gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        chat(gpt, [{"role": "user", "content": "y" * (server.capacity() + 50)}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        chat(gpt, model="no/such")
    assert missing.value.code == "model_not_found"
    for raw in (b"{", b"[]", b"\xff", b""):
        status, answer = server.send("/v1/chat/completions", raw=raw)
        assert (status, set(answer["error"])) == (400, {"message", "type", "param", "code"})


def test_a_failure_in_mid_stream_reaches_the_client(
    gpt: openai.OpenAI, fourth_word_fails: Callable[[Exception], None]
) -> None:
    fourth_word_fails(LookupError("no word for this"))
    with pytest.raises(openai.APIError, match="no word for this") as failed:
        list(chat(gpt, stream=True))
    assert failed.value.type == "server_error"


def test_only_what_is_no_error_of_that_shape_is_reshaped() -> None:
    mine = {"error": {"message": "m", "type": "t", "param": "p", "code": "c"}}
    assert in_shape(400, mine) == mine
    told = in_shape(503, {"error": "no room"})
    assert told == {
        "error": {"message": "no room", "type": "server_error", "param": None, "code": None}
    }


def test_a_client_that_leaves_ends_its_reply(server: Client, gpt: openai.OpenAI, say: Say) -> None:
    say("x" * 3000)

    def leave() -> None:
        with chat(gpt, max_tokens=3000, stream=True) as stream:
            next(chunk for chunk in stream if chunk.choices[0].delta.content)

    at_once([leave] * 3)
    server.settle()
    told = server.send("/v1/cache")[1]["engine"]["tokens"]
    server.settle()
    assert server.send("/v1/cache")[1]["engine"]["tokens"] == told
    say("Yes.")
    assert chat(gpt).choices[0].message.content == "Yes."
