"""Arrays with uniqueItems: refused, or left out by name."""

from __future__ import annotations

from typing import Any

import pytest
from forms.schemas import refusal

from mlx_blockpool.forms.exact import exact

SET = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    "schema",
    [
        {**SET, "items": {"type": "string"}},
        {**SET, "items": {"enum": ["a"]}},
        {"uniqueItems": True},
    ],
)
def test_unique_items_are_refused_or_named(schema: Any) -> None:
    whole = {"properties": {"a": schema}}
    assert str(refusal(whole)).startswith(
        "schema.properties.a.uniqueItems: uniqueItems is not supported: leave it out"
    )
    unkept: list[str] = []
    rest = {key: value for key, value in schema.items() if key != "uniqueItems"}
    assert exact(whole, "schema", unkept=unkept) == exact({"properties": {"a": rest}}, "schema")
    assert unkept == ["schema.properties.a.uniqueItems"]


@pytest.mark.parametrize("schema", [{**SET, "maxItems": 1}, {**SET, "uniqueItems": False}])
def test_unique_items_that_say_nothing_are_kept(schema: Any) -> None:
    unkept: list[str] = []
    exact(schema, "schema", unkept=unkept)
    assert unkept == []
