"""Schemas made exact: what llguidance alone would take wrongly, what is refused and where, and the README's table of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forms.schemas import accepts, compiled, refusal

from mlx_blockpool.config import FormConfig
from mlx_blockpool.forms import places
from mlx_blockpool.forms.places import place
from mlx_blockpool.forms.schema import REFUSED, SchemaError, exact

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
TUPLE = {"items": [{"type": "string"}], "anyOf": [{"type": "array"}], "additionalItems": {"type": "integer"}}
TREE = {
    "$ref": "#/$defs/tree~1s",
    "$defs": {"tree/s": {"type": "array", "items": {"$ref": "#/$defs/tree~1s"}, "maxItems": 2}},
}


def tagged(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}, "next": {"$ref": "#/$defs/any"}}, "required": ["kind"]}


NAMES = {
    "type": "object",
    "propertyNames": {"$ref": "#/$defs/name"},
    "additionalProperties": {"type": "integer"},
    "$defs": {"name": {"enum": ["a", "b"], "type": "string"}},
}
UNION = {
    "$ref": "#/$defs/any",
    "$defs": {"any": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, "a": tagged("a"), "b": tagged("b")},
}


@pytest.mark.parametrize(
    ("schema", "kept", "forbidden"),
    [
        (OPEN, ['{"a":1,"b":"x"}', '{"\\n":"x"}'], ['{"\\u0061":"x"}', '{"b":1,"\\u0061":"x"}', '{"a":1,"a":2}']),
        ({"patternProperties": {"^a": {"type": "integer"}}}, ['{"ab":1}', '{"b":"x"}'], ['{"\\u0061b":"x"}']),
        ({"patternProperties": {r"^\w+$": {"type": "null"}}}, ['{"a":null}', "1"], ['{"é":1}', '{"-":1}', '{"a":1}']),
        ({"patternProperties": {".": {}}, "anyOf": [{"type": "object"}]}, ['{"a":1}'], ['{"\u2028":1}', '{"":1}']),
        ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
        ({"type": "object", "required": ["a"], "minProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1,"a":2}', '{"a":1,"\\u0061":2}']),
        ({"type": "number", "allOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}]}, ["2.5", "2.1"], ["2", "2.0"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.0000001"], ["0", "0.0", "-0"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0, "type": "number"}, ["-0.25"], ["0", "-0", "-0.0"]),
        ({"type": "number", "exclusiveMaximum": 1, "minimum": 0}, ["0.9", "0.99"], ["1", "1.0"]),
        ({"type": "integer", "exclusiveMinimum": 2**53}, [str(2**53 + 2)], [str(2**53)]),
        ({"type": "integer", "exclusiveMinimum": -(10**18)}, ["-999999999999999000"], [str(-(10**18))]),
        ({"type": "integer", "maximum": 2**63 - 1}, ["9223372036854774784"], [str(2**63), str(2**64)]),
        ({"type": "number", "maximum": 8309081514.3151865}, ["8309081514.2"], ["8309081514.31518650000001"]),
        ({"type": "integer", "multipleOf": 2.0, "minLength": 1.0}, ["4"], ["5"]),
        ({"type": "number", "multipleOf": 0.01}, ["0.07", "19.99", "3"], ["0.075"]),
        ({"items": {"multipleOf": 1_000}, "contentMediaType": "a", "multipleOf": 0.01}, ["[1000]", "0.07"], ["[100]", "0.075"]),
        (TUPLE, ['["a",1]'], ['["a","b"]', "[1]"]),
        ({"prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "additionalItems": True}, ['["a",1]'], ["[1]"]),
        ({"items": False, "anyOf": [{"type": "array"}], "prefixItems": [{}]}, ["[1]"], ["[1,2]"]),
        (TREE, ["[[],[[]]]"], ["[1]", "[[],[],[]]"]),
        (UNION, ['{"kind":"a","next":{"kind":"b"}}'], ['{"kind":"c"}', '{"kind":"a","next":{"kind":1}}']),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [3, True]}]}, ["3", "true"], ["4"]),
        ({"enum": [1, "x", None, [1]], "minimum": 1}, ["1", '"x"', "null", "[1]"], ["true", "2", "[2]"]),
        ({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer"}}}, ["5"], ["4", '"x"']),
        ({"properties": {"p": {"$ref": "#/x/0"}}, "x": [{"type": "null"}], "required": ["p"]}, ['{"p":null}'], ['{"p":1}']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"']),
        ({"format": "time"}, ['"23:59:59Z"', "1"], ['"23:59:60Z"', '"24:00:00Z"']),
        ({"format": "date-time", "pattern": "Z$"}, ['"2000-02-29T00:00:00Z"'], ['"2000-02-30T00:00:00Z"']),
        ({"format": "duration"}, ['"P1Y2M3DT4H"', '"P2W"', '"PT0S"'], ['"P"', '"P1YT"', '"P1W1D"', '"P1234567D"']),
        ({"type": "string", "format": "int64"}, ['"any"'], ["1"]),
        ({"type": "string", "nullable": True}, ['"x"'], ["null"]),
        ({"const": "\x01", "additionalProperties": False}, ['"\\u0001"'], ['"x"']),
        (
            {"propertyNames": {"type": "string"}, "uniqueItems": False, "unevaluatedItems": True, "type": "array"},
            ["[1,1]"],
            ["1"],
        ),
        (NAMES, ['{"a":1}', '{"a":1,"b":2}', "{}"], ['{"c":1}', '{"a":"x"}']),
        ({"propertyNames": {"pattern": "^a"}, "type": "object"}, ['{"ab":1}'], ['{"b":1}']),
        (True, ["1", '{"a":[null]}'], ["nul"]),
        ({"$schema": "https://example.com/own", "x-guidance": {"lenient": True}, "type": "null"}, ["null"], ["1"]),
    ],
)
def test_a_matcher_accepts_what_the_schema_does(schema: Any, kept: list[str], forbidden: list[str]) -> None:
    matcher = compiled(schema)
    assert [(text, True) for text in kept] == [(text, accepts(matcher, text)) for text in kept]
    assert [(text, False) for text in forbidden] == [(text, accepts(matcher, text)) for text in forbidden]


NEVER = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#"}}, "required": ["b"]}}}
LOOP = {
    "properties": {"b": {"multipleOf": 0.001}},
    "$ref": "#/$defs/a",
    "$defs": {"a": {"multipleOf": 999, "anyOf": [{"$ref": "#/$defs/a"}, True]}},
}
CONTROL = {"properties": {"a": {"enum": ["b", "\x7f"]}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        *(({"properties": {"a": {keyword: [1]}}}, f"schema.properties.a.{keyword}: {keyword} is not") for keyword in REFUSED),
        ([], "schema: a schema is an object"),
        (False, "schema: no value satisfies it"),
        (NEVER, "schema: no value satisfies it"),
        ({"$ref": "#"}, "schema: no value satisfies it"),
        ({"required": ["a"], "properties": {"a": False}, "type": "object"}, "schema: no value satisfies it"),
        ({"properties": {"a b": {"type": "objct"}}}, "schema.properties[\"a b\"].type: 'objct' is no type; types are array,"),
        ({"type": []}, "schema.type: type is a name or a list"),
        ({"enum": []}, "schema.enum: enum is a list that is not empty"),
        ({"enum": list(range(10_001))}, "schema.enum: more than 10000 values"),
        ({"enum": [1, {"a": 2**53 + 1}]}, "schema.enum[1].a: numbers of more than 15 digits"),
        ({"const": 0.30000000000000004}, "schema.const: numbers of more than 15 digits"),
        ({"const": "\ud800"}, "schema.const: half of a surrogate pair"),
        ({"properties": {"\ud800": True}}, 'schema.properties["\\ud800"]: half of a surrogate pair'),
        (CONTROL, "schema.properties.a.enum[1]: control characters need additionalProperties: false"),
        ({"minimum": True}, "schema.minimum: minimum is a number"),
        ({"exclusiveMinimum": float("nan")}, "schema.exclusiveMinimum: exclusiveMinimum is a number"),
        ({"minimum": 1e19}, "schema.minimum: minimum beyond 9223372036854774784 is not"),
        ({"multipleOf": 0}, "schema.multipleOf: multipleOf is a number above 0"),
        ({"multipleOf": 0.1234567891}, "schema.multipleOf: multipleOf above 10000 units of its last digit"),
        (
            {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}, {"multipleOf": 7}]},
            "schema.allOf[2].multipleOf: its common multiple with others",
        ),
        (LOOP, "schema.$defs.a.multipleOf: its common multiple with others"),
        ({"minLength": 1.5}, "schema.minLength: minLength is a whole number"),
        ({"maxItems": 10**9}, "schema.maxItems: more than 10000 items"),
        ({"type": "object", "minProperties": 2}, "schema.minProperties: minProperties above"),
        ({"pattern": "a(?=b)"}, "schema.pattern: look-around is not supported"),
        ({"pattern": 1}, "schema.pattern: pattern is a text"),
        ({"patternProperties": {"\\ba": True}}, 'schema.patternProperties["\\\\ba"]: word boundaries'),
        ({"patternProperties": {".": True, "[^\\n\\r\\u2028\\u2029]": True}}, "another pattern matches the same names"),
        ({"propertyNames": {"maxLength": 2}}, "schema.propertyNames: propertyNames is only supported with enum"),
        ({"propertyNames": {"not": {}}}, "schema.propertyNames.not: not is not supported"),
        ({"propertyNames": False}, "schema.propertyNames: propertyNames is only supported with enum"),
        ({"propertyNames": {"const": "a"}, "properties": {"a": True}}, "schema.propertyNames: propertyNames is only"),
        ({"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}}, "schema.propertyNames: propertyNames"),
        ({"patternProperties": {r"\d": True}, "properties": {"é": {}}}, "schema.patternProperties: a pattern with '.', "),
        ({"patternProperties": {f"^x{n}$": True for n in range(65)}}, "schema.patternProperties: more than 64 patterns"),
        ({"allOf": [{"propertyNames": {"pattern": f"^{n}$"}} for n in range(65)]}, "propertyNames: more than 64 patterns"),
        ({"allOf": []}, "schema.allOf: allOf is a list of schemas that is not empty"),
        ({"properties": []}, "schema.properties: properties is an object of schemas"),
        ({"items": [{}], "prefixItems": [{}]}, "schema.items: items is a schema where prefixItems"),
        ({"$ref": "#/$defs/b", "$defs": {}}, "schema.$ref: #/$defs/b names nothing"),
        ({"items": {"$ref": "https://example.com/a"}}, "schema.items.$ref: only references within the schema"),
        ({"items": {"$id": "a", "type": "null"}}, "schema.items.$id: $id is not supported below"),
        (
            {"$schema": "http://json-schema.org/draft-03/schema#"},
            "schema.$schema: http://json-schema.org/draft-03/schema# is not",
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, "schema.$defs.a.not: not is not supported"),
        ({"properties": {str(n): True for n in range(401)}}, "schema.properties: more than 400 properties that are not required"),
        ({"properties": {str(n): True for n in range(2_001)}}, "schema.properties: more than 2000 properties"),
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
    return {"$ref": "#/$defs/0", "$defs": {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in names} | {str(length): {}}}


def test_nesting_is_bounded_with_and_without_references() -> None:
    assert refusal(nested(63)) is None
    assert refusal(nested(65)) == "schema: nested more than 64 deep"
    assert refusal(chained(95)) is None
    # llguidance overflows the stack of its thread with some thousands.
    assert "schemas are nested more than 200 deep, references followed" in str(refusal(chained(4_000)))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "array", "items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "schema.items.oneOf: "),
        ({"properties": {"b": {"pattern": "a{1000000000000}"}}}, "schema.properties.b.pattern: "),
        ({"type": "object", "properties": {"x": {"type": "string", "minLength": 3, "maxLength": 2}}, "required": ["x"]},
         "schema.properties.x.minLength: "),
        ({"type": "array", "minItems": 1, "items": {"format": "date", "minLength": 30, "type": "string"}},
         "schema.items.minLength: "),
        ({"type": "object", "patternProperties": {"a.": True, "b$": True}}, "schema.patternProperties: "),
        ({"$ref": "#/$defs/a/items", "$defs": {"a": {"items": {"anyOf": [{"type": "array"}], "minItems": 2, "maxItems": 1}}}},
         "schema.$defs.a.items.minItems: "),
        ({"type": "object", "patternProperties": {r"\d": True}, "required": ["a"]}, "schema.patternProperties: "),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2, "additionalProperties": False},
         "schema.minProperties: "),
        ({"type": "string", "format": "date", "maxLength": 3, "minLength": 1}, "schema.maxLength: "),
        ({"items": {"type": "integer", "exclusiveMinimum": 5, "maximum": 5}, "type": "array", "minItems": 1},
         "schema.items.exclusiveMinimum: "),
    ],
)  # fmt: skip
def test_what_does_not_compile_has_its_place(schema: Any, expected: str) -> None:
    assert str(refusal(schema)).startswith(expected), refusal(schema)


def test_the_search_for_a_place_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_SEARCH_SECONDS", 0.0)
    assert place({"properties": {"a": {"type": "string"}}}, lambda schema: False) == ""


def test_an_exact_schema_says_nothing_but_what_it_holds_to() -> None:
    schema = {"$id": "a", "title": "A", "properties": {"b": {"$ref": "#/$defs/c"}}, "$defs": {"c": {"const": 1, "default": 1}}}
    expected = {"properties": {"b": {"$ref": "#/$defs/0"}}, "$defs": {"0": {"$comment": ".$defs.c", "const": 1}}}
    assert json.dumps(expected) == json.dumps(exact(schema, "schema"))
    limits = FormConfig(depth=2)
    with pytest.raises(SchemaError, match="nested more than 2 deep"):
        exact(schema, "schema", limits)


def test_the_documents_name_the_refused_keywords() -> None:
    text = (Path(places.__file__).parent / "README.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| refused |"))
    assert sorted(f"`{keyword}`" for keyword in REFUSED) == sorted(row.split("|")[2].replace(" ", "").split(","))
