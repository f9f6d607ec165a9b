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

from dataclasses import dataclass, field
from typing import Any

from .schema import JsonSchema, Schema, mapped, own_types, subschemas, with_groups_together, without

# Names that closing adds, and parts of schemas that it reads, before it stops.
MOST_NAMES = 20_000
_MOST_PARTS = 50_000


class TooManyNamesError(Exception):
    """Closing would make a schema too large."""


@dataclass
class Keys:
    """The keys of objects that several schemas, which hold together, declare.

    names:       in `properties` or `required`. patterns: of `patternProperties`.
    is_declared: whether any of them has `properties` or `patternProperties`.
    is_decided:  whether any of them says which other keys there are, or lists its values.
    least:       the largest `minProperties`.
    """

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    is_declared: bool = False
    is_decided: bool = False
    least: int = 0

    def include(self, other: Keys) -> None:
        self.names |= other.names
        self.patterns |= other.patterns
        self.is_declared |= other.is_declared
        self.is_decided |= other.is_decided
        self.least = max(self.least, other.least)

    @property
    def is_closing(self) -> bool:
        """Whether objects can do without other keys, and nothing says that they have some."""
        return (
            self.is_declared
            and not self.is_decided
            and (bool(self.patterns) or self.least <= len(self.names))
        )


def close_objects(schema: JsonSchema, exact: Schema) -> tuple[JsonSchema, dict[str, JsonSchema]]:
    """A schema and its `$defs` with `additionalProperties: false` wherever it is missing next to
    declared keys.

    exact: the definitions to which it refers. Accepts nothing that `schema` does not accept. Raises
    TooManyNamesError.
    """
    closing = _Closing(exact)
    return closing.whole(schema), closing.finished()


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
    """Schemas that are closed. `made`: the definitions, by their new names.

    A definition is needed in up to three forms: as the schema of a value ("name"), as one of
    several that hold together ("name.part"), and within a oneOf as it is ("name.open"): one of its
    branches must not match more values than before.
    """

    def __init__(self, exact: Schema) -> None:
        self.exact = exact
        self.made: dict[str, JsonSchema] = {}
        self.waiting: list[tuple[str, str, str]] = []
        self.added = 0
        self.parts = iter(range(_MOST_PARTS))

    def finished(self) -> dict[str, JsonSchema]:
        """The definitions to which closed schemas refer, closed too."""
        while self.waiting:
            name, old, form = self.waiting.pop()
            schema = self.exact.target(f"#/$defs/{old}")
            if form == "":
                self.made[name] = self.whole(schema)
            else:
                self.made[name] = self._part(schema) if form == ".part" else self._open(schema)
        return self.made

    def whole(self, schema: JsonSchema, around: Keys | None = None) -> JsonSchema:
        """The schema of a value, closed.

        `around`: the keys of other schemas that hold together with it.
        """
        around = around or Keys()
        if isinstance(schema, bool):
            return self._with_keys({}, around) if schema and around.is_declared else schema
        if "object" not in own_types(schema):
            return self._part_of(schema)
        if not around.names and not around.is_declared and (found := self._passed_on(schema)):
            return found
        joint = self._keys(without(schema, "anyOf"))
        joint.include(around)
        branches = [self._keys(branch) for branch in schema.get("anyOf", ())]
        if (
            branches
            and not joint.is_decided
            and (not joint.is_declared or any(branch.is_declared for branch in branches))
        ):
            rest = self._part_of(without(schema, "anyOf"))
            closed = [self.whole(branch, joint) for branch in schema["anyOf"]]
            return {key: closed if key == "anyOf" else rest[key] for key in schema}
        for branch in branches:
            joint.include(branch)
        return (
            self._with_keys(self._part_of(schema), joint)
            if joint.is_closing
            else self._part_of(schema)
        )

    def _passed_on(self, schema: dict[str, Any]) -> JsonSchema | None:
        """The same for a schema that leaves its keys to a single other one, which is closed
        itself; else None.
        """
        for key in ("$ref", "allOf"):
            if key in schema and self._keys(without(schema, key)) == Keys():
                if key == "$ref":
                    return {
                        **self._part_of(without(schema, key)),
                        "$ref": self._reference(schema, ""),
                    }
                if len(schema[key]) == 1:
                    return {
                        **self._part_of(without(schema, key)),
                        key: [self.whole(schema[key][0])],
                    }
        return None

    def _with_keys(self, schema: dict[str, Any], keys: Keys) -> dict[str, Any]:
        """A schema with these keys and no others."""
        found = dict(schema)
        for keyword, names in (("properties", keys.names), ("patternProperties", keys.patterns)):
            new = [name for name in names if name not in found.get(keyword, {})]
            self.added += len(new)
            if new or keyword == "properties":
                found[keyword] = {**found.get(keyword, {}), **dict.fromkeys(new, True)}
        if self.added > MOST_NAMES:
            raise TooManyNamesError
        return with_groups_together({**found, "additionalProperties": False})

    def _part_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        """One of several schemas that hold together: only the values in it are closed."""
        return self._referring(mapped(schema, self._closed_below), ".part")

    def _closed_below(self, keyword: str, part: JsonSchema) -> JsonSchema:
        if keyword == "oneOf":
            return self._open(part)
        return self._part(part) if keyword in ("allOf", "anyOf") else self.whole(part)

    def _part(self, schema: JsonSchema) -> JsonSchema:
        return schema if isinstance(schema, bool) else self._part_of(schema)

    def _open(self, schema: JsonSchema) -> JsonSchema:
        """A schema as it is, with references to definitions as they are."""
        if isinstance(schema, bool):
            return schema
        return self._referring(mapped(schema, lambda _, part: self._open(part)), ".open")

    def _referring(self, schema: dict[str, Any], form: str) -> dict[str, Any]:
        """A schema that refers to a definition in this form."""
        return {**schema, "$ref": self._reference(schema, form)} if "$ref" in schema else schema

    def _reference(self, schema: dict[str, Any], form: str) -> str:
        old = schema["$ref"].rpartition("/")[2]
        name = old + form
        if name not in self.made:
            self.made[name] = True
            self.waiting.append((name, old, form))
        return f"#/$defs/{name}"

    def _keys(self, schema: JsonSchema) -> Keys:
        """The keys that a schema and those within it, which hold for the same value, declare."""
        found = Keys()
        for _, part in zip(self.parts, self.exact.together(schema), strict=False):
            found.include(_declared(part))
        if next(self.parts, None) is None:
            raise TooManyNamesError
        return found


def _declared(schema: dict[str, Any]) -> Keys:
    """The keys that a schema itself declares."""
    names = dict.fromkeys((*schema.get("properties", ()), *schema.get("required", ())))
    return Keys(
        names,
        dict.fromkeys(schema.get("patternProperties", ())),
        "properties" in schema or "patternProperties" in schema,
        not {"additionalProperties", "const", "enum"}.isdisjoint(schema),
        schema.get("minProperties", 0),
    )
