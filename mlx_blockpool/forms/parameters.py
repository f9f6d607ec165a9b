"""The parameters of a tool as their JSON schemas describe them: which types a value may have,
and its value from raw text.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from typing import Any

from .lark import text_without
from .schema import (
    ANNOTATIONS,
    LISTS,
    JsonSchema,
    Schema,
    SchemaError,
    constants,
    mapped,
    own_types,
    type_of,
    without,
)

# Words of Python and of YAML, which models write for JSON's where no text is allowed.
BOOLEANS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}
_HOST = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9A-Fa-f]{1,4}"
_COMPRESSED = "|".join(f"(?:{_HEX}:){{1,{n}}}(?::{_HEX}){{1,{7 - n}}}" for n in range(1, 7))
_PATH = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
# Texts of each format: not all, but a schema's other keywords may leave out some as well.
FORMATS = {
    "email": f"[A-Za-z0-9_+-]+(?:[.][A-Za-z0-9_+-]+)*@{_HOST}(?:[.]{_HOST})+",
    "hostname": f"{_HOST}(?:[.]{_HOST})*",
    "ipv4": f"{_BYTE}(?:[.]{_BYTE}){{3}}",
    "ipv6": f"(?:{_HEX}:){{7}}{_HEX}|::(?:{_HEX}(?::{_HEX}){{0,6}})?|"
    f"(?:{_HEX}:){{1,7}}:|{_COMPRESSED}",
    "uri": f"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:{_PATH}*@)?{_HOST}(?:[.]{_HOST})*(?::[0-9]{{1,5}})?(?:/{_PATH}*)*|{_PATH}+(?:/{_PATH}*)*)"
    f"(?:[?](?:{_PATH}|[/?])*)?(?:#(?:{_PATH}|[/?])*)?",
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
}
NULLS = ("null", "none", "nil")
MOST_CONDITIONS = 20


def fenced(schema: JsonSchema, *words: str) -> JsonSchema:
    """The same schema of JSON in which none of the words stands, so that a parser may end the
    JSON there.
    """
    pattern = f"^{text_without(*words)}$"
    anything = {
        "anyOf": [
            {"type": ["null", "boolean", "number"]},
            {"$ref": "#/$defs/fenced_text"},
            {"type": "array", "items": {"$ref": "#/$defs/fenced"}},
            {
                "type": "object",
                "patternProperties": {pattern: {"$ref": "#/$defs/fenced"}},
                "additionalProperties": False,
            },
        ]
    }
    inner: JsonSchema = _fenced(schema, words, pattern)
    if isinstance(inner, bool):
        return inner
    shown, added = (
        json.dumps(inner),
        {"fenced": anything, "fenced_text": {"type": "string", "pattern": pattern}},
    )
    if '"#/$defs/fenced"' not in shown:
        del added["fenced"]
    return (
        {**inner, "$defs": {**inner.get("$defs", {}), **added}}
        if '"#/$defs/fenced' in shown
        else inner
    )


def _fenced(schema: JsonSchema, words: tuple[str, ...], pattern: str, part: bool = False) -> Any:
    """`part`: the schema is one of an allOf, of which one more fences what all allow."""
    if isinstance(schema, bool):
        return {"$ref": "#/$defs/fenced"} if schema and not part else schema
    out = mapped(
        without(schema, *ANNOTATIONS),
        lambda key, each: (
            each
            if key == "additionalProperties"
            else _fenced(each, words, pattern, key == "allOf" or (part and key in LISTS))
        ),
    )
    if "$defs" in out:
        out["$defs"] = {name: _fenced(each, words, pattern) for name, each in out["$defs"].items()}
    values = constants(out)
    if values is not None:
        kept = [
            value
            for value in values
            if not any(word in json.dumps(value, ensure_ascii=False) for word in words)
        ]
        return {**without(out, "const"), "enum": kept}
    if part or {"$ref", "anyOf"} & set(out):
        return out
    if out == {"type": "string"}:
        return {"$ref": "#/$defs/fenced_text"}
    if not set(out) - {"$defs"}:
        return {"$ref": "#/$defs/fenced"}
    return _closed(out, words, pattern)


def _closed(out: dict[str, Any], words: tuple[str, ...], pattern: str) -> dict[str, Any]:
    """A schema that says something itself, with a fence around its texts, its items and the
    names of its properties.
    """
    allowed, in_parts = own_types(out), "allOf" in out
    if "string" in allowed and "format" not in out:
        out = (
            {**out, "allOf": [*out.get("allOf", []), {"pattern": pattern}]}
            if "pattern" in out
            else {**out, "pattern": pattern}
        )
    if in_parts and not {"items", "properties", "additionalProperties"} & set(out):
        return out
    if "array" in allowed:
        out.setdefault("items", {"$ref": "#/$defs/fenced"})
    if "object" in allowed and not in_parts and out.get("additionalProperties", True) is not False:
        if "patternProperties" in out:
            why = "patternProperties needs additionalProperties: false in this model's calls"
            raise SchemaError(why, ".patternProperties")
        rest = _fenced(out.get("additionalProperties", True), words, pattern)
        out["additionalProperties"] = False
        if out.get("properties"):
            # A pattern would match declared properties too, so that no others are written next to
            # them.
            out["properties"] = {
                **dict.fromkeys(out.get("required", []), rest),
                **out["properties"],
            }
        else:
            out["patternProperties"] = {pattern: rest}
    return out


def decode(value: Any, allowed: frozenset[str]) -> Any:
    """An argument that a parser of tags has returned as raw text, in one of the types that its
    schema allows.
    """
    if value is None:
        return "null" if "null" not in allowed and "string" in allowed else None
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if allowed == {"string"} else value
    if allowed == {"string"}:
        return value
    found = _read(value)
    if "string" in allowed:
        return found if type_of(found) in allowed else value
    if type_of(found) in allowed:
        return found
    word = value.strip().lower()
    if "null" in allowed and word in NULLS:
        return None
    if "boolean" in allowed and word in BOOLEANS:
        return BOOLEANS[word]
    return _read_python(value) if isinstance(found, str) else found


def _read(text: str) -> Any:
    """What text says as JSON; else the text."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError):
        return text


def _read_python(text: str) -> Any:
    """What text says as a literal of Python, which some models write instead of JSON; else the
    text.
    """
    try:
        found = ast.literal_eval(text.strip())
        return (
            json.loads(json.dumps(found, allow_nan=False))
            if isinstance(found, list | dict)
            else text
        )
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def conditions(schema: dict[str, Any], whole: Schema, place: str) -> list[str]:
    """Regular expressions, all of which a text of this schema matches as a whole. Raises
    SchemaError.

    whole: the schema that this one is a part of.
    """
    found: list[str] = []
    for part in whole.together(schema):
        for key in ("anyOf", "enum", "const"):
            if key in part:
                raise SchemaError(
                    f"{key} is not supported here by this model's tool calls", f"{place}.{key}"
                )
        if "pattern" in part:
            found.append(_searched(part["pattern"], f"{place}.pattern"))
        if "format" in part:
            # Exact schemas have no others.
            found.append(FORMATS[part["format"]])
        if "minLength" in part or "maxLength" in part:
            found.append(f"(?s:.){{{part.get('minLength', 0)},{part.get('maxLength', '')}}}")
        if len(found) > MOST_CONDITIONS:
            raise SchemaError(
                f"more than {MOST_CONDITIONS} patterns of one text are not supported by this "
                "model's tool calls",
                place,
            )
    return found


def _searched(pattern: str, place: str) -> str:
    """A regular expression for whole texts in which a pattern is found."""
    core = pattern.removeprefix("^")
    ends = bool(re.search(r"(?<!\\)(?:\\\\)*\$\Z", core))
    core = core[:-1] if ends else core
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", core, flags=re.DOTALL)
    if re.search(r"[\^$]", bare) or ("|" in _top(bare) and (ends or core != pattern)):
        raise SchemaError(
            "^ and $ are supported at the ends of the whole pattern only by this model's tool "
            "calls",
            place,
        )
    before, after = "" if pattern.startswith("^") else "(?s:.*)", "" if ends else "(?s:.*)"
    return f"{before}(?:{core}){after}"


def _top(regex: str) -> str:
    """A regular expression without its groups."""
    parts, depth = [], 0
    for part in re.split(r"([()])", regex):
        depth = max(depth - (part == ")"), 0)
        if not depth and part not in ("(", ")"):
            parts.append(part)
        depth += part == "("
    return "".join(parts)


def _finite(text: str) -> float:
    """A number of JSON as a double; the largest one for those beyond, which JSON could not write
    again.
    """
    value = float(text)
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a number of JSON")
