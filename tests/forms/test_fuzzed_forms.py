"""Fuzzed schemas, regular expressions and grammars: each compiles or is refused, soon, in little
memory, by no other error.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forms.schemas import EOS, compiled_as, vocabulary_of_bytes
from forms.test_schema_suite import GROUPS, KEYS, Schemas
from thorough import only

from mlx_blockpool.errors import FormError
from mlx_blockpool.forms.exact import REFUSED, exact

JUNK = (
    *(
        None,
        True,
        0,
        -1,
        1.5,
        10**400,
        1e308,
        float("inf"),
        10**9,
        2**31,
        2**32,
        2**64,
        -(2**70),
        "",
        "\ud800",
        "x" * 2_000,
    ),
    *(
        [],
        {},
        [[]],
        {"a": {}},
        ["a"],
        {"$ref": "#"},
        "#/$defs/A",
        "(",
        "[a-",
        "a{99999}",
        "(a{100}){100}",
        "(a|b|ab)*c{50}",
        "\\",
    ),
    *(
        ".*" * 50,
        "(((a*)*)*)*",
        "^(([a-z])+.)+[A-Z]([a-z])+$",
        "(?:a?){40}a{40}",
        "(.{1,200}a){1,20}",
        r"\p{L}{1,500}x",
        "\\",
    ),
)
KEYWORDS = (
    *(keyword for group in GROUPS for keyword in group),
    *REFUSED,
    "$id",
    "$anchor",
    "$defs",
    "x-guidance",
    "$schema",
)
REGEX = (
    *(
        "(a|b)*",
        "a{1,1000}",
        ".{500}",
        "[^a]*",
        "(x?y){30}",
        r"\w+",
        "(.*a)?",
        "(?i)",
        "(",
        r"\p{L}",
        r"\b",
        "{",
        "|",
        "$",
        "^",
    ),
    *("&&", "~", "[[:alpha:]]", "é", "\x00", "/", "\n"),
)
LARK = (
    *(
        "start: ",
        "a",
        "b",
        '"x"',
        "/[a-z]+/",
        "|",
        "*",
        "+",
        "?",
        "{1,50}",
        "(",
        ")",
        "\n",
        "a: ",
        "b: ",
        "&",
        "~",
        "<[5]>",
        '"\\n"',
    ),
    *(
        '%json {"type":"string"}',
        "%regex {}",
        "/(.*a){20}/",
        "root ::= ",
        "[a-z]",
        "%ignore /x/",
        "-> x",
        "%llguidance {}",
        "[lazy]",
    ),
    *(
        "$",
        "..",
        "/" + "a?" * 50 + "a" * 50 + "/",
        "{5000}",
        '"\\n"',
        "start",
        "[lazy]",
        's: s s s | "a" | ""',
    ),
)


class Forms:
    def __init__(self, number: int) -> None:
        self.draw = random.Random(number)
        self.schemas = Schemas(number)

    def form(self) -> tuple[str, Any]:
        draw, chance = self.draw, self.draw.random()
        if chance < 0.45:
            return "json", self.changed(self.schemas.whole())
        if chance < 0.75:
            return "json", self.large()
        if chance < 0.87:
            return "regex", "".join(draw.choice(REGEX) for _ in range(draw.randint(1, 8)))
        return "grammar", "".join(draw.choice(LARK) for _ in range(draw.randint(1, 14)))

    def changed(self, value: Any) -> Any:
        draw = self.draw
        if draw.random() < 0.08:
            return draw.choice(JUNK)
        if isinstance(value, dict):
            found = {key: self.changed(part) for key, part in value.items() if draw.random() > 0.05}
            return found | (
                {draw.choice(KEYWORDS): draw.choice(JUNK)} if draw.random() < 0.25 else {}
            )
        if isinstance(value, list):
            return [self.changed(part) for part in value] * draw.choice((1, 1, 1, 2, 40))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value * draw.choice((1, 1, 1, -1, 10, 10**6, 10**12, 0.001))
        return value

    def large(self) -> Any:
        draw, some = self.draw, self.schemas.schema
        count = draw.choice((50, 300, 1_000, 3_000))
        few, all_names = range(count // 10), [f"p{n}" for n in range(count)]
        kinds: tuple[Callable[[], Any], ...] = (
            lambda: {"type": "object", "properties": {f"p{n}": some(2) for n in few}},
            lambda: {
                "type": "object",
                "properties": dict.fromkeys(all_names, True),
                "required": all_names,
            },
            lambda: {"enum": [f"{'a' * 50}{n}" for n in range(3 * count)]},
            lambda: {"anyOf": [some(2) for _ in few]},
            lambda: {"oneOf": [{"const": n} for n in range(count)]},
            lambda: {
                "allOf": [
                    {"anyOf": [some(2) for _ in range(4)]} for _ in range(draw.randint(2, 12))
                ]
            },
            lambda: {"type": "array", "items": some(2), "minItems": 3 * count, "maxItems": 10_000},
            lambda: {
                "type": "string",
                "minLength": 100 * count,
                "maxLength": count * 10 ** draw.randint(2, 9),
            },
            lambda: {"patternProperties": {f"^{chr(97 + n % 26)}{n}[a-z]*$": some(2) for n in few}},
            lambda: {
                "$ref": "#/$defs/0",
                "$defs": {str(n): self.node(n, count) for n in range(count)},
            },
            lambda: {
                "type": "number",
                "multipleOf": draw.choice((1, 9_999, 0.001, 12_345)),
                "minimum": draw.uniform(-1e6, 1e6),
            },
            lambda: {
                "type": "string",
                "pattern": "".join(draw.choice(REGEX) for _ in range(draw.randint(1, 6))),
            },
            lambda: {
                "type": "object",
                "additionalProperties": some(2),
                "maxProperties": 1_000 * count,
                "minProperties": 1,
            },
            lambda: self.nested(draw.randint(5, 60)),
        )
        return draw.choice(kinds)()

    def nested(self, depth: int) -> Any:
        found = self.schemas.schema(2)
        for _ in range(depth):
            found = (
                {"items": found}
                if self.draw.random() < 0.5
                else {"properties": {"a": found, "b": True}}
            )
        return found

    def node(self, number: int, count: int) -> Any:
        names = [{"$ref": f"#/$defs/{(7 * number + each) % count}"} for each in range(3)]
        return {
            "anyOf": [
                {"type": "string"},
                {"type": "object", "properties": dict(zip(KEYS, names, strict=False))},
            ]
        }


def resident() -> int:
    """Bytes of memory that the process holds; 0 where the system does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * 4096 if path.exists() else 0


def steps(matcher: Any, draw: random.Random) -> None:
    """Some tokens that a matcher allows, until it ends or meets a limit, which is an error of
    its own.
    """
    for _ in range(30):
        mask = matcher.compute_logit_bias()
        allowed = [token for token in range(EOS) if mask[token]]
        if matcher.is_error() or not allowed or not matcher.consume_token(draw.choice(allowed)):
            return


@pytest.mark.parametrize("count", only((30, 2_000), 30))
def test_fuzzed_forms_compile_or_are_refused_within_a_second(count: int) -> None:
    forms = Forms(count)
    vocabulary_of_bytes()
    found = {"compiled": 0, "refused": 0}
    for _ in range(count):
        kind, form = forms.form()
        before, started = resident(), time.process_time()
        try:
            matcher = compiled_as(
                kind, json.dumps(exact(form, "schema")) if kind == "json" else form, "schema"
            )
        except FormError:
            found["refused"] += 1
        else:
            found["compiled"] += 1
            steps(matcher, forms.draw)
        assert time.process_time() - started < 1, (kind, form)
        assert resident() - before < 100 << 20, (kind, form)
    assert min(found.values()) > count / 5


@pytest.mark.thorough
def test_every_keyword_takes_any_value_or_is_refused() -> None:
    refused = set()
    for keyword in KEYWORDS:
        for junk in JUNK:
            for schema in (
                {keyword: junk},
                {"properties": {"a": {"type": "string", keyword: junk}}, "required": ["a"]},
            ):
                try:
                    compiled_as("json", json.dumps(exact(schema, "schema")), "schema")
                except FormError as error:
                    refused.add(error.place.partition(".")[0].partition("[")[0])
    assert refused == {"schema"}
