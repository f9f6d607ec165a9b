"""Calls that are sent as they are generated, through the clients of all four protocols."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import anthropic
import ollama
import openai
import pytest
from thorough import only

from server.scripted import LOOK_UP, Say
from server.serving import Client

pytestmark = pytest.mark.server("--pool-bytes 20MB", model="agent")

ASKED: Any = [{"role": "user", "content": "Go."}]
SCHEMA = LOOK_UP["input_schema"]
CHAT_TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
TOOL: Any = {"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": False}
# Tokens are characters, which cut escapes; only in escapes they are not ASCII.
WORD = 'é🎉 "a\\b"\n\t\u2028 \x07</tool>' + "x" * 8


class Streamed(NamedTuple):
    """A stream: the parts of its calls' arguments, each call's in a list, its text and its end."""

    parts: list[list[str]]
    text: str
    end: str | None


def of_chat(gpt: openai.OpenAI, **options: Any) -> Streamed:
    chunks = gpt.chat.completions.create(
        **{"model": "m", "messages": ASKED, "max_tokens": 400, "stream": True, **options}
    )
    parts: list[list[str]] = []
    text, end = "", None
    for chunk in chunks:
        (choice,) = chunk.choices
        for call in choice.delta.tool_calls or ():
            if call.index == len(parts):
                assert (call.id[:5], call.type, call.function.name) == (
                    "call_",
                    "function",
                    "look_up",
                )
                parts.append([])
            else:
                assert (call.id, call.type, call.function.name) == (None, None, None)
            parts[call.index].append(call.function.arguments)
        text += choice.delta.content or ""
        end = choice.finish_reason or end
    return Streamed(parts, text, end)


def of_messages(claude: anthropic.Anthropic, **options: Any) -> Streamed:
    parts: list[list[str]] = []
    text, end = "", None
    for event in claude.messages.create(
        **{"model": "m", "messages": ASKED, "max_tokens": 400, "stream": True, **options}
    ):
        if event.type == "content_block_start" and event.content_block.type == "tool_use":
            assert (event.content_block.name, event.content_block.input) == ("look_up", {})
            parts.append([])
        elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            parts[-1].append(event.delta.partial_json)
        elif event.type == "content_block_delta":
            text += event.delta.text
        elif event.type == "message_delta":
            end = event.delta.stop_reason
    return Streamed(parts, text, end)


def of_responses(gpt: openai.OpenAI, **options: Any) -> tuple[Streamed, list[Any]]:
    """The stream, and the output of the response at its end."""
    parts: list[list[str]] = []
    text, output, end = "", [], None
    for event in gpt.responses.create(
        **{"model": "m", "input": "Go.", "max_output_tokens": 400, "stream": True, **options}
    ):
        if event.type == "response.output_item.added" and event.item.type == "function_call":
            assert (event.item.name, event.item.arguments) == ("look_up", "")
            parts.append([])
        elif event.type == "response.function_call_arguments.delta":
            parts[-1].append(event.delta)
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == "".join(parts[-1])
        elif event.type == "response.output_text.delta":
            text += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            output, end = event.response.output, event.response.status
    return Streamed(parts, text, end), output


def call_of(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "look_up", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("is_ascii", only([False, True], False))
def test_the_parts_are_the_whole_call_in_every_protocol(
    gpt: openai.OpenAI, claude: anthropic.Anthropic, server: Client, say: Say, is_ascii: bool
) -> None:
    word = WORD if is_ascii else WORD.encode("ascii", "ignore").decode()
    arguments = {"word": word, "more": [1, 2.50, {"a": None}, []]}
    say(f"Ok.{call_of(json.dumps(arguments, ensure_ascii=is_ascii))}")
    whole = gpt.chat.completions.create(
        model="m", messages=ASKED, tools=[CHAT_TOOL], max_tokens=400
    )
    (call,) = whole.choices[0].message.tool_calls or ()
    expected = json.dumps(arguments, ensure_ascii=False)
    assert call.function.arguments == expected  # type: ignore[union-attr]
    chat = of_chat(gpt, tools=[CHAT_TOOL])
    messages = of_messages(claude, tools=[LOOK_UP])
    response, output = of_responses(gpt, tools=[TOOL])
    assert (chat.end, messages.end, response.end) == ("tool_calls", "tool_use", "completed")
    assert output[-1].arguments == expected
    for streamed in (chat, messages, response):
        assert streamed.text == "Ok."
        (parts,) = streamed.parts
        assert "".join(parts) == expected
        # One packet for each token that shows something: characters, here.
        assert len(parts) == len(chat.parts[0]) >= len(WORD)
        assert max(map(len, parts)) <= 8
    sdk = ollama.Client(f"http://127.0.0.1:{server.port}")
    pieces = list(
        sdk.chat("m", ASKED, tools=[CHAT_TOOL], stream=True, options={"num_predict": 400})
    )
    calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [arguments]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_malformed_call_is_incomplete_and_its_text_follows(
    gpt: openai.OpenAI, claude: anthropic.Anthropic, say: Say, is_cut: bool
) -> None:
    """The conversation goes on after it."""
    text = call_of('{"word": "pool')
    say(text)
    most = len(text) - 30 if is_cut else 400
    ends = ("length", "max_tokens", "incomplete") if is_cut else ("stop", "end_turn", "completed")
    whole = gpt.chat.completions.create(
        model="m", messages=ASKED, tools=[CHAT_TOOL], max_tokens=most
    )
    assert whole.choices[0].message.tool_calls is None
    shown = whole.choices[0].message.content
    chat = of_chat(gpt, tools=[CHAT_TOOL], max_tokens=most)
    messages = of_messages(claude, tools=[LOOK_UP], max_tokens=most)
    response, output = of_responses(gpt, tools=[TOOL], max_output_tokens=most)
    for streamed, end in zip((chat, messages, response), ends, strict=True):
        assert (streamed.text, streamed.end) == (shown, end)
        (parts,) = streamed.parts
        assert '{"word": "pool}}'.startswith("".join(parts))
        assert len(parts) > 5
    broken = "".join(chat.parts[0])
    assert (output[0].status, output[0].arguments) == ("incomplete", broken)
    say("Again.")
    error = "not JSON"
    call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": broken}}
    turns = [
        *ASKED,
        {"role": "assistant", "content": shown, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": error},
    ]
    assert of_chat(gpt, tools=[CHAT_TOOL], messages=turns).text == "Again."
    items = [
        {"role": "user", "content": "Go."},
        *(item.to_dict() for item in output),
        {"type": "function_call_output", "call_id": output[0].call_id, "output": error},
    ]
    assert of_responses(gpt, tools=[TOOL], input=items)[0].text == "Again."


def test_text_that_looks_like_a_call_streams_at_once(gpt: openai.OpenAI, say: Say) -> None:
    text = call_of('{"word": "pool"}')
    say(text)
    chunks = gpt.chat.completions.create(model="m", messages=ASKED, max_tokens=400, stream=True)
    pieces = [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(filter(None, pieces)) == text
    # The markers, and each character between them but space, which comes with the next one.
    assert len(pieces) >= 2 + len("".join(text.split())) - len("<tool_call></tool_call>")
