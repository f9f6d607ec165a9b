"""TagCall: Lark of tool calls in tags, between which text stands as it is and everything else as
JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .json_calls import parameters
from .lark import Lark, quoted, slashed, text_without
from .parameters import conditions, decode, fenced
from .schema import JsonSchema, Schema, SchemaError, constants, own_types, placed, type_of, without
from .tags import Tags

# What parsers read back as a parameter's name.
KEY = r"[^\s<>\"'=:,{}\[\]&]+"
# What parsers strip.
EDGE = r"[\s\x1c-\x1f]"
# Keywords that say nothing of values other than text, and those of schemas that allow every other
# value of their types.
OF_TEXT = {"pattern", "format", "minLength", "maxLength", "$comment"}
UNBOUND = {*OF_TEXT, "type", "$defs"}
SPACE = r"[ \t\r\n]*"
NUMBER = "-?(?:0|[1-9][0-9]*)"
SCALARS = {
    "null": "null",
    "boolean": "true|false",
    "integer": NUMBER,
    "number": f"{NUMBER}(?:[.][0-9]+)?(?:[eE][+-]?[0-9]+)?",
}
# Text that reads as JSON of each type.
READS_AS = {**SCALARS, "integer": SCALARS["number"], "array": r"\[(?s:.*)", "object": r"\{(?s:.*)"}
# Text of which a part may read so: nulls and booleans are whole words, whose literals end with
# their tag as text does.
BEGINS_AS = {**READS_AS, "integer": "[-0-9](?s:.*)", "number": "[-0-9](?s:.*)"}


def tag_call(
    lark: Lark, name: str, schema: JsonSchema, place: str, tags: Tags, several: bool
) -> str:
    """Lark of a call in tags."""
    return TagCall(lark, tags, Schema(schema), place, several).text(name)


@dataclass(frozen=True)
class TagCall:
    """Calls in tags of one function, as rules of `lark`. `whole`: the exact schema of its
    parameters; `place`: the schema's.

    `several`: whether it may be the second or a later one between its markers.
    """

    lark: Lark
    tags: Tags
    whole: Schema
    place: str
    several: bool
    _written: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Lark of a call of the function."""
        declared, rest = parameters(self.whole.root, self.whole, self.place)
        if not declared and rest is not False:
            key, keyed = self.tags.key.split("{key}")
            written = self._argument(
                f"{self.lark.literal(key)} {self.lark.terminal(slashed(KEY))}",
                keyed,
                True,
                self.place,
            )
            return self._call(name, [(written, "*")])
        arguments = []
        for key, (required, each) in declared.items():
            place = f"{self.place}.properties.{key}"
            if not re.fullmatch(KEY, key):
                raise SchemaError(
                    "this model's tool calls cannot write a parameter of this name", place
                )
            written = self._argument("", self.tags.key.replace("{key}", key), each, place)
            arguments.append((written, "" if required else "?"))
        return self._call(name, arguments)

    def _call(self, name: str, arguments: list[tuple[str, str]]) -> str:
        """A call of these arguments, each with its quantifier."""
        begin = self._begin(name)
        finish = self.lark.literal(self.tags.finish)
        if not self.tags.empty or not all(quantifier for _, quantifier in arguments):
            return " ".join(
                [begin, *(f"{written}{quantifier}" for written, quantifier in arguments), finish]
            )
        # The parser fails on a call without arguments in tags.
        ways, rest = [self.lark.literal(json.dumps({"name": name, "arguments": {}}))], ""
        for written, quantifier in reversed(arguments):
            after = f"{written}* {rest}" if quantifier == "*" else rest
            ways.append(f"{begin} {written} {after} {finish}")
            rest = self.lark.rule(f"{written}{quantifier} {rest}")
        return f"({' | '.join(ways)})"

    def _begin(self, name: str) -> str:
        begin = self.tags.begin.replace("{name}", name)
        before, index, after = begin.partition("{index}")
        if not index or not self.several:
            return self.lark.literal(begin.replace("{index}", "1"))
        return (
            f"{self.lark.literal(before)} {self.lark.terminal('/[1-9][0-9]?/')} "
            f"{self.lark.literal(after)}"
        )

    def _argument(self, before: str, key: str, schema: JsonSchema, place: str) -> str:
        """A rule for the tags of one parameter and its value; `before`: Lark of what stands
        before `key`.
        """
        shown, values = json.dumps(schema), dict[str, list[str]]()
        # Schemas without references are the same in all tools.
        known = self._written if '"$ref"' in shown else self.lark.written
        if shown not in known:
            with placed(place):
                known[shown] = list(self._values(schema, place))
        written = known[shown]
        for kind, value in written:
            values.setdefault(kind if "{type}" in key else "", []).append(value)
        if not values:
            raise SchemaError("this model's tool calls can write no value of this schema", place)
        ways = [
            f"{before} {self.lark.literal(key.replace('{type}', kind))} "
            f"({' | '.join(dict.fromkeys(each))})"
            for kind, each in values.items()
        ]
        return self.lark.rule(" | ".join(ways))

    def _values(self, schema: JsonSchema, place: str) -> Iterator[tuple[str, str]]:
        """Lark of values and the closing tag, each with its JSON type."""
        allowed, union = self.whole.types(schema), self.whole.branches(schema)
        texts, free = [], set[str]()
        for branch in union:
            kinds = self.whole.types(branch)
            if constants(branch) is None and "string" in kinds:
                texts.append(conditions(branch, self.whole, place))
            if constants(branch) is None and set(branch) <= UNBOUND:
                free |= kinds - {"string"}
        # Any text may be written: also that which reads as a value of another type, if all values
        # of the type are allowed.
        is_plain = [] in texts and "{type}" not in self.tags.key and not self.tags.reads_json
        covered = free if is_plain else set()
        bare = set() if "{type}" in self.tags.key or not texts else free & SCALARS.keys()
        for branch in union:
            if constants(branch) is not None:
                yield from self._listed(branch, allowed, place)
            else:
                yield from self._json(
                    branch,
                    self.whole.types(branch) - covered - bare - {"string"},
                    "string" in allowed,
                )
        yield from ((kind, self._scalar(kind)) for kind in sorted(bare - covered))
        # Text ends only with its tag: what begins like another value would never be that value.
        others = frozenset(READS_AS) - free if self.tags.reads_json else allowed - free - {"string"}
        others = others if [] in texts else others | (allowed & {"array", "object"})
        others = others | ({"null"} - free if self.tags.nulls else set())
        for wanted in texts:
            for around in dict.fromkeys((("", ""), self.tags.section)):
                yield "string", self._text(wanted, others, others & allowed, *around)

    def _listed(
        self, branch: dict[str, Any], allowed: frozenset[str], place: str
    ) -> Iterator[tuple[str, str]]:
        """The values of `enum` or `const` that are read back as what they are."""
        others = without(branch, "enum", "const")
        if set(others) - {"type", "$defs", "$comment"}:
            why = "enum is supported by this model's tool calls without other keywords alone"
            raise SchemaError(why, f"{place}.enum")
        kinds = own_types(others)
        for value in constants(branch) or []:
            raw = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if type_of(value) not in kinds or any(mark in raw for mark in self.tags.marks):
                continue
            found = self._read(raw, allowed)
            if type_of(found) == type_of(value) and found == value:
                yield type_of(value), self._word(raw)

    def _read(self, raw: str, allowed: frozenset[str]) -> Any:
        """What the parser and `decode` make of a value."""
        text = raw.strip() if self.tags.takes == "space" else raw
        if self.tags.nulls and text.lower() == "null":
            return decode(None, allowed)
        if self.tags.reads_json:
            try:
                return decode(json.loads(text), allowed)
            except ValueError:
                pass
        return decode(text, allowed)

    def _json(
        self, branch: dict[str, Any], kinds: frozenset[str], next_to_text: bool
    ) -> Iterator[tuple[str, str]]:
        """Values other than text.

        Where the schema allows no text, Python's words stand for JSON's: some templates write them.
        """
        named = sorted(kinds - {"integer"} if "number" in kinds else kinds)
        parts = [
            each
            for each in branch.get("allOf", [])
            if not isinstance(each, dict) or set(each) - OF_TEXT
        ]
        branch = {**without(branch, "allOf", *OF_TEXT), **({"allOf": parts} if parts else {})}
        groups = (
            [[kind] for kind in named] if "{type}" in self.tags.key else [named] if named else []
        )
        for group in groups:
            schema: JsonSchema = self.whole.standalone(
                {**branch, "type": group if len(group) > 1 else group[0]}
            )
            head, rest = self._cut("")
            value = self.lark.json(fenced(schema, *self.tags.marks))
            written = f"{value} {self.lark.literal(head)} {rest}"
            # Models may call either a number.
            both = {"integer", "number"} if {"integer", "number"} & set(group) else set()
            yield from ((kind, written) for kind in sorted({*group, *both}))
        if not next_to_text and "allOf" not in branch:
            words = {"boolean": ("True", "False"), "null": ("None",)}
            yield from ((kind, self._word(word)) for kind in named for word in words.get(kind, ()))

    def _word(self, text: str) -> str:
        """Lark of a text and the closing tag: one literal as far as other text could continue
        there.
        """
        head, rest = self._cut("")
        return f"{self.lark.literal(f'{text}{head}')} {rest}"

    def _scalar(self, kind: str) -> str:
        head, rest = self._cut("")
        return f"{self.lark.terminal(slashed(f'(?:{SCALARS[kind]}){quoted(head)}'))} {rest}"

    def _text(
        self,
        wanted: list[str],
        others: frozenset[str],
        begun: frozenset[str],
        before: str,
        after: str,
    ) -> str:
        """Text that the parser returns as it is, and which is neither JSON of `others` nor a
        beginning of those `begun`.
        """
        marks, head, rest = self.tags.marks, *self._cut(after)
        refused = [f"(?s:.*){quoted(after)}(?s:.*)"] if after else self._edges()
        if self.tags.nulls and "null" in others:
            refused.append("(?i:null)")
        if self.tags.reads_json:
            refused += ['"(?s:.*)', "NaN|-?Infinity"]
        reads = {
            kind: BEGINS_AS[kind] if kind in begun else READS_AS[kind] for kind in sorted(others)
        }
        refused += [f"{SPACE}(?:{regex}){SPACE}" for regex in reads.values()]
        texts = [text_without(*(mark for mark in marks if mark != before)), *wanted]
        whole = [slashed(f"{quoted(before)}(?:{text}){quoted(head)}") for text in texts]
        if refused:
            whole.append("~" + slashed(f"{quoted(before)}(?:{'|'.join(refused)}){quoted(head)}"))
        return f"{self.lark.terminal(' & '.join(whole))} {rest}"

    def _edges(self) -> list[str]:
        """Text that loses something at its edges."""
        if self.tags.takes == "space":
            return [rf"{EDGE}(?s:.*)", rf"(?s:.*){EDGE}"]
        if self.tags.takes == "line":
            first = [] if self.tags.key.endswith("\n") else [r"\n(?s:.*)"]
            return first if self.tags.close.startswith("\n") else [*first, r"(?s:.*)\n"]
        return []

    def _cut(self, after: str) -> tuple[str, str]:
        """(what belongs to the terminal of a text that ends with `after` and the closing tag, Lark
        of the rest).

        A text ends only where its terminal does, or where an added token comes, which no text
        allows.
        """
        closes = [f"{after}{close}" for close in self.tags.closes]
        close = closes[0]
        added = self.lark.first_added(close)
        end = len(close.rstrip()) if added is None else added
        rests = (self.lark.literal(each[end:]) for each in closes)
        return close[:end], f"({' | '.join(rests)})"
