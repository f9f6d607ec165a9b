"""exact(): JSON schemas as replies can keep them: rewritten where that keeps their meaning, and
refused with their place.

llguidance takes most of draft 2020-12 and refuses most of what it cannot keep. This closes the gaps
between what it accepts and what a schema says: it follows references, checks the values of
keywords, drops annotations and writes some keywords anew. Runs on the threads of sockets, and does
not know tokens.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from ..config import FormConfig
from .closed_objects import close_objects
from .patterns import FORMAT_PATTERNS, FORMATS, common
from .schema import (
    LISTS,
    MAPS,
    ONE,
    TYPES,
    JsonSchema,
    Schema,
    SchemaError,
    placed,
    step,
    subschemas,
    with_groups_together,
    without,
)

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
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
# Values with which they say nothing.
_IDLE: dict[str, tuple[Any, ...]] = {
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
}

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_UPPER = ("maximum", "exclusiveMaximum")
_BOUNDS = ("minimum", "exclusiveMinimum", *_UPPER)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (isinstance(value, int) or math.isfinite(value))
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_filled(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


# What the values of keywords are.
_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(MAPS, (lambda value: isinstance(value, dict), "an object of schemas")),
    **dict.fromkeys(LISTS, (_is_filled, "a list of schemas that is not empty")),
    **dict.fromkeys(
        _COUNTS,
        (
            lambda value: _is_number(value) and value >= 0 and value == int(value),
            "a whole number that is not negative",
        ),
    ),
    **dict.fromkeys(_BOUNDS, (_is_number, "a number")),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("pattern", "format"), (lambda value: isinstance(value, str), "a text")),
    "enum": (_is_filled, "a list that is not empty"),
    "required": (_are_names, "a list of names"),
    "type": (
        lambda value: isinstance(value, str) or (_is_filled(value) and _are_names(value)),
        "a name or a list of names",
    ),
}
_KEPT = {*_SHAPES, *ONE, "$ref", "additionalItems", "const"}
# How many there may be, and of what.
_MOST = {
    "properties": (FormConfig.properties, "properties"),
    "enum": (FormConfig.enum_values, "values"),
    "minItems": (FormConfig.items, "items"),
    "maxItems": (FormConfig.items, "items"),
}

# of schemas, references followed: llguidance's own walk is recursive, and 1,000 overflow the stack
_MOST_DEPTH = 200
_DIALECTS = ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12")
_MOST_PAIRS = 20_000  # of parts of schemas that are compared, and parts that are read

# llguidance reads numbers as doubles, some of them one unit off. Whole numbers that are doubles are
# read as they are, and so are decimal numbers of at most 15 digits, 22 of them after the point.
_WHOLE, _DIGITS, _PLACES = 2**53, 15, 22
_MULTIPLE_PLACES = 9
_MULTIPLE = 10_000  # llguidance keeps a state for each remainder


def exact(schema: Any, path: str, unkept: list[str] | None = None) -> JsonSchema:
    """A schema that accepts nothing but what `schema` accepts, and of which llguidance keeps every
    keyword.

    path: its place in the body. unkept: gets the places of each `uniqueItems` that cannot be kept
    and is left out; None: it is refused. Schemas that references name stand in its `$defs`. Raises
    SchemaError.
    """
    with placed(path):
        _measure(schema)
        return _Walk(schema, path, unkept).whole()


class _Walk:
    """One schema made exact. Places (`at`) are relative to the schema: ".properties.a"."""

    def __init__(self, root: Any, path: str, unkept: list[str] | None) -> None:
        self.source = Schema(root)
        self.path = path
        self.unkept = unkept
        self.defs: dict[str, JsonSchema] = {}
        self.exact = Schema({"$defs": self.defs})
        self.checked: set[str] = set()  # places on the way of references whose $id was checked
        self.names: dict[str, str] = {}  # of those in `defs`, by the places that they were at
        self.patterns = 0  # of names
        self.near: set[int] = set()  # whole numbers next below a bound
        self.multiples: dict[Decimal, str] = {}  # each multipleOf, and where it is
        # The schemas of each oneOf, and where it is.
        self.unions: list[tuple[list[JsonSchema], str]] = []

    def whole(self) -> JsonSchema:
        schema = self.schema(self.source.root, "", 0)
        for each in [schema, *self.defs.values()]:
            for part in subschemas(each):
                self._exclude_bounds(part)
        pairs = iter(range(1, _MOST_PAIRS))
        for branches, at in self.unions:
            if not all(
                self.exact.are_disjoint(one, other, pairs)
                for one, other in itertools.combinations(branches, 2)
            ):
                why = (
                    "oneOf is not supported where two of its schemas may match: use anyOf, or make "
                    "them differ in a const"
                )
                raise SchemaError(why, at)
        if not can_be_merged(self.multiples):
            last = next(reversed(self.multiples.values()))
            raise SchemaError("its common multiple with others in the schema is too large", last)
        schema = close_objects(schema, self.exact)
        if not Schema(schema).has_finite_value():
            raise SchemaError("no value satisfies it")
        return {} if schema is True else schema

    def schema(self, value: Any, at: str, depth: int) -> JsonSchema:
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise SchemaError("a schema is an object, true or false", at)
        if depth > _MOST_DEPTH:
            raise SchemaError(
                f"schemas are nested more than {_MOST_DEPTH} deep, references followed", at
            )
        self._refuse(value, at)
        found: dict[str, Any] = {}
        for keyword in filter(_KEPT.__contains__, value):
            self._keyword(keyword, value, found, at, depth)
        if any(
            name not in found["patternProperties"] for name in value.get("patternProperties", ())
        ):
            self._close(found, at)
        if "unevaluatedProperties" in value:
            # It is true here: a client that says so does not want its objects closed.
            found.setdefault("additionalProperties", True)
        if value.get("uniqueItems") and found.get("maxItems", 2) > 1:
            if self.unkept is None:
                why = (
                    "uniqueItems is not supported: leave it out, and drop repeated items of the "
                    "reply"
                )
                raise SchemaError(why, f"{at}.uniqueItems")
            self.unkept.append(f"{self.path}{at}.uniqueItems")
        return self._finished(found, at)

    def _keyword(
        self, keyword: str, value: dict[str, Any], found: dict[str, Any], at: str, depth: int
    ) -> None:
        """Add to `found` what a keyword of a schema becomes."""
        given, at = value[keyword], f"{at}.{keyword}"
        if keyword == "items" and isinstance(given, list):
            # As drafts before 2020-12 have prefixItems.
            keyword = "prefixItems"
        elif keyword == "additionalItems":
            if not isinstance(value.get("items"), list):
                return
            keyword = "items"
        fits, shape = _SHAPES.get(keyword, (lambda value: True, ""))
        if not fits(given):
            raise SchemaError(f"{keyword} is {shape}", at)
        most, what = _MOST.get(keyword, (math.inf, ""))
        if keyword in _MOST and (given if keyword in _COUNTS else len(given)) > most:
            raise SchemaError(f"more than {most} {what} are not supported", at)
        found[keyword] = self._kept(keyword, given, at, depth)

    def _kept(self, keyword: str, given: Any, at: str, depth: int) -> Any:
        """What a keyword's value becomes, which has its shape."""
        if keyword in MAPS:
            return self._map(given, keyword, at, depth)
        if keyword in LISTS:
            return [self.schema(part, f"{at}[{i}]", depth + 1) for i, part in enumerate(given)]
        if keyword in ONE:
            return self.schema(given, at, depth + 1)
        if keyword == "$ref":
            return self._reference(given, at, depth)
        if keyword in _COUNTS:
            return int(given)
        if keyword in _BOUNDS:
            return self._bound(keyword, given, at)
        if keyword == "multipleOf":
            try:
                self.multiples.setdefault(multiple(given), at)
            except ValueError as error:
                raise SchemaError(f"{keyword} {error}", at) from None
            return int(given) if given == int(given) else float(given)
        if keyword == "pattern":
            return self._pattern(given, at)
        if keyword in ("const", "enum"):
            self._check_constant(given, at)
        elif keyword != "format":
            for name in [given] if isinstance(given, str) else given:
                _check_text(name, at)
                if keyword == "type" and name not in TYPES:
                    raise SchemaError(
                        f"{name[:50]!r} is not a type; types are {', '.join(sorted(TYPES))}", at
                    )
        return given

    def _close(self, found: dict[str, Any], at: str) -> None:
        """Write no other names where a pattern of names was rewritten: readings of it disagree
        about which names it matches.
        """
        found["additionalProperties"] = False
        if not all(
            name.isascii() and name.isprintable()
            for key in ("properties", "required")
            for name in found.get(key, ())
        ):
            why = (
                "a pattern with '.', '\\w' or the like is only supported next to properties with "
                "ASCII names"
            )
            raise SchemaError(why, f"{at}.patternProperties")

    def _refuse(self, value: dict[str, Any], at: str) -> None:
        for keyword in REFUSED:
            if keyword in value and value[keyword] not in _IDLE.get(keyword, ()):
                raise SchemaError(f"{keyword} is not supported", f"{at}.{keyword}")
        self._check_base(value, at)
        dialect = value.get("$schema")
        if (
            isinstance(dialect, str)
            and "json-schema.org" in dialect
            and not any(known in dialect for known in _DIALECTS)
        ):
            raise SchemaError(
                f"{dialect[:60]} is not supported; use draft 2020-12", f"{at}.$schema"
            )
        if isinstance(value.get("items"), list) and "prefixItems" in value:
            raise SchemaError("items is a schema where prefixItems is given", f"{at}.items")

    def _check_base(self, value: Any, at: str) -> None:
        """References below another `$id` are relative to it."""
        if (
            at
            and isinstance(value, dict)
            and isinstance(value.get("$id"), str)
            and _has_reference(value)
        ):
            raise SchemaError(
                "$id is only supported below the root of a schema where no $ref is below it",
                f"{at}.$id",
            )

    def _map(self, given: Any, keyword: str, at: str, depth: int) -> dict[str, JsonSchema]:
        found: dict[str, JsonSchema] = {}
        for name, part in given.items():
            here = at + step(name)
            schema = self.schema(part, here, depth + 1)
            if keyword == "patternProperties":
                name = self._pattern(name, here)
                if name in found:
                    raise SchemaError("another pattern matches the same names", here)
            _check_text(name, here)
            found[name] = schema
        if keyword == "patternProperties":
            self.patterns += len(found)
            if self.patterns > FormConfig.patterns:
                raise SchemaError(
                    f"more than {FormConfig.patterns} patterns of names are not supported", at
                )
        return found

    def _reference(self, given: Any, at: str, depth: int) -> str:
        with placed(at.removesuffix(".$ref")):
            way = list(self.source.follow(given))
        for place, schema in way:
            if place not in self.checked:
                self._check_base(schema, place)
                self.checked.add(place)
        if place not in self.names:
            name = self.names[place] = str(len(self.names))
            self.defs[name] = self.schema(schema, place, depth + 1)
        return f"#/$defs/{self.names[place]}"

    def _bound(self, keyword: str, given: int | float, at: str) -> int | float:
        # llguidance takes larger excluded bounds for included ones.
        largest = 10**_DIGITS - 1 if keyword.startswith("exclusive") else _WHOLE
        bound = min(given, largest) if keyword in _UPPER else max(given, -largest)
        if not is_kept(bound) or abs(bound) > largest:
            raise SchemaError("numbers of more than 15 digits are not supported here", at)
        if bound == int(bound):
            return int(bound)
        self.near.add(math.floor(bound))
        return bound

    def _check_constant(self, value: Any, at: str) -> None:
        if isinstance(value, str):
            _check_text(value, at)
            if any(
                (character < " " and character not in "\b\f\n\r\t") or character == "\x7f"
                for character in value
            ):
                raise SchemaError("control characters are not supported here", at)
        elif isinstance(value, dict):
            for name, part in value.items():
                _check_text(name, at)
                self._check_constant(part, at + step(name))
        elif isinstance(value, list):
            for number, part in enumerate(value):
                self._check_constant(part, f"{at}[{number}]")
        elif isinstance(value, int | float) and not is_kept(value):
            raise SchemaError("numbers of more than 15 digits are not supported here", at)

    def _pattern(self, given: str, at: str) -> str:
        _check_text(given, at)
        try:
            return common(given)
        except ValueError as error:
            raise SchemaError(str(error), at) from None

    def _finished(self, found: dict[str, Any], at: str) -> JsonSchema:
        """What keywords need of each other."""
        if "oneOf" in found:
            found = self._united(found, at)
        if (name := found.pop("format", None)) in FORMAT_PATTERNS:
            found["allOf"] = [*found.pop("allOf", ()), {"pattern": FORMAT_PATTERNS[name]}]
        elif name in FORMATS:
            found["format"] = name
        required, properties = set(found.get("required", ())), found.get("properties", {})
        if len(properties.keys() - required) > FormConfig.optional_properties:
            most = (
                f"more than {FormConfig.optional_properties} properties that are not required are "
                "not supported"
            )
            raise SchemaError(most, f"{at}.properties")
        least = found.get("minProperties", 0)
        closes = "properties" in found and least <= len(properties.keys() | required)
        is_closed = found.get("additionalProperties", not closes) is False and not found.get(
            "patternProperties"
        )
        if least > len(required) + 1 and not is_closed:
            why = (
                "minProperties above the number of required ones and one more needs "
                "additionalProperties: false"
            )
            raise SchemaError(why, f"{at}.minProperties")
        return with_groups_together(found)

    def _exclude_bounds(self, schema: dict[str, Any]) -> None:
        """Whole bounds that llguidance accepts although they are excluded, with the next number as
        the bound.

        These are those with another bound of the value less than 1 away.
        """
        lower, upper = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        if lower in self.near:
            following = beyond(lower, -1)
            schema["minimum"] = max(following, schema.get("minimum", following))
        if upper is not None and upper - 1 in self.near:
            following = beyond(upper, 1)
            schema["maximum"] = min(following, schema.get("maximum", following))

    def _united(self, found: dict[str, Any], at: str) -> dict[str, Any]:
        """A schema with an anyOf in place of its oneOf: they mean the same if no two of its schemas
        have a value in common, which is proven once all references are read.
        """
        branches, known = found["oneOf"], {key: found[key] for key in ("type",) if key in found}
        required = found.get("required", [])
        narrowed = [
            each
            if isinstance(each, bool)
            else {**known, **each, "required": [*each.get("required", ()), *required]}
            for each in branches
        ]
        self.unions.append((narrowed, f"{at}.oneOf"))
        if "anyOf" in found:
            return {
                **without(found, "oneOf"),
                "allOf": [*found.get("allOf", ()), {"anyOf": branches}],
            }
        return {"anyOf" if key == "oneOf" else key: value for key, value in found.items()}


def is_kept(value: int | float) -> bool:
    """Whether llguidance reads exactly this number. True for bools."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value)):
        return abs(value) <= _WHOLE
    if not math.isfinite(value):
        return False
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    return len(digits) <= _DIGITS and int(exponent) >= -_PLACES


def beyond(bound: int, sign: int) -> float:
    """The number next to a whole bound that is excluded: below it (`sign` 1) or above it (-1)."""
    places = _DIGITS - len(str(abs(bound))) if bound else _PLACES
    return round(bound - sign * 10.0**-places, places)


def multiple(value: int | float) -> Decimal:
    """The value of multipleOf. Raises ValueError for one that llguidance does not read exactly."""
    found = Decimal(repr(value)).normalize()
    places = max(-int(found.as_tuple().exponent), 0)
    if places > _MULTIPLE_PLACES or found.scaleb(places) > _MULTIPLE:
        raise ValueError(
            f"above {_MULTIPLE} units of its last digit, or with more than {_MULTIPLE_PLACES} "
            "places, is not supported"
        )
    return found


def can_be_merged(multiples: Iterable[Decimal]) -> bool:
    """Whether llguidance's least common multiple of values that hold together is right: it
    computes with 32 bits.
    """
    found = set(multiples)
    places = max((-int(value.as_tuple().exponent) for value in found), default=0)
    return math.lcm(*(int(value.scaleb(max(places, 0))) for value in found)) < 2**16


def _check_text(text: str, at: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SchemaError("half of a surrogate pair is not a character", at) from None


def _measure(schema: Any) -> None:
    """Raise SchemaError for a schema that is too large to be walked."""
    left: list[tuple[Any, int]] = [(schema, 0)]
    for count, (value, depth) in enumerate(left):
        if depth > FormConfig.depth:
            raise SchemaError(f"nested more than {FormConfig.depth} deep")
        if count >= FormConfig.values:
            raise SchemaError(f"more than {FormConfig.values} values")
        if isinstance(value, dict | list):
            left.extend(
                (part, depth + 1) for part in (value.values() if isinstance(value, dict) else value)
            )
    try:
        size = len(json.dumps(schema))
    except (TypeError, ValueError) as error:
        raise SchemaError(f"not JSON: {error}") from None
    if size > FormConfig.schema_bytes:
        raise SchemaError(f"{size} bytes as JSON; a schema may have {FormConfig.schema_bytes}")


def _has_reference(value: Any) -> bool:
    if isinstance(value, dict):
        return "$ref" in value or any(map(_has_reference, value.values()))
    return isinstance(value, list) and any(map(_has_reference, value))
