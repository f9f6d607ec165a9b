"""OpenAI's own client against /v1/responses: replies, streams, tools, thinking, conversations
that are gone on from, errors.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from thorough import only, tried

from mlx_blockpool.config import HistoryConfig
from mlx_blockpool.server.api import responses
from mlx_blockpool.server.kept_responses import KeptResponses
from server import scripted
from server.scripted import CALL, LOOK_UP, SYSTEM, Say, anthropic_client
from server.serving import Client

pytestmark = pytest.mark.server("--pool-bytes 20MB --prefill-step-size 128", model="agent")

TOOL: Any = {
    "type": "function",
    "name": LOOK_UP["name"],
    "description": LOOK_UP["description"],
    "parameters": LOOK_UP["input_schema"],
    "strict": False,
}
ADD: Any = {"type": "function", "name": "add", "parameters": None}
# As Codex 0.169 sends it, with fewer functions and shorter texts.
SPAWN: Any = {
    "type": "namespace",
    "name": "agents",
    "description": "Tools for spawning and managing sub-agents.",
    "tools": [
        {"type": "function", "name": "spawn", "strict": False, "parameters": TOOL["parameters"]}
    ],
}
CHAT_TOOL: Any = {
    "type": "function",
    "function": {k: v for k, v in TOOL.items() if k not in ("type", "strict")},
}


def ask(gpt: openai.OpenAI, said: Any, **options: Any) -> Any:
    return gpt.responses.create(
        **{"model": "default_model", "max_output_tokens": 400, "input": said, **options}
    )


def shown(response: Any) -> list[dict[str, Any]]:
    """The output without what differs each time, and without what the client adds."""
    items = [item.to_dict() for item in response.output]
    for part in [part for item in items for part in item.get("content", ())]:
        part.pop("parsed", None)
    return [
        {name: item[name] for name in item if name not in ("id", "call_id", "parsed_arguments")}
        for item in items
    ]


def message(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": status, "content": [part]}


def raw_events(server: Client, **body: Any) -> list[dict[str, Any]]:
    """What a stream has on the wire, each event under its own number."""
    found = scripted.raw_events(server, "/v1/responses", **{"max_output_tokens": 400, **body})
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


# -- replies ---------------------------------------------------------------------------------------


def test_the_reply_is_that_of_the_chat(gpt: openai.OpenAI) -> None:
    """Without tokens that end it, a model without training goes on until it is cut."""
    response = ask(gpt, "What is a pool?", instructions=SYSTEM, max_output_tokens=12)
    said: Any = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What is a pool?"},
    ]
    other = gpt.chat.completions.create(model="default_model", messages=said, max_tokens=12)
    assert response.output_text == other.choices[0].message.content
    assert other.usage is not None
    assert response.usage.input_tokens == other.usage.prompt_tokens
    assert response.usage.output_tokens == other.usage.completion_tokens == 12
    assert response.usage.total_tokens == other.usage.total_tokens
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert other.usage.prompt_tokens_details.cached_tokens == other.usage.prompt_tokens - 1  # type: ignore[union-attr]


def test_what_a_response_says_of_itself(gpt: openai.OpenAI, say: Say) -> None:
    say("Yes.")
    response = ask(
        gpt,
        "Is it?",
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        user="me",
        tools=[TOOL],
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        prompt_cache_key="key",
        prompt_cache_retention="24h",
        safety_identifier="x",
        truncation="auto",
        service_tier="auto",
        include=["reasoning.encrypted_content"],
    )
    assert (response.object, response.status, response.error, response.output_text) == (
        "response",
        "completed",
        None,
        "Yes.",
    )
    assert shown(response) == [message("Yes.")]
    assert (response.temperature, response.top_p, response.metadata, response.user) == (
        0.5,
        0.9,
        {"a": "b"},
        "me",
    )
    assert (response.tool_choice, response.parallel_tool_calls, response.max_output_tokens) == (
        "auto",
        False,
        400,
    )
    assert (response.tools[0].name, response.reasoning.effort, response.text.format.type) == (
        "look_up",
        "low",
        "text",
    )
    assert response.usage.output_tokens == len("Yes.") + 1
    assert response.created_at <= response.completed_at


@pytest.mark.parametrize(
    "text",
    [
        "Plain text.",
        f"Let me see.\n{CALL}",
        "<think>\nHm.\nSo.\n</think>\n\nYes.",
        f"<think>Look.</think>{CALL}\n{CALL}",
        "",
    ],
)
@pytest.mark.parametrize("summary", only([None, "auto"], "auto"))
def test_a_stream_adds_up_to_the_response(
    gpt: openai.OpenAI, say: Say, text: str, summary: str | None
) -> None:
    """The client checks the order of the events on its own: each item, its parts and their
    deltas.
    """
    say(text)
    asked: Any = {
        "model": "default_model",
        "max_output_tokens": 400,
        "tools": [TOOL],
        "input": "Go.",
    }
    asked |= {"reasoning": {"summary": summary}, "include": ["reasoning.encrypted_content"]}
    whole = gpt.responses.create(**asked)
    with gpt.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert shown(streamed) == shown(whole)
    assert (streamed.status, streamed.output_text) == (whole.status, whole.output_text)
    assert (streamed.usage.output_tokens, streamed.usage.output_tokens_details) == (
        whole.usage.output_tokens,
        whole.usage.output_tokens_details,
    )
    texts = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert texts[-1:] == [whole.output_text][: len(texts)]


def test_the_events_come_in_the_protocols_order(server: Client, say: Say) -> None:
    say(f"<think>\nHm.\n</think>\n\nOk.\n{CALL}")
    events = raw_events(server, input="Go.", tools=[TOOL])
    kinds = [e["type"].removeprefix("response.") for e in events]
    # On a busy machine a reply may wait, and says at any place that it goes on.
    kinds[2:] = [kind for kind in kinds[2:] if kind != "in_progress"]
    assert [
        kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before
    ] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    added = [e for e in events if e["type"] == "response.output_item.added"]
    assert [(e["output_index"], e["item"]["type"], e["item"]["status"]) for e in added] == [
        (0, "reasoning", "in_progress"),
        (1, "message", "in_progress"),
        (2, "function_call", "in_progress"),
    ]
    created, completed = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert completed["output"] == [
        e["item"] for e in events if e["type"] == "response.output_item.done"
    ]
    assert [item["id"] for item in completed["output"]] == [e["item"]["id"] for e in added]
    assert completed["usage"]["output_tokens_details"]["reasoning_tokens"] == len("\nHm.\n") + 1


def test_a_summary_has_events_of_its_own(server: Client, say: Say) -> None:
    say("<think>\nHm.\n</think>\n\nOk.")
    events = raw_events(server, input="Go.", reasoning={"summary": "auto"})
    kinds = [e["type"].removeprefix("response.") for e in events if "summary" in e["type"]]
    assert [
        kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before
    ] == [
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ]
    assert events[-1]["response"]["output"][0]["summary"] == [
        {"type": "summary_text", "text": "Hm."}
    ]


def test_a_reply_that_is_cut_is_incomplete(server: Client, gpt: openai.OpenAI, say: Say) -> None:
    say("One, two, three.")
    cut = ask(gpt, "Count.", max_output_tokens=8)
    assert shown(cut) == [message("One, two", "incomplete")]
    assert (cut.status, cut.incomplete_details.reason, cut.completed_at) == (
        "incomplete",
        "max_output_tokens",
        None,
    )
    last = raw_events(server, input="Count.", max_output_tokens=8)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")


def test_events_say_that_something_goes_on_while_nothing_can_be_told(
    server: Client, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comments do not count for Codex, which hangs up."""
    monkeypatch.setattr(responses, "PROGRESS_SECONDS", 0.0)
    # Nothing of a call can be shown before its name.
    say(f'<tool_call>\n{{"arguments": {{"word": "{"x" * 200}"}}, "name": "look_up"}}\n</tool_call>')
    events = raw_events(server, input="Go. " * 300, tools=[TOOL])
    kinds = [event["type"] for event in events]
    # The prompt is computed in eight parts and more, and the call has two hundred tokens and more.
    goes_on = kinds[1 : kinds.index("response.output_item.added")]
    assert set(goes_on) == {"response.in_progress"}
    assert len(goes_on) >= 1 + 8 + 200 // 32
    assert events[3]["response"]["status"] == "in_progress"
    monkeypatch.setattr(responses, "PROGRESS_SECONDS", 1e9)
    assert [event["type"] for event in raw_events(server, input="Come. " * 60)].count(
        "response.in_progress"
    ) == 1
    server.settle()


# -- tools and conversations -----------------------------------------------------------------------


def test_a_tool_is_called_and_its_result_comes_back(
    server: Client, gpt: openai.OpenAI, say: Say
) -> None:
    say(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}", "A pool holds blocks.")
    first = ask(gpt, "What is a pool?", tools=[TOOL], instructions=SYSTEM)
    assert [item["type"] for item in shown(first)] == ["reasoning", "message", "function_call"]
    call = first.output[2]
    assert (call.name, json.loads(call.arguments), call.call_id[:5]) == (
        "look_up",
        {"word": "pool"},
        "call_",
    )
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It holds blocks."}
    said = [
        {"role": "user", "content": "What is a pool?"},
        *(item.to_dict() for item in first.output),
        result,
    ]
    second = ask(gpt, said, tools=[TOOL], instructions=SYSTEM)
    assert second.output_text == "A pool holds blocks."
    # The same conversation in the chat's words is the same prompt.
    function = {"name": "look_up", "arguments": '{"word": "pool"}'}
    turn = {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm."}
    chat: Any = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What is a pool?"},
        {**turn, "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "It holds blocks."},
    ]
    usage = gpt.chat.completions.create(
        model="default_model", messages=chat, tools=[CHAT_TOOL], max_tokens=2
    ).usage
    assert usage is not None
    assert usage.prompt_tokens == second.usage.input_tokens
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 1  # type: ignore[union-attr]


def test_a_response_is_gone_on_from_by_its_id(gpt: openai.OpenAI, say: Say) -> None:
    say(f"<think>\nHm.\n</think>\n\n{CALL}", "A pool holds blocks.", "Yes.")
    first = ask(gpt, "What is a pool?", tools=[TOOL], instructions=SYSTEM)
    result = {
        "type": "function_call_output",
        "call_id": first.output[-1].call_id,
        "output": "It holds blocks.",
    }
    second = ask(gpt, [result], tools=[TOOL], instructions=SYSTEM, previous_response_id=first.id)
    assert (second.previous_response_id, second.output_text) == (first.id, "A pool holds blocks.")
    assert second.usage.input_tokens_details.cached_tokens > len(SYSTEM)
    with gpt.responses.stream(
        model="default_model", input="Sure?", tools=[TOOL], previous_response_id=second.id
    ) as stream:
        third = stream.get_final_response()
    # Instructions are those of one response.
    whole = [
        {"role": "user", "content": "What is a pool?"},
        *(i.to_dict() for i in first.output),
        result,
    ]
    whole += [*(i.to_dict() for i in second.output), {"role": "user", "content": "Sure?"}]
    assert third.usage is not None
    assert third.usage.input_tokens == ask(gpt, whole, tools=[TOOL]).usage.input_tokens
    kept = gpt.responses.retrieve(third.id)
    assert (kept.id, kept.output_text, kept.usage, kept.status) == (
        third.id,
        "Yes.",
        third.usage,
        "completed",
    )
    # A reference stands for its item.
    referred = [
        whole[0],
        {"type": "item_reference", "id": first.output[0].id},
        {"type": "item_reference", "id": first.output[1].id},
    ]
    by_reference = ask(gpt, [*referred, result], tools=[TOOL], instructions=SYSTEM)
    assert by_reference.usage.input_tokens == second.usage.input_tokens


def test_what_is_not_stored_is_not_gone_on_from(gpt: openai.OpenAI, say: Say) -> None:
    say("Yes.")
    first = ask(gpt, "Is it?", store=False)
    assert first.store is False
    with pytest.raises(
        openai.BadRequestError, match="Send the whole conversation as input"
    ) as unknown:
        ask(gpt, "Sure?", previous_response_id=first.id)
    assert (unknown.value.param, unknown.value.type) == (
        "previous_response_id",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError, match="keeps the last ones only"):
        gpt.responses.retrieve(first.id)


def test_the_oldest_responses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptResponses()
    monkeypatch.setattr(HistoryConfig, "responses", 3)
    for i in range(5):
        kept.keep({"id": f"resp_{i}", "output": [{"id": f"msg_{i}"}]}, [{"text": "x"}])
    assert [kept.get(f"resp_{i}") is not None for i in range(5)] == [False, False, True, True, True]
    assert [kept.item(f"msg_{i}") for i in (1, 4)] == [None, {"id": "msg_4"}]
    monkeypatch.setattr(HistoryConfig, "response_characters", 1000)
    kept.keep({"id": "resp_5", "output": []}, [{"text": "x" * 800}])
    assert [kept.get(f"resp_{i}") is not None for i in range(6)] == [
        False,
        False,
        False,
        True,
        True,
        True,
    ]
    kept.keep({"id": "resp_6", "output": []}, [{"text": "x" * 2000}])
    assert not any(kept.get(f"resp_{i}") for i in range(7))


def test_thinking_that_a_client_sends_back_packed_is_read(gpt: openai.OpenAI, say: Say) -> None:
    say(f"<think>\nA long thought.\n</think>\n\n{CALL}", "Done.")
    asked: Any = {"tools": [TOOL], "store": False, "include": ["reasoning.encrypted_content"]}
    first = ask(gpt, "Go.", **asked)
    reasoning, call = (item.to_dict() for item in first.output)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "So."}
    user = {"role": "user", "content": "Go."}
    packed = {name: reasoning[name] for name in ("id", "type", "encrypted_content")} | {
        "summary": []
    }
    lengths = [
        ask(gpt, [user, *said, call, result], **asked).usage.input_tokens
        for said in ([reasoning], [packed], [{**packed, "encrypted_content": "somebody's"}])
    ]
    # The two tokens around it are one each.
    assert lengths[0] == lengths[1] == lengths[2] + len("\nA long thought.\n\n\n") + 2


@pytest.mark.parametrize("called", ["agents__spawn", "spawn"])
def test_a_function_in_a_namespace_is_called_and_comes_back(
    server: Client, say: Say, called: str
) -> None:
    say(f'<tool_call>\n{{"name": "{called}", "arguments": {{"word": "a"}}}}\n</tool_call>')
    events = raw_events(server, input="Go.", tools=[TOOL, SPAWN])
    call = events[-1]["response"]["output"][0]
    assert (call["type"], call["namespace"], call["name"], call["arguments"]) == (
        "function_call",
        "agents",
        "spawn",
        '{"word": "a"}',
    )
    assert [
        event["name"]
        for event in events
        if event["type"] == "response.function_call_arguments.done"
    ] == ["spawn"]
    # Sent back it is what a function of the long name would be.
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Done."}
    flat = {name: value for name, value in call.items() if name != "namespace"} | {
        "name": "agents__spawn"
    }
    plain = {"type": "function", "name": "agents__spawn", "parameters": TOOL["parameters"]}
    lengths = [
        server.send(
            "/v1/responses/input_tokens",
            {"input": [{"role": "user", "content": "Go."}, item, result], "tools": tools},
        )
        for item, tools in ((call, [TOOL, SPAWN]), (flat, [TOOL, plain]))
    ]
    assert lengths[0] == lengths[1]


def test_tools_of_the_vendors_servers_are_left_out(
    server: Client, say: Say, caplog: pytest.LogCaptureFixture
) -> None:
    say("Yes.")
    body: Any = {
        "input": "Go.",
        "tools": [
            {"type": "web_search", "external_web_access": False},
            TOOL,
            {"type": "custom", "name": "x"},
        ],
    }
    with caplog.at_level("INFO"):
        status, answer = server.send("/v1/responses", {**body, "max_output_tokens": 20})
    assert (status, answer["output"][0]["content"][0]["text"]) == (200, "Yes.")
    assert [m for m in caplog.messages if "left out" in m] == [
        "left out tools that only a vendor's servers run, or that are not functions: web_search, "
        "custom"
    ]
    counts = [
        server.send("/v1/responses/input_tokens", {**body, "tools": tools})[1]
        for tools in (body["tools"], [TOOL])
    ]
    assert counts[0] == counts[1]


def test_the_tokens_of_a_prompt_are_counted(server: Client, gpt: openai.OpenAI, say: Say) -> None:
    say("Yes.")
    body: Any = {"input": "What is a pool?", "instructions": SYSTEM, "tools": [TOOL]}
    counted = gpt.responses.input_tokens.count(model="default_model", **body)
    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens",
        ask(gpt, body.pop("input"), **body).usage.input_tokens,
    )
    status, answer = server.send("/v1/responses/input_tokens", {"input": 5})
    assert (status, answer["error"]["param"]) == (400, "input")


def test_choices_of_tools(gpt: openai.OpenAI, say: Say) -> None:
    say(f"{CALL}\n{CALL}")
    assert [i["type"] for i in shown(ask(gpt, "Go.", tools=[TOOL]))] == ["function_call"] * 2
    assert [i["type"] for i in shown(ask(gpt, "Go.", tools=[TOOL], parallel_tool_calls=False))] == [
        "function_call"
    ]
    assert [i["type"] for i in shown(ask(gpt, "Go.", tools=[TOOL], tool_choice="none"))] == [
        "message"
    ]
    # What is said here stands behind the beginning of a call.
    say(f'\n{{"name": "look_up", "arguments": {{"word": "a"}}}}\n</tool_call>\n{CALL}')
    for choice, words in (
        ("required", ["a", "pool"]),
        ({"type": "function", "name": "look_up"}, ["a"]),
    ):
        forced = ask(gpt, "Go.", tools=[TOOL, ADD, SPAWN], tool_choice=choice)
        assert [(i["type"], i["arguments"]) for i in shown(forced)] == [
            ("function_call", json.dumps({"word": word})) for word in words
        ]
        assert forced.to_dict()["tool_choice"] == choice


def test_unknown_values_of_optional_fields_have_no_effect_and_are_logged(
    gpt: openai.OpenAI, say: Say, caplog: pytest.LogCaptureFixture
) -> None:
    say("Yes.")
    with caplog.at_level("INFO"):
        assert (
            ask(gpt, "Go.", reasoning={"effort": "enormous", "summary": "rhymed"}).output_text
            == "Yes."
        )
    for logged in ("reasoning.effort: 'enormous'", "reasoning.summary: 'rhymed'"):
        assert logged in caplog.text


def test_effort_none_ends_the_thinking_before_it_begins(gpt: openai.OpenAI, say: Say) -> None:
    say("Yes.")
    on, off = (
        ask(gpt, "Go.", reasoning={"effort": effort}).usage.input_tokens
        for effort in ("high", "none")
    )
    assert off == on + len("\n\n\n\n") + 2


def test_both_protocols_and_all_roles_make_one_prompt(
    server: Client, gpt: openai.OpenAI, say: Say
) -> None:
    say("Yes.")
    parts = [{"type": "input_text", "text": "One. "}, {"type": "input_text", "text": "Two."}]
    said = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
    ]
    said += [
        {"role": "assistant", "content": [{"type": "output_text", "text": "Three."}]},
        {"role": "user", "content": "Four?"},
    ]
    other: Any = [
        {"role": "user", "content": "One. Two."},
        {"role": "assistant", "content": "Three."},
    ]
    claude = anthropic_client(server).messages.count_tokens(
        model="default_model",
        system="Be brief.",
        messages=[*other, {"role": "user", "content": "Four?"}],
    )
    assert ask(gpt, said).usage.input_tokens == claude.input_tokens


# -- errors and clients that leave -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": None}, "input", "Field required"),
        ({"input": []}, "input", "Field required"),
        ({"input": 7}, "input", "valid list; found 7"),
        ({"input": [7]}, "input[0]", "valid dictionary"),
        (
            {"input": [{"type": "web_search_call", "id": "x"}]},
            "input[0].type",
            "function_call_output",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "is not known"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "robot"),
        ({"input": [{"role": "user"}]}, "input[0].content", "Field required"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
            "input_file",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input[0].content[0].image_url",
            "file",
        ),
        (
            {"input": [{"type": "function_call", "name": "a", "call_id": "b", "arguments": "a"}]},
            "input[0].arguments",
            "be JSON",
        ),
        (
            {"input": [{"type": "function_call", "name": "a", "call_id": "b", "arguments": "[]"}]},
            "input[0].arguments",
            "dictionary",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "b"}]},
            "input[0].output",
            "Field required",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "tools[0].tools[0].name",
            "Field required",
        ),
        (
            {"tools": [SPAWN, {"type": "function", "name": "agents__spawn"}]},
            "tools[1].name",
            "'agents__spawn'",
        ),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice",
            "that are functions",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "Field required"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "any"}, "tool_choice", "'auto', 'none' or 'required'; found 'any'"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "not found"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            "Field required",
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"anyOf": [{"not": {}}]}}}},
            "text.format.schema.anyOf[0].not",
            "not",
        ),
        (
            {
                "tools": [
                    {"type": "function", "name": "a", "strict": True, "parameters": {"not": {}}}
                ]
            },
            "tools[0].parameters.not",
            "not",
        ),
        ({"reasoning": {"effort": 7}}, "reasoning.effort", "valid string"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"temperature": -1}, "temperature", "greater"),
        ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"background": True}, "background", "not computed"),
        ({"conversation": "conv_1"}, "conversation", "stores none"),
        ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
        ({"prompt_cache_retention": "1h"}, None, "'in_memory' or '24h'"),
        ({"session_id": 7}, None, "session_id must be a string"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_place(
    gpt: openai.OpenAI, body: Any, param: str | None, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gpt.post(
            "/responses", body={"input": "Go.", "max_output_tokens": 2, **body}, cast_to=object
        )
    assert words in refused.value.body["message"]  # type: ignore[index]
    assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")


def test_images_need_a_model_that_sees(gpt: openai.OpenAI) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    with pytest.raises(openai.BadRequestError, match="takes no images") as refused:
        ask(gpt, [{"role": "user", "content": [{"type": "input_text", "text": "See."}, image]}])
    assert "input[0].content[1]" in refused.value.body["message"]  # type: ignore[index]


def test_other_errors(server: Client, gpt: openai.OpenAI) -> None:
    capacity = server.capacity()
    with pytest.raises(openai.BadRequestError, match=str(capacity)) as long:
        ask(gpt, "y" * (capacity + 50))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="no/such") as unknown:
        ask(gpt, "Go.", model="no/such")
    assert unknown.value.code == "model_not_found"
    for raw in (b"{", b"[]", b"\xff", b'{"input": ' + b"[" * 100_000):
        status, answer = server.send("/v1/responses", raw=raw)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    for path in ("/v1/responses/resp_x/cancel", "/v1/responses/compact"):
        status, answer = server.send(path, {})
        assert (status, path in answer["error"]["message"]) == (404, True)


def test_a_failure_in_mid_stream_is_the_last_event(
    server: Client,
    gpt: openai.OpenAI,
    fourth_word_fails: Callable[[Exception], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fourth_word_fails(LookupError("no word for this"))
    events = raw_events(server, input="speak", max_output_tokens=10)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]) == (
        "failed",
        {"code": "server_error", "message": "no word for this"},
    )
    monkeypatch.undo()
    assert ask(gpt, "speak", max_output_tokens=4).usage.output_tokens == 4


def test_a_client_that_leaves_ends_its_reply(server: Client, gpt: openai.OpenAI, say: Say) -> None:
    say("x" * 3000)
    with gpt.responses.create(
        model="default_model", input="Go.", max_output_tokens=3000, stream=True
    ) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    server.settle()
    assert server.generator.registry.loaded
    say("Yes.")
    assert ask(gpt, "Go.").output_text == "Yes."


def test_a_client_that_leaves_before_it_is_answered(
    server: Client, gpt: openai.OpenAI, say: Say
) -> None:
    say("Yes.")
    body = json.dumps({"input": "A long prompt. " * 100, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            "POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            f"{len(body)}\r\n\r\n".encode()
            + body
        )
    server.settle()
    assert ask(gpt, "Go.").output_text == "Yes."


def test_several_at_once(server: Client, gpt: openai.OpenAI) -> None:
    async def together() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0
        ) as client:
            asked = [
                {"model": "default_model", "input": f"Number {i}", "max_output_tokens": 6}
                for i in range(6)
            ]
            return await asyncio.gather(*(client.responses.create(**one) for one in asked))  # type: ignore[call-overload]

    answers = asyncio.run(together())
    alone = [ask(gpt, f"Number {i}", max_output_tokens=6) for i in range(6)]
    assert [a.output_text for a in answers] == [a.output_text for a in alone]


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "input_text", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "role",
                    "content",
                    "text",
                    "id",
                    "name",
                    "call_id",
                    "output",
                    "arguments",
                    "summary",
                    "effort",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
KINDS = st.sampled_from(
    ["message", "reasoning", "function_call", "function_call_output", "item_reference", "x"]
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": KINDS,
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]),
        "content": ODD | st.just("Hi."),
        "call_id": st.just("c") | ODD,
        "name": st.just("add") | ODD,
        "arguments": st.sampled_from(["{}", "[", ""]) | ODD,
        "output": st.just("So.") | ODD,
        "summary": ODD,
        "encrypted_content": ODD,
        "id": st.just("i") | ODD,
    },
)
FIELDS = (
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "reasoning",
    "text",
    "metadata",
    "store",
    "include",
    "user",
    "previous_response_id",
    "model",
    "truncation",
    "prompt_cache_retention",
    "stream_options",
    "top_k",
)


@tried(15, 500, suppress_health_check=list(HealthCheck))
@given(
    said=st.just("Hi.") | st.lists(ITEM, max_size=4) | ODD,
    odd=st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=2),
)
def test_odd_bodies_are_the_clients_error(server: Client, said: Any, odd: dict[str, Any]) -> None:
    status, answer = server.send("/v1/responses", {"input": said, "max_output_tokens": 2, **odd})
    assert status in (200, 400, 404), answer
    if status != 200:
        assert answer["error"]["message"]
        assert "Traceback" not in answer["error"]["message"]


def test_after_all_of_this_the_server_is_well(server: Client, gpt: openai.OpenAI) -> None:
    assert ask(gpt, "Still there?", max_output_tokens=3).usage.output_tokens == 3
