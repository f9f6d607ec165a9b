"""Objects whose schemas leave out additionalProperties have the keys that their schemas name,
and no others.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from forms.schemas import accepts, compiled, refusal
from thorough import seeds

from mlx_blockpool.forms import closed_objects
from mlx_blockpool.forms.exact import exact
from mlx_blockpool.forms.schema import SchemaError

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
A, B = {"properties": {"a": INTEGER}}, {"properties": {"b": TEXT}}
DEFS = {
    "A": {"type": "object", **A, "required": ["a"]},
    "B": {"type": "object", **B},
    "tree": {
        "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}, "a": INTEGER}
    },
    "cat": {
        "type": "object",
        "properties": {"kind": {"const": "cat"}, "a": INTEGER},
        "required": ["kind"],
    },
    "dog": {
        "type": "object",
        "properties": {"kind": {"const": "dog"}, "b": TEXT},
        "required": ["kind"],
    },
}
NESTED = {
    "properties": {
        "a": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]},
        "l": {"items": {"$ref": "#/$defs/B"}},
    }
}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize(
    ("schema", "kept", "forbidden"),
    [
        (A, ['{"a":1}', "{}", "7"], ['{"a":1,"c":1}', '{"c":1}']),
        ({"type": "object", "properties": {}}, ["{}"], ['{"a":1}']),
        # Without declared keys an object is free.
        ({"type": "object"}, ["{}", '{"c":{"d":1}}'], []),
        ({"type": "object", "required": ["a"]}, ['{"a":1,"c":1}'], ['{"c":1}']),
        ({**A, "additionalProperties": True}, ['{"a":1,"c":1}'], []),
        ({**A, "additionalProperties": {}}, ['{"a":1,"c":1}'], []),
        ({**A, "additionalProperties": INTEGER}, ['{"a":1,"c":1}'], ['{"a":1,"c":"x"}']),
        ({**A, "unevaluatedProperties": True}, ['{"a":1,"c":1}'], []),
        ({**A, "required": ["a", "c"]}, ['{"a":1,"c":null}'], ['{"a":1}', '{"a":1,"c":1,"d":1}']),
        (
            {"patternProperties": {"^x": INTEGER}},
            ['{"x":1,"xx":2}'],
            ['{"x":1,"y":1}', '{"x":"x"}'],
        ),
        ({**A, "patternProperties": {"^x": INTEGER}}, ['{"a":1,"x":2}'], ['{"y":1}']),
        (
            {**A, "required": ["a"], "minProperties": 2, "type": "object"},
            ['{"a":1,"c":1}'],
            ['{"a":1}'],
        ),
        ({"const": {"a": 1, "c": 2}, **A}, ['{"a":1,"c":2}'], ['{"a":1}']),
        (
            {"properties": {"a": A, "b": {"items": B}}},
            ['{"a":{"a":1},"b":[{"b":"x"}]}'],
            ['{"a":{"c":1}}', '{"b":[{"a":1}]}'],
        ),
        # What holds together is closed together.
        ({"allOf": [A, B]}, ['{"a":1,"b":"x"}', '{"b":"x"}', "{}"], ['{"a":1,"c":1}', '{"a":"x"}']),
        (
            {"allOf": [ref("A"), B], "$defs": DEFS},
            ['{"a":1,"b":"x"}', '{"a":1}'],
            ['{"a":1,"c":1}', '{"b":"x"}'],
        ),
        ({**ref("A"), **B, "$defs": DEFS}, ['{"a":1,"b":"x"}'], ['{"a":1,"c":1}', '{"b":"x"}']),
        (
            {**ref("A"), "required": ["c"], "$defs": DEFS},
            ['{"a":1,"c":1}'],
            ['{"a":1}', '{"a":1,"c":1,"d":1}'],
        ),
        ({"allOf": [ref("A")], "$defs": DEFS}, ['{"a":1}'], ['{"a":1,"c":1}']),
        ({"allOf": [A], "required": ["c"]}, ['{"a":1,"c":1}'], ['{"a":1}', '{"c":1,"d":1}']),
        (
            {"allOf": [{"allOf": [A, {"required": ["c"]}]}, B]},
            ['{"a":1,"b":"x","c":1}'],
            ['{"c":1,"d":1}', '{"a":1}'],
        ),
        ({"allOf": [{**A, "additionalProperties": True}, B]}, ['{"a":1,"c":1}'], ['{"a":"x"}']),
        (
            {"allOf": [A, {"patternProperties": {"^x": TEXT}}]},
            ['{"a":1,"x":"x"}'],
            ['{"x":1}', '{"c":1}'],
        ),
        # Of a union each branch is closed by itself, with the keys around it.
        (
            {"anyOf": [A, B]},
            ['{"a":1}', '{"b":"x"}', "{}", "7"],
            ['{"c":1}', '{"a":1,"b":"x"}', '{"b":1}'],
        ),
        (
            {**A, "anyOf": [{"required": ["a"]}, {"required": ["c"]}]},
            ['{"a":1}', '{"a":1,"c":1}'],
            ["{}", '{"a":1,"d":1}'],
        ),
        (
            {**A, "anyOf": [B, {"required": ["c"]}]},
            ['{"a":1,"b":"x"}', '{"a":1,"c":1}'],
            ['{"a":1,"b":"x","c":1}', '{"d":1}'],
        ),
        ({**A, "anyOf": [B, True]}, ['{"a":1,"b":"x"}', '{"a":1}'], ['{"a":1,"c":1}']),
        ({"anyOf": [A, {"type": "object"}]}, ['{"a":1}', '{"c":1}'], []),
        (
            {"anyOf": [{**A, "additionalProperties": True}, B]},
            ['{"a":1,"c":1}', '{"b":"x"}'],
            ['{"a":"x"}'],
        ),
        (
            {**NESTED, "$defs": DEFS},
            ['{"a":{"a":1},"l":[{"b":"x"}]}', '{"a":null}'],
            ['{"a":{"a":1,"c":1}}', '{"l":[{"c":1}]}'],
        ),
        (
            {"oneOf": [ref("cat"), ref("dog")], "$defs": DEFS},
            ['{"kind":"cat","a":1}', '{"kind":"dog","b":"x"}'],
            ['{"kind":"cat","b":"x"}', '{"kind":"dog","c":1}'],
        ),
        (
            {**ref("tree"), "$defs": DEFS},
            ['{"kids":[{"a":1},{}],"a":1}'],
            ['{"kids":[{"c":1}]}', '{"c":1}'],
        ),
        # One definition, alone and as a part.
        (
            {"properties": {"x": ref("A"), "y": {"allOf": [ref("A"), B]}}, "$defs": DEFS},
            ['{"x":{"a":1},"y":{"a":1,"b":"x"}}'],
            ['{"x":{"a":1,"b":"x"}}', '{"y":{"a":1,"c":1}}'],
        ),
    ],
)
def test_objects_have_the_keys_that_their_schemas_name(
    schema: Any, kept: list[str], forbidden: list[str]
) -> None:
    matcher = compiled(schema)
    assert [(text, True) for text in kept] == [(text, accepts(matcher, text)) for text in kept]
    assert [(text, False) for text in forbidden] == [
        (text, accepts(matcher, text)) for text in forbidden
    ]


def test_a_oneof_whose_schemas_may_match_together_is_not_told_apart_by_closing_them() -> None:
    """{"a": 1, "b": 1} satisfies both, and so does not satisfy the oneOf; closed, only the
    second would match it.
    """
    schema = {
        "oneOf": [
            {"type": "object", **A},
            {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}},
        ]
    }
    assert "oneOf is not supported where two of its schemas may match" in str(refusal(schema))


def part(draw: random.Random, depth: int) -> dict[str, Any]:
    """A random schema of one or more that hold together."""
    found: dict[str, Any] = {}
    if draw.random() < 0.7:
        found["properties"] = dict.fromkeys(draw.sample("abcd", draw.randint(0, 2)), INTEGER)
    if draw.random() < 0.4:
        found["required"] = draw.sample("abcd", 1)
    if depth and draw.random() < 0.6:
        found["allOf"] = [part(draw, depth - 1) for _ in range(draw.randint(1, 2))]
    if depth and draw.random() < 0.4:
        found["$ref"] = draw.choice(["#/$defs/A", "#/$defs/B"])
    return found


def required_by(schema: dict[str, Any], defs: dict[str, Any]) -> list[str]:
    return [
        *schema.get("required", ()),
        *(name for each in below(schema, defs) for name in required_by(each, defs)),
    ]


def below(schema: dict[str, Any], defs: dict[str, Any]) -> list[Any]:
    return [*schema.get("allOf", ()), *([defs[schema["$ref"][-1]]] if "$ref" in schema else [])]


def declares(schema: dict[str, Any], defs: dict[str, Any]) -> bool:
    return "properties" in schema or any(declares(each, defs) for each in below(schema, defs))


@pytest.mark.parametrize("number", seeds(2, 40))
def test_random_schemas_accept_what_unevaluated_properties_leave(number: int) -> None:
    draw, values = (
        random.Random(number),
        [dict.fromkeys(keys, 1) for n in range(4) for keys in itertools.permutations("abcde", n)],
    )
    for _ in range(12):
        defs = {"A": part(draw, 0), "B": part(draw, 0)}
        schema = {"type": "object", **part(draw, 2), "$defs": defs}
        # Keys that are required may be written, as if they were declared.
        needed = {
            "allOf": [schema, {"properties": dict.fromkeys(required_by(schema, defs), True)}],
            "$defs": defs,
        }
        closed = {**needed, "unevaluatedProperties": False} if declares(schema, defs) else schema
        valid = {
            json.dumps(sorted(value))
            for value in values
            if jsonschema.Draft202012Validator(closed).is_valid(value)
        }
        matcher = compiled(schema)
        found = {
            json.dumps(sorted(value)) for value in values if accepts(matcher, json.dumps(value))
        }
        assert found == valid, schema


def test_closing_gives_up_before_a_schema_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {
        "properties": {f"p{n}": INTEGER for n in range(300)},
        "anyOf": [{"properties": {f"q{n}": TEXT}} for n in range(100)],
    }
    with pytest.raises(
        SchemaError, match=r"^schema: .* write additionalProperties in its objects$"
    ):
        exact(wide, "schema")
    assert exact({**wide, "additionalProperties": True}, "schema")
    monkeypatch.setattr(closed_objects, "_MOST_PARTS", 50)
    with pytest.raises(SchemaError, match="write additionalProperties in its objects"):
        exact(wide, "schema")
