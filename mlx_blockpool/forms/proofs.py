"""What exact schemas say for certain: that two of them have no value in common, and that one has a value that ends.

Both look at references, types, constants and required properties alone: "no" means that it is not certain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .places import Schema

Defs = Mapping[str, Schema]

_ALL = frozenset({"array", "boolean", "null", "number", "object", "string"})
_DEPTH = 16  # of the parts of schemas that one proof looks at


def are_disjoint(one: Schema, other: Schema, defs: Defs, tries: Iterator[Any], depth: int = _DEPTH) -> bool:
    """Whether no value is of both schemas. `tries`: has an item for each pair of parts that may be compared."""
    if not depth or next(tries, None) is None:
        return False
    for schema, against in ((one, other), (other, one)):
        if isinstance(schema, bool):
            if not schema:
                return True
            continue
        if any(are_disjoint(part, against, defs, tries, depth - 1) for part in _conjuncts(schema, defs)):
            return True
        branches = schema.get("anyOf") or schema.get("oneOf")
        if branches and all(are_disjoint(branch, against, defs, tries, depth - 1) for branch in branches):
            return True
    if isinstance(one, bool) or isinstance(other, bool):
        return False
    common = _types(one) & _types(other)
    values, others = _values(one), _values(other)
    if not common or (values is not None and others is not None and not values & others):
        return True
    return common == {"object"} and any(
        are_disjoint(one["properties"][name], other["properties"][name], defs, tries, depth - 1)
        for name in {*one.get("required", ()), *other.get("required", ())}
        if name in one.get("properties", {}) and name in other.get("properties", {})
    )


def _conjuncts(schema: dict[str, Any], defs: Defs) -> Iterator[Schema]:
    """Schemas that each value of `schema` is of, too."""
    if "$ref" in schema:
        yield target(schema, defs)
    yield from schema.get("allOf", ())


def _types(schema: dict[str, Any]) -> frozenset[str]:
    types = schema.get("type", _ALL)
    found = {types} if isinstance(types, str) else set(types)
    if (values := _constants(schema)) is not None:
        found &= {_type(value) for value in values} | ({"integer"} if "integer" in found else set())
    return frozenset("number" if each == "integer" else each for each in found)


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    for types, name in ((str, "string"), ((int, float), "number"), (dict, "object"), (list, "array")):
        if isinstance(value, types):
            return name
    return "null"


def _constants(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _values(schema: dict[str, Any]) -> frozenset[str] | None:
    """The constants of a schema as text; 1.0 is 1."""
    if (values := _constants(schema)) is None or any(isinstance(value, dict | list) for value in values):
        return None
    return frozenset(json.dumps(int(value) if isinstance(value, float) and value == int(value) else value) for value in values)


def target(schema: dict[str, Any], defs: Defs) -> Schema:
    """The schema that an exact schema refers to."""
    return defs[schema["$ref"].rpartition("/")[2]]


def has_finite_value(schema: Schema, defs: Defs) -> bool:
    """Whether a value of the schema ends; False where references require each other for ever."""
    finite: set[str] = set()
    known = -1
    while known < len(finite):
        known = len(finite)
        for name, each in defs.items():
            if name not in finite and _ends(each, finite):
                finite.add(name)
    return _ends(schema, finite)


def _ends(schema: Schema, finite: set[str]) -> bool:
    """Whether a schema has a finite value if the definitions in `finite` have one."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in finite:
        return False
    if not all(_ends(part, finite) for part in schema.get("allOf", ())):
        return False
    if any(not any(_ends(branch, finite) for branch in schema[key]) for key in ("anyOf", "oneOf") if key in schema):
        return False
    return any(_type_ends(each, schema, finite) for each in _types(schema))


def _type_ends(name: str, schema: dict[str, Any], finite: set[str]) -> bool:
    if name == "object":
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        if schema.get("patternProperties"):
            rest = True
        return all(_ends(properties.get(key, rest), finite) for key in schema.get("required", ()))
    if name == "array":
        first = schema["items"] if isinstance(schema.get("items"), list) else schema.get("prefixItems", [])
        rest = schema.get("additionalItems" if "items" in schema and first is schema["items"] else "items", True)
        needed = schema.get("minItems", 0)
        return all(_ends(item, finite) for item in first[:needed]) and (needed <= len(first) or _ends(rest, finite))
    return True


def held_together(schema: Schema, defs: Defs, keyword: str, tries: Iterator[Any]) -> Iterator[Any]:
    """The values that a keyword has in the schemas that a value of this one may have to satisfy at once.

    `tries`: has an item for each schema that may be looked at.
    """
    left = [schema]
    while left and next(tries, None) is not None:
        part = left.pop()
        if isinstance(part, dict):
            if keyword in part:
                yield part[keyword]
            left += [*_conjuncts(part, defs), *part.get("anyOf", ()), *part.get("oneOf", ())]
