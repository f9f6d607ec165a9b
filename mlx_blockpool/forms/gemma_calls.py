"""Tool calls of Gemma's models: `call:f{key:value}`, with bare keys, and strings between markers
in place of quotes.
"""

from __future__ import annotations

import json
import re
from typing import Any

from .json_calls import members
from .lark import Lark, quoted, slashed, text_without
from .parameters import conditions
from .schema import JsonSchema, Schema, SchemaError, constants, placed, type_of

QUOTE, ESCAPE = '<|"|>', "<escape>"
SCALARS = frozenset({"number", "integer", "boolean", "null"})
# What JSON's own grammar keeps of numbers.
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def gemma4(lark: Lark, name: str, schema: JsonSchema, place: str) -> str:
    """`call:f{text:<|"|>A1<|"|>,list:[1,2],more:{deep:true}}`."""
    return _Values(lark, Schema(schema), QUOTE, "<tool_call|>", r"[^\x00]*").call(name, place)


def function_gemma(lark: Lark, name: str, schema: JsonSchema, place: str) -> str:
    """`call:f{text:<escape>A1<escape>,number:2}`.

    The parser ends it at the first brace, and does not read lists and objects.
    """
    values = _Values(lark, Schema(schema), ESCAPE, "<end_function_call>", "[^}]*", False)
    return values.call(name, place)


class _Values:
    """Values of a call's parameters: text between two `mark`s, numbers, booleans and null.

    whole:  the schema of all parameters.
    end:    the marker after a call, at which a parser ends it unless it is a token.
    fence:  a regular expression that all text matches, too.
    nests:  whether values may also be lists and objects of values.
    """

    def __init__(
        self, lark: Lark, whole: Schema, mark: str, end: str, fence: str, nests: bool = True
    ) -> None:
        self._lark, self._whole, self._mark, self._nests = lark, whole, mark, nests
        self._fences = [
            text_without(mark),
            fence,
            *([] if end in lark.added else [text_without(end)]),
        ]
        # Schemas may contain themselves, as the schema of any value does.
        self._named: dict[str, str] = {}

    def call(self, name: str, place: str) -> str:
        return f"{self._lark.literal(f'call:{name}')} {self._braces(self._whole.root, place)}"

    def _braces(self, schema: JsonSchema, place: str) -> str:
        """Lark of an object's properties in braces."""
        written = members(
            self._lark,
            self._whole,
            schema,
            place,
            is_name=lambda key: re.fullmatch(r"\w+", key) is not None,
            why="this model's calls need names of letters, digits and _",
            more="/[A-Za-z0-9_]{1,64}/",
            colon=":",
            comma=self._lark.literal(","),
            value=self._value,
        )
        return f'"{{" {written} "}}"'

    def _value(self, schema: JsonSchema, place: str) -> str:
        """Lark of a value. Raises SchemaError where none can be written."""
        known = json.dumps(schema, sort_keys=True)
        if known not in self._named:
            self._named[known] = name = self._lark.later()
            with placed(place):
                union = self._whole.branches(schema)
                ways = [way for each in union for way in self._ways(each, place)]
            if not ways:
                raise SchemaError(
                    "no value that the schema allows can be written in this model's calls", place
                )
            self._lark.define(name, self._lark.rule(" | ".join(dict.fromkeys(ways))))
        return self._named[known]

    def _ways(self, schema: dict[str, Any], place: str) -> list[str]:
        """Lark for each kind of value that a schema without unions allows."""
        values, allowed = constants(schema), self._whole.types(schema)
        refused: set[str] = set()
        if values is not None:
            refused = set(schema) - {"type", "enum", "const", "$defs"}
        elif not allowed <= {"string"}:
            refused = set(schema) & {"allOf"}
        for keyword in sorted(refused):
            raise SchemaError(
                f"{keyword} is not supported here in this model's calls", f"{place}.{keyword}"
            )
        if values is not None:
            written = [self._written(value) for value in values if type_of(value) in allowed]
            return [self._lark.literal(text) for text in written if text is not None]
        ways = [self._text(schema, place)] if "string" in allowed else []
        if scalars := sorted(allowed & SCALARS):
            ways.append(
                self._lark.json(
                    {"type": scalars, **{key: schema[key] for key in OF_NUMBERS if key in schema}}
                )
            )
        if self._nests and "array" in allowed:
            ways.append(self._array(schema, place))
        if self._nests and "object" in allowed:
            ways.append(self._braces(schema, place))
        return ways

    def _text(self, schema: dict[str, Any], place: str) -> str:
        tail = "" if self._mark in self._lark.added else quoted(self._mark)
        kept = [*self._fences, *conditions(schema, self._whole, place)]
        body = self._lark.terminal(" & ".join(slashed(f"(?:{each}){tail}") for each in kept))
        mark = self._lark.literal(self._mark)
        return f"{mark} {body} {'' if tail else mark}"

    def _array(self, schema: dict[str, Any], place: str) -> str:
        least, most, items = (
            schema.get("minItems", 0),
            schema.get("maxItems"),
            schema.get("items", True),
        )
        first = schema.get("prefixItems", [])[:most]
        open_end = "" if most is None else str(most - len(first) - (not first))
        if most == 0 or (items is False and not first):
            return '"[]"'
        whole = more = ""
        if items is not False and most != len(first):
            item = self._value(items, f"{place}.items")
            more = f'("," {item}){{{max(least - len(first) - (not first), 0)},{open_end}}}'
            whole = f"{item} {more}"
        for number, each in reversed(list(enumerate(first, 1))):
            whole = self._lark.rule(
                f"{self._value(each, f'{place}.prefixItems[{number - 1}]')} {more}"
            )
            more = f'("," {whole}){"" if number <= least else "?"}'
        return self._lark.rule(f'"[" {whole} "]"' if least else f'"[]" | "[" {whole} "]"')

    def _written(self, value: Any) -> str | None:
        """A value as a call has it; None: it cannot be written."""
        if isinstance(value, str):
            is_text = all(re.fullmatch(each, value) for each in self._fences)
            return f"{self._mark}{value}{self._mark}" if is_text else None
        if not isinstance(value, list | dict):
            return json.dumps(value)
        keys = value if isinstance(value, dict) else {}
        inner = [self._written(each) for each in (keys.values() if keys else value)]
        if not self._nests or None in inner or not all(re.fullmatch(r"\w+", key) for key in keys):
            return None
        if isinstance(value, list):
            return f"[{','.join(filter(None, inner))}]"
        return f"{{{','.join(f'{key}:{each}' for key, each in zip(keys, inner, strict=True))}}}"
