"""Lark: a grammar as llguidance reads it, built rule by rule.

Has the added tokens of a vocabulary, and does not read schemas.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from ..config import FormConfig
from ..errors import FormError
from .closed_objects import has_open_keys
from .schema import JsonSchema
from .token_bytes import any_of

# Space inside of JSON. Without a bound a model may write space endlessly.
JSON_SPACE = r"[ \t\r\n]{0,20}"
# A few rules that repeat each other may force a text of any length, which no limit of llguidance
# ends.
NO_FORCING = '%llguidance {"no_forcing": true}'
# Letters after a backslash, for JSON whose objects are open: \u escapes of a key could make it a
# declared one.
_ESCAPES = '"\\bfnrt'


class Lark:
    """Rules and terminals, named in the order in which they come. Equal ones are one.

    added:   the ids of added tokens by their text. llguidance never forces one as the bytes of a
             literal, nor allows it in text.
    forces:  whether tokens are forced where the grammar leaves no choice.
    """

    def __init__(self, added: Mapping[str, int]) -> None:
        self.added = added
        self.forces = True
        self._words = any_of(added)
        self._names: dict[str, str] = {}
        self._bytes = 0
        self._later: dict[str, str] = {}
        # What was written for a schema before, of the same rules.
        self.written: dict[str, list[tuple[str, str]]] = {}

    def literal(self, text: str) -> str:
        """Exactly this text, its added tokens by their ids."""
        parts, at = [], 0
        for match in self._words.finditer(text):
            if match.start() > at:
                parts.append(_bytes(text[at : match.start()]))
            parts.append(f"<[{self.added[match[0]]}]>")
            at = match.end()
        if at < len(text):
            parts.append(_bytes(text[at:]))
        return f"({' '.join(parts)})" if len(parts) > 1 else "".join(parts) or '""'

    def first_added(self, text: str) -> int | None:
        """Where the first added token in a text is."""
        found = self._words.search(text)
        return None if found is None else found.start()

    def rule(self, body: str) -> str:
        """The name of a rule."""
        return self._name("r", body)

    def terminal(self, body: str) -> str:
        """The name of a terminal: regular expressions between slashes, joined by `&`, `|` and
        `~`.
        """
        return self._name("T", body)

    def later(self) -> str:
        """The name of a rule that `define` completes: rules that contain themselves need it."""
        name = f"r{self._count}"
        self._later[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Complete the rule that `later` has named."""
        self._later[name] = body

    def json(self, schema: JsonSchema, **more: Any) -> str:
        """The name of a rule for JSON of an exact schema.

        `more`: options of llguidance, as well as those that it needs.
        """
        held: dict[str, Any] = dict(schema) if isinstance(schema, dict) else {"anyOf": [schema]}
        escapes = {"json_allowed_escapes": _ESCAPES} if has_open_keys(schema) else {}
        held["x-guidance"] = {"whitespace_pattern": JSON_SPACE, **escapes, **more}
        return self.rule(f"%json {json.dumps(held)}")

    def text(self, start: str) -> str:
        """The whole grammar."""
        rules = [*((name, body) for body, name in self._names.items()), *self._later.items()]
        free = [] if self.forces else [NO_FORCING]
        return "\n".join(
            [f"start: {start}", *(f"{name}: {body}" for name, body in rules), *free, ""]
        )

    @property
    def _count(self) -> int:
        return len(self._names) + len(self._later)

    def _name(self, letter: str, body: str) -> str:
        if body not in self._names:
            self._bytes += len(body)
            if self._bytes > FormConfig.calls_bytes:
                most = f"{FormConfig.calls_bytes >> 20} MB"
                raise FormError(
                    f"the grammar of the tools' calls would have more than {most}: use fewer or "
                    "smaller schemas"
                )
        return self._names.setdefault(body, f"{letter}{self._count}")


def _bytes(text: str) -> str:
    # The one control character that JSON writes as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def quoted(text: str) -> str:
    """A regular expression for exactly this text."""
    return (
        re.sub(r"([\\^$.|?*+()\[\]{}&~#/-])", r"\\\1", text)
        .replace("\n", r"\n")
        .replace("\t", r"\t")
        .replace("\r", r"\r")
    )


def slashed(regex: str) -> str:
    """A regular expression between slashes, which end at the first bare one and at the end of a
    line.
    """
    bare = re.sub(r"\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], regex, flags=re.DOTALL)
    return "/" + bare.replace("\n", r"\n").replace("\r", r"\r") + "/"


@functools.cache
def text_without(*words: str) -> str:
    """A regular expression for text in which none of the words stands. They begin with the same
    character, which is once in each.

    A search for the words by their beginnings: what follows one of them is not their first
    character, nor the next one of any.
    """
    first = words[0][0]
    assert all(word.rfind(first) == 0 for word in words), f"{first!r} comes again in one of {words}"
    found = [
        word
        for word in words
        if not any(word.startswith(other) for other in words if other != word)
    ]
    begun = sorted({word[:i] for word in found for i in range(1, len(word))})
    if not begun:
        return f"{_none_of(first)}*"
    repeated = f"(?:{'|'.join(map(quoted, begun))})"
    missed = []
    for part in begun:
        following = sorted({word[len(part)] for word in found if word.startswith(part)})
        missed.append(quoted(part) + _none_of(first, *following))
    return f"(?:{_none_of(first)}|{repeated}*(?:{'|'.join(missed)}))*{repeated}*"


def _none_of(*characters: str) -> str:
    return "[^" + "".join(f"\\{c}" if c in "\\[]^-&~" else c for c in characters) + "]"
