"""Where the parts of an exact schema are, in the schema that it was made from.

An exact schema has most parts in their old places. The others have their place as `$comment`: what references name, what patterns
that were rewritten map to, and branches of a oneOf that has become an anyOf.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any] | bool

MAPS = ("properties", "patternProperties")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
ONE = ("items", "additionalItems", "additionalProperties")
_BASIC = ("type", "$ref", "allOf", "anyOf", "oneOf")
_SEARCH_SECONDS = 0.3  # processor time that the place of an error may take


def place(schema: Schema, compiles: Callable[[Schema], bool]) -> str:
    """Where in an exact schema that does not compile the reason is, as ".properties.a.pattern". `compiles`: tries a schema."""
    defs = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    deadline = time.thread_time() + _SEARCH_SECONDS

    def fails(part: dict[str, Any]) -> bool:
        return time.thread_time() < deadline and not compiles({**part, "$defs": defs} if defs else part)

    if isinstance(schema, bool):
        return ""
    at, below = "", schema
    while below:
        schema = below
        at, below = next(((there, part) for there, part in members(schema, at) if fails(part)), (at, {}))
    # Without one of the basic ones most of what is wrong with a schema goes away.
    for keyword in sorted(schema, key=_BASIC.__contains__):
        rest = {key: value for key, value in schema.items() if key not in (keyword, "$defs")}
        if keyword not in ("$defs", "$comment") and not fails(rest) and time.thread_time() < deadline:
            return f"{at}.{_original(schema, keyword)}"
    return at


def members(schema: dict[str, Any], at: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each schema within an exact one, and its place; those that references name first."""
    for keyword in ("$defs", *(keyword for keyword in schema if keyword != "$defs")):
        value = schema.get(keyword)
        parts: list[tuple[str, Any]] = []
        if isinstance(value, dict) and keyword in ("$defs", *MAPS):
            parts = [(f"{at}.{keyword}{step(name)}", part) for name, part in value.items()]
        elif isinstance(value, list) and keyword in (*LISTS, "items"):
            parts = [(f"{at}.{keyword}[{number}]", part) for number, part in enumerate(value)]
        elif keyword in ONE:
            parts = [(f"{at}.{keyword}", value)]
        for there, part in parts:
            if isinstance(part, dict):
                yield part.get("$comment", there), part


def subschemas(schema: Schema) -> Iterator[dict[str, Any]]:
    """An exact schema and all schemas within it."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left.extend(below for _, below in members(part, ""))


def step(name: str) -> str:
    """A key in a place."""
    return f".{name}" if re.fullmatch(r"[A-Za-z_$][\w$-]*", name) else f"[{json.dumps(name)}]"


def _original(schema: dict[str, Any], keyword: str) -> str:
    """The keyword of the client's schema that has become this one."""
    parts = schema[keyword]
    comment = parts[-1].get("$comment", "") if isinstance(parts, list) and parts and isinstance(parts[-1], dict) else ""
    if keyword == "allOf" and comment == "format":
        return "format"
    if keyword == "additionalProperties" and "patternProperties" in schema:
        return "patternProperties"
    if (excluded := f"exclusive{keyword.capitalize()}") in schema:
        return excluded
    return "oneOf" if keyword == "anyOf" and comment.endswith("]") else keyword
