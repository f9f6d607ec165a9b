"""What is certain of exact schemas: that they have no value in common, and that one has a value
that ends.
"""

from __future__ import annotations

from typing import Any

import pytest

from mlx_blockpool.forms.schema import Schema

DEFS: dict[str, Any] = {
    "text": {"type": "string"},
    "cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
    "dog": {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}},
    "loop": {"$ref": "#/$defs/loop"},
    "list": {"type": "array", "items": {"$ref": "#/$defs/list"}},
    "deep": {"type": "array", "items": {"$ref": "#/$defs/deep"}, "minItems": 1},
    "pair": {
        "type": ["object", "null"],
        "properties": {"next": {"$ref": "#/$defs/pair"}},
        "required": ["next"],
    },
}
WHOLE = Schema({"$defs": DEFS})


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"type": "integer"}, {"type": "number"}, False),
        ({"type": ["integer", "null"]}, ref("text"), True),
        ({"const": 1}, {"const": 1.0}, False),
        ({"const": 1}, {"const": True}, True),
        ({"const": "1"}, {"const": 1}, True),
        ({"enum": ["a", "b"]}, {"enum": ["b"]}, False),
        ({"enum": [[1], 2]}, {"enum": [[1]]}, False),
        ({"const": {"a": 1, "b": [2]}}, {"const": {"b": [2.0], "a": 1.0}}, False),
        ({"const": {"a": 1}}, {"const": {"a": True}}, True),
        ({"const": 1}, {"type": "integer"}, False),
        (ref("cat"), ref("dog"), True),
        (ref("cat"), {"properties": {"kind": {"const": "dog"}}}, True),
        (ref("dog"), {"properties": {"kind": {"const": "cat"}}}, False),
        ({"allOf": [ref("cat")], "minProperties": 2}, {"anyOf": [ref("dog"), ref("text")]}, True),
        ({"anyOf": [ref("cat"), ref("text")]}, ref("dog"), True),
        ({"anyOf": [ref("dog"), ref("text")]}, ref("dog"), False),
        (ref("loop"), ref("loop"), False),
        (False, True, True),
        (True, {}, False),
    ],
)
def test_schemas_are_disjoint_where_it_is_certain(one: Any, other: Any, expected: bool) -> None:
    assert (expected, expected) == (
        WHOLE.are_disjoint(one, other, iter(range(1, 99))),
        WHOLE.are_disjoint(other, one, iter(range(1, 99))),
    )


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (ref("loop"), False),
        (ref("list"), True),
        (ref("deep"), False),
        (ref("pair"), True),
        ({"anyOf": [ref("deep"), {"type": "null"}]}, True),
        ({"allOf": [ref("list"), ref("deep")]}, False),
        (
            {"type": "array", "prefixItems": [ref("list")], "items": ref("deep"), "minItems": 1},
            True,
        ),
        (
            {"type": "array", "prefixItems": [ref("list")], "items": ref("deep"), "minItems": 2},
            False,
        ),
        ({"type": "object", "required": ["a"], "additionalProperties": ref("deep")}, False),
        (
            {
                "type": "object",
                "required": ["a"],
                "additionalProperties": False,
                "patternProperties": {"a": True},
            },
            True,
        ),
        ({"type": "string", "const": 1}, False),
    ],
)
def test_schemas_without_a_finite_value_are_known(schema: Any, expected: bool) -> None:
    assert expected == Schema({**schema, "$defs": DEFS}).has_finite_value()


def test_a_proof_ends_with_its_tries() -> None:
    wide: Any = {"type": "string"}
    for _ in range(8):
        wide = {"allOf": [wide] * 20}
    tries = iter(range(1_000))
    assert not Schema({}).are_disjoint(wide, wide, tries)
    assert next(tries, None) is None
