"""Every reply that ends satisfies its schema: the JSON Schema Test Suite, schemas of
hypothesis-jsonschema, and random ones.

The suite is draft 2020-12 of https://github.com/json-schema-org/JSON-Schema-Test-Suite, as
jsonschema 4.26 carries it.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forms.schemas import accepts, compiled, errors_of, reply
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema
from thorough import only, seeds

from mlx_blockpool.errors import FormError
from mlx_blockpool.forms.patterns import FORMATS

SUITE = Path(__file__).parent / "suite" / "draft2020-12"
FILES = sorted(str(path.relative_to(SUITE)) for path in SUITE.rglob("*.json"))
QUICK = [
    name
    for name in FILES
    if Path(name).stem
    in ("additionalProperties", "allOf", "const", "oneOf", "ref", "not", "date-time")
]
# Schemas of the suite that compile, and those that are refused, in all files.
KEPT, REFUSED = 226, 212


def has(schema: Any, place: str) -> bool:
    """Whether a place is in a schema."""
    for name, quoted, number in re.findall(r"\.([A-Za-z_$][\w$-]*)|\[(\".*?\")\]|\[(\d+)\]", place):
        key = int(number) if number else json.loads(quoted) if quoted else name
        if not (key < len(schema) if isinstance(schema, list) else key in schema):
            return False
        schema = schema[key]
    return True


def cases(name: str) -> Iterator[tuple[Any, list[Any]]]:
    for group in json.loads((SUITE / name).read_text()):
        yield group["schema"], group["tests"]


def outcome(schema: Any, tests: list[Any]) -> str:
    """Whether a schema of the suite is kept or refused, or what is wrong."""
    try:
        matcher = compiled(schema)
    except FormError as error:
        return (
            "refused"
            if error.place.startswith("schema") and has(schema, error.place)
            else f"{error.place} is not in {schema}"
        )
    is_annotation = isinstance(schema, dict) and schema.get("format", "date") not in FORMATS
    wrong = [
        test
        for test in tests
        if not test["valid"] and accepts(matcher, json.dumps(test["data"], ensure_ascii=False))
    ]
    return f"{schema} accepts {wrong}" if wrong and not is_annotation else "kept"


@pytest.mark.parametrize("name", only(FILES, *QUICK))
def test_the_suite_is_kept_or_refused_with_its_place(name: str) -> None:
    assert {outcome(schema, tests) for schema, tests in cases(name)} <= {"kept", "refused"}


@pytest.mark.thorough
def test_so_many_schemas_of_the_suite_are_kept() -> None:
    found = Counter(outcome(schema, tests) for name in FILES for schema, tests in cases(name))
    assert dict(found) == {"kept": KEPT, "refused": REFUSED}


KEYS = ("a", "b", "ab", "é", 'a"', "", "x1")
TEXTS = ("a", "b", "ab", "", "é", 'a"b', "\n", "1", "\x01")
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    10,
    -5,
    0.5,
    -0.5,
    1.5,
    -2.75,
    0.1,
    0.3,
    100,
    99,
    1e-3,
    12.34,
    0.05,
    9,
    -9.99,
    1.0,
    2.0,
    2**53,
    1e17,
)
PATTERNS = ("^a", "b$", "a", "^[ab]+$", "^x", "^[^a]", ".", r"\d", r"^\w+$", "^a|b$", r"^\S\W?$")
TYPES = ("object", "array", "string", "integer", "number", "null", "boolean")
GROUPS = (
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    ("minLength", "maxLength", "pattern", "format"),
    (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
    ),
    ("items", "prefixItems", "minItems", "maxItems"),
    ("enum", "const"),
    ("allOf", "anyOf", "oneOf", "$ref"),
)


class Schemas:
    """Random schemas, whose keywords meet in every combination."""

    def __init__(self, number: int) -> None:
        self.draw = random.Random(number)

    def whole(self) -> dict[str, Any]:
        found = self.schema(0)
        return {
            **(found if isinstance(found, dict) else {}),
            "$defs": {"A": self.schema(1), "B": self.schema(1)},
        }

    def schema(self, depth: int) -> Any:
        draw = self.draw
        if draw.random() < 0.06:
            return draw.choice((True, True, False))
        if depth > 3:
            return {"type": draw.choice(TYPES[2:])}
        keywords = ["type"] if draw.random() < 0.75 else []
        for _ in range(draw.choice((1, 1, 1, 2, 2, 3))):
            group = draw.choice(GROUPS if depth else (*GROUPS, GROUPS[2]))
            keywords += draw.sample(group, draw.randint(1, min(3, len(group))))
        draw.shuffle(keywords)
        return {keyword: self.value(keyword, depth + 1) for keyword in keywords}

    def value(self, keyword: str, depth: int) -> Any:
        draw = self.draw
        if keyword == "type":
            return draw.choice(
                (
                    *TYPES,
                    ["string", "null"],
                    ["integer", "string"],
                    ["object", "array"],
                    ["integer", "number"],
                )
            )
        if keyword in ("const", "enum"):
            return (
                self.constant(0)
                if keyword == "const"
                else [self.constant(0) for _ in range(draw.randint(1, 4))]
            )
        if keyword == "multipleOf":
            return draw.choice((1, 2, 3, 0.5, 0.1, 0.01, 7, 1.5))
        if keyword in GROUPS[0]:
            return draw.choice(NUMBERS)
        if keyword.startswith(("minL", "minI", "minP", "maxL", "maxI", "maxP")):
            return draw.randint(0, 2) if keyword.startswith("min") else draw.randint(0, 4)
        if keyword in ("pattern", "format"):
            return draw.choice(
                PATTERNS
                if keyword == "pattern"
                else ("date", "time", "ipv4", "uuid", "email", "own")
            )
        if keyword in ("properties", "patternProperties"):
            names = KEYS if keyword == "properties" else PATTERNS
            return {draw.choice(names): self.schema(depth) for _ in range(draw.randint(1, 3))}
        if keyword == "required":
            return draw.sample(KEYS, draw.randint(1, 2))
        if keyword == "$ref":
            return draw.choice(("#/$defs/A", "#/$defs/B", "#"))
        if keyword in ("items", "additionalProperties"):
            return draw.choice((False, True, self.schema(depth), self.schema(depth)))
        return [self.schema(depth) for _ in range(draw.randint(1, 3))]

    def constant(self, depth: int) -> Any:
        draw, chance = self.draw, self.draw.random()
        if chance < 0.65 or depth > 1:
            return draw.choice((*TEXTS, *NUMBERS, None, True, False))
        if chance < 0.8:
            return [self.constant(depth + 1) for _ in range(draw.randint(0, 2))]
        return {draw.choice(KEYS): self.constant(depth + 1) for _ in range(draw.randint(0, 2))}


def compiled_or_placed(schema: Any) -> Any:
    """A matcher, or the place below the schema of what is refused."""
    try:
        return compiled(schema)
    except FormError as error:
        return error.place.removeprefix("schema")


def replies_satisfy(schema: Any, draw: random.Random, count: int) -> int | None:
    """How many of `count` random replies ended; None for a schema that is refused."""
    matcher = compiled_or_placed(schema)
    if isinstance(matcher, str):
        assert has(schema, matcher), matcher
        return None
    found = [text for _ in range(count) if (text := reply(matcher, draw)) is not None]
    for text in found:
        assert not errors_of(schema, text), (text, schema)
    return len(found)


@pytest.mark.parametrize("number", seeds(1, 40))
def test_random_replies_satisfy_random_schemas(number: int) -> None:
    schemas, ended = Schemas(number), []
    while len(ended) < 40:
        found = replies_satisfy(schemas.whole(), schemas.draw, 4)
        if found is not None:
            ended.append(found)
    assert sum(ended) > 0.8 * 4 * len(ended)


def schemas_of_hypothesis(depth: int) -> st.SearchStrategy[Any]:
    """Schemas whose keywords have values that hypothesis-jsonschema draws from schemas."""
    count, number = (
        {"type": "integer", "minimum": 0, "maximum": 6},
        {"type": "number", "minimum": -99, "maximum": 99},
    )
    value = {"type": ["null", "boolean", "number", "string"]}
    kinds: dict[str, Any] = {
        "type": {
            "anyOf": [
                {"enum": [*TYPES]},
                {"type": "array", "items": {"enum": [*TYPES]}, "minItems": 1, "uniqueItems": True},
            ]
        },
        "enum": {
            "type": "array",
            "items": {"anyOf": [value, {"type": "array", "items": value}]},
            "minItems": 1,
            "maxItems": 4,
        },
        "const": value,
        "multipleOf": {"enum": [1, 2, 5, 0.25, 0.1]},
        "pattern": {"enum": [*PATTERNS]},
        "format": {"enum": sorted(FORMATS)},
        "required": {"type": "array", "items": {"enum": [*KEYS]}, "maxItems": 2},
        "uniqueItems": {"type": "boolean"},
        **dict.fromkeys(
            ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
            count,
        ),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), number),
    }
    keywords = {keyword: from_schema(kind) for keyword, kind in kinds.items()}
    if depth:
        below = schemas_of_hypothesis(depth - 1)
        some = st.lists(below, min_size=1, max_size=3)
        keywords |= {
            **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), some),
            "items": below,
            "additionalProperties": below,
        }
        keywords["properties"] = st.dictionaries(st.sampled_from(KEYS), below, max_size=3)
    chosen = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=4, unique=True)
    return chosen.flatmap(
        lambda names: st.fixed_dictionaries({name: keywords[name] for name in names})
    )


@pytest.mark.parametrize("wanted", only((8, 300), 8))
def test_random_replies_satisfy_schemas_of_hypothesis(wanted: int) -> None:
    ended: list[int] = []
    draw = random.Random(wanted)

    @seed(wanted)
    @settings(
        max_examples=5 * wanted,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(schemas_of_hypothesis(2))
    def satisfied(schema: Any) -> None:
        if (found := replies_satisfy(schema, draw, 4)) is not None:
            ended.append(found)

    satisfied()
    assert len(ended) >= wanted
    assert sum(ended) > 0.5 * 4 * len(ended)
