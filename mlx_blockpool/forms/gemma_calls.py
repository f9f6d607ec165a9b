"""Tool calls of Gemma's models: `call:f{key:value}`, with bare keys, and strings between markers
in place of quotes.
"""

from __future__ import annotations

import json
import re
from typing import Any

from .json_calls import listing, parameters, repeated
from .lark import Lark, quoted, slashed, text_without
from .parameters import conditions
from .schema import ANNOTATIONS, JsonSchema, Schema, SchemaError, constants, placed, type_of

QUOTE, ESCAPE = '<|"|>', "<escape>"
SCALARS = frozenset({"number", "integer", "boolean", "null"})
# What JSON's own grammar keeps of numbers.
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def gemma4(lark: Lark, name: str, schema: JsonSchema, place: str) -> str:
    """`call:f{text:<|"|>A1<|"|>,list:[1,2],more:{deep:true}}`."""
    return _Nested(lark, Schema(schema), QUOTE, "<tool_call|>").call(name, place)


def function_gemma(lark: Lark, name: str, schema: JsonSchema, place: str) -> str:
    """`call:f{text:<escape>A1<escape>,number:2}`.

    The parser ends it at the first brace, and does not read lists and objects.
    """
    return _Flat(lark, Schema(schema), ESCAPE, "<end_function_call>", "[^}]*").call(name, place)


class _Flat:
    """Values of a call's parameters: text between two `mark`s, numbers, booleans and null.

    whole:  the schema of all parameters.
    end:    the marker after a call, at which a parser ends it unless it is a token.
    fence:  a regular expression that all text matches, too.
    """

    def __init__(
        self, lark: Lark, whole: Schema, mark: str, end: str, fence: str = r"[^\x00]*"
    ) -> None:
        self._lark, self._whole, self._mark = lark, whole, mark
        self._fences = [
            text_without(mark),
            fence,
            *([] if end in lark.added else [text_without(end)]),
        ]

    def call(self, name: str, place: str) -> str:
        return f"{self._lark.literal(f'call:{name}')} {self.braces(self._whole.root, place)}"

    def braces(self, schema: JsonSchema, place: str) -> str:
        """Lark of an object's properties in braces."""
        declared, rest = parameters(schema, self._whole, place)
        comma, parts = self._lark.literal(","), []
        for key, (required, each) in declared.items():
            if re.fullmatch(r"\w+", key) is None:
                raise SchemaError(
                    "this model's calls need names of letters, digits and _",
                    f"{place}.properties.{key}",
                )
            parts.append(
                (
                    required,
                    f"{self._lark.literal(f'{key}:')} "
                    f"{self.value(each, f'{place}.properties.{key}')}",
                )
            )
        if rest is not False:
            keys = " & ".join(
                ["/[A-Za-z0-9_]{1,64}/", *(f"~{slashed(quoted(key))}" for key in declared)]
            )
            pair = (
                f'{self._lark.terminal(keys)} ":" '
                f"{self.value(rest, f'{place}.additionalProperties')}"
            )
            parts.append((False, repeated(self._lark, pair, comma)))
        return f'"{{" {listing(self._lark, parts, comma)} "}}"'

    def value(self, schema: JsonSchema, place: str) -> str:
        """Lark of a value. Raises SchemaError where none can be written."""
        with placed(place):
            ways = [way for each in self._whole.branches(schema) for way in self._ways(each, place)]
        if not ways:
            raise SchemaError(
                "no value that the schema allows can be written in this model's calls", place
            )
        return self._lark.rule(" | ".join(dict.fromkeys(ways)))

    def _ways(self, schema: dict[str, Any], place: str) -> list[str]:
        """Lark for each kind of value that a schema without unions allows."""
        values, allowed = constants(schema), self._whole.types(schema)
        if values is not None:
            self._refuse(
                schema,
                set(schema) - ANNOTATIONS - {"type", "enum", "const", "$defs", "definitions"},
                place,
            )
            written = [self._written(value) for value in values if type_of(value) in allowed]
            return [self._lark.literal(text) for text in written if text is not None]
        if "allOf" in schema and not allowed <= {"string"}:
            self._refuse(schema, {"allOf"}, place)
        ways = [self._text(schema, place)] if "string" in allowed else []
        if scalars := sorted(allowed & SCALARS):
            ways.append(
                self._lark.json(
                    {"type": scalars, **{key: schema[key] for key in OF_NUMBERS if key in schema}}
                )
            )
        return ways

    def _text(self, schema: dict[str, Any], place: str) -> str:
        tail = "" if self._mark in self._lark.added else quoted(self._mark)
        kept = [*self._fences, *conditions(schema, self._whole, place)]
        body = self._lark.terminal(" & ".join(slashed(f"(?:{each}){tail}") for each in kept))
        return (
            f"{self._lark.literal(self._mark)} {body} "
            f"{'' if tail else self._lark.literal(self._mark)}"
        )

    def _written(self, value: Any) -> str | None:
        """A value as a call has it; None: it cannot be written."""
        if not isinstance(value, str):
            return None if isinstance(value, list | dict) else json.dumps(value)
        return (
            f"{self._mark}{value}{self._mark}"
            if all(re.fullmatch(each, value) for each in self._fences)
            else None
        )

    def _refuse(self, schema: dict[str, Any], keywords: set[str], place: str) -> None:
        for keyword in sorted(keywords & set(schema)):
            raise SchemaError(
                f"{keyword} is not supported here in this model's calls", f"{place}.{keyword}"
            )


class _Nested(_Flat):
    """Values that may also be lists and objects of values."""

    def __init__(self, lark: Lark, whole: Schema, mark: str, end: str) -> None:
        super().__init__(lark, whole, mark, end)
        self._named: dict[str, str] = {}

    def value(self, schema: JsonSchema, place: str) -> str:
        # Schemas may contain themselves, as the schema of any value does.
        known = json.dumps(schema, sort_keys=True)
        if known not in self._named:
            self._named[known] = name = self._lark.later()
            self._lark.define(name, super().value(schema, place))
        return self._named[known]

    def _ways(self, schema: dict[str, Any], place: str) -> list[str]:
        ways = super()._ways(schema, place)
        if constants(schema) is not None:
            return ways
        allowed = self._whole.types(schema)
        if "array" in allowed:
            ways.append(self._array(schema, place))
        return [*ways, self.braces(schema, place)] if "object" in allowed else ways

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
            item = self.value(items, f"{place}.items")
            more = f'("," {item}){{{max(least - len(first) - (not first), 0)},{open_end}}}'
            whole = f"{item} {more}"
        for number, each in reversed(list(enumerate(first, 1))):
            whole = self._lark.rule(
                f"{self.value(each, f'{place}.prefixItems[{number - 1}]')} {more}"
            )
            more = f'("," {whole}){"" if number <= least else "?"}'
        return self._lark.rule(f'"[" {whole} "]"' if least else f'"[]" | "[" {whole} "]"')

    def _written(self, value: Any) -> str | None:
        if isinstance(value, list):
            items = [self._written(each) for each in value]
            return None if None in items else f"[{','.join(filter(None, items))}]"
        if isinstance(value, dict):
            pairs = {key: self._written(each) for key, each in value.items()}
            if None in pairs.values() or not all(re.fullmatch(r"\w+", key) for key in pairs):
                return None
            return f"{{{','.join(f'{key}:{each}' for key, each in pairs.items())}}}"
        return super()._written(value)
