"""Reading of replies and the blocks that they become: stop words across tokens, held back text,
calls, space, usage.
"""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import TextStateMachine
from mlx_lm.tool_parsers import glm47, json_tools, pythonic

from mlx_blockpool.server.api.anthropic import MessageRenderer, input_usage
from mlx_blockpool.server.api.call_stream import Call, CallCut, CallPart
from mlx_blockpool.server.api.reply import (
    CALLS,
    END_OF_TURN,
    MAX_TOKENS,
    OUT_OF_CONTEXT,
    STOP_WORD,
    BlockEnd,
    ReplyBlocks,
    ReplyParser,
    Silence,
    Text,
    Thinking,
)
from mlx_blockpool.server.prompts.job import PreparedPrompt
from mlx_blockpool.server.request import ChatRequest, ParsedRequest

START, END = "<tool_call>", "</tool_call>"
EDGES = {
    "normal": [("<think>", "reasoning"), (START, "tool")],
    "reasoning": [("</think>", "normal"), (START, "tool")],
    "tool": [(END, "normal")],
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def reading(words: list[str] | None = None, **options: Any) -> ReplyParser:
    """Of a reply to a request with one tool."""
    context = Namespace(
        text_sm=TextStateMachine(EDGES),
        initial_state=options.pop("state", "normal"),
        tool_parser=options.pop("parser", json_tools.parse_tool_call),
    )
    prepared = PreparedPrompt(call=(START, END))
    request = ChatRequest(
        "chat",
        "",
        [],
        options.pop("tools", TOOLS),
        None,
        prepared=prepared,
        calls=options.pop("calls", "may"),
    )
    # No stop word is found by its tokens here.
    request.tokenizer = Namespace(encode=lambda *_, **__: [-1])
    arguments: Any = Namespace(stop_words=words or [], max_tokens=options.pop("max_tokens", 1))
    return ReplyParser(
        ParsedRequest(request, arguments, None, options.pop("one_call", False)),
        context,
        shows_parts=options.pop("shows_parts", False),
    )


def responses(texts: list[str], reason: str = "stop") -> list[Any]:
    """mlx-lm's responses; the token that ends a turn adds no text."""
    given = [*texts, ""] if reason == "stop" else texts
    reasons = [None] * (len(given) - 1) + [reason]
    return [
        Namespace(text=text, token=i, finish_reason=r)
        for i, (text, r) in enumerate(zip(given, reasons, strict=True))
    ]


def events_of(parser: ReplyParser, given: list[Any]) -> list[Any]:
    """All events of a reply."""
    return [*(event for response in given for event in parser.add(response)), *parser.end()]


def read(parser: ReplyParser, texts: list[str], reason: str = "stop") -> list[Any]:
    """The pieces, those of one kind in one."""
    pieces: list[Any] = []
    for response in responses(texts, reason):
        if parser.reason is None:
            pieces += parser.parse(response)
    joined: list[Any] = []
    for kind, group in itertools.groupby(pieces, type):
        same = list(group)
        joined += same if kind is Call else [kind("".join(p.text for p in same))]
    return joined


@pytest.mark.parametrize(("reason", "words"), [("length", None), ("stop", ["STOP"])])
def test_a_call_that_was_cut_is_no_shorter_call(reason: str, words: list[str] | None) -> None:
    """Parsers of tags leave out an argument whose end is missing."""
    call = f"{START}run<arg_key>path</arg_key><arg_value>/a</arg_value><arg_key>dry</arg_key>"
    written = f"{call}<arg_value>tr{'' if words is None else 'STOP'}"
    parser = reading(words, parser=glm47.parse_tool_call)
    assert read(parser, list(written), reason) == [Text(f"{call}<arg_value>tr")]
    assert parser.num_calls == 0


# -- stop words ------------------------------------------------------------------------------------


def test_a_stop_word_ends_a_reply_however_it_was_tokenized() -> None:
    own = reading(["END", "no"])
    assert read(own, ["One E", "N", "D two", " three"]) == [Text("One ")]
    assert (own.reason, own.stop_word, len(own.tokens)) == (STOP_WORD, "END", 3)


def test_a_stop_word_that_the_engine_has_found_by_its_tokens() -> None:
    own, found = reading(["END"]), responses(["aEE", "N", "D"], "length")
    found[-1].finish_reason = "stop"
    assert [piece for response in found for piece in own.parse(response)] == [Text("a"), Text("E")]
    assert (own.reason, own.stop_word) == (STOP_WORD, "END")


def test_what_was_held_back_for_a_stop_word_is_told_at_the_end() -> None:
    for reason, expected in (("stop", END_OF_TURN), ("length", MAX_TOKENS)):
        own = reading(["END"])
        assert read(own, ["One E", "N"], reason) == [Text("One EN")]
        assert (own.reason, own.stop_word) == (expected, None)


def test_what_was_held_back_for_a_marker_is_told_at_the_end() -> None:
    assert read(reading(), ["a <", "tool"]) == [Text("a <tool")]
    assert read(reading(["x"]), ["a ", "<"]) == [Text("a <")]


@given(
    st.text("abE<", max_size=30),
    st.integers(1, 5),
    st.lists(st.text("abE<", min_size=1, max_size=4), max_size=3, unique=True),
)
def test_a_reply_is_told_up_to_the_first_stop_word(text: str, size: int, words: list[str]) -> None:
    own = reading(words)
    told = read(own, [text[i : i + size] for i in range(0, len(text), size)])
    found = [(text.index(word) + len(word), -len(word), word) for word in words if word in text]
    expected = text
    if found:
        end, length, word = min(found)
        expected = text[: end + length]
        assert own.stop_word == word
    assert "".join(piece.text for piece in told) == expected


# -- calls and thinking ----------------------------------------------------------------------------


def test_calls_and_thinking_in_their_order() -> None:
    own = reading()
    assert read(own, ["<thi", "nk>H", "m.", "</think>", "Ok.", ADD, "\n", ADD]) == [
        Thinking("Hm."),
        Text("Ok."),
        Call(None, "add", {"a": 1}),
        Text("\n"),
        Call(None, "add", {"a": 1}),
    ]
    assert (own.num_calls, own.num_thinking) == (2, 2)


@pytest.mark.parametrize(
    "written",
    [
        "add 1",
        '{"name": "add"}',
        '{"name": 7, "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        "[]",
        "7",
        '{"arguments": "{"}',
    ],
)
def test_what_is_no_call_is_text(written: str) -> None:
    own = reading()
    assert read(own, [f"{START}{written}{END}"]) == [Text(f"{START}{written}{END}")]
    assert own.num_calls == 0


def test_a_call_that_was_cut_is_text_and_one_without_its_end_is_a_call() -> None:
    cut = ADD[: -len(END) - 3]
    assert read(reading(), [cut], "length") == [Text(cut)]
    assert read(reading(), [ADD.removesuffix(END) + "</tool"]) == [Call(None, "add", {"a": 1})]
    for reason in ("stop", "length"):
        assert read(reading(), [f"{cut}</tool"], reason) == [Text(f"{cut}</tool")]
        assert read(reading(tools=None), [f"{cut}</tool"], reason) == [Text(f"{cut}</tool")]


def test_a_reply_that_was_begun_with_a_call() -> None:
    assert read(reading(state="tool"), [ADD.removeprefix(START)]) == [Call(None, "add", {"a": 1})]


def test_arguments_in_a_string_and_ids_of_the_model() -> None:
    written = json.dumps({"name": "add", "id": "functions.add:0", "arguments": '{"a": 2}'})
    assert read(reading(), [f"{START}{written}{END}"]) == [Call("functions.add:0", "add", {"a": 2})]


def test_a_parser_that_gives_several_calls() -> None:
    own = reading(parser=pythonic.parse_tool_call, one_call=True)
    assert read(own, [f"{START}[add(a=1), add(a=2)]{END}", "more"]) == [Call(None, "add", {"a": 1})]
    assert (own.reason, own.num_calls, len(own.tokens)) == (CALLS, 1, 1)


def test_calls_that_nobody_offered_are_text() -> None:
    for options in ({"tools": None}, {"calls": "never"}):
        assert read(reading(**options), [ADD]) == [Text(ADD)]


def test_tokens_that_show_nothing_are_silence() -> None:
    parser = reading()
    pieces = [
        parser.parse(response)
        for response in responses([START, '{"name": "add", ', '"arguments": {}}', END])
    ]
    assert pieces == [[], [], [], [Call(None, "add", {})], []]


def test_the_name_of_a_call_comes_first_and_its_last_brace_with_its_end() -> None:
    parser = reading(shows_parts=True)
    texts = [START, '{"name": "ad', 'd"', ', "arguments": {', '"a": "x', "y", '"}}', END]
    pieces = [parser.parse(response) for response in responses(texts)]
    assert pieces == [
        *([], [], [CallPart(None, "add", "{")], []),
        *([CallPart(None, "add", '"a": "x')], [CallPart(None, "add", "y")]),
        *([CallPart(None, "add", '"')], [Call(None, "add", {"a": "xy"})], []),
    ]


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ('{"name": "add", "arguments": {"a": 1', '{"a": '),
        ('{"name": "add", "arguments": {"a": 1, "b": "x', '{"a": 1, "b": "x'),
        ('{"name": "add", "arguments": {"a": 1}]', '{"a": 1'),
        ('{"name": "add", "arguments": 7}', "{"),
        ('{"name": "add", "arguments": {"a": "\n"}}', '{"a": "'),
    ],
)
def test_a_malformed_call_ends_without_its_brace_and_is_text(
    written: str, sent: str, reason: str
) -> None:
    parser, given = reading(shows_parts=True), responses([f"{START}{written}", END], reason)
    pieces = [piece for response in given for piece in parser.parse(response)]
    parts = [piece for piece in pieces if isinstance(piece, CallPart)]
    assert "".join(part.text for part in parts) == sent
    assert pieces[len(parts) :] == [CallCut(), Text(f"{START}{written}{END}")]
    assert parser.reason == (END_OF_TURN if reason == "stop" else MAX_TOKENS)


def test_a_call_whose_beginning_was_wrong_comes_again_as_it_is() -> None:
    parser = reading(shows_parts=True)
    written = '{"name": "add", "arguments": {"a": 1, "a": 2}}'
    pieces = [piece for each in responses([START, written, END]) for piece in parser.parse(each)]
    assert pieces[-2:] == [CallCut(), Call(None, "add", {"a": 2})]
    assert (parser.num_calls, parser.reason) == (1, CALLS)


def test_a_call_ends_when_the_next_one_begins() -> None:
    for one_call in (False, True):
        parser = reading(parser=pythonic.parse_tool_call, shows_parts=True, one_call=one_call)
        pieces = [
            [type(piece) for piece in parser.parse(response)]
            for response in responses([START, "[add(a=1)", ", add(", "a=2)]", END])
            if parser.reason is None
        ]
        assert pieces == (
            [[], [CallPart, CallPart], [Call]]
            if one_call
            else [[], [CallPart, CallPart], [Call, CallPart], [CallPart], [Call], []]
        )


def test_calls_that_were_not_offered_stream_as_text() -> None:
    for options in ({"tools": None}, {"calls": "never"}):
        parser = reading(**options)
        texts = ["a ", START, '{"name', '": "add"', "}", END, " b"]
        pieces = [parser.parse(response) for response in responses(texts)]
        assert pieces == [[Text(text)] for text in texts] + [[]]


# -- blocks ----------------------------------------------------------------------------------------


def blocks(*pieces: Any) -> list[Any]:
    """What each block says, after Anthropic's rendering of the events."""
    made = ReplyBlocks()
    content = rendered([*(event for piece in pieces for event in made.add(piece)), *made.end()])
    assert made.text == "".join(b["text"] for b in content if b["type"] == "text")
    assert made.thinking == "".join(b["thinking"] for b in content if b["type"] == "thinking")
    return [b.get("text", b.get("thinking", b.get("name"))) for b in content]


def rendered(events: list[Any]) -> list[Any]:
    """The content blocks of a message."""
    reader = reading()
    body = Namespace(shows_thinking=True, max_tokens=1, model="m", stream=True)
    arguments: Any = Namespace(stop_words=[], max_tokens=1, logprobs=False, top_logprobs=0)
    renderer = MessageRenderer(
        ParsedRequest(reader._request, arguments, body, False), reader._context
    )
    indices = [each["index"] for event in events for each in renderer._render(event)]  # type: ignore[index]
    assert indices == sorted(indices)
    return renderer._content


def test_space_at_the_edges_of_blocks_is_the_templates() -> None:
    call = Call(None, "add", {})
    assert blocks(Text(" a"), Text(" \n"), Text("b"), Text("\n")) == [" a \nb\n"]
    assert blocks(Text("a"), Text("\n\n"), call, Text("\n"), call) == ["a", "add", "add"]
    assert blocks(Thinking("\n"), Thinking("Hm.\n"), Text("\n\n"), Text("Yes.")) == ["Hm.", "Yes."]
    assert blocks(Thinking("\n\n"), Text("\n\nYes.")) == ["Yes."]
    assert blocks(Text("\n"), call, Text("\nDone. ")) == ["add", "Done. "]
    assert blocks(Text("\n")) == [""]
    assert blocks() == [""]


def test_the_end_of_a_block_has_all_of_it_and_says_whether_it_was_cut() -> None:
    for reason in ("stop", "length"):
        parser = reading()
        assert events_of(parser, responses(["<think>", "Hm", ".</think>", "Yes", "."], reason)) == [
            Thinking("Hm"), Thinking("."), BlockEnd("Hm."),
            Text("Yes"), Text("."), BlockEnd("Yes.", is_cut=reason == "length"),
        ]  # fmt: skip
        assert (len(parser.tokens), parser.num_thinking) == (6 if reason == "stop" else 5, 2)


def test_why_a_reply_has_ended() -> None:
    def reason_of(
        texts: list[str], reason: str = "stop", words: list[str] | None = None, **options: Any
    ) -> Any:
        parser = reading(words, **options)
        events_of(parser, responses(texts, reason))
        return parser.reason

    assert (reason_of(["a"]), reason_of(["a"], "length"), reason_of([ADD])) == (
        END_OF_TURN,
        MAX_TOKENS,
        CALLS,
    )
    assert reason_of(["a"], "length", max_tokens=2) == OUT_OF_CONTEXT
    assert reason_of([ADD, "END"], words=["END"]) == reason_of(["END"], words=["END"]) == STOP_WORD


def test_silence_is_an_event_after_many_tokens_that_show_nothing() -> None:
    hidden = [START, '{"name": "add", "arguments": {"a": "', *["x"] * 62, '"}}', END]
    events = events_of(reading(), responses(hidden))
    assert [type(event) for event in events] == [Silence, Silence, CallPart, Call]


def test_calls_are_remembered_in_the_other_protocols_shape() -> None:
    made = ReplyBlocks()
    call = Call("functions.add:0", "add", {"a": "ä"})
    part = CallPart("functions.add:0", "add", '{"a": "ä"}')
    assert list(made.add(call)) == [part, call]
    assert made.calls == [call]
    assert rendered([part, call]) == [
        {"type": "tool_use", "id": "functions.add:0", "name": "add", "input": {"a": "ä"}}
    ]
    function = {"name": "add", "arguments": '{"a": "ä"}'}
    assert call.openai(call.id) == {
        "id": "functions.add:0",
        "type": "function",
        "function": function,
    }


# -- usage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached", "marks", "expected"),
    [
        (0, [], (0, 100, 0, 0)),
        (40, [], (0, 60, 0, 40)),
        (0, [(30, 300)], (70, 30, 0, 0)),
        (20, [(30, 3600), (80, 300)], (20, 50, 10, 20)),
        (50, [(30, 3600), (80, 300)], (20, 30, 0, 50)),
        (90, [(80, 300)], (10, 0, 0, 90)),
        (99, [(100, 3600)], (0, 0, 1, 99)),
    ],
)
def test_usage_adds_up(
    cached: int, marks: list[tuple[int, int]], expected: tuple[int, ...]
) -> None:
    usage = input_usage(100, cached, marks)
    created = usage["cache_creation"]
    found = (
        usage["input_tokens"],
        created["ephemeral_5m_input_tokens"],
        created["ephemeral_1h_input_tokens"],
    )
    assert (*found, usage["cache_read_input_tokens"]) == expected
    assert usage["cache_creation_input_tokens"] == found[1] + found[2]
    assert sum(expected) == 100
