"""Calls as they are written: however a block is cut, the parts of each call are the JSON of the
call that mlx-lm's parser reads from the whole block.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import random
import re
from collections.abc import Iterable
from typing import Any

import pytest
from forms.vocabularies import tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import tool_parsers
from thorough import many

from mlx_blockpool.forms.calls import FAMILIES, writes_tags
from mlx_blockpool.server.api import call_readers
from mlx_blockpool.server.api.call_readers import READERS, VALUE
from mlx_blockpool.server.api.call_stream import Call, CallCut, CallPart, CallStream
from mlx_blockpool.server.api.conversation import arguments_of
from mlx_blockpool.server.api.reply import ReplyBlocks
from server.test_anthropic_reply import END, START, events_of, reading, responses

TYPES: dict[str, Any] = {
    "path": {"type": "string"},
    "text": {"type": "string"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "n": {"type": "integer"},
    "on": {"type": "boolean"},
    "items": {"type": "array"},
    "options": {"type": "object"},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": TYPES}},
    }
    for name in ("write", "get-x", "write_2")
]
# laguna's parser is glm47's.
PARSERS = sorted({*FAMILIES} - {"laguna"})
# What ends, begins or escapes something in one syntax or another.
NASTY = (
    *("null", "NULL", "5", "1e5", "true", "None", '"a"', "{", "}", "[1]", '{"a": 1}', "\\", '"'),
    *("'", "\n", " ", "\t", "\x00", "é", "🎉", "\ud83d", "\u2028", ",", ":", ")", "]", "<", "&"),
    *("</parameter>", "<parameter=n>", "</function>", "</param>", "]]>", "<![CDATA[", "</invoke>"),
    *("<arg_value>", "</arg_value>", "</longcat_arg_value>", "<|close|>", "<|sep|>", '<|"|>'),
    *("</atem:parameter>", "</atem:invoke>", "<escape>", "[ARGS]", "<|tool_call_end|>", '"""'),
)


def module_of(parser: str) -> Any:
    return importlib.import_module(f"mlx_lm.tool_parsers.{parser}")


def tagged(parser: str, name: str, arguments: dict[str, Any], spaced: bool) -> str:
    tags = FAMILIES[parser].build
    assert not callable(tags)
    space = "\n" if spaced else ""
    opens, closes = tags.section if spaced else ("", "")
    parts = [tags.begin.replace("{name}", name).replace("{index}", "1")]
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        parts += [
            tags.key.replace("{key}", key).replace("{type}", "string" if is_text else "json"),
            f"{opens}{value}{closes}" if is_text else json.dumps(value),
            tags.close,
        ]
    return "".join([*parts, tags.finish]).replace("~", space)


def gemma(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(gemma(each, quote) for each in value)}]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def written(parser: str, name: str, arguments: dict[str, Any], draw: random.Random) -> str:
    """A call as the models of a parser write it."""
    dumped = json.dumps(arguments, ensure_ascii=draw.random() < 0.5)
    if writes_tags(parser):
        return tagged(parser, name, arguments, draw.random() < 0.5)
    match parser:
        case "json_tools":
            head = {"name": name, "arguments": arguments}
            return "\n" + json.dumps(dict(draw.sample(list(head.items()), 2)))
        case "kimi_k2":
            return (
                f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{dumped}"
                "<|tool_call_end|>"
            )
        case "mistral":
            return f"{name}[ARGS]{dumped}"
        case "pythonic":
            values = [
                f"{key}={repr(value) if draw.random() < 0.6 else json.dumps(value)}"
                for key, value in arguments.items()
            ]
            return f"{name.replace('-', '_')}({', '.join(values)})"
        case "gemma4":
            return f"call:{name}{gemma(arguments, '<|' + chr(34) + '|>')}"
    return f"call:{name}{gemma(arguments, '<escape>')}"


def block(parser: str, calls: list[str]) -> str:
    """What stands between the markers of calls."""
    within = FAMILIES[parser].within
    if within is None:
        return calls[0]
    text = within.join(calls)
    return f"[{text}]" if parser == "pythonic" else text


VALUES: dict[str, st.SearchStrategy[Any]] = {}
TEXTS = st.lists(st.one_of(st.text(max_size=6), st.sampled_from(NASTY)), max_size=6).map("".join)
ANY = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        TEXTS,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "path": TEXTS,
        "text": TEXTS,
        "maybe": st.one_of(TEXTS, st.none()),
        "n": st.integers(),
        "on": st.booleans(),
        "items": st.lists(ANY, max_size=3),
        "options": st.dictionaries(st.sampled_from("abc"), ANY, max_size=3),
        "other": ANY,
    },
)
CALLS = st.tuples(st.sampled_from(["write", "get-x", "write_2"]), ARGUMENTS)


def streamed(parser: str, parts: list[str], is_cut: bool = False) -> tuple[list[Any], str | None]:
    """The calls of a block, with None for those that end malformed, and its text. Checks that the
    parts of each call are its JSON.
    """
    stream = CallStream(module_of(parser).parse_tool_call, TOOLS)
    pieces = [piece for part in parts for piece in stream.feed(part)]
    rest, text = stream.end(is_cut)
    return joined([*pieces, *rest]), text


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def joined(pieces: list[Any]) -> list[Call | None]:
    calls: list[Call | None] = []
    begun, sent = None, ""
    for piece in pieces:
        if isinstance(piece, CallPart):
            assert begun in (None, piece.name)
            begun, sent = piece.name, sent + piece.text
            continue
        if isinstance(piece, Call):
            assert begun in (None, piece.name)
            assert piece.written.startswith(sent)
            assert piece.written != sent
        else:
            assert isinstance(piece, CallCut)
            assert begun is not None
            assert not is_json(sent)
        calls.append(piece if isinstance(piece, Call) else None)
        begun, sent = None, ""
    assert begun is None
    return calls


def whole(parser: str, text: str) -> tuple[list[Any], str | None]:
    """The calls of a block that is read when it has ended."""
    stream = CallStream(module_of(parser).parse_tool_call, TOOLS)
    stream._reader, stream.text = None, text
    return stream.end(is_cut=False)


def cut(text: str, draw: random.Random) -> list[str]:
    """A text in parts."""
    size = draw.choice([1, 3, 8, 1000])
    parts = []
    while text:
        taken = draw.randint(1, size)
        parts.append(text[:taken])
        text = text[taken:]
    return parts


def test_every_parser_of_mlx_lm_has_a_reader() -> None:
    assert set(READERS) == {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=many(8, 800), deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_the_parts_of_calls_are_the_whole_calls(
    parser: str, calls: list[tuple[str, Any]], draw: random.Random
) -> None:
    text = block(parser, [written(parser, name, given, draw) for name, given in calls])
    found, rest = streamed(parser, cut(text, draw))
    expected, text_of_none = whole(parser, text)
    assert [call for call in found if call is not None][: len(expected)] == expected
    assert (rest is None) == (text_of_none is None)


def pieces_of(parser: str, parts: Iterable[str]) -> list[Any]:
    """The pieces of a block, those that its end adds in a list at the end."""
    stream = CallStream(module_of(parser).parse_tool_call, TOOLS)
    pieces: list[Any] = [piece for part in parts for piece in stream.feed(part)]
    return [*pieces, stream.end(is_cut=False)]


@pytest.mark.parametrize(
    ("parser", "name"),
    [
        (parser, name)
        for parser in PARSERS
        for name in ("path", "maybe", "items")
        # function_gemma's parser reads no lists.
        if (parser, name) != ("function_gemma", "items")
    ],
)
def test_each_token_of_a_long_argument_is_one_part(parser: str, name: str) -> None:
    value: Any = "x" * 100 if name != "items" else ["x" * 100]
    text = block(parser, [written(parser, "write", {name: value}, random.Random(1))])
    *pieces, (rest, _) = pieces_of(parser, text)
    expected = Call(pieces[0].id, "write", {name: value})
    assert rest == [expected]
    parts = [piece.text for piece in pieces]
    assert "".join(parts) + "}" == expected.written
    # The first token of a text that may be JSON comes with the next one.
    assert parts.count("x") >= 98
    assert max(map(len, parts)) <= 16


@pytest.mark.parametrize("kind", ["bpe", "spm", "naive"])
@pytest.mark.parametrize("parser", PARSERS)
def test_parts_of_the_tokens_of_a_model(parser: str, kind: str) -> None:
    arguments = {"path": "/é🎉", "text": '# é🎉\n\tx = "a\\nb"  # it\'s <b>\n' * 3, "n": -7}
    text = block(parser, [written(parser, "write", arguments, random.Random(2))])
    tokenizer = tokenizer_of(kind)
    detokenizer = tokenizer.detokenizer
    texts = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        detokenizer.add_token(token)
        texts.append(detokenizer.last_segment)
    detokenizer.finalize()
    texts.append(detokenizer.last_segment)
    *pieces, (rest, _) = pieces_of(parser, texts)
    (call,) = rest
    sent = "".join(piece.text for piece in pieces)
    assert sent + "}" == call.written
    assert len(pieces) > 30


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        # Calls in a list have their ids last, which Mistral's templates need.
        ("mistral", '[{"name": "write", "arguments": {"path": "a"}, "id": "abcdefghi"}]'),
        ("glm47", '{"name": "write", "arguments": {"path": "a"}}'),
        ("glm47", "write\n"),
        ("longcat", '{"name": "write", "arguments": {}}'),
    ],
)
def test_other_spellings_are_whole_at_their_ends(parser: str, text: str) -> None:
    (found,) = pieces_of(parser, text)
    assert found == whole(parser, text)
    assert [call.name for call in found[0]] == ["write"]


def parameters(*values: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<function=write>\n{inner}</function>"


def test_tags_in_a_value_are_its_text() -> None:
    value = "<parameter=n>\n1</parameter</function>\n<tool"
    assert streamed("qwen3_coder", list(parameters(("text", value), ("n", "5")))) == (
        [Call(None, "write", {"text": value, "n": 5})],
        None,
    )


def test_a_repeated_key_is_that_of_the_parser() -> None:
    """What was sent of its first value cannot be taken back: the call comes again."""
    for key, value in (("text", "b"), ("n", "7")):
        text = parameters((key, "5"), ("on", "true"), (key, value))
        found, rest = streamed("qwen3_coder", list(text))
        assert ([None, *whole("qwen3_coder", text)[0]], None) == (found, rest)
        assert found[1].arguments == {key: int(value) if key == "n" else value, "on": True}


@pytest.mark.parametrize(
    "value",
    [
        r"\ud83d\ude00",
        r"a\ud83d\ude00b\ude00",
        r"\ud83d\ud83d\ude00",
        r"\U0000d83d\ude00",
        r"\ud83dx",
        r"\ud83d",
        r"\ud83d\n",
    ],
)
def test_two_escapes_of_python_may_be_one_character(value: str) -> None:
    text = f'[write(text="{value}", items=["{value}"])]'
    expected = json.loads(json.dumps(ast.literal_eval(f'"{value}"')))
    call = Call(None, "write", {"text": expected, "items": [expected]})
    assert whole("pythonic", text) == streamed("pythonic", list(text)) == ([call], None)


def test_the_characters_of_a_long_word_are_matched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    matched = [0]

    class Counting:
        def match(self, text: str, at: int) -> re.Match[str] | None:
            found = VALUE.match(text, at)
            matched[0] += 0 if found is None else found.end() - at
            return found

    monkeypatch.setattr(call_readers, "VALUE", Counting())
    word = "x" * 3000
    (part, key, value, *_) = pieces_of("function_gemma", f"call:write{{path:{word},n:5}}")
    assert (part.text + key.text + value.text).endswith(f'"path": "{word}"')
    assert matched[0] == len(word) + 1


def test_calls_that_have_ended_stay_where_another_one_is_malformed() -> None:
    first = '<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{"n": 1}'
    text = f"{first}<|tool_call_end|><|tool_call_begin|>functions.write:1<|tool_call_argument"
    for second in (f'{text}_begin|>{{"n"', f"{text}_begin|>[1]<|tool_call_end|>"):
        found, rest = streamed("kimi_k2", list(second))
        assert found == [Call("functions.write:0", "write", {"n": 1}), None]
        assert rest == second[len(first) + len("<|tool_call_end|>") :]


def test_a_literal_that_is_not_json_is_malformed() -> None:
    for text in (
        "[write(n=1, items=[{'a'}])]",
        "[write(n=1, text=b'a')]",
        "[write(n=1, text=...)]",
    ):
        assert streamed("pythonic", list(text)) == ([None], text)


@pytest.mark.parametrize("parser", PARSERS)
# Python warns of escapes in malformed literals, with text that workers of pytest cannot send.
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
@settings(max_examples=many(8, 6200), deadline=None)
@given(
    st.lists(CALLS, min_size=1, max_size=2),
    st.lists(
        st.tuples(
            st.integers(0, 400), st.integers(0, 6) | st.integers(0, 200), st.sampled_from(NASTY)
        ),
        max_size=4,
    ),
    st.randoms(use_true_random=False),
)
def test_no_text_of_malformed_calls_is_lost(
    parser: str, calls: list[tuple[str, Any]], edits: list[Any], draw: random.Random
) -> None:
    """A block is what mlx-lm's parser reads from it, or text; so is one that a limit has cut."""
    text = block(parser, [written(parser, name, given, draw) for name, given in calls])
    for start, size, new in edits:
        text = text[:start] + new + text[start + size :]
    found, rest = streamed(parser, cut(text, draw))
    ended = [call for call in found if call is not None]
    expected, text_of_none = whole(parser, text)
    if rest is None:
        assert expected[: len(ended)] == ended or not text.strip()
    else:
        assert text.endswith(rest)
        assert ended or rest == text_of_none == text
    shown = "" if rest is None else f"{START}{rest}{END}"
    reply = reply_to(parser, ["Before.", *cut(f"{START}{text}{END}", draw), "After."], "stop")
    assert (reply.calls, without_space(reply.text)) == (
        ended,
        without_space(f"Before.{shown}After."),
    )
    reply = reply_to(parser, ["Before.", *cut(f"{START}{text}", draw)], "length")
    assert reply.calls or without_space(reply.text) == without_space(f"Before.{START}{text}")


def reply_to(parser: str, texts: list[str], reason: str) -> ReplyBlocks:
    """What a client is sent of a streamed reply."""
    reply = reading(parser=module_of(parser).parse_tool_call, tools=TOOLS, shows_parts=True)
    events_of(reply, responses(texts, reason))
    return reply.blocks


def without_space(text: str) -> str:
    """Space next to calls and at the ends of a reply is not shown."""
    return "".join(text.split())


@pytest.mark.parametrize("text", ['{"a": 1', '{"a": "x', "{", '{"a": tr', '{"a": 1, "b": '])
def test_arguments_of_a_call_that_was_cut_are_none(text: str) -> None:
    assert arguments_of(text) == {}


@pytest.mark.parametrize("text", ['{"a": 1}}', "{'a': 1}", '{"a":' + "[" * 3000, "[1", "x"])
def test_other_arguments_that_are_not_json_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="JSON"):
        arguments_of(text)


def test_arguments_of_a_client_are_read() -> None:
    assert arguments_of("") == {}
    assert arguments_of(' {"a": [1]} ') == {"a": [1]}
