"""Calls that are JSON, Python's or Gemma's: mlx-lm's parsers read back what a grammar lets
through, and it keeps its schema.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from forms.vocabularies import ADDED, vocabulary_of
from forms.walks import FLAT, NASTY, SCHEMAS, compiled, walk
from jsonschema import Draft202012Validator
from llguidance import LLMatcher
from thorough import many

from mlx_blockpool.errors import FormError
from mlx_blockpool.forms.calls import call_grammar
from mlx_blockpool.forms.output_format import ToolFormat
from mlx_blockpool.forms.vocabulary import Vocabulary

MARKERS = (
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        '<|"|>',
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
    ),
    *(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
    ),
    *("<escape>", "<start_function_call>", "<end_function_call>"),
)
VOCABULARIES = {
    "markers": (*ADDED, *MARKERS),
    "list": tuple(text for text in (*ADDED, *MARKERS) if text != "[ARGS]"),
    # Markers as ordinary text, where a parser finds them wherever they stand.
    "bare": ("<think>", "</think>"),
}
JSON_CALL = '{"name": "f", "arguments": {"city": CITY, "unit": "c"}}'
KIMI_CALL = (
    '<|tool_call_begin|>functions.f:12<|tool_call_argument_begin|>{"city": CITY, "unit": '
    '"c"}<|tool_call_end|>'
)
GEMMA_CALL = 'call:f{city:<|"|>CITY<|"|>,unit:<|"|>c<|"|>}<tool_call|>'
ESCAPED_CALL = "call:f{city:<escape>CITY<escape>,unit:<escape>c<escape>}<end_function_call>"
# The parser, its vocabulary, a call as templates write it, and what stands before it, between two,
# and after the last.
FAMILIES = {
    "json_tools": (
        "json_tools",
        "markers",
        f"\n{JSON_CALL}\n</tool_call>",
        "",
        "\n<tool_call>",
        "",
    ),
    "mistral": ("mistral", "markers", 'f[ARGS]{"city": CITY, "unit": "c"}', "", "[TOOL_CALLS]", ""),
    "mistral_list": (
        "mistral",
        "list",
        JSON_CALL.replace("}}", '}, "id": "a1B2c3D4e"}'),
        " [",
        ", ",
        "]",
    ),
    "kimi_k2": ("kimi_k2", "markers", KIMI_CALL, "", "", "<|tool_calls_section_end|>"),
    "pythonic": ("pythonic", "markers", 'f(city=CITY, unit="c")', "[", ", ", "]<|tool_call_end|>"),
    "gemma4": ("gemma4", "markers", GEMMA_CALL, "", "<|tool_call>", ""),
    "function_gemma": ("function_gemma", "markers", ESCAPED_CALL, "", "<start_function_call>", ""),
    "json_tools_bare": ("json_tools", "bare", f"{JSON_CALL}</tool_call>", "", "\n<tool_call>", ""),
    "pythonic_bare": ("pythonic", "bare", 'f(city=CITY,unit="c")', "[", ", ", "]<|tool_call_end|>"),
    "gemma4_bare": ("gemma4", "bare", GEMMA_CALL, "", "<|tool_call>", ""),
    "function_gemma_bare": (
        "function_gemma",
        "bare",
        ESCAPED_CALL,
        "",
        "<start_function_call>",
        "",
    ),
}
# Texts that no argument can have: the parsers would cut there.
CLOSED = {
    "kimi_k2": {"<|tool_call_end|>"},
    "gemma4": {'<|"|>', "\x00"},
    "function_gemma": {"<escape>", "}", "f[ARGS]{}"},
    "json_tools_bare": {"</tool_call>"},
    "pythonic_bare": {"<|tool_call_end|>"},
    "gemma4_bare": {'<|"|>', "<tool_call|>", "\x00"},
    "function_gemma_bare": {"<escape>", "<end_function_call>", "}", "f[ARGS]{}"},
}


def matcher_of(
    family: str, tools: dict[str, Any], extent: Any = "call", spelling: str = ""
) -> LLMatcher:
    wanted = [
        ToolFormat(name, json.dumps(schema), f"tools[{i}]")
        for i, (name, schema) in enumerate(tools.items())
    ]
    vocabulary = vocabulary_for(family)
    return compiled(
        vocabulary, call_grammar(FAMILIES[family][0], wanted, vocabulary, spelling, extent)
    )


def vocabulary_for(family: str) -> Vocabulary:
    return vocabulary_of("bpe", 400, VOCABULARIES[FAMILIES[family][1]])


def with_markers(vocabulary: Vocabulary, text: str) -> list[int]:
    """A text whose markers are their tokens."""
    at = min((text.find(word) for word in vocabulary.added if word in text), default=-1)
    if at < 0:
        return list(vocabulary.ll.tokenize_str(text))
    word = max((word for word in vocabulary.added if text.startswith(word, at)), key=len)
    return [
        *vocabulary.ll.tokenize_str(text[:at]),
        vocabulary.added[word],
        *with_markers(vocabulary, text[at + len(word) :]),
    ]


def call_of(family: str, city: str) -> str:
    is_raw = "CITY<" in FAMILIES[family][2]
    return FAMILIES[family][2].replace(
        "CITY", city if is_raw else json.dumps(city, ensure_ascii=False)
    )


def calls_in(family: str, tokens: list[int]) -> list[Any]:
    """The calls that mlx-lm's parser reads in each block of a reply."""
    parser, vocabulary = (
        importlib.import_module(f"mlx_lm.tool_parsers.{FAMILIES[family][0]}"),
        vocabulary_for(family),
    )
    end = vocabulary.added.get(parser.tool_call_end)
    blocks: list[list[int]] = [[]]
    for token in tokens:
        if token == end:
            blocks.append([])
        else:
            blocks[-1].append(token)
    texts = [vocabulary.ll.decode_str(block).strip() for block in blocks]
    if end is None and parser.tool_call_end:
        texts = texts[0].split(parser.tool_call_end)
    read = [
        parser.parse_tool_call(text.strip().removeprefix(parser.tool_call_start))
        for text in texts
        if text
    ]
    return [call for one in read for call in (one if isinstance(one, list) else [one])]


def takes(matcher: LLMatcher, tokens: list[int]) -> bool:
    found = matcher.deep_copy()
    return bool(found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting())


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_taken_as_templates_write_them_one_or_several(family: str) -> None:
    before, between, following = FAMILIES[family][3:]
    vocabulary, call = vocabulary_for(family), call_of(family, "Oslo")
    one = with_markers(vocabulary, f"{before}{call}{following}")
    three = with_markers(vocabulary, f"{before}{between.join([call] * 3)}{following}")
    alone, many = (
        matcher_of(family, {"g": SCHEMAS["none"], "f": SCHEMAS["text"]}, extent)
        for extent in ("call", "reply")
    )
    assert [takes(alone, one), takes(many, one), takes(alone, three), takes(many, three)] == [
        True,
        True,
        False,
        True,
    ]
    for tokens, count in ((one, 1), (three, 3)):
        found = [(call["name"], call["arguments"]) for call in calls_in(family, tokens)]
        assert found == [("f", {"city": "Oslo", "unit": "c"})] * count


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_reads_like_a_marker_ends_nothing(family: str) -> None:
    before, _, following = FAMILIES[family][3:]
    vocabulary, matcher, closed = (
        vocabulary_for(family),
        matcher_of(family, {"f": SCHEMAS["text"]}),
        set(),
    )
    head, tail = (
        with_markers(vocabulary, part)
        for part in f"{before}{call_of(family, 'CUT')}{following}".split("CUT")
    )
    is_raw = "CITY<" in FAMILIES[family][2]
    assert matcher.consume_tokens(head)
    for text in NASTY:
        written = text if is_raw else json.dumps(text, ensure_ascii=False)[1:-1]
        tokens = [*vocabulary.ll.tokenize_str(f"a{written}b"), *tail]
        if not takes(matcher, tokens):
            closed.add(text)
            continue
        (call,) = calls_in(family, [*head, *tokens])
        assert call["arguments"] == {"city": f"a{text}b", "unit": "c"}
    # JSON's \\u means something else in Python's strings.
    assert closed == CLOSED.get(family, set()) | (
        {"\x00"} if family.startswith("pythonic") else set()
    )


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_walk_is_a_call_that_keeps_its_schema(family: str, name: str) -> None:
    if family.startswith("function_gemma") and name not in FLAT:
        return
    matcher, ended = matcher_of(family, {"f": SCHEMAS[name]}), 0
    for seed in range(16):
        tokens = walk(matcher, vocabulary_for(family), seed)
        if tokens is None:
            continue
        (call,) = calls_in(family, tokens)
        assert call["name"] == "f"
        Draft202012Validator(SCHEMAS[name]).validate(call["arguments"])
        ended += 1
        if ended == many(1, 8):
            break
    assert ended


@pytest.mark.parametrize(
    ("family", "name", "schema", "why"),
    [
        (
            "function_gemma",
            "f",
            SCHEMAS["lists"],
            "tools[0].properties.t: no value that the schema allows can be written",
        ),
        (
            "gemma4",
            "f",
            {"properties": {"a b": {}}},
            "tools[0].properties.a b: this model's calls need names of letters, digits and _",
        ),
        (
            "gemma4",
            "f",
            {"minProperties": 1},
            "tools[0].minProperties: minProperties is not supported here",
        ),
        (
            "gemma4",
            "f",
            {"properties": {"a": {"allOf": [{"minimum": 1}]}}},
            "tools[0].properties.a.allOf: allOf is not supported",
        ),
        (
            "pythonic",
            "f",
            {"properties": {"class": {}}},
            "tools[0].properties.class: this model's calls need Python's names of arg",
        ),
        ("pythonic", "class", {}, "tools[0].name: this model cannot call a function named 'class'"),
        ("pythonic", "f", {"anyOf": [{}]}, "tools[0].anyOf: anyOf is not supported here"),
        ("mistral", "a b", {}, "tools[0].name: this model cannot call a function named 'a b'"),
        (
            "function_gemma",
            "a-b",
            {},
            "tools[0].name: this model cannot call a function named 'a-b'",
        ),
    ],
)
def test_what_calls_cannot_write_is_refused_with_its_place(
    family: str, name: str, schema: dict[str, Any], why: str
) -> None:
    with pytest.raises(FormError) as raised:
        matcher_of(family, {name: {"type": "object", **schema}})
    assert str(raised.value).startswith(why)


@pytest.mark.parametrize("family", ["json_tools", "mistral_list"])
def test_functions_of_any_name_are_called(family: str) -> None:
    before, _, following = FAMILIES[family][3:]
    call = call_of(family, "Oslo").replace('"f"', '"two words, \\"é\\""')
    tokens = with_markers(vocabulary_for(family), f"{before}{call}{following}")
    assert takes(matcher_of(family, {'two words, "é"': SCHEMAS["text"]}), tokens)
    assert [one["name"] for one in calls_in(family, tokens)] == ['two words, "é"']


@pytest.mark.parametrize(
    ("spelling", "taken"), [("", "b:2,a:1"), ("call:f{key_a:C3D4,key_b:A1B2}", "a:1,b:2")]
)
def test_arguments_come_in_the_order_of_the_schema_or_that_of_their_names(
    spelling: str, taken: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"b": {}, "a": {}},
        "required": ["b"],
        "additionalProperties": False,
    }
    for family, call in (
        ("gemma4", "call:f{KEYS}<tool_call|>"),
        ("function_gemma", "call:f{KEYS}<end_function_call>"),
    ):
        matcher = matcher_of(family, {"f": schema}, spelling=spelling)
        for keys in ("b:2,a:1", "a:1,b:2", "b:2", "a:1"):
            tokens = with_markers(vocabulary_for(family), call.replace("KEYS", keys))
            assert takes(matcher, tokens) == (keys in (taken, "b:2"))


def test_python_may_write_its_own_words() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": ["boolean", "null"]}, "b": {"type": "boolean"}},
    }
    tokens = with_markers(vocabulary_for("pythonic"), "[f(a=None, b=True)]<|tool_call_end|>")
    assert takes(matcher_of("pythonic", {"f": schema}), tokens)
    assert calls_in("pythonic", tokens) == [{"name": "f", "arguments": {"a": None, "b": True}}]
