"""The keys of objects whose schemas leave out `additionalProperties`: only those that the schema
names.

llama.cpp, Ollama and xgrammar read a missing `additionalProperties` in a structured output as
`false`, and small models do not stop adding keys without it. Works on exact schemas, in which
references lead to `$defs`.

A value has to satisfy a schema, what it refers to, and its `allOf`, all together; so they are
closed together. The schema of the whole value gets `additionalProperties: false` next to the names
that all of them declare. Of an `anyOf`, each branch is closed with its own names and those around
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .schema import (
    JsonSchema,
    Schema,
    SchemaError,
    mapped,
    own_types,
    subschemas,
    with_groups_together,
    without,
)

# Names that closing adds, and parts of schemas that it reads, before it stops.
MOST_NAMES = 20_000
_MOST_PARTS = 50_000
# Keywords that say which other keys an object has, or list its values; and all that closing reads.
_DECIDING = {"additionalProperties", "const", "enum"}
_DECLARING = {"properties", "patternProperties"}
_READ = {*_DECIDING, *_DECLARING, "required", "minProperties"}


def close_objects(schema: JsonSchema, exact: Schema) -> JsonSchema:
    """A schema with `additionalProperties: false` wherever it is missing next to declared keys, and
    with the `$defs` to which it refers.

    exact: the definitions to which `schema` refers. Accepts nothing that `schema` does not accept.
    Raises SchemaError for a schema that would become too large.
    """
    return _Closing(exact).all(schema)


def has_open_keys(schema: JsonSchema) -> bool:
    """Whether an object of an exact schema may have keys apart from those that are declared or
    counted.
    """
    return any(_is_open(each) for each in subschemas(schema))


def _is_open(schema: dict[str, Any]) -> bool:
    is_open = schema.get("additionalProperties", True) is not False
    known = schema.get("properties") or (schema.get("required") and "minProperties" in schema)
    return bool(schema.get("patternProperties") or (is_open and known))


class _Closing:
    """Schemas that are closed.

    A definition is needed in up to two forms: as the schema of a value ("name"), and as one of
    several that hold together ("name.part").
    """

    def __init__(self, exact: Schema) -> None:
        self.exact = exact
        # The names of the definitions that are needed, in the order in which they were found.
        self.needed: dict[str, None] = {}
        self.names_left, self.parts_left = MOST_NAMES, _MOST_PARTS

    def all(self, schema: JsonSchema) -> JsonSchema:
        """A schema closed, with its definitions."""
        closed, definitions = self.whole(schema), dict[str, JsonSchema]()
        while len(definitions) < len(self.needed):
            for name in list(self.needed)[len(definitions) :]:
                old, _, is_part = name.partition(".")
                target = self.exact.target(f"#/$defs/{old}")
                definitions[name] = self.each(target, bool(is_part))
        return (
            {**closed, "$defs": definitions} if definitions and isinstance(closed, dict) else closed
        )

    def each(self, schema: JsonSchema, is_part: bool) -> JsonSchema:
        """A schema closed, as part() or whole() does it."""
        return self.part(schema) if is_part and isinstance(schema, dict) else self.whole(schema)

    def whole(self, schema: JsonSchema, around: Sequence[dict[str, Any]] = ()) -> JsonSchema:
        """The schema of a value, closed.

        `around`: what other schemas that hold together with it say about keys.
        """
        if isinstance(schema, bool):
            if not schema or not around:
                return schema
            schema = {}
        if "object" not in own_types(schema):
            return self.part(schema)
        if "$ref" in schema and not around and not self._read(without(schema, "$ref")):
            return self.part(schema, "")
        together = [*around, *self._read(without(schema, "anyOf"))]
        if any(not _DECIDING.isdisjoint(each) for each in together):
            return self.part(schema)
        if "anyOf" in schema:
            closed = [self.whole(branch, together) for branch in schema["anyOf"]]
            return {**self.part({**schema, "anyOf": []}), "anyOf": closed}
        part = self.part(schema)
        if all(_DECLARING.isdisjoint(each) for each in together):
            return part
        names, patterns = (
            dict.fromkeys(name for each in together for key in keys for name in each.get(key, ()))
            for keys in (("properties", "required"), ("patternProperties",))
        )
        least = max(each.get("minProperties", 0) for each in together)
        if not patterns and least > len(names):
            return part
        for keyword, known in (("properties", names), ("patternProperties", patterns)):
            added = dict.fromkeys(
                (name for name in known if name not in part.get(keyword, {})), True
            )
            self.names_left -= len(added)
            if added or keyword == "properties":
                part[keyword] = {**part.get(keyword, {}), **added}
        self._check_limits()
        return with_groups_together({**part, "additionalProperties": False})

    def part(self, schema: dict[str, Any], form: str = ".part") -> dict[str, Any]:
        """One of several schemas that hold together: only the values in it are closed.

        `form`: that of the definition to which it refers.
        """
        closed = mapped(schema, lambda key, each: self.each(each, key in ("allOf", "anyOf")))
        if "$ref" in schema:
            closed["$ref"] += form
            self.needed[closed["$ref"].rpartition("/")[2]] = None
        return closed

    def _read(self, schema: JsonSchema) -> list[dict[str, Any]]:
        """Those of the schemas that hold together with a schema that say something about keys."""
        found = []
        for part in self.exact.together(schema):
            self.parts_left -= 1
            self._check_limits()
            if not _READ.isdisjoint(part):
                found.append(part)
        return found

    def _check_limits(self) -> None:
        if self.names_left < 0 or self.parts_left < 0:
            why = (
                "its allOf, anyOf and $ref combine too many properties: write "
                "additionalProperties in its objects"
            )
            raise SchemaError(why)
