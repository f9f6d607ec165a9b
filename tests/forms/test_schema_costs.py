"""What a hostile schema costs: comparisons and permutations are counted, not repeated."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_blockpool.forms import schema
from mlx_blockpool.forms.exact import exact as rewritten
from mlx_blockpool.forms.schema import SchemaError, without_refused

MANY = [f"v{number}" for number in range(2000)]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many constants own_types() has looked at, one number a call."""
    found: list[int] = []

    def own_types(part: dict[str, Any]) -> frozenset[str]:
        found.append(len(schema.constants(part) or ()))
        return before(part)

    before = schema.own_types
    monkeypatch.setattr(schema, "own_types", own_types)
    return found


def test_branches_that_share_an_enum_look_at_it_once(typed: list[int]) -> None:
    branches = [
        {
            "type": "object",
            "required": ["v", "k"],
            "properties": {"v": {"$ref": "#/$defs/e"}, "k": {"const": number}},
        }
        for number in range(20)
    ]
    rewritten({"$defs": {"e": {"enum": MANY}}, "oneOf": branches}, "")
    assert sum(typed) <= 4 * len(MANY)


def test_of_names_that_begin_alike_the_refused_one_is_left_out() -> None:
    def build(given: dict[str, Any]) -> dict[str, Any]:
        if given["properties"]["a.b"] is not True:
            raise SchemaError("refused", ".properties.a.b")
        return given

    asked = {"type": "object", "properties": {"a": {"type": "integer"}, "a.b": {"pattern": "x"}}}
    found = without_refused(asked, build, iter(range(5)))
    assert found is not None
    assert found["properties"] == {"a": {"type": "integer"}, "a.b": True}
