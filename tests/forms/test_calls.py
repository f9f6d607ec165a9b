"""Grammars of tool calls against mlx-lm's parsers: random walks within them are calls whose
arguments keep their schemas.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import sys
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from forms.vocabularies import tokenizer_of, vocabulary_of
from llguidance import LLMatcher
from mlx_lm import tool_parsers
from thorough import only, seeds

from mlx_blockpool.config import FormConfig
from mlx_blockpool.errors import FormError
from mlx_blockpool.forms.calls import (
    FAMILIES,
    Extent,
    argument_types,
    arguments,
    as_strings,
    call_grammar,
    loosened,
    writes_tags,
)
from mlx_blockpool.forms.compiler import Compiler
from mlx_blockpool.forms.exact import exact
from mlx_blockpool.forms.output_format import ToolFormat
from mlx_blockpool.forms.schema import type_of
from mlx_blockpool.forms.tags import TAGS

IN_TAGS = sorted(parser for parser in FAMILIES if writes_tags(parser))
# laguna's is glm47's.
QUICK = [parser for parser in IN_TAGS if parser != "laguna"]
# The markers that are one token each in the models of these parsers.
MARKERS = (
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    *(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        "<|open|>",
        "<|close|>",
        "<|sep|>",
    ),
)
TOKENIZER = tokenizer_of("bpe", 600, MARKERS)
VOCABULARY = vocabulary_of("bpe", 600, MARKERS)
COMPILER = Compiler(FormConfig())


def closed(**properties: Any) -> dict[str, Any]:
    """An object of these properties, those required whose names end with an underscore."""
    required = [name for name in properties if name.endswith("_")]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


NODE = closed(
    v_={"type": "string"}, kids={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "text": closed(city_={"type": "string"}, unit={"enum": ["c", "f"]}),
    "numbers": closed(
        n_={"type": "integer", "minimum": 3, "maximum": 12},
        x={"type": "number"},
        b_={"type": "boolean"},
    ),
    "optional": closed(
        a_={"anyOf": [{"type": "integer"}, {"type": "null"}]},
        b_={"anyOf": [{"type": "string"}, {"type": "null"}]},
    ),
    "unions": closed(
        u_={"anyOf": [{"type": "string"}, {"type": "integer"}]},
        v={"type": ["string", "number", "null"]},
    ),
    "lists": closed(
        texts={"type": "array", "items": {"type": "string"}, "maxItems": 3},
        numbers_={"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    ),
    "references": {
        **closed(node_={"$ref": "#/$defs/node"}, k_={"const": "fix"}),
        "$defs": {"node": NODE},
    },
    "patterns": closed(
        s_={"type": "string", "minLength": 2, "maxLength": 6},
        p_={"type": "string", "pattern": "^[a-z]{2,4}[0-9]$"},
        q={"type": "string", "pattern": "a/b"},
    ),
    "values": closed(
        e_={"enum": ["null", "true", "5", 5, None, "a b", " a", "x</parameter>", [1], {"a": "b"}]}
    ),
    "formats": closed(
        d={"type": "string", "format": "date"}, u_={"type": "string", "format": "uuid"}
    ),
    "nothing": closed(),
    "anything": {"type": "object"},
    "any": closed(
        any_={},
        o={"type": "object"},
        m={"type": "object", "additionalProperties": {"type": "string"}},
    ),
}
# What ends values, calls or replies, or reads as something else than text.
NASTY = [
    *(
        "null",
        "NULL",
        "5",
        "1e5",
        "true",
        "None",
        "\n",
        " ",
        "\x1c",
        "\\",
        '"',
        "'",
        "{",
        "}",
        "[",
        "]",
        ",",
        "é",
        "<",
        "</",
    ),
    *(
        "</parameter>",
        "</param>",
        "</function>",
        "</tool_call>",
        "</invoke>",
        "</minimax:tool_call>",
        "<arg_key>",
        "</arg_value>",
    ),
    *(
        "</longcat_arg_value>",
        "</atem:parameter>",
        "</atem:invoke>",
        "<|close|>argument<|sep|>",
        "<|open|>",
        "]]>",
        "<![CDATA[",
    ),
]


ENDS = (
    '"',
    "]",
    "}",
    "1",
    "</param>",
    "</parameter>",
    "\n</parameter>",
    "</atem:parameter>",
    "</longcat_arg_value>",
    "a/b",
)


def matcher_of(
    parser: str,
    tools: Sequence[ToolFormat],
    extent: Extent = "call",
    spelling: str = "",
    added: tuple[str, ...] = MARKERS,
) -> LLMatcher:
    vocabulary = vocabulary_of("bpe", 600, added)
    grammar = call_grammar(parser, tools, vocabulary, spelling, extent)
    return COMPILER.compile(added, vocabulary, grammar, "tools")


def held(name: str, schema: Any, place: str | None = "tools[0].function.parameters") -> ToolFormat:
    return ToolFormat(name, json.dumps(exact(schema, "")), place)


def shown(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def walk(matcher: LLMatcher, draw: random.Random, most: int = 300) -> str | None:
    """A random text of the grammar; None: it did not end. Nasty texts come as their tokens, and
    spelled byte by byte.

    Random text hardly ever ends a value: after 25 tokens the ends of values are tried first.
    """
    tokens: list[int] = []
    while len(tokens) < most:
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
        assert not matcher.is_error(), matcher.get_error()
        choice = [int(token) for token in allowed if token not in VOCABULARY.eos]
        if not choice or (len(choice) < len(allowed) and draw.random() < 0.7):
            return str(TOKENIZER.decode(tokens))
        if len(choice) == 1:
            assert matcher.consume_tokens(choice)
            tokens += choice
            continue
        nasty = draw.choice(NASTY)
        spelled = [
            token
            for part in (nasty if draw.random() < 0.6 else [nasty])
            for token in tokens_of(part)
        ]
        ends = [tokens_of(end) for end in ENDS] + [
            [token] for token in choice if token in VOCABULARY.added.values()
        ]
        ends = (
            [end for end in ends if matcher.validate_tokens(end) == len(end)]
            if len(tokens) > 25
            else []
        )
        if ends and draw.random() < 0.8:
            taken = draw.choice(ends)
        elif draw.random() < 0.5 and matcher.validate_tokens(spelled) == len(spelled):
            taken = spelled
        else:
            taken = [draw.choice(choice)]
        assert matcher.consume_tokens(taken)
        tokens += taken
    return None


def parsed(parser: str, text: str, tools: Sequence[Any]) -> list[Any]:
    """What mlx-lm's parser makes of the calls in a block, as a reply reads them."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    assert text.endswith(FAMILIES[parser].end)
    calls = module.parse_tool_call(
        text[: len(text) - len(FAMILIES[parser].end)], as_strings(argument_types(parser, tools))
    )
    calls = calls if isinstance(calls, list) else [calls]
    return [(call["name"], read(parser, call["name"], call["arguments"], tools)) for call in calls]


def read(parser: str, name: str, raw: Any, tools: Sequence[Any]) -> dict[str, Any]:
    """The arguments of a call that a parser has returned."""
    return arguments(argument_types(parser, tools).get(name, {}), raw)


def check(schema: Any, value: Any) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(
        value
    )


@pytest.mark.parametrize("parser", IN_TAGS)
def test_the_markers_are_those_of_the_parser(parser: str) -> None:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    assert (FAMILIES[parser].start, FAMILIES[parser].end) == (
        module.tool_call_start,
        module.tool_call_end,
    )


def test_every_parser_of_mlx_lm_has_a_grammar() -> None:
    assert set(FAMILIES) == {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}


@pytest.mark.parametrize("seed", seeds(1, 40))
@pytest.mark.parametrize("parser", QUICK)
def test_random_calls_keep_their_schemas(parser: str, seed: int) -> None:
    tools = [shown(name, schema) for name, schema in SCHEMAS.items()]
    matcher = matcher_of(parser, [held(name, schema) for name, schema in SCHEMAS.items()])
    texts = [walk(matcher.deep_copy(), random.Random(f"{seed} {number}")) for number in range(2)]
    for text in filter(None, texts):
        [(name, found)] = parsed(parser, text, tools)
        check(SCHEMAS[name], found)
    assert any(texts), "no walk has ended"


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("parser", IN_TAGS)
@pytest.mark.thorough
def test_random_calls_keep_each_schema(parser: str, name: str) -> None:
    matcher, draw = matcher_of(parser, [held("get_x", SCHEMAS[name])]), random.Random(name)
    texts = [walk(matcher.deep_copy(), draw) for _ in range(30)]
    for text in filter(None, texts):
        [(_, found)] = parsed(parser, text, [shown("get_x", SCHEMAS[name])])
        check(SCHEMAS[name], found)
    assert sum(text is not None for text in texts) >= 5


# A call as the models of each parser write it, and what stands between two of them.
WRITTEN = {
    "glm47": (
        "get_x<arg_key>city_</arg_key><arg_value>Oslo</arg_value><arg_key>unit</arg_key><arg_value>c</arg_value>",
        None,
    ),
    "kimi_k3": (
        '<|open|>call tool="get_x" index="1"<|sep|><|open|>argument key="city_" '
        'type="string"<|sep|>Oslo<|close|>argument<|sep|>'
        '<|open|>argument key="unit" '
        'type="string"<|sep|>c<|close|>argument<|sep|><|close|>call<|sep|>',
        "",
    ),
    "longcat": (
        "get_x\n<longcat_arg_key>city_</longcat_arg_key>\n<longcat_arg_value>Oslo</longcat_arg_value>\n"
        "<longcat_arg_key>unit</longcat_arg_key>\n<longcat_arg_value>c</longcat_arg_value>\n",
        None,
    ),
    "minicpm5": (
        '"get_x"><param name="city_"><![CDATA[Oslo]]></param><param name="unit">c</param>',
        None,
    ),
    "minimax_m2": (
        '\n<invoke name="get_x">\n<parameter name="city_">Oslo</parameter>\n<parameter '
        'name="unit">c</parameter>\n</invoke>\n',
        "",
    ),
    "muse_spark": (
        '\n<atem:invoke name="get_x">\n<atem:parameter name="city_">Oslo</atem:parameter>\n'
        '<atem:parameter name="unit">c</atem:parameter>\n</atem:invoke>\n',
        "",
    ),
    "qwen3_coder": (
        "\n<function=get_x>\n<parameter=city_>\nOslo\n</parameter>\n<parameter=unit>\nc\n</parameter>\n</function>\n",
        None,
    ),
}


@pytest.mark.parametrize("parser", WRITTEN)
def test_one_call_and_several_as_models_write_them(parser: str) -> None:
    (call, within), family = WRITTEN[parser], FAMILIES[parser]
    one, tool = f"{call}{family.end}", held("get_x", SCHEMAS["text"])
    assert follows(matcher_of(parser, [tool], "call"), one)
    second = call.removeprefix("\n").replace('index="1"', 'index="2"')
    block = one if within is None else f"{call}{within}{second}{family.end}"
    assert follows(matcher_of(parser, [tool], "block"), block)
    matcher = matcher_of(parser, [tool], "reply")
    assert follows(matcher, f"{block}\n{family.start}{one}")
    # Only the first call of one that must be alone.
    assert not follows(matcher_of(parser, [tool], "call"), f"{one}\n{family.start}{one}")
    found = parsed(parser, block, [shown("get_x", SCHEMAS["text"])])
    assert found == [("get_x", {"city_": "Oslo", "unit": "c"})] * (1 if within is None else 2)


def follows(matcher: LLMatcher, text: str) -> bool:
    tokens = tokens_of(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


UNIONS: list[tuple[Any, list[Any]]] = [
    ({"type": ["string", "null"]}, ["x", "nullx", None]),
    ({"type": ["string", "null"], "minLength": 2}, ["xy", None]),
    ({"type": ["string", "integer"]}, ["5x", 5, -12]),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 10}]}, ["x", 12]),
    (
        {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "number"}, {"type": "boolean"}]},
        ["2.5.1", 2.5, True],
    ),
    (
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        ["x", ["a", "5"]],
    ),
    ({"anyOf": [{"type": "string"}, {"const": None}]}, ["null.", None]),
    ({"anyOf": [{"type": "string"}, {"const": True}]}, ["false alarm", True]),
    (
        {"anyOf": [{"type": "string", "pattern": "^b+$"}, {"enum": ["a", False]}]},
        ["bb", "a", False],
    ),
    ({}, ["x", 5, None, True, {"a": [1]}, "{% raw"]),
]


@pytest.mark.parametrize("parser", only(IN_TAGS, "glm47", "muse_spark", "qwen3_coder"))
def test_each_type_of_a_union_can_be_written(parser: str) -> None:
    properties = {f"p{number}": schema for number, (schema, _) in enumerate(UNIONS)}
    matcher, tools = (
        matcher_of(parser, [held("get_x", closed(**properties))]),
        [shown("get_x", closed(**properties))],
    )
    tags = TAGS.get(parser, TAGS["glm47"]).spelled("")
    for name, (_, values) in zip(properties, UNIONS, strict=True):
        for value in values:
            if parser == "muse_spark" and value == "2.5.1":
                continue
            kind = (
                "string"
                if isinstance(value, str)
                else "number"
                if isinstance(value, float)
                else type_of(value)
            )
            raw = value if isinstance(value, str) else json.dumps(value)
            begin, key = (
                tags.begin.format(name="get_x", index=1),
                tags.key.format(key=name, type=kind),
            )
            text = f"{tags.lead}{begin}{key}{raw}{tags.close}{tags.finish}{FAMILIES[parser].end}"
            assert follows(matcher.deep_copy(), text), text
            assert parsed(parser, text, tools) == [("get_x", {name: value})]


# What templates write of the sample: GLM 4.5's lines, tags in the order of their names, and a form
# that is none of the parser's.
SAMPLES = {
    "lines": (
        "glm47",
        "sample_function\n<arg_key>key_b</arg_key>\n<arg_value>A1B2</arg_value>\n"
        "<arg_key>key_a</arg_key>\n<arg_value>C3D4</arg_value>\n",
        "get_x\n<arg_key>z_</arg_key>\n<arg_value>1</arg_value>\n<arg_key>a_</arg_key>\n<arg_value>2</arg_value>\n",
    ),
    "sorted": (
        "qwen3_coder",
        "\n<function=sample_function>\n<parameter=key_a>\nC3D4\n</parameter>\n<parameter=key_b>\nA1B2\n</parameter>\n</function>\n",
        "\n<function=get_x>\n<parameter=a_>\n2\n</parameter>\n<parameter=z_>\n1\n</parameter>\n</function>\n",
    ),
    "other": (
        "qwen3_coder",
        '{"name": "sample_function", "arguments": {"key_b": "A1B2", "key_a": "C3D4"}}',
        "\n<function=get_x>\n<parameter=z_>\n1\n</parameter>\n<parameter=a_>\n2\n</parameter>\n</function>\n",
    ),
    "no lines": (
        "qwen3_coder",
        "<function=sample_function><parameter=key_b>A1B2</parameter>\n<parameter=key_a>C3D4</parameter></function>",
        "<function=get_x><parameter=z_>1</parameter>\n<parameter=a_>2</parameter></function>",
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_space_and_order_are_the_templates(name: str) -> None:
    parser, sample, call = SAMPLES[name]
    schema = closed(z_={"type": "integer"}, a_={"type": "string", "minLength": 1})
    matcher = matcher_of(parser, [held("get_x", schema)], spelling=sample)
    assert follows(matcher.deep_copy(), f"{call}{FAMILIES[parser].end}")
    text = walk(matcher, random.Random(name))
    assert (
        text is None or check(schema, parsed(parser, text, [shown("get_x", schema)])[0][1]) is None
    )


def test_text_that_would_be_read_as_another_value_cannot_be_written() -> None:
    call = "\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    refused: list[tuple[Any, list[str]]] = [
        ({"anyOf": [{"type": "string"}, {"const": True}]}, ["false", " false", "true "]),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 10}]}, ["9", "5.0", "1e1"]),
        (
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
            ['["a"]'],
        ),
        ({"type": "string"}, ["null", "NULL"]),
        ({"type": "string", "maxLength": 3}, ["abcd"]),
    ]
    for schema, texts in refused:
        matcher = matcher_of("qwen3_coder", [held("f", closed(a=schema))])
        assert [text for text in texts if follows(matcher.deep_copy(), call.format(text))] == []


@pytest.mark.parametrize(
    ("place", "schema"),
    [
        (".anyOf", {"anyOf": [closed(a={}), closed(b={})]}),
        (".minProperties", {**closed(a={}, b={}), "minProperties": 1}),
        (".properties.a b", closed(**{"a b": {"type": "string"}})),
        (".properties.a.pattern", closed(a={"type": "string", "pattern": "^a|b$"})),
        (".type", {"type": "string"}),
        (".properties.a.enum", closed(a={"type": "string", "enum": ["</parameter>"]})),
    ],
)
def test_strict_schemas_that_tags_cannot_keep_are_refused_with_their_place(
    place: str, schema: Any
) -> None:
    with pytest.raises(FormError) as raised:
        matcher_of("qwen3_coder", [held("get_x", schema)])
    assert raised.value.place == f"tools[0].function.parameters{place}".removesuffix(".enum")
    # Calls of tools that are not strict have any arguments there.
    assert follows(
        matcher_of("qwen3_coder", [held("get_x", schema, None)]),
        "\n<function=get_x>\n</function>\n</tool_call>",
    )


@pytest.mark.parametrize("parser", only(IN_TAGS, "longcat", "qwen3_coder"))
def test_names_that_cannot_be_read_back_are_refused(parser: str) -> None:
    for name in ("get x", "get<x", 'get"x', "", "get\nx", "a=b"):
        with pytest.raises(
            FormError, match=r"^tools\[0\].function.name: this model cannot call a function named"
        ):
            matcher_of(parser, [held(name, closed())])
        with pytest.raises(FormError, match="cannot call functions of these names"):
            matcher_of(parser, [held(name, closed(), None)])
    matcher = matcher_of(parser, [held(name, closed()) for name in NAMES])
    draw, seen = random.Random(1), set()
    for _ in range(8):
        [(name, found)] = parsed(parser, walk(matcher.deep_copy(), draw) or "", [])
        assert found == {}
        seen.add(name)
    assert seen <= set(NAMES)
    assert len(seen) > 1


NAMES = ["get_x", "get-x", "mcp__files.read", "größe", "a/b", "ns:tool", "42"]


def test_a_hundred_tools_share_the_rules_of_their_parameters() -> None:
    kinds: list[Any] = [
        {"type": "string"},
        {"type": "integer"},
        {"type": "array", "items": {"type": "string"}},
    ]
    schema = closed(**{f"p{number}": kinds[number % 3] for number in range(8)})
    tools = [held(f"tool_{number}", schema) for number in range(100)]
    grammar = call_grammar("qwen3_coder", tools, VOCABULARY)
    assert len(grammar.splitlines()) < 100 + 8 + 10
    matcher = COMPILER.compile("", VOCABULARY, grammar, "tools")
    assert follows(
        matcher, "\n<function=tool_99>\n<parameter=p1>\n5\n</parameter>\n</function>\n</tool_call>"
    )


def test_grammars_are_bounded_however_often_they_repeat_a_schema(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FormConfig, "calls_bytes", 1 << 17)
    node = closed(**{f"k{number}": {"type": "string"} for number in range(390)})
    lists = {
        f"p{number}": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": number}
        for number in range(12)
    }
    with pytest.raises(FormError, match="the grammar of the tools' calls would have more than"):
        call_grammar(
            "qwen3_coder", [held("get_x", {**closed(**lists), "$defs": {"n": node}})], VOCABULARY
        )
    # The same schema is written once.
    same = {f"p{number}": lists["p1"] for number in range(12)}
    call_grammar(
        "qwen3_coder", [held("get_x", {**closed(**same), "$defs": {"n": node}})], VOCABULARY
    )


@pytest.mark.parametrize("keyword", ["anyOf", "allOf"])
def test_references_that_multiply_take_no_time(keyword: str) -> None:
    steps = {
        f"s{n}": {keyword: [{"$ref": f"#/$defs/s{n + 1}"}, {"$ref": f"#/$defs/s{n + 1}"}]}
        for n in range(50)
    }
    schema = {**closed(a={"$ref": "#/$defs/s0"}), "$defs": {**steps, "s50": {"type": "string"}}}
    tools = [shown("f", schema)]
    assert read("qwen3_coder", "f", {"a": "5"}, tools) == {"a": "5"}
    tool = held("f", schema, None)
    assert follows(
        matcher_of("qwen3_coder", [tool]),
        "\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>",
    )


def test_a_schema_that_leads_to_itself() -> None:
    union = {
        "anyOf": [
            {"$ref": "#/$defs/u"},
            {"type": "string"},
            {"type": "array", "items": {"$ref": "#/$defs/u"}},
        ]
    }
    matcher = matcher_of(
        "qwen3_coder", [held("f", {**closed(a={"$ref": "#/$defs/u"}), "$defs": {"u": union}})]
    )
    assert follows(
        matcher, '\n<function=f>\n<parameter=a>\n[["x"]]\n</parameter>\n</function>\n</tool_call>'
    )


def test_tools_are_loosened_unless_they_are_strict() -> None:
    strict, other = held("a", SCHEMAS["text"]), held("b", SCHEMAS["text"], None)
    assert loosened([strict, other]) == (strict, ToolFormat("b", '{"type": "object"}', None))


@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"type": "string"}, None, "null"),
        ({"type": "string"}, "5", "5"),
        ({"type": ["string", "null"]}, None, None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({"type": ["string", "boolean"]}, "True", "True"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "off", False),
        ({"type": "array"}, "['a', True]", ["a", True]),
        ({"type": "array"}, "no list", "no list"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "-1e999", -sys.float_info.max),
        ({"$ref": "#/$defs/n"}, "7", 7),
        ({"$ref": "#/$defs/missing"}, "7", "7"),
        ({"type": "int"}, "7", 7),
        ({"type": "str"}, "7", "7"),
        ({"type": ["dict", "none"]}, "{'a': None}", {"a": None}),
        ({"type": 5}, "7", "7"),
        (True, "[1]", [1]),
    ],
)
def test_arguments_have_a_type_of_their_schema(schema: Any, raw: Any, value: Any) -> None:
    tools = [
        shown(
            "f",
            {"type": "object", "properties": {"a": schema}, "$defs": {"n": {"type": "integer"}}},
        )
    ]
    assert read("qwen3_coder", "f", {"a": raw, "other": "5"}, tools) == {
        "a": value,
        "other": "5",
    }
    assert read("json_tools", "f", {"a": raw}, tools) == {"a": raw}
    assert read("qwen3_coder", "g", {"a": raw}, tools) == {"a": raw}


def test_only_parsers_of_tags_read_every_parameter_as_text() -> None:
    tools = [
        shown("f", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        shown("g", None),
    ]
    assert as_strings(argument_types("json_tools", tools)) == []
    names = [
        tool["function"]["parameters"]["properties"]
        for tool in as_strings(argument_types("qwen3_coder", tools))
    ]
    assert names == [{"a": {"type": "string"}}, {}]
