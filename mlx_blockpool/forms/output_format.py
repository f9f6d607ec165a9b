"""OutputFormat and ToolFormat: the forms that a request's body asks for, and their grammar in
Lark.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from ..errors import FormError
from .exact import exact
from .lark import NO_FORCING, Lark
from .schema import JsonSchema

# Around JSON: models begin and end it with lines, and llguidance takes space inside alone.
SPACE = r"/[ \t\r\n]{0,4}/"


@dataclass(frozen=True)
class OutputFormat:
    """The form of a reply's content, exact and checked.

    kind:   what `text` is.
    text:   JSON of the exact schema with its keys in their order, a regular expression, a JSON list
            of texts, or a grammar in Lark's or GBNF's form. It says the same for equal forms, and
            names them in caches.
    place:  where the body has it, for errors: "response_format.json_schema.schema".
    unkept: the places of its keywords that replies do not keep.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str
    place: str
    unkept: tuple[str, ...] = ()

    @property
    def grammar(self) -> str:
        """The form in Lark. Raises FormError for text that does not have this form."""
        try:
            # JSON may have halves of characters, which no text of a reply has.
            self.text.encode()
            return self._lark()
        except Exception as error:
            # The converter of grammars is recursive, and raises whatever a text leads it to.
            raise FormError(f"this {self.kind} cannot be read: {error}", self.place) from error

    def _lark(self) -> str:
        if self.kind == "json":
            return json_grammar(json.loads(self.text))
        if self.kind == "choice":
            return (
                "start: /"
                + "|".join(
                    regex_to_lark(f"(?:{re.escape(text)})") for text in json.loads(self.text)
                )
                + "/"
            )
        if self.kind == "regex":
            return f"start: /{regex_to_lark(_whole(self.text)) or '(?:)'}/"
        return f"{any_to_lark(self.text)}\n{NO_FORCING}"


@dataclass(frozen=True)
class ToolFormat:
    """A tool whose calls keep a schema.

    schema:  JSON of the exact schema of its parameters, with its keys in their order.
    place:   where the body has the schema of a strict tool. None for a tool that is not strict; if
             its schema cannot be kept, its calls may have any arguments.
    unkept:  the places of the strict schema's keywords that calls do not keep.
    """

    name: str
    schema: str
    place: str | None
    unkept: tuple[str, ...] = ()


def json_grammar(schema: JsonSchema) -> str:
    """Lark of JSON that an exact schema accepts, with space around."""
    lark = Lark({})
    space = lark.terminal(SPACE)
    return lark.text(f"{space} {lark.json(schema)} {space}")


def check_schemas(grammar: str, place: str) -> None:
    """Check the JSON schemas that a grammar in Lark has after %json.

    Raises SchemaError for one that cannot be kept.
    """
    for found in re.finditer(r"%json\s*", grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            # llguidance says what is wrong with it, if it is not part of a text.
            continue
        exact(schema, f"{place}: %json")


def _whole(pattern: str) -> str:
    """A pattern without the anchors at its ends: it is matched with the whole text in any case."""
    return re.sub(r"(?<!\\)((?:\\\\)*)\$\Z", r"\1", pattern.removeprefix("^"))
