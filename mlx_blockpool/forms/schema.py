"""JSON schemas as they can be kept: exact ones, rewritten where that keeps their meaning, and refused with their place.

llguidance takes most of draft 2020-12 and refuses most of what it cannot keep. `exact` closes the gaps between what it accepts
and what a schema says: it follows references, checks the values of keywords, drops annotations and writes some keywords anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from ..config import FormConfig
from ..errors import FormError
from .numbers import beyond, can_be_merged, inward, is_kept, is_small, multiple
from .patterns import FORMAT_PATTERNS, FORMATS, common
from .places import LISTS, MAPS, ONE, step, subschemas
from .places import Schema as Schema
from .proofs import are_disjoint, has_finite_value, held_together

# Keywords that cannot be kept.
REFUSED = (
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
)
# Values with which they say nothing.
_IDLE: dict[str, tuple[Any, ...]] = {"uniqueItems": (False,), "unevaluatedItems": (True, {})}
_IDLE["unevaluatedProperties"] = _IDLE["unevaluatedItems"]

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# llguidance reads keywords between `allOf` and its like as schemas of their own: those that need each other stay together.
_TOGETHER = (("properties", "patternProperties", "additionalProperties"), ("prefixItems", "items", "additionalItems"))

_KEPT = frozenset({"$ref", "const", "enum", "format", "multipleOf", "pattern", "required", "type", *_COUNTS, *_LOWER, *_UPPER})
_KEPT |= {*MAPS, *LISTS, *ONE}

_MOST_ITEMS = 10_000  # llguidance writes one rule for each item up to maxItems
_MOST_PATTERNS = 64  # llguidance compares those of an object in pairs, and 300 take seconds
_MOST_DEPTH = 200  # of schemas, references followed: llguidance's own walk is recursive, and 1,000 overflow the stack
_DIALECTS = ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12")
_MOST_PAIRS = 20_000  # of parts of schemas that are compared, and parts that are looked at
_ESCAPES = '"\\bfnrt'  # without \u


class SchemaError(FormError):
    """A schema that cannot be kept. `keyword`: what cannot; None: the schema as a whole."""

    def __init__(self, place: str, keyword: str | None, why: str) -> None:
        self.keyword = keyword
        super().__init__(why, place)


def exact(schema: Any, path: str, limits: FormConfig | None = None) -> Schema:
    """A schema that accepts nothing but what `schema` accepts, and of which llguidance keeps every keyword.

    path: its place in the body. Schemas that references name stand in its `$defs`. Where one stands in another place than in
    `schema`, its `$comment` says where it was. Raises SchemaError.
    """
    limits = limits or FormConfig()
    _measure(schema, path, limits)
    return _Walk(schema, path, limits).whole()


def options(schema: Schema) -> dict[str, Any]:
    """What llguidance has to do otherwise for an exact schema: values of its `x-guidance`.

    Where keys are open beside declared ones, strings have no \\u escapes: an escaped key could be a declared one.
    """
    is_open = any(_has_open_keys(each) for each in subschemas(schema))
    return {"json_allowed_escapes": _ESCAPES} if is_open else {}


class _Walk:
    """One schema made exact. Places (`at`) are relative to the schema: ".properties.a"."""

    def __init__(self, root: Any, path: str, limits: FormConfig) -> None:
        self.root = root
        self.path = path
        self.limits = limits
        self.defs: dict[str, Schema] = {}
        self.names: dict[tuple[str, ...], str] = {}  # of those in `defs`, by the parts of their pointers
        self.patterns = 0  # of names
        self.near_lower: set[int] = set()  # whole numbers next below a bound, ...
        self.near_upper: set[int] = set()  # ... and next above one
        self.multiples: dict[Decimal, str] = {}  # each multipleOf, and where it is
        self.pairs = iter(range(1, _MOST_PAIRS))
        self.controls: list[str] = []  # where constants have characters that JSON writes as \u

    def whole(self) -> Schema:
        schema = self.schema(self.root, "", 0)
        for each in [schema, *self.defs.values()]:
            for part in subschemas(each):
                self._prove_one_of(part)
                self._exclude_bounds(part)
        if isinstance(schema, dict) and self.defs:
            schema = {**schema, "$defs": self.defs}
        elif schema is True:
            schema = {}
        if not has_finite_value(schema, self.defs):
            raise self._error("", None, "no value satisfies it")
        if self.controls and options(schema):
            why = "control characters need additionalProperties: false beside all properties of the schema"
            raise self._error(self.controls[0], "const", why)
        if not can_be_merged(self.multiples):
            self._check_multiples(schema)
        return schema

    def _error(self, at: str, keyword: str | None, why: str) -> SchemaError:
        return SchemaError(self.path + at, keyword, why)

    def schema(self, value: Any, at: str, depth: int) -> Schema:
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise self._error(at, None, "a schema is an object, true or false")
        if depth > _MOST_DEPTH:
            raise self._error(at, None, f"schemas are nested more than {_MOST_DEPTH} deep, references followed")
        self._refuse(value, at)
        found: dict[str, Any] = {}
        for keyword in _ordered(value):
            given, here = value[keyword], f"{at}.{keyword}"
            if keyword in MAPS:
                found[keyword] = self._map(given, keyword, here, depth)
                found |= {"additionalProperties": True} if keyword == "patternProperties" else {}
            elif keyword in LISTS or (keyword == "items" and isinstance(given, list)):
                found[keyword] = self._list(given, keyword, here, depth)
            elif keyword in ONE:
                found[keyword] = self.schema(given, here, depth + 1)
            elif keyword == "$ref":
                found[keyword] = self._reference(given, here, depth)
            else:
                found[keyword] = self._value(keyword, given, here)
        if any(name not in found["patternProperties"] for name in value.get("patternProperties", ())):
            self._close(found, at)
        if "propertyNames" in value:
            found |= self._named(found, self.schema(value["propertyNames"], f"{at}.propertyNames", depth + 1), at)
        return self._finished(found, at)

    def _close(self, found: dict[str, Any], at: str) -> None:
        """Write no other names where a pattern of names was rewritten: readings of it disagree about which names it matches."""
        found["additionalProperties"] = False
        if not all(name.isascii() and name.isprintable() for key in ("properties", "required") for name in found.get(key, ())):
            why = "a pattern with '.', '\\w' or the like is only supported beside properties with ASCII names"
            raise self._error(f"{at}.patternProperties", "patternProperties", why)

    def _named(self, found: dict[str, Any], names: Schema, at: str) -> dict[str, Any]:
        """Keywords that say the same as propertyNames, for the exact schema of the names."""
        for _ in self.defs:
            if isinstance(names, dict) and names.keys() <= {"$ref", "$comment"} and "$ref" in names:
                names = self.defs.get(names["$ref"].rpartition("/")[2], False)
        said = {key: value for key, value in names.items() if key != "$comment"} if isinstance(names, dict) else {}
        if names is True or (names is not False and said in ({}, {"type": "string"})):
            return {}
        rest = found.get("additionalProperties", True)
        if isinstance(rest, dict):
            rest = {"$comment": f"{at}.additionalProperties", **rest}
        if said.pop("type", "string") == "string" and len(said) == 1 and not found.keys() & set(MAPS):
            if "pattern" in said:
                self._count_patterns(1, f"{at}.propertyNames", "propertyNames")
                return {"patternProperties": {said["pattern"]: rest}, "additionalProperties": False}
            some = [said["const"]] if "const" in said else said.get("enum", [])
            if 0 < len(some) <= self.limits.optional_properties:
                return {"properties": {name: rest for name in some if isinstance(name, str)}, "additionalProperties": False}
        why = "propertyNames is only supported with enum, const or pattern, and without properties beside"
        raise self._error(f"{at}.propertyNames", "propertyNames", why)

    def _refuse(self, value: dict[str, Any], at: str) -> None:
        for keyword in REFUSED:
            if keyword in value and value[keyword] not in _IDLE.get(keyword, ()):
                raise self._error(f"{at}.{keyword}", keyword, f"{keyword} is not supported")
        self._check_base(value, at)
        dialect = value.get("$schema")
        if isinstance(dialect, str) and "json-schema.org" in dialect and not any(known in dialect for known in _DIALECTS):
            raise self._error(f"{at}.$schema", "$schema", f"{dialect[:60]} is not supported; use draft 2020-12")
        if isinstance(value.get("items"), list) and "prefixItems" in value:
            raise self._error(f"{at}.items", "items", "items is a schema where prefixItems is given")

    def _check_base(self, value: Any, at: str) -> None:
        """References below another `$id` would be relative to it."""
        if at and isinstance(value, dict) and isinstance(value.get("$id"), str):
            raise self._error(f"{at}.$id", "$id", "$id is not supported below the root of a schema")

    def _map(self, given: Any, keyword: str, at: str, depth: int) -> dict[str, Schema]:
        if not isinstance(given, dict):
            raise self._error(at, keyword, f"{keyword} is an object of schemas")
        found: dict[str, Schema] = {}
        for name, part in given.items():
            here = at + step(name)
            schema = self.schema(part, here, depth + 1)
            if keyword == "patternProperties":
                name = self._pattern(name, here)
                if name in found:
                    raise self._error(here, keyword, "another pattern matches the same names")
                schema = {"$comment": here, **schema} if isinstance(schema, dict) else schema
            self._check_text(name, here)
            found[name] = schema
        if keyword == "patternProperties":
            self._count_patterns(len(found), at, keyword)
        if len(found) > self.limits.properties:
            raise self._error(at, keyword, f"more than {self.limits.properties} properties are not supported")
        return found

    def _count_patterns(self, count: int, at: str, keyword: str) -> None:
        self.patterns += count
        if self.patterns > _MOST_PATTERNS:
            raise self._error(at, keyword, f"more than {_MOST_PATTERNS} patterns of names are not supported")

    def _list(self, given: Any, keyword: str, at: str, depth: int) -> list[Schema]:
        if not isinstance(given, list) or not given:
            raise self._error(at, keyword, f"{keyword} is a list of schemas that is not empty")
        found = []
        for number, part in enumerate(given):
            here = f"{at}[{number}]"
            schema = self.schema(part, here, depth + 1)
            found.append({"$comment": here, **schema} if keyword == "oneOf" and isinstance(schema, dict) else schema)
        return found

    def _reference(self, given: Any, at: str, depth: int) -> str:
        if not isinstance(given, str) or (given != "#" and not given.startswith("#/")):
            raise self._error(at, "$ref", "only references within the schema, as #/$defs/name, are supported")
        pointer = tuple(unquote(part).replace("~1", "/").replace("~0", "~") for part in given[1:].split("/")[1:])
        if pointer not in self.names:
            schema, place = self.root, ""
            for part in pointer:
                if isinstance(schema, dict) and part in schema:
                    schema, place = schema[part], place + step(part)
                    self._check_base(schema, place)
                elif isinstance(schema, list) and part.isdecimal() and len(part) < 9 and int(part) < len(schema):
                    schema, place = schema[int(part)], f"{place}[{int(part)}]"
                else:
                    raise self._error(at, "$ref", f"{given[:100]} names nothing in the schema")
            name = self.names[pointer] = str(len(self.names))
            found = self.schema(schema, place, depth + 1)
            self.defs[name] = {"$comment": place, **found} if isinstance(found, dict) else found
        return f"#/$defs/{self.names[pointer]}"

    def _value(self, keyword: str, given: Any, at: str) -> Any:
        if keyword in ("type", "required"):
            return self._names(keyword, given, at)
        if keyword in _COUNTS:
            return self._count(keyword, given, at)
        if keyword in (*_LOWER, *_UPPER, "multipleOf"):
            return self._number(keyword, given, at)
        if keyword == "const":
            self._check_constant(given, keyword, at)
        elif keyword == "enum":
            if not isinstance(given, list) or not given:
                raise self._error(at, keyword, "enum is a list that is not empty")
            if len(given) > self.limits.enum_values:
                raise self._error(at, keyword, f"more than {self.limits.enum_values} values are not supported")
            for number, value in enumerate(given):
                self._check_constant(value, keyword, f"{at}[{number}]")
        elif not isinstance(given, str):  # pattern, format
            raise self._error(at, keyword, f"{keyword} is a text")
        return self._pattern(given, at) if keyword == "pattern" else given

    def _names(self, keyword: str, given: Any, at: str) -> Any:
        names = [given] if isinstance(given, str) and keyword == "type" else given
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or (keyword == "type" and not names):
            raise self._error(at, keyword, f"{keyword} is {'a name or ' if keyword == 'type' else ''}a list of names")
        for name in names:
            self._check_text(name, at)
            if keyword == "type" and name not in _TYPES:
                raise self._error(at, keyword, f"{name[:50]!r} is no type; types are {', '.join(sorted(_TYPES))}")
        return given

    def _count(self, keyword: str, given: Any, at: str) -> int:
        if not _is_number(given) or given < 0 or given != int(given):
            raise self._error(at, keyword, f"{keyword} is a whole number that is not negative")
        if keyword.endswith("Items") and given > _MOST_ITEMS:
            raise self._error(at, keyword, f"more than {_MOST_ITEMS} items are not supported")
        return int(given)

    def _number(self, keyword: str, given: Any, at: str) -> int | float:
        """A bound or a multiple."""
        if not _is_number(given) or (keyword == "multipleOf" and given <= 0):
            raise self._error(at, keyword, f"{keyword} is a number{' above 0' if keyword == 'multipleOf' else ''}")
        try:
            if keyword != "multipleOf":
                bound = inward(given, 1 if keyword in _UPPER else -1)
                if isinstance(bound, float):
                    self.near_lower.add(math.floor(bound))
                    self.near_upper.add(math.ceil(bound))
                return bound
            self.multiples.setdefault(multiple(given), at)
        except ValueError as error:
            raise self._error(at, keyword, f"{keyword} {error}") from None
        return int(given) if given == int(given) else given

    def _check_constant(self, value: Any, keyword: str, at: str) -> None:
        if isinstance(value, str):
            self._check_text(value, at)
            if any((character < " " and character not in "\b\f\n\r\t") or character == "\x7f" for character in value):
                self.controls.append(at)
        elif isinstance(value, dict):
            for name, part in value.items():
                self._check_text(name, at)
                self._check_constant(part, keyword, at + step(name))
        elif isinstance(value, list):
            for number, part in enumerate(value):
                self._check_constant(part, keyword, f"{at}[{number}]")
        elif isinstance(value, int | float) and not is_kept(value):
            raise self._error(at, keyword, "numbers of more than 15 digits are not supported here")

    def _check_text(self, text: str, at: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self._error(at, None, "half of a surrogate pair is no character") from None

    def _pattern(self, given: str, at: str) -> str:
        self._check_text(given, at)
        try:
            return common(given)
        except ValueError as error:
            raise self._error(at, "pattern", str(error)) from None

    def _finished(self, found: dict[str, Any], at: str) -> Schema:
        """What keywords need of each other."""
        if not isinstance(found.get("items"), list):
            found.pop("additionalItems", None)
        if (name := found.pop("format", None)) in FORMATS:
            if name in FORMAT_PATTERNS:
                found["allOf"] = [*found.pop("allOf", ()), {"$comment": "format", "pattern": FORMAT_PATTERNS[name]}]
            else:
                found["format"] = name
        required, properties = set(found.get("required", ())), found.get("properties", {})
        if len(properties.keys() - required) > self.limits.optional_properties:
            most = f"more than {self.limits.optional_properties} properties that are not required are not supported"
            raise self._error(f"{at}.properties", "properties", most)
        is_closed = found.get("additionalProperties", True) is False and not found.get("patternProperties")
        if found.get("minProperties", 0) > len(required) + 1 and not is_closed:
            why = "minProperties above the number of required ones and one more needs additionalProperties: false"
            raise self._error(f"{at}.minProperties", "minProperties", why)
        return found

    def _check_multiples(self, whole: Schema) -> None:
        tries = iter(range(_MOST_PAIRS))
        for schema in subschemas(whole):
            found = [multiple(value) for value in held_together(schema, self.defs, "multipleOf", tries)]
            if next(tries, None) is None or (len(found) > 1 and not can_be_merged(found)):
                at = self.multiples[found[0]] if found else ""
                raise self._error(at, "multipleOf", "its common multiple with others that hold beside is too large")

    def _exclude_bounds(self, schema: dict[str, Any]) -> None:
        """Bounds that llguidance accepts although they are excluded, with the next number as the bound.

        These are large ones, and whole numbers with the other bound less than 1 away, here or in a schema that holds beside.
        """
        for keyword, inclusive, near, sign in (
            ("exclusiveMinimum", "minimum", self.near_lower, -1),
            ("exclusiveMaximum", "maximum", self.near_upper, 1),
        ):
            bound = schema.get(keyword)
            if bound is not None and (not is_small(bound) or bound in near):
                following = beyond(bound, sign)
                schema[inclusive] = sign * min(sign * following, sign * schema.get(inclusive, following))

    def _prove_one_of(self, schema: dict[str, Any]) -> None:
        """Branches of a oneOf that have no value in common are those of an anyOf. llguidance does not look through references."""
        branches = [branch for branch in schema.get("oneOf", ()) if branch is not False]
        if "anyOf" not in schema and branches:
            pairs = ((one, other) for number, one in enumerate(branches) for other in branches[:number])
            if all(are_disjoint(one, other, self.defs, self.pairs) for one, other in pairs):
                parts = list(schema.items())
                schema.clear()
                schema.update(("anyOf", branches) if key == "oneOf" else (key, value) for key, value in parts)


def _measure(schema: Any, path: str, limits: FormConfig) -> None:
    """Raise SchemaError for a schema that is too large to be walked."""
    left: list[tuple[Any, int]] = [(schema, 0)]
    for count, (value, depth) in enumerate(left):
        if depth > limits.depth:
            raise SchemaError(path, None, f"nested more than {limits.depth} deep")
        if count >= limits.values:
            raise SchemaError(path, None, f"more than {limits.values} values")
        if isinstance(value, dict | list):
            left.extend((part, depth + 1) for part in (value.values() if isinstance(value, dict) else value))
    try:
        size = len(json.dumps(schema))
    except (TypeError, ValueError) as error:
        raise SchemaError(path, None, f"not JSON: {error}") from None
    if size > limits.schema_bytes:
        raise SchemaError(path, None, f"{size} bytes as JSON; a schema may have {limits.schema_bytes}")


def _ordered(schema: dict[str, Any]) -> Iterator[str]:
    """The keywords of a schema that say something about values, those that need each other side by side."""
    done: set[str] = set()
    for keyword in schema:
        group = next((group for group in _TOGETHER if keyword in group), (keyword,))
        for each in group:
            if each in schema and each in _KEPT and each not in done:
                done.add(each)
                yield each


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and (isinstance(value, int) or math.isfinite(value))


def _has_open_keys(schema: dict[str, Any]) -> bool:
    """Whether an object may have keys beside those that are declared or counted."""
    is_open = schema.get("additionalProperties", True) is not False
    known = schema.get("properties") or (schema.get("required") and "minProperties" in schema)
    return bool(schema.get("patternProperties") or (is_open and known))
