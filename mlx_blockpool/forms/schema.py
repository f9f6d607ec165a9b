"""Schema: what a JSON schema and its parts say: the targets of references, and which types,
constants and branches are allowed.

Reads schemas as clients send them as well as exact ones. Changes nothing, and does not know
grammars. Any thread may use it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import unquote

from ..errors import FormError

JsonSchema = dict[str, Any] | bool
T = TypeVar("T")

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
}
# Keywords whose values are schemas by name, lists of schemas, and schemas.
MAPS = ("properties", "patternProperties")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
ONE = ("items", "additionalProperties")
# Keywords of which one says what another leaves over, in the same schema alone. llguidance reads
# the keywords before an `allOf` or its like, and those after it, as separate schemas.
TOGETHER = (("properties", "patternProperties", "additionalProperties"), ("prefixItems", "items"))
# How names of types in other languages begin; all others are those of text.
_OTHER_NAMES = {
    "integer": ("int", "uint", "long", "short", "unsigned"),
    "number": ("num", "float", "double"),
    "boolean": ("bool", "binary"),
    "array": ("arr", "list", "tuple", "set"),
    "object": ("obj", "dict", "map"),
    "null": ("none", "null", "nil"),
}
_REFERENCE = re.compile(r'"\$ref": "((?:[^"\\]|\\.)*)"')
# A union of more schemas is refused: references may multiply them without end.
_MOST_BRANCHES = 1_000
_DEPTH = 16  # of the parts of schemas that are compared


class SchemaError(FormError):
    """A schema that cannot be kept.

    A place that begins with a point is relative to the part of a schema that is read: placed()
    completes it, and so is none.
    """


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Let the place of a SchemaError begin with this one if it is relative."""
    try:
        yield
    except SchemaError as error:
        if error.place and not error.place.startswith("."):
            raise
        raise SchemaError(error.why, f"{place}{error.place}") from error


def without_refused(
    schema: dict[str, Any],
    build: Callable[[dict[str, Any]], T],
    spare: Iterator[int],
    place: str = "",
) -> T | None:
    """What `build` makes of an object's schema at a place, with any value in place of properties
    whose schemas it refuses.

    Returns None if it refuses more than properties, or if `spare` has ended, of which each refused
    property takes an item.
    """
    properties = dict(schema.get("properties", {}))
    while True:
        try:
            return build({**schema, "properties": properties} if properties else schema)
        except SchemaError as error:
            refused = f"{error.place.removeprefix(place)}."
        begins = {
            key: (f".properties.{key}.", f".properties.{key}[", f".properties[{json.dumps(key)}]")
            for key in properties
        }
        # Of names that begin alike, such as a and a.b, the longest.
        key = max(
            (key for key, begin in begins.items() if refused.startswith(begin)),
            key=len,
            default=None,
        )
        if key is None or properties[key] is True or next(spare, None) is None:
            return None
        properties[key] = True


class Schema:
    """What the parts of a JSON schema say. `root`: the schema in which references are resolved."""

    def __init__(self, root: Any) -> None:
        self.root = root
        # Parts with their types and values, by their identity: are_disjoint() compares each with
        # many others.
        self._values: dict[int, tuple[JsonSchema, frozenset[str], frozenset[str] | None]] = {}

    def follow(self, reference: Any) -> Iterator[tuple[str, Any]]:
        """Each value on the way to what a reference names, with its place, ".$defs.a"; the last is
        the target.

        Raises SchemaError for a reference that names nothing.
        """
        if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            raise SchemaError(
                "only references within the schema, as #/$defs/name, are supported", ".$ref"
            )
        value, place = self.root, ""
        yield place, value
        for part in reference.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value, place = value[name], place + step(name)
            elif (
                isinstance(value, list)
                and name.isdecimal()
                and len(name) < 9
                and int(name) < len(value)
            ):
                value, place = value[int(name)], f"{place}[{int(name)}]"
            else:
                raise SchemaError(f"{reference[:100]} names nothing in the schema", ".$ref")
            yield place, value

    def target(self, reference: Any) -> JsonSchema:
        """The schema that a reference names. Raises SchemaError."""
        *_, (_, found) = self.follow(reference)
        if not isinstance(found, dict | bool):
            raise SchemaError(f"{reference[:100]} names no schema", ".$ref")
        return found

    def resolve(self, part: JsonSchema) -> JsonSchema:
        """A part without a reference at its top.

        Raises SchemaError for references that lead nowhere, or to themselves.
        """
        seen: list[str] = []
        while isinstance(part, dict) and "$ref" in part:
            reference = part["$ref"]
            if reference in seen:
                raise SchemaError(f"$ref leads to itself: {reference}", ".$ref")
            seen.append(reference)
            part = both(
                self.target(reference), {key: value for key, value in part.items() if key != "$ref"}
            )
        return part

    def types(
        self, part: JsonSchema, known: dict[str, frozenset[str]] | None = None
    ) -> frozenset[str]:
        """The types that a value of a part may have; "number" comes with "integer".

        `known`: those of references.
        """
        if isinstance(part, bool):
            return TYPES if part else frozenset()
        known = {} if known is None else known
        found = own_types(part)
        if "$ref" in part:
            reference = part["$ref"]
            if reference not in known:
                # A schema that leads to itself allows nothing by that.
                known[reference] = frozenset()
                known[reference] = self.types(self.target(reference), known)
            found &= known[reference]
        for key in ("anyOf", "oneOf"):
            if key in part:
                found &= frozenset().union(*(self.types(each, known) for each in part[key]))
        for each in part.get("allOf", ()):
            found &= self.types(each, known)
        return found

    def branches(self, part: JsonSchema) -> list[dict[str, Any]]:
        """The schemas whose union a part of an exact schema is: those of anyOf, and one for each of
        several types. Raises SchemaError.
        """
        steps = iter(range(_MOST_BRANCHES))

        def expanded(each: JsonSchema, seen: frozenset[str]) -> Iterator[dict[str, Any]]:
            if next(steps, None) is None:
                why = (
                    f"a union of more than {_MOST_BRANCHES} schemas is not supported by this "
                    "model's tool calls"
                )
                raise SchemaError(why)
            if isinstance(each, dict) and "$ref" in each:
                shown = json.dumps(each)
                if shown in seen:
                    return
                seen |= {shown}
            inner = as_object(self.resolve(each))
            if "anyOf" in inner:
                rest = without(inner, "anyOf")
                for one in inner["anyOf"]:
                    yield from expanded(both(one, rest) if rest else one, seen)
            elif isinstance(inner.get("type"), list):
                yield from ({**inner, "type": kind} for kind in inner["type"])
            else:
                yield inner

        return list(expanded(part, frozenset()))

    def conjuncts(self, part: dict[str, Any]) -> Iterator[JsonSchema]:
        """The schemas that each value of a part has to satisfy, too."""
        if "$ref" in part:
            yield self.target(part["$ref"])
        yield from part.get("allOf", ())

    def together(self, part: JsonSchema) -> Iterator[dict[str, Any]]:
        """A part, and all schemas that one of its values may have to satisfy, too; what each
        reference names once.
        """
        seen: set[str] = set()
        left = [part]
        while left:
            each = left.pop()
            if isinstance(each, bool):
                continue
            yield each
            if each.get("$ref") in seen:
                each = without(each, "$ref")
            seen |= {each["$ref"]} if "$ref" in each else set()
            left += reversed([*self.conjuncts(each), *each.get("anyOf", ())])

    def standalone(self, part: dict[str, Any]) -> dict[str, Any]:
        """A part of an exact schema as a whole one, with those `$defs` to which its references
        lead.
        """
        needed: dict[str, Any] = {}
        waiting = [part]
        while waiting:
            for reference in _REFERENCE.findall(json.dumps(waiting.pop())):
                name = reference.rpartition("/")[2]
                if name not in needed:
                    needed[name] = self.target(reference)
                    waiting.append(needed[name])
        return {**part, "$defs": needed} if needed else part

    def are_disjoint(
        self, one: JsonSchema, other: JsonSchema, tries: Iterator[Any], depth: int = _DEPTH
    ) -> bool:
        """Whether it is certain that no value is of both schemas.

        tries: has an item for each pair of parts that may be compared.
        """
        if not depth or next(tries, None) is None:
            return False
        for part, against in ((one, other), (other, one)):
            if isinstance(part, bool):
                if not part:
                    return True
                continue
            if any(
                self.are_disjoint(each, against, tries, depth - 1) for each in self.conjuncts(part)
            ):
                return True
            branches = part.get("anyOf")
            if branches and all(
                self.are_disjoint(branch, against, tries, depth - 1) for branch in branches
            ):
                return True
        if isinstance(one, bool) or isinstance(other, bool):
            return False
        (types, values), (other_types, others) = (
            self._types_and_values(one),
            self._types_and_values(other),
        )
        common = types & other_types
        if not common or (values is not None and others is not None and values.isdisjoint(others)):
            return True
        return common == {"object"} and any(
            self.are_disjoint(
                _property_schema(one, name), _property_schema(other, name), tries, depth - 1
            )
            for name in dict.fromkeys((*one.get("required", ()), *other.get("required", ())))
        )

    def _types_and_values(
        self, part: dict[str, Any]
    ) -> tuple[frozenset[str], frozenset[str] | None]:
        """own_types() of an exact schema, and the distinct() values, or None if it
        allows any.
        """
        known = self._values.get(id(part))
        if known is None or known[0] is not part:
            values = constants(part)
            known = part, own_types(part), None if values is None else distinct(values)
            self._values[id(part)] = known
        return known[1:]

    def has_finite_value(self) -> bool:
        """Whether a value of an exact schema ends; False where references require each other for
        ever.
        """
        definitions: dict[str, JsonSchema] = (
            self.root.get("$defs", {}) if isinstance(self.root, dict) else {}
        )
        finite: set[str] = set()
        known = -1
        while known < len(finite):
            known = len(finite)
            finite |= {
                f"#/$defs/{name}" for name, each in definitions.items() if _ends(each, finite)
            }
        return _ends(self.root, finite)


def _property_schema(part: dict[str, Any], name: str) -> JsonSchema:
    """What a schema says of the values of one key."""
    rest = True if "patternProperties" in part else part.get("additionalProperties", True)
    found: JsonSchema = part.get("properties", {}).get(name, rest)
    return found


def _ends(part: JsonSchema, finite: set[str]) -> bool:
    """Whether a part has a finite value if the references in `finite` have one."""
    if isinstance(part, bool):
        return part
    if "$ref" in part and part["$ref"] not in finite:
        return False
    if not all(_ends(each, finite) for each in part.get("allOf", ())):
        return False
    if not any(_ends(branch, finite) for branch in part.get("anyOf", (True,))):
        return False
    return any(_type_ends(kind, part, finite) for kind in own_types(part))


def _type_ends(kind: str, part: dict[str, Any], finite: set[str]) -> bool:
    if kind == "object":
        properties, rest = part.get("properties", {}), part.get("additionalProperties", True)
        if part.get("patternProperties"):
            rest = True
        return all(_ends(properties.get(key, rest), finite) for key in part.get("required", ()))
    if kind == "array":
        first, needed = part.get("prefixItems", []), part.get("minItems", 0)
        rest = part.get("items", True)
        return all(_ends(item, finite) for item in first[:needed]) and (
            needed <= len(first) or _ends(rest, finite)
        )
    return True


def both(one: JsonSchema, other: JsonSchema) -> JsonSchema:
    """A schema of values that two allow."""
    if isinstance(one, bool) or isinstance(other, bool):
        return (other if one else False) if isinstance(one, bool) else (one if other else False)
    said = without(other, *ANNOTATIONS)
    meets = any(key in one and one[key] != value for key, value in said.items())
    if meets or any(
        not one.keys().isdisjoint(group) and not said.keys().isdisjoint(group) for group in TOGETHER
    ):
        return {"allOf": [one, other]}
    return {**one, **other}


def without(part: dict[str, Any], *keywords: str) -> dict[str, Any]:
    """A schema without these keywords."""
    return {key: value for key, value in part.items() if key not in keywords}


def as_object(part: JsonSchema) -> dict[str, Any]:
    """A schema that is not true or false."""
    return ({} if part else {"enum": []}) if isinstance(part, bool) else part


def constants(part: JsonSchema) -> list[Any] | None:
    """The values of `const` or `enum`; None: any."""
    if isinstance(part, bool):
        return None
    return [part["const"]] if "const" in part else part.get("enum")


def own_types(part: dict[str, Any]) -> frozenset[str]:
    """The types that `type`, `enum` and `const` of a schema allow; "number" comes with
    "integer".
    """
    named = part.get("type", TYPES)
    found = frozenset(map(_type_named, [named] if isinstance(named, str) else named))
    if "number" in found:
        found |= {"integer"}
    values = constants(part)
    if values is None:
        return found
    return found & (
        frozenset(map(type_of, values))
        | ({"number"} if any(isinstance(v, float) for v in values) else set())
    )


def _type_named(name: str) -> str:
    """The type of JSON that a name in a schema means: unchecked schemas have names of other
    languages.
    """
    if name in TYPES:
        return name
    return next(
        (kind for kind, beginnings in _OTHER_NAMES.items() if name.lower().startswith(beginnings)),
        "string",
    )


def type_of(value: Any) -> str:
    """The JSON type of a value; "integer" for those numbers too that have no fraction."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number" if isinstance(value, float) and not value.is_integer() else "integer"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def distinct(values: list[Any]) -> frozenset[str]:
    """Texts of values, which equal ones share: 1.0 is written as 1, and true is not 1."""
    return frozenset(json.dumps(value, sort_keys=True) for value in map(_with_integers, values))


def _with_integers(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    if isinstance(value, dict):
        return {name: _with_integers(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def mapped(part: dict[str, Any], change: Callable[[str, JsonSchema], JsonSchema]) -> dict[str, Any]:
    """The same schema with each schema in it changed; `change` gets the keyword that has it,
    too.
    """
    found: dict[str, Any] = {}
    for key, value in part.items():
        if key in MAPS:
            found[key] = {name: change(key, each) for name, each in value.items()}
        elif key in LISTS:
            found[key] = [change(key, each) for each in value]
        else:
            found[key] = change(key, value) if key in ONE else value
    return found


def subschemas(part: JsonSchema) -> Iterator[dict[str, Any]]:
    """An exact schema and all schemas within it."""
    if isinstance(part, bool):
        return
    yield part
    for keyword, value in part.items():
        if keyword in ("$defs", *MAPS):
            below = list(value.values())
        else:
            below = value if keyword in LISTS else [value] if keyword in ONE else []
        for each in below:
            yield from subschemas(each)


def with_groups_together(part: dict[str, Any]) -> dict[str, Any]:
    """The same schema with the keywords of each group of TOGETHER next to each other."""
    found: dict[str, Any] = {}
    for key in part:
        group = next((group for group in TOGETHER if key in group), (key,))
        found |= {each: part[each] for each in group if each in part}
    return found


def step(name: str) -> str:
    """A key in a place."""
    return f".{name}" if re.fullmatch(r"[A-Za-z_$][\w$-]*", name) else f"[{json.dumps(name)}]"
