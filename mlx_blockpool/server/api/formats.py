"""The form of a reply that a body names: the formats of OpenAI and Anthropic, and the fields of
vLLM and llama.cpp.

A schema is made exact here, on the socket's thread, or refused with its keyword and place. Knows no
tokens and no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from ...config import FormConfig
from ...forms.exact import exact
from ...forms.output_format import OutputFormat, check_schemas
from ..bodies import InvalidRequestError
from ..validation import Body, List, Object, Text, TextOr, only

ANY_OBJECT = {"type": "object"}

Texts = Annotated[List[Text], Field(min_length=1, max_length=FormConfig.enum_values)]
NO_TAGS = "name the form of the whole reply: json, regex, choice or grammar"


class TextFormat(Body):
    type: Literal["text"]

    def wanted(self, place: str) -> None:
        return None


PLAIN = TextFormat(type="text")


class ObjectFormat(Body):
    """Any object, or those of a schema, which llama.cpp's clients may add."""

    type: Literal["json_object"]
    schema_: Object = Field(default=ANY_OBJECT, alias="schema")

    def wanted(self, place: str) -> OutputFormat:
        return schema_form(
            self.schema_, f"{place}.schema" if "schema_" in self.model_fields_set else place
        )


class SchemaFormat(Body):
    """A schema as the Responses API and Anthropic's have it.

    A name and `strict` change nothing: every schema is kept.
    """

    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")

    def wanted(self, place: str) -> OutputFormat:
        return schema_form(self.schema_, f"{place}.schema")


class NamedSchema(Body):
    schema_: Object = Field(alias="schema")


class ChatSchemaFormat(Body):
    """A schema as chats and completions have it."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def wanted(self, place: str) -> OutputFormat:
        return schema_form(self.json_schema.schema_, f"{place}.json_schema.schema")


ReplyFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]
ChatReplyFormat = Annotated[
    TextFormat | ObjectFormat | ChatSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(Body):
    """vLLM's field for a form. Its fields for whitespace and for a backend change nothing."""

    json_: TextOr[Object] | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None
    structural_tag: Annotated[Any, only(why=NO_TAGS)] = None

    def wanted(self, place: str) -> OutputFormat | None:
        json_object = schema_form(ANY_OBJECT, f"{place}.json_object") if self.json_object else None
        return only_form(
            (
                json_object,
                named_form("json", self.json_, f"{place}.json"),
                named_form("regex", self.regex, f"{place}.regex"),
                named_form("choice", self.choice, f"{place}.choice"),
                named_form("grammar", self.grammar, f"{place}.grammar"),
            )
        )


def named_form(
    kind: Literal["json", "regex", "choice", "grammar"], given: Any, place: str
) -> OutputFormat | None:
    """The form that a field of vLLM's or llama.cpp's names; None for one that is left out.

    given: a schema or its JSON, a regular expression, texts, or a grammar. Raises
    InvalidRequestError and SchemaError.
    """
    if given is None:
        return None
    if kind == "json":
        if isinstance(given, str):
            _check_size(given, FormConfig.schema_bytes, place)
            try:
                given = json.loads(given)
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(
                    place, f"Input should be a JSON schema, or its JSON as text: {error}"
                ) from error
        return schema_form(given, place)
    if kind == "choice":
        _check_size("".join(given), FormConfig.schema_bytes, place)
        _check_size(max(given, key=len), FormConfig.forced_bytes, place)
        given = json.dumps(list(dict.fromkeys(given)))
    else:
        _check_size(given, FormConfig.text_bytes, place)
    if kind == "grammar":
        check_schemas(given, place)
    return OutputFormat(kind, given, place)


def only_form(forms: Iterable[OutputFormat | None]) -> OutputFormat | None:
    """The one form that a body names, or None. Raises InvalidRequestError for several."""
    found = [form for form in forms if form is not None]
    if len(found) > 1:
        raise InvalidRequestError(
            found[1].place,
            f"a reply has one form, and {found[0].place} names one; leave one of them out",
        )
    return found[0] if found else None


def schema_form(schema: Any, place: str) -> OutputFormat:
    """The form of JSON that satisfies a schema. Raises SchemaError."""
    unkept: list[str] = []
    found = exact(schema, place, unkept=unkept)
    return OutputFormat("json", json.dumps(found, separators=(",", ":")), place, tuple(unkept))


def _check_size(text: str, most: int, place: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            place, "Input should be Unicode; found half of a surrogate pair"
        ) from error
    if size > most:
        raise InvalidRequestError(place, f"a form may have {most:,} bytes; this one has {size:,}")
