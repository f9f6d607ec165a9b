"""Schemas made exact: what llguidance alone would take wrongly, what is refused and where, and
the README's table of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forms.schemas import accepts, compiled, refusal

from mlx_blockpool.config import FormConfig
from mlx_blockpool.forms import compiler
from mlx_blockpool.forms.exact import REFUSED, exact
from mlx_blockpool.forms.schema import SchemaError

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
TUPLE = {
    "items": [{"type": "string"}],
    "anyOf": [{"type": "array"}],
    "additionalItems": {"type": "integer"},
}
TREE = {
    "$ref": "#/$defs/tree~1s",
    "$defs": {"tree/s": {"type": "array", "items": {"$ref": "#/$defs/tree~1s"}, "maxItems": 2}},
}


def tagged(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": name}, "next": {"$ref": "#/$defs/any"}},
        "required": ["kind"],
    }


UNION = {
    "$ref": "#/$defs/any",
    "$defs": {
        "any": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
        "a": tagged("a"),
        "b": tagged("b"),
    },
}


@pytest.mark.parametrize(
    ("schema", "kept", "forbidden"),
    [
        (
            OPEN,
            ['{"a":1,"b":"x"}', '{"\\n":"x"}'],
            ['{"\\u0061":"x"}', '{"b":1,"\\u0061":"x"}', '{"a":1,"a":2}'],
        ),
        (
            {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": True},
            ['{"ab":1}', '{"b":"x"}'],
            ['{"\\u0061b":"x"}'],
        ),
        (
            {"patternProperties": {r"^\w+$": {"type": "null"}}},
            ['{"a":null}', "1"],
            ['{"é":1}', '{"-":1}', '{"a":1}'],
        ),
        (
            {"patternProperties": {".": {}}, "anyOf": [{"type": "object"}]},
            ['{"a":1}'],
            ['{"\u2028":1}', '{"":1}'],
        ),
        ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
        (
            {"type": "object", "required": ["a"], "minProperties": 2},
            ['{"a":1,"b":2}'],
            ['{"a":1,"a":2}', '{"a":1,"\\u0061":2}'],
        ),
        (
            {"type": "number", "allOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}]},
            ["2.5", "2.1"],
            ["2", "2.0"],
        ),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
            ["0.5", "0.0000001"],
            ["0", "0.0", "-0"],
        ),
        (
            {"minimum": -0.5, "exclusiveMaximum": 0, "type": "number"},
            ["-0.25"],
            ["0", "-0", "-0.0"],
        ),
        ({"type": "number", "exclusiveMaximum": 1, "minimum": 0}, ["0.9", "0.99"], ["1", "1.0"]),
        (
            {"type": "integer", "exclusiveMinimum": -(10**18)},
            ["-999999999999998"],
            [str(-(10**18))],
        ),
        ({"type": "integer", "maximum": 2**63 - 1}, [str(2**53)], [str(2**63), str(2**64)]),
        ({"type": "integer", "multipleOf": 2.0, "minLength": 1.0}, ["4"], ["5"]),
        ({"type": "number", "multipleOf": 0.01}, ["0.07", "19.99", "3"], ["0.075"]),
        (
            {"items": {"multipleOf": 100}, "contentMediaType": "a", "multipleOf": 0.01},
            ["[100]", "0.07"],
            ["[10]", "0.075"],
        ),
        (TUPLE, ['["a",1]'], ['["a","b"]', "[1]"]),
        (
            {
                "prefixItems": [{"type": "string"}],
                "items": {"type": "integer"},
                "additionalItems": True,
            },
            ['["a",1]'],
            ["[1]"],
        ),
        ({"items": False, "anyOf": [{"type": "array"}], "prefixItems": [{}]}, ["[1]"], ["[1,2]"]),
        (TREE, ["[[],[[]]]"], ["[1]", "[[],[],[]]"]),
        (
            UNION,
            ['{"kind":"a","next":{"kind":"b"}}'],
            ['{"kind":"c"}', '{"kind":"a","next":{"kind":1}}'],
        ),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [3, True]}]}, ["3", "true"], ["4"]),
        (
            {"enum": [1, "x", None, [1]], "minimum": 1},
            ["1", '"x"', "null", "[1]"],
            ["true", "2", "[2]"],
        ),
        (
            {"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer"}}},
            ["5"],
            ["4", '"x"'],
        ),
        (
            {"properties": {"p": {"$ref": "#/x/0"}}, "x": [{"type": "null"}], "required": ["p"]},
            ['{"p":null}'],
            ['{"p":1}'],
        ),
        (
            {"type": "string", "format": "date"},
            ['"2024-02-29"'],
            ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"'],
        ),
        ({"format": "time"}, ['"23:59:59Z"', "1"], ['"23:59:60Z"', '"24:00:00Z"']),
        (
            {"format": "date-time", "pattern": "Z$"},
            ['"2000-02-29T00:00:00Z"'],
            ['"2000-02-30T00:00:00Z"'],
        ),
        (
            {"format": "duration"},
            ['"P1Y2M3DT4H"', '"P2W"', '"PT0S"'],
            ['"P"', '"P1YT"', '"P1W1D"', '"P1234567D"'],
        ),
        ({"type": "string", "format": "int64"}, ['"any"'], ["1"]),
        ({"type": "string", "nullable": True}, ['"x"'], ["null"]),
        (
            {
                "propertyNames": {"type": "string"},
                "uniqueItems": False,
                "unevaluatedItems": True,
                "type": "array",
            },
            ["[1,1]"],
            ["1"],
        ),
        (True, ["1", '{"a":[null]}'], ["nul"]),
        (
            {"items": {"$id": "https://example.com/a", "type": "null"}, "type": "array"},
            ["[null]"],
            ["[1]"],
        ),
        (
            {
                "items": {"$ref": "#/$defs/a"},
                "$defs": {"a": {"$id": "a", "type": "null"}},
                "type": "array",
            },
            ["[null]"],
            ["[1]"],
        ),
        (
            {"$schema": "https://example.com/own", "x-guidance": {"lenient": True}, "type": "null"},
            ["null"],
            ["1"],
        ),
    ],
)
def test_a_matcher_accepts_what_the_schema_does(
    schema: Any, kept: list[str], forbidden: list[str]
) -> None:
    matcher = compiled(schema)
    assert [(text, True) for text in kept] == [(text, accepts(matcher, text)) for text in kept]
    assert [(text, False) for text in forbidden] == [
        (text, accepts(matcher, text)) for text in forbidden
    ]


REQUIRED = {"type": "object", "properties": {"b": {"$ref": "#"}}, "required": ["b"]}
ENDLESS: list[Any] = [
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    REQUIRED,
    {"$ref": "#/$defs/a", "$defs": {"a": REQUIRED}},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
]
LOOP = {
    "allOf": [{"multipleOf": 0.001}],
    "$ref": "#/$defs/a",
    "$defs": {"a": {"multipleOf": 999, "anyOf": [{"$ref": "#/$defs/a"}, True]}},
}
CONTROL = {"properties": {"a": {"enum": ["b", "\x7f"]}}, "additionalProperties": True}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        *(
            (
                {"properties": {"a": {keyword: [1]}}},
                f"schema.properties.a.{keyword}: {keyword} is not",
            )
            for keyword in REFUSED
        ),
        ([], "schema: a schema is an object"),
        (False, "schema: no value satisfies it"),
        *((schema, "schema: no value satisfies it") for schema in ENDLESS),
        (
            {"required": ["a"], "properties": {"a": False}, "type": "object"},
            "schema: no value satisfies it",
        ),
        (
            {"properties": {"a b": {"type": "objct"}}},
            "schema.properties[\"a b\"].type: 'objct' is not a type; types are array,",
        ),
        ({"type": []}, "schema.type: type is a name or a list"),
        ({"enum": []}, "schema.enum: enum is a list that is not empty"),
        ({"enum": list(range(10_001))}, "schema.enum: more than 10000 values"),
        ({"enum": [1, {"a": 2**53 + 1}]}, "schema.enum[1].a: numbers of more than 15 digits"),
        ({"const": 0.30000000000000004}, "schema.const: numbers of more than 15 digits"),
        ({"const": "\ud800"}, "schema.const: half of a surrogate pair"),
        (
            {"properties": {"\ud800": True}},
            'schema.properties["\\ud800"]: half of a surrogate pair',
        ),
        (CONTROL, "schema.properties.a.enum[1]: control characters are not supported here"),
        ({"minimum": True}, "schema.minimum: minimum is a number"),
        (
            {"exclusiveMinimum": float("nan")},
            "schema.exclusiveMinimum: exclusiveMinimum is a number",
        ),
        ({"minimum": 1e19}, "schema.minimum: numbers of more than 15 digits"),
        ({"multipleOf": 0}, "schema.multipleOf: multipleOf is a number above 0"),
        (
            {"multipleOf": 0.1234567891},
            "schema.multipleOf: multipleOf above 10000 units of its last digit",
        ),
        (
            {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}, {"multipleOf": 7}]},
            "schema.allOf[2].multipleOf: its common multiple with others",
        ),
        (LOOP, "multipleOf: its common multiple with others"),
        ({"minLength": 1.5}, "schema.minLength: minLength is a whole number"),
        ({"maxItems": 10**9}, "schema.maxItems: more than 10000 items"),
        ({"type": "object", "minProperties": 2}, "schema.minProperties: minProperties above"),
        ({"pattern": "a(?=b)"}, "schema.pattern: look-around is not supported"),
        ({"pattern": 1}, "schema.pattern: pattern is a text"),
        (
            {"patternProperties": {"\\ba": True}},
            'schema.patternProperties["\\\\ba"]: word boundaries',
        ),
        (
            {"patternProperties": {".": True, "[^\\n\\r\\u2028\\u2029]": True}},
            "another pattern matches the same names",
        ),
        (
            {"patternProperties": {r"\d": True}, "properties": {"é": {}}},
            "schema.patternProperties: a pattern with '.', ",
        ),
        (
            {"patternProperties": {f"^x{n}$": True for n in range(65)}},
            "schema.patternProperties: more than 64 patterns",
        ),
        (
            {"type": "array", "items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}},
            "schema.items.oneOf: oneOf is not supported where two of its schemas may match",
        ),
        ({"allOf": []}, "schema.allOf: allOf is a list of schemas that is not empty"),
        ({"properties": []}, "schema.properties: properties is an object of schemas"),
        ({"items": [{}], "prefixItems": [{}]}, "schema.items: items is a schema where prefixItems"),
        ({"$ref": "#/$defs/b", "$defs": {}}, "schema.$ref: #/$defs/b names nothing"),
        (
            {"items": {"$ref": "https://example.com/a"}},
            "schema.items.$ref: only references within the schema",
        ),
        (
            {"items": {"$id": "a", "items": {"$ref": "#"}}},
            "schema.items.$id: $id is only supported below the root of a schema where",
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$id": "a", "$ref": "#/x", "x": {}}}},
            "schema.$defs.a.$id: $id is only supported",
        ),
        (
            {"minimum": 5, "exclusiveMinimum": True},
            "schema.exclusiveMinimum: exclusiveMinimum is a number",
        ),
        (
            {"properties": {"a": {"exclusiveMaximum": False}}},
            "schema.properties.a.exclusiveMaximum: exclusiveMaximum is a number",
        ),
        (
            {"$schema": "http://json-schema.org/draft-03/schema#"},
            "schema.$schema: http://json-schema.org/draft-03/schema# is not",
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}},
            "schema.$defs.a.not: not is not supported",
        ),
        (
            {"properties": {str(n): True for n in range(401)}},
            "schema.properties: more than 400 properties that are not required",
        ),
        (
            {"properties": {str(n): True for n in range(2_001)}},
            "schema.properties: more than 2000 properties",
        ),
        ({"title": "x" * (256 << 10)}, "bytes as JSON; a schema may have 262144"),
        ({"examples": [0] * 20_000}, "schema: more than 20000 values"),
    ],
)
def test_a_refused_schema_has_its_keyword_and_place(schema: Any, expected: str) -> None:
    with pytest.raises(SchemaError) as refused:
        exact(schema, "schema")
    assert expected in str(refused.value)


def nested(depth: int) -> Any:
    return {"items": nested(depth - 1)} if depth else {}


def chained(length: int) -> Any:
    names = range(length)
    return {
        "$ref": "#/$defs/0",
        "$defs": {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in names}
        | {str(length): {}},
    }


def test_nesting_is_bounded_with_and_without_references() -> None:
    assert refusal(nested(63)) is None
    assert refusal(nested(65)) == "schema: nested more than 64 deep"
    assert refusal(chained(95)) is None
    # llguidance overflows the stack of its thread with some thousands.
    assert "schemas are nested more than 200 deep, references followed" in str(
        refusal(chained(4_000))
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"b": {"pattern": "a{1000000000000}"}}},
        {
            "type": "object",
            "properties": {"x": {"type": "string", "minLength": 3, "maxLength": 2}},
            "required": ["x"],
        },
        {"type": "object", "patternProperties": {"a.": True, "b$": True}},
        {"type": "object", "patternProperties": {r"\d": True}, "required": ["a"]},
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "minProperties": 2,
            "additionalProperties": False,
        },
        {
            "items": {"type": "integer", "exclusiveMinimum": 5, "maximum": 5},
            "type": "array",
            "minItems": 1,
        },
    ],
)
def test_what_does_not_compile_is_refused(schema: Any) -> None:
    assert str(refusal(schema)).startswith("schema: "), refusal(schema)


def test_an_exact_schema_says_nothing_but_what_it_holds_to(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {
        "$id": "a",
        "title": "A",
        "properties": {"b": {"$ref": "#/$defs/c"}},
        "$defs": {"c": {"const": 1, "default": 1}},
    }
    expected = {
        "properties": {"b": {"$ref": "#/$defs/0"}},
        "additionalProperties": False,
        "$defs": {"0": {"const": 1}},
    }
    assert json.dumps(expected) == json.dumps(exact(schema, "schema"))
    monkeypatch.setattr(FormConfig, "depth", 2)
    with pytest.raises(SchemaError, match="nested more than 2 deep"):
        exact(schema, "schema")


def test_the_documents_name_the_refused_keywords() -> None:
    text = (Path(compiler.__file__).parent / "README.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| refused |"))
    assert sorted(f"`{keyword}`" for keyword in REFUSED) == sorted(
        row.split("|")[2].replace(" ", "").split(",")
    )
