"""The parameters of a tool as their JSON schemas describe them: which types a value may have, and its value from raw text."""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from typing import Any

from .lark import without
from .schema import Schema, SchemaError

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
# Words of Python and of YAML, which models write for JSON's where no text is allowed.
BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_HOST = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9A-Fa-f]{1,4}"
_COMPRESSED = "|".join(f"(?:{_HEX}:){{1,{n}}}(?::{_HEX}){{1,{7 - n}}}" for n in range(1, 7))
_PATH = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
# Texts of each format: not all, but a schema's other keywords may leave out some as well.
FORMATS = {
    "duration": f"P(?:(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:{_TIME})?|{_TIME}|[0-9]+W)",
    "email": f"[A-Za-z0-9_+-]+(?:[.][A-Za-z0-9_+-]+)*@{_HOST}(?:[.]{_HOST})+",
    "hostname": f"{_HOST}(?:[.]{_HOST})*",
    "ipv4": f"{_BYTE}(?:[.]{_BYTE}){{3}}",
    "ipv6": f"(?:{_HEX}:){{7}}{_HEX}|::(?:{_HEX}(?::{_HEX}){{0,6}})?|(?:{_HEX}:){{1,7}}:|{_COMPRESSED}",
    "uri": f"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:{_PATH}*@)?{_HOST}(?:[.]{_HOST})*(?::[0-9]{{1,5}})?(?:/{_PATH}*)*|{_PATH}+(?:/{_PATH}*)*)"
    f"(?:[?](?:{_PATH}|[/?])*)?(?:#(?:{_PATH}|[/?])*)?",
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
}
# How names of types in other languages begin; all others are those of text.
OTHER_NAMES = {
    "integer": ("int", "uint", "long", "short", "unsigned"),
    "number": ("num", "float", "double"),
    "boolean": ("bool", "binary"),
    "array": ("arr", "list", "tuple", "set"),
    "object": ("obj", "dict", "map"),
    "null": ("none", "null", "nil"),
}
NULLS = ("null", "none", "nil")
# Keywords of which one says what another leaves over, in the same schema alone.
TOGETHER = (frozenset({"properties", "patternProperties", "additionalProperties"}), frozenset({"prefixItems", "items"}))
# A union of more schemas is refused: references may multiply them without end.
MOST_BRANCHES = 1_000
MOST_CONDITIONS = 20
REFERENCE = re.compile(r'"\$ref": "((?:[^"\\]|\\.)*)"')
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def resolve(schema: Schema, root: Schema) -> Schema:
    """A schema without a reference at its top. Raises SchemaError for references that lead nowhere, or to themselves."""
    seen: list[str] = []
    while isinstance(schema, dict) and "$ref" in schema:
        reference = str(schema["$ref"])
        if reference in seen:
            raise SchemaError("", "$ref", f"$ref leads to itself: {reference}")
        seen.append(reference)
        schema = both(_target(reference, root), {key: value for key, value in schema.items() if key != "$ref"})
    return schema


def _target(reference: str, root: Schema) -> Schema:
    node: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            node = node[int(name)] if isinstance(node, list) else node[name]
        except (KeyError, TypeError, ValueError, IndexError):
            node = None
    if not reference.startswith("#") or not isinstance(node, dict | bool):
        raise SchemaError("", "$ref", f"$ref leads nowhere: {reference}")
    return node


def both(schema: Schema, other: Schema) -> Schema:
    """A schema of values that two allow."""
    if isinstance(schema, bool) or isinstance(other, bool):
        return (other if schema else False) if isinstance(schema, bool) else (schema if other else False)
    said = {key: value for key, value in other.items() if key not in ANNOTATIONS}
    meets = any(key in schema and schema[key] != value for key, value in said.items())
    if meets or any(group & set(schema) and group & set(said) for group in TOGETHER):
        return {"allOf": [schema, other]}
    return {**schema, **other}


def type_of(value: Any) -> str:
    """The JSON type of a value; "integer" for those numbers too that have no fraction."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number" if isinstance(value, float) and not value.is_integer() else "integer"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def types(schema: Schema, root: Schema, known: dict[str, frozenset[str]] | None = None) -> frozenset[str]:
    """The types that a value of this schema may have; "number" comes with "integer". `known`: those of references."""
    known = {} if known is None else known
    if not isinstance(schema, dict) or "$ref" not in schema:
        return _types(schema, root, known)
    name = json.dumps(schema)
    if name not in known:
        # A schema that leads to itself allows nothing by that.
        known[name] = frozenset()
        known[name] = _types(resolve(schema, root), root, known)
    return known[name]


def _types(schema: Schema, root: Schema, known: dict[str, frozenset[str]]) -> frozenset[str]:
    if isinstance(schema, bool):
        return TYPES if schema else frozenset()
    named = schema.get("type", TYPES)
    found = frozenset(map(_type, [named] if isinstance(named, str) else named))
    if "number" in found:
        found |= {"integer"}
    values = listed(schema)
    if values is not None:
        found &= frozenset(map(type_of, values)) | ({"number"} if any(isinstance(v, float) for v in values) else set())
    for key in ("anyOf", "oneOf"):
        if key in schema:
            found &= frozenset().union(*(types(each, root, known) for each in schema[key]))
    for each in schema.get("allOf", []):
        found &= types(each, root, known)
    return found


def _type(name: str) -> str:
    """The type of JSON that a name in a schema means: schemas that nobody has checked have names of other languages."""
    if name in TYPES:
        return name
    return next((kind for kind, beginnings in OTHER_NAMES.items() if name.lower().startswith(beginnings)), "string")


def listed(schema: Schema) -> list[Any] | None:
    """The values of `const` or `enum`; None: any."""
    if isinstance(schema, bool):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def branches(schema: Schema, root: Schema) -> list[dict[str, Any]]:
    """The schemas whose union an exact schema is: those of anyOf, and one for each of several types.

    Raises SchemaError for oneOf, which exact schemas have only where several of its schemas may match.
    """
    found: list[dict[str, Any]] = []
    waiting: list[tuple[Schema, frozenset[str]]] = [(schema, frozenset())]
    steps = 0
    while waiting:
        steps += 1
        if steps > MOST_BRANCHES:
            raise SchemaError(
                "", None, f"a union of more than {MOST_BRANCHES} schemas is not supported by this model's tool calls"
            )
        each, seen = waiting.pop()
        reference = json.dumps(each) if isinstance(each, dict) and "$ref" in each else None
        if reference in seen:
            continue
        inner = _object(resolve(each, root))
        seen = seen if reference is None else seen | {reference}
        if "oneOf" in inner:
            why = "oneOf is not supported by this model's tool calls where two of its schemas may match: use anyOf"
            raise SchemaError("", "oneOf", why)
        if "anyOf" in inner:
            rest = {name: value for name, value in inner.items() if name != "anyOf"}
            # Backwards: the last one is taken first.
            waiting += [(both(one, rest) if rest else one, seen) for one in reversed(inner["anyOf"])]
        elif isinstance(inner.get("type"), list):
            found += [{**inner, "type": kind} for kind in inner["type"]]
        else:
            found.append(inner)
    return found


def standalone(schema: dict[str, Any], root: Schema) -> dict[str, Any]:
    """A part of `root`, an exact schema, as a schema of its own, with those `$defs` of the root to which references lead."""
    definitions = root.get("$defs", {}) if isinstance(root, dict) else {}
    needed: dict[str, Any] = {}
    waiting = [schema]
    while waiting:
        for reference in REFERENCE.findall(json.dumps(waiting.pop())):
            name = json.loads(f'"{reference}"').removeprefix("#/$defs/").split("/")[0].replace("~1", "/").replace("~0", "~")
            if name in definitions and name not in needed:
                needed[name] = definitions[name]
                waiting.append(definitions[name])
    return {**schema, "$defs": needed} if needed else schema


def fenced(schema: Schema, *words: str) -> Schema:
    """The same schema of JSON in which none of the words stands, so that a parser may end the JSON there."""
    pattern = f"^{without(*words)}$"
    anything = {
        "anyOf": [
            {"type": ["null", "boolean", "number"]},
            {"$ref": "#/$defs/fenced_text"},
            {"type": "array", "items": {"$ref": "#/$defs/fenced"}},
            {"type": "object", "patternProperties": {pattern: {"$ref": "#/$defs/fenced"}}, "additionalProperties": False},
        ]
    }
    inner: Schema = _fenced(schema, words, pattern)
    if isinstance(inner, bool):
        return inner
    shown, added = json.dumps(inner), {"fenced": anything, "fenced_text": {"type": "string", "pattern": pattern}}
    if '"#/$defs/fenced"' not in shown:
        del added["fenced"]
    return {**inner, "$defs": {**inner.get("$defs", {}), **added}} if '"#/$defs/fenced' in shown else inner


def _fenced(schema: Any, words: tuple[str, ...], pattern: str, part: bool = False) -> Any:
    """`part`: the schema is one of an allOf, of which one more fences what all allow."""
    if isinstance(schema, bool):
        return {"$ref": "#/$defs/fenced"} if schema and not part else schema
    out = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    for key in out:
        if key in MAPS:
            out[key] = {name: _fenced(each, words, pattern) for name, each in out[key].items()}
        elif key in LISTS:
            out[key] = [_fenced(each, words, pattern, part or key == "allOf") for each in out[key]]
        elif key == "items":
            out[key] = _fenced(out[key], words, pattern)
    values = listed(out)
    if values is not None:
        kept = [value for value in values if not any(word in json.dumps(value, ensure_ascii=False) for word in words)]
        return {**{key: value for key, value in out.items() if key != "const"}, "enum": kept}
    if part or {"$ref", "anyOf", "oneOf"} & set(out):
        return out
    if out == {"type": "string"}:
        return {"$ref": "#/$defs/fenced_text"}
    if not set(out) - {"$defs", "definitions"}:
        return {"$ref": "#/$defs/fenced"}
    return _closed(out, words, pattern)


def _closed(out: dict[str, Any], words: tuple[str, ...], pattern: str) -> dict[str, Any]:
    """A schema that says something itself, with a fence around its texts, its items and the names of its properties."""
    allowed, in_parts = types({"type": out["type"]} if "type" in out else True, True), "allOf" in out
    if "string" in allowed and "format" not in out:
        out = {**out, "allOf": [*out.get("allOf", []), {"pattern": pattern}]} if "pattern" in out else {**out, "pattern": pattern}
    if in_parts and not {"items", "properties", "additionalProperties"} & set(out):
        return out
    if "array" in allowed:
        out.setdefault("items", {"$ref": "#/$defs/fenced"})
    if "object" in allowed and not in_parts and out.get("additionalProperties", True) is not False:
        if "patternProperties" in out:
            why = "patternProperties needs additionalProperties: false in this model's calls"
            raise SchemaError("", "patternProperties", why)
        rest = _fenced(out.get("additionalProperties", True), words, pattern)
        out["additionalProperties"] = False
        if out.get("properties"):
            # A pattern would be of declared properties too: others are not written beside them.
            out["properties"] = {**dict.fromkeys(out.get("required", []), rest), **out["properties"]}
        else:
            out["patternProperties"] = {pattern: rest}
    return out


def decode(value: Any, schema: Schema, root: Schema) -> Any:
    """An argument that a parser of tags has returned as raw text, in a type that its schema allows."""
    return decode_as(types(schema, root), value)


def decode_as(allowed: frozenset[str], value: Any) -> Any:
    """The same for the types that a schema allows."""
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
    """What text says as a literal of Python, which some models write instead of JSON; else the text."""
    try:
        found = ast.literal_eval(text.strip())
        return json.loads(json.dumps(found, allow_nan=False)) if isinstance(found, list | dict) else text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def conditions(schema: dict[str, Any], root: Schema, place: str, seen: set[str] | None = None) -> list[str]:
    """Regular expressions, all of which a text of this schema matches as a whole. Raises SchemaError.

    `seen`: references whose conditions are known already.
    """
    found: list[str] = []
    seen = set() if seen is None else seen
    for key, value in schema.items():
        at = f"{place}.{key}"
        if key in ("anyOf", "oneOf", "enum", "const"):
            raise SchemaError(at, key, f"{key} is not supported here by this model's tool calls")
        if key == "allOf":
            for one in value:
                reference = json.dumps(one["$ref"]) if isinstance(one, dict) and "$ref" in one else None
                if reference not in seen:
                    seen |= set() if reference is None else {reference}
                    found += conditions(_object(resolve(one, root)), root, at, seen)
        elif key == "pattern":
            found.append(_searched(value, at))
        elif key == "format":
            if value not in FORMATS:
                raise SchemaError(at, key, f"format {value!r} is not supported by this model's tool calls")
            found.append(FORMATS[value])
    if "minLength" in schema or "maxLength" in schema:
        found.append(f"(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}")
    if len(found) > MOST_CONDITIONS:
        raise SchemaError(
            place, None, f"more than {MOST_CONDITIONS} patterns of one text are not supported by this model's tool calls"
        )
    return found


def _object(schema: Schema) -> dict[str, Any]:
    return ({} if schema else {"enum": []}) if isinstance(schema, bool) else schema


def _searched(pattern: str, place: str) -> str:
    """A regular expression for whole texts in which a pattern is found."""
    core = pattern.removeprefix("^")
    ends = bool(re.search(r"(?<!\\)(?:\\\\)*\$\Z", core))
    core = core[:-1] if ends else core
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", core, flags=re.DOTALL)
    if re.search(r"[\^$]", bare) or ("|" in _top(bare) and (ends or core != pattern)):
        raise SchemaError(
            place, "pattern", "^ and $ are supported at the ends of the whole pattern only by this model's tool calls"
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
    """A number of JSON as a double; the largest one for those beyond, which JSON could not write again."""
    value = float(text)
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")
