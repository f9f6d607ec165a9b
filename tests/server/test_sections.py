"""Replies that keep a form: their tokens say what is thinking, content and calls, whatever their
text says.
"""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
from forms.vocabularies import tokenizer_of, vocabulary_of
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import make_text_state_machine
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tool_parsers import json_tools, pythonic, qwen3_coder
from thorough import tried

from mlx_blockpool.forms.output_format import OutputFormat
from mlx_blockpool.server.api.call_stream import Call, CallPart
from mlx_blockpool.server.api.completions import Packets, TextRenderer
from mlx_blockpool.server.api.reply import CALLS, ReplyParser, Text, Thinking
from mlx_blockpool.server.api.sections import Mark, Section, Sections
from mlx_blockpool.server.prompts.job import PreparedPrompt
from mlx_blockpool.server.request import ChatRequest, ParsedRequest, PromptRequest

KINDS = ["bpe", "spm", "prefixed", "naive"]
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}, "strict": True}}]
NASTY = 'é🎉 <think>a</think> b </tool_call> <tool_call>{"} c'
CONTENT = json.dumps({"text": NASTY}, ensure_ascii=False)
CALL = json.dumps({"name": "add", "arguments": {"text": NASTY}}, ensure_ascii=False)
CALLED = Call(None, "add", {"text": NASTY})
JSON = OutputFormat("json", "{}", "response_format")


def reading(
    kind: str, words: list[str] | None = None, state: str = "normal", **options: Any
) -> ReplyParser:
    """Of a reply that keeps a form."""
    tokenizer = tokenizer_of(kind)
    sm = make_text_state_machine(tokenizer)
    context = Namespace(text_sm=sm, initial_state=state, tool_parser=json_tools.parse_tool_call)
    may_call, begun = options.pop("may_call", True), options.pop("begun", "start")
    shows_parts = options.pop("shows_parts", False)
    request = ChatRequest("chat", "", [], options.pop("tools", TOOLS), None, **options)
    compiled: Any = Namespace(
        state="thinking" if state == "reasoning" else begun, may_call=may_call
    )
    request.compiled, request.tokenizer, request.prepared = (
        compiled,
        tokenizer,
        PreparedPrompt(call=MARKERS[2:]),
    )
    return ReplyParser(parsed(request, words), context, shows_parts=shows_parts)


def parsed(request: Any, words: list[str] | None = None, one_call: bool = False) -> ParsedRequest:
    arguments: Any = Namespace(stop_words=words or [], max_tokens=9, logprobs=False, top_logprobs=0)
    return ParsedRequest(request, arguments, Namespace(logprobs=False, stream=True), one_call)


def tokens_of(kind: str, *parts: str) -> list[int]:
    """Tokens of text; only a part that is a marker is the marker's token."""
    vocabulary = vocabulary_of(kind)
    return [
        t
        for part in parts
        for t in ([vocabulary.added[part]] if part in MARKERS else vocabulary.ll.tokenize_str(part))
    ]


def read(kind: str, parser: ReplyParser, *parts: str, reason: str = "stop") -> list[Any]:
    """The pieces of a reply that comes one token after the other, those of one kind in one."""
    given_tokens = tokens_of(kind, *parts)
    pieces: list[Any] = []
    for response in responses(kind, given_tokens, reason):
        if parser.reason is None:
            pieces += parser.parse(response)
    joined: list[Any] = []
    for each, group in itertools.groupby(pieces, type):
        same = list(group)
        joined += same if each is Call else [each("".join(piece.text for piece in same))]
    return joined


def responses(kind: str, tokens: list[int], reason: str, end: int = -1) -> Iterator[Any]:
    """mlx-lm's responses, with the text that its detokenizer has for each token; `end`, which
    stops a reply, adds none.
    """
    detokenizer = tokenizer_of(kind).detokenizer
    for number, token in enumerate(tokens):
        detokenizer.add_token(token)
        is_last = reason == "length" and number == len(tokens) - 1
        if is_last:
            detokenizer.finalize()
        yield Namespace(
            text=detokenizer.last_segment,
            token=token,
            logprob=0.0,
            finish_reason="length" if is_last else None,
        )
    detokenizer.finalize()
    yield Namespace(text=detokenizer.last_segment, token=end, logprob=0.0, finish_reason="stop")


@pytest.mark.parametrize("kind", KINDS)
def test_no_marker_is_found_in_the_content_of_a_form(kind: str) -> None:
    assert read(kind, reading(kind, form=JSON), CONTENT) == [Text(CONTENT)]
    parser = reading(kind, form=JSON)
    thinking = ["<think>", "Hm, <tool_call>.", "</think>"]
    assert read(kind, parser, *thinking, CONTENT) == [Thinking("Hm, <tool_call>."), Text(CONTENT)]
    assert parser.num_thinking == len(tokens_of(kind, *thinking)) - 1


def test_thinking_that_the_prompt_began_and_a_call_in_place_of_content() -> None:
    parser = reading("bpe", form=JSON, state="reasoning")
    assert read("bpe", parser, "Hm.", "</think>", "<tool_call>", CALL, "</tool_call>") == [
        Thinking("Hm."),
        CALLED,
    ]
    assert parser.num_thinking == len(tokens_of("bpe", "Hm.", "</think>"))
    assert (parser.num_calls, parser.reason) == (1, CALLS)
    # Where no call may come, its marker is part of the thinking.
    parser = reading("bpe", form=JSON, state="reasoning", may_call=False)
    assert read("bpe", parser, "Hm.", "<tool_call>", "?", "</think>", CONTENT) == [
        Thinking("Hm.<tool_call>?"),
        Text(CONTENT),
    ]


def test_content_that_the_client_begins() -> None:
    assert read("bpe", reading("bpe", form=JSON, begin="{", begun="form"), "<", "think> ") == [
        Text("<think> ")
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_ends_with_the_token_of_its_marker(kind: str) -> None:
    parser = reading(kind)
    parts = [
        "Ok. ",
        "<tool_call>",
        f"\n{CALL}\n",
        "</tool_call>",
        "\n",
        "<tool_call>",
        CALL,
        "</tool_call>",
        "\nDone.",
    ]
    assert read(kind, parser, *parts) == [Text("Ok. "), CALLED, Text("\n"), CALLED, Text("\nDone.")]
    assert parser.num_calls == 2
    assert read(kind, reading(kind, state="tool", calls="must"), CALL, "</tool_call>") == [CALLED]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_keeps_a_form_streams_token_by_token(kind: str) -> None:
    parser = reading(kind, form=JSON, shows_parts=True)
    tokens = tokens_of(kind, "<tool_call>", CALL, "</tool_call>")
    pieces = [piece for each in responses(kind, tokens, "stop") for piece in parser.parse(each)]
    parts = [piece.text for piece in pieces if isinstance(piece, CallPart)]
    assert "".join(parts) + "}" == CALLED.written
    assert pieces[len(parts) :] == [CALLED]
    assert len(parts) > len(tokens) // 2


def test_a_marker_that_is_spelled_begins_no_call_in_free_text() -> None:
    text = 'I call <tool_call>{"name": "add", "arguments": {}}</tool_call> now.'
    parser = reading("bpe")
    assert read("bpe", parser, "<think>", "Hm.", "</think>", text) == [Thinking("Hm."), Text(text)]
    assert parser.num_calls == 0


def test_text_after_a_call_in_thinking_is_no_thinking() -> None:
    parser = reading("bpe")
    assert read("bpe", parser, "<think>", "Hm.", "<tool_call>", CALL, "</tool_call>", "Done.") == [
        Thinking("Hm."),
        CALLED,
        Text("Done."),
    ]


def test_calls_whose_end_is_ordinary_text_are_found_by_their_text() -> None:
    inner = tokenizer_of("bpe")._tokenizer
    request = ChatRequest("chat", "", [], TOOLS, None)
    compiled: Any = Namespace(state="free", may_call=True)
    request.compiled = compiled
    # Space is no marker, also where it is an added token.
    for end, is_found in (("</tool_call>", True), ("<end>", False), ("<end  of it>", False)):
        request.tokenizer = TokenizerWrapper(
            inner, BPEStreamingDetokenizer, tool_call_start="<tool_call>", tool_call_end=end
        )
        assert Sections.for_reply(request, "normal").by_tokens == is_found


def test_a_call_that_is_cut_is_text_and_one_call_ends_a_reply() -> None:
    parser = reading("bpe")
    assert read("bpe", parser, "<tool_call>", CALL[:-20], reason="length") == [
        Text(f"<tool_call>{CALL[:-20]}")
    ]
    alone = ReplyParser(parsed(parser._request, one_call=True), parser._context)
    assert read("bpe", alone, "<tool_call>", CALL, "</tool_call>", "more") == [CALLED]
    assert alone.reason == CALLS


def test_a_cut_call_is_text_where_its_parser_would_read_one() -> None:
    written = '[add(n=[1, 2], text="a")]'
    for words, rest, reason in (([], "", "length"), (["Oslo"], "Oslo", "stop")):
        parser = reading("bpe", words)
        parser._context.tool_parser = pythonic.parse_tool_call
        assert read("bpe", parser, "<tool_call>", written, rest, reason=reason) == [
            Text(f"<tool_call>{written}")
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_stop_words_end_a_reply_that_keeps_a_form(kind: str) -> None:
    parser = reading(kind, ["</tool"], form=JSON)
    assert read(kind, parser, "<think>", "Hm.", "</think>", CONTENT) == [
        Thinking("Hm."),
        Text(CONTENT[: CONTENT.index("</tool")]),
    ]
    assert parser.stop_word == "</tool"
    # One that begins like a marker is not in its way.
    parser = reading(kind, ["</tool_call>\n\n"], state="normal")
    assert read(kind, parser, "<tool_call>", CALL, "</tool_call>", "\nDone.") == [
        CALLED,
        Text("\nDone."),
    ]


MARKS: dict[Section, list[Mark]] = {
    "free": [Mark((1, 2), "<ab>", "call"), Mark((3,), "<c>", "thinking")],
    "thinking": [Mark((4,), "</c>", "free")],
    "call": [Mark((1, 5, 2), "<axb>", "free")],
}
SPELLED = {1: "<a", 2: "b>", 3: "<c>", 4: "</c>", 5: "x", 6: "é", 7: "<"}


def sections_of(tokens: list[int]) -> list[tuple[Section, str]]:
    """The same without a stream: all tokens at once."""
    found: list[tuple[Section, str]] = []
    section: Section = "free"
    begun = at = 0
    while at < len(tokens):
        at += 1
        mark = next(
            (
                m
                for m in MARKS[section]
                if tuple(tokens[max(begun, at - len(m.tokens)) : at]) == m.tokens
            ),
            None,
        )
        if mark is not None:
            found.append(
                (section, "".join(SPELLED[t] for t in tokens[begun : at - len(mark.tokens)]))
            )
            section, begun = mark.section, at
    return [*found, (section, "".join(SPELLED[t] for t in tokens[begun:]))]


@tried(25, 2000)
@given(st.lists(st.sampled_from(sorted(SPELLED)), max_size=24), st.data())
def test_sections_are_those_of_the_whole_reply_however_late_its_text_comes(
    tokens: list[int], data: st.DataObject
) -> None:
    sections, held, later = Sections(MARKS, "free"), "", ""
    found: list[tuple[Section, str]] = []
    for token in tokens:
        # A detokenizer holds back the beginnings of characters, and a parser of stop words more.
        text, held = held + SPELLED[token], ""
        if token == 6 and data.draw(st.booleans()):
            text, held = text[:-1], text[-1:]
        sections.add(token, text)
        later += text
        size = data.draw(st.integers(0, len(later)))
        found += sections.split(later[:size])
        later = later[size:]
    found += [*sections.split(later), sections.flush()]
    joined = [
        (section, "".join(part for _, part in group))
        for section, group in itertools.groupby(found, lambda each: each[0])
    ]
    whole = sections_of(tokens)
    expected = [
        (section, "".join(part for _, part in group))
        for section, group in itertools.groupby(whole, lambda each: each[0])
    ]
    if held:
        expected[-1] = (expected[-1][0], expected[-1][1][: -len(held)])
    assert joined == expected


@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "five", "five"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "5", "5"),
        ({"type": ["array", "null"]}, "[1, 2]", [1, 2]),
        ({"$ref": "#/$defs/N"}, "2.5", 2.5),
        ({"type": "boolean"}, "True", True),
    ],
)
def test_arguments_in_tags_have_the_types_of_their_schemas(
    schema: dict[str, Any], raw: str, value: Any
) -> None:
    parameters = {"type": "object", "properties": {"n": schema}, "$defs": {"N": {"type": "number"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    parser = reading("bpe", tools=tools)
    parser._context.tool_parser = qwen3_coder.parse_tool_call
    parameters = f"<parameter=n>\n{raw}\n</parameter>\n<parameter=other>\n7\n</parameter>"
    written = f"\n<function=add>\n{parameters}\n</function>\n"
    assert read("bpe", parser, "<tool_call>", written, "</tool_call>") == [
        Call(None, "add", {"n": value, "other": "7"})
    ]


def test_tools_that_are_none_are_in_nobodys_way() -> None:
    function = {"name": "add", "parameters": {"properties": {"n": {"type": ["integer", "null"]}}}}
    parser = reading(
        "bpe", tools=["add", {"name": "add"}, {"function": None}, {"function": function}]
    )
    parser._context.tool_parser = qwen3_coder.parse_tool_call
    written = "<function=add>\n<parameter=n>\n5\n</parameter>\n</function>"
    assert read("bpe", parser, "<tool_call>", written, "</tool_call>") == [
        Call(None, "add", {"n": 5})
    ]


def completed(words: list[str], given: Iterator[Any]) -> str:
    """The text of a completion that keeps a form."""
    tokenizer = tokenizer_of("bpe")
    request = PromptRequest("text", "", [], None, None, form=JSON)
    compiled: Any = Namespace(state="start", may_call=False)
    request.compiled, request.tokenizer = compiled, tokenizer
    context = Namespace(text_sm=make_text_state_machine(tokenizer, words), initial_state="normal")
    renderer = TextRenderer(parsed(request, words), context, 0, Packets({}, "text"))
    packets: list[Any] = []
    for response in given:
        if renderer.parser.reason is None:
            packets += renderer.add(response)
    return "".join(packet["choices"][0]["text"] for packet in [*packets, *renderer.finish()])


def test_a_completion_that_keeps_a_form_shows_its_content_alone() -> None:
    # The engine has found the stop word by its tokens.
    cut = CONTENT.index("</tool")
    for words, written in (([], CONTENT), (["</tool"], CONTENT[: cut + len("</tool")])):
        tokens = tokens_of("bpe", "<think>", "Hm, <tool_call>", "</think>", written)
        found = completed(words, responses("bpe", tokens, "stop" if words else "length"))
        assert found == written.removesuffix("</tool")


def test_a_completion_that_ends_like_the_beginning_of_a_stop_word_is_whole() -> None:
    for word in ("}\n\n", 'c"}x'):
        given = responses(
            "bpe", tokens_of("bpe", CONTENT), "stop", end=tokenizer_of("bpe").eos_token_id
        )
        assert completed([word], given) == CONTENT


def test_a_stop_word_that_adds_no_text_is_found_by_its_tokens() -> None:
    tokenizer = tokenizer_of("bpe")
    end = tokenizer.eos_token
    for word, text in ((end, CONTENT), (f'"}}{end}', CONTENT)):
        parser = reading("bpe", [word], form=JSON)
        pieces = [
            piece
            for response in responses(
                "bpe", tokens_of("bpe", text), "stop", end=tokenizer.eos_token_id
            )
            if parser.reason is None
            for piece in parser.parse(response)
        ]
        expected = text if word == end or not text.endswith('"}') else text[:-2]
        assert (
            "".join(piece.text for piece in pieces if isinstance(piece, Text)),
            parser.stop_word,
        ) == (expected, word)
