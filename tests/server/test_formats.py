"""The forms that bodies of every protocol ask for: what is taken, and errors that name keyword
and place. Without a model.
"""

from __future__ import annotations

import copy
import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_blockpool.config import FormConfig
from mlx_blockpool.errors import FormError
from mlx_blockpool.forms.output_format import OutputFormat, ToolFormat
from mlx_blockpool.server.api import anthropic_request, ollama_request, responses_request
from mlx_blockpool.server.api.completions_request import ChatBody, TextBody
from mlx_blockpool.server.api.errors import anthropic_status, openai_answer
from mlx_blockpool.server.bodies import InvalidRequestError
from mlx_blockpool.server.kept_responses import KeptResponses
from mlx_blockpool.server.validation import validated

OPTIONS = Namespace(
    max_tokens=9,
    temp=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    num_draft_tokens=3,
    chat_template_args={},
    use_default_chat_template=False,
)
SAID = [{"role": "user", "content": "Hello"}]
PET: dict[str, Any] = {
    "type": "object",
    "properties": {"legs": {"type": "integer"}},
    "required": ["legs"],
}
BAD: dict[str, Any] = {"type": "object", "properties": {"legs": {"anyOf": [{"not": {"const": 3}}]}}}


def chat(**body: Any) -> Any:
    return validated(ChatBody, {"messages": SAID, **body}).request()


def text(**body: Any) -> Any:
    return validated(TextBody, {"prompt": "Hello", **body}).request()


def responses(**body: Any) -> Any:
    return responses_request.parse({"input": "Hello", **body}, OPTIONS, KeptResponses()).request


def anthropic(**body: Any) -> Any:
    return anthropic_request.parse({"max_tokens": 5, "messages": SAID, **body}, OPTIONS).request


def ollama(**body: Any) -> Any:
    return ollama_request.parse_chat({"messages": SAID, **body}, OPTIONS).request


def generate(**body: Any) -> Any:
    return ollama_request.parse_generate({"prompt": "Hello", **body}, OPTIONS).request


def of_chat(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "Pet", "strict": True, "schema": schema},
        }
    }


def of_responses(schema: Any) -> dict[str, Any]:
    return {
        "text": {"format": {"type": "json_schema", "name": "Pet", "strict": True, "schema": schema}}
    }


def of_anthropic(schema: Any) -> dict[str, Any]:
    return {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}}}


ANY = {"type": "object"}
# As PET is kept: what a schema does not name is not written.
CLOSED = {
    "type": "object",
    "properties": PET["properties"],
    "additionalProperties": False,
    "required": PET["required"],
}


@pytest.mark.parametrize(
    ("parse", "body", "place", "schema"),
    [
        (chat, of_chat(PET), "response_format.json_schema.schema", CLOSED),
        (chat, {"response_format": {"type": "json_object"}}, "response_format", ANY),
        (
            chat,
            {"response_format": {"type": "json_object", "schema": PET}},
            "response_format.schema",
            CLOSED,
        ),
        (chat, {"structured_outputs": {"json": PET}}, "structured_outputs.json", CLOSED),
        (
            chat,
            {"structured_outputs": {"json": json.dumps(PET)}},
            "structured_outputs.json",
            CLOSED,
        ),
        (
            chat,
            {"structured_outputs": {"json_object": True}},
            "structured_outputs.json_object",
            ANY,
        ),
        (chat, {"guided_json": PET, "response_format": {"type": "text"}}, "guided_json", CLOSED),
        (text, {"guided_json": json.dumps(PET)}, "guided_json", CLOSED),
        (text, of_chat(PET), "response_format.json_schema.schema", CLOSED),
        (chat, {"json_schema": PET, "grammar": ""}, "json_schema", CLOSED),
        (responses, of_responses(PET), "text.format.schema", CLOSED),
        (
            responses,
            {"text": {"format": {"type": "json_object"}, "verbosity": "low"}},
            "text.format",
            ANY,
        ),
        (anthropic, of_anthropic(PET), "output_config.format.schema", CLOSED),
        (
            anthropic,
            {"output_format": {"type": "json_schema", "schema": PET}},
            "output_format.schema",
            CLOSED,
        ),
        (ollama, {"format": PET}, "format", CLOSED),
        (ollama, {"format": "json"}, "format", ANY),
        (generate, {"format": PET}, "format", CLOSED),
        (generate, {"format": PET, "raw": True}, "format", CLOSED),
    ],
)
def test_schemas_are_parsed_out_of_every_protocol(
    parse: Any, body: Any, place: str, schema: Any
) -> None:
    form = parse(**body).form
    assert (form.kind, form.place) == ("json", place)
    assert json.loads(form.text) == schema
    assert list(json.loads(form.text)) == list(schema), "a reply has its keys in the schema's order"


@pytest.mark.parametrize("parse", [chat, text])
def test_expressions_choices_and_grammars_are_vllms(parse: Any) -> None:
    values = {"regex": "a+", "choice": ["b", "a", "b"], "grammar": 'start: "a"'}
    written = {"choice": '["b", "a"]'}
    for kind, value in values.items():
        expected = written.get(kind, value)
        assert parse(**{f"guided_{kind}": value}).form == OutputFormat(
            kind, expected, f"guided_{kind}"
        )  # type: ignore[arg-type]
        found = parse(
            structured_outputs={kind: value, "whitespace_pattern": " ", "json_object": False}
        ).form
        assert found == OutputFormat(kind, expected, f"structured_outputs.{kind}")  # type: ignore[arg-type]
    assert parse(grammar='root ::= "a"').form == OutputFormat("grammar", 'root ::= "a"', "grammar")


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (chat, {}),
        (
            chat,
            {
                "response_format": {"type": "text"},
                "structured_outputs": {"json_object": False},
                "guided_json": None,
            },
        ),
        (text, {"structured_outputs": None}),
        (text, {"json_schema": None, "grammar": ""}),
        (responses, {"text": {"verbosity": "low", "format": None}}),
        (anthropic, {"output_config": {"effort": "low", "format": None}, "output_format": None}),
        (ollama, {"format": ""}),
        (ollama, {"format": {}}),
        (generate, {"format": None}),
    ],
)
def test_without_a_form_replies_are_free(parse: Any, body: Any) -> None:
    request = parse(**body)
    assert request.form is None
    assert getattr(request, "held", ()) == ()


LEGS = "properties.legs.anyOf"


@pytest.mark.parametrize(
    ("parse", "body", "place", "words"),
    [
        (chat, of_chat(BAD), f"response_format.json_schema.schema.{LEGS}[0].not", "not"),
        (
            chat,
            {"structured_outputs": {"json": BAD}},
            f"structured_outputs.json.{LEGS}[0].not",
            "not",
        ),
        (text, {"guided_json": json.dumps(BAD)}, f"guided_json.{LEGS}[0].not", "not"),
        (responses, of_responses(BAD), f"text.format.schema.{LEGS}[0].not", "not"),
        (anthropic, of_anthropic(BAD), f"output_config.format.schema.{LEGS}.0.not", "not"),
        (ollama, {"format": BAD}, f"format.{LEGS}[0].not", "not"),
        (chat, {"response_format": "json"}, "response_format", "valid dictionary; found 'json'"),
        (chat, {"response_format": {}}, "response_format.type", "Field required"),
        (
            chat,
            {"response_format": {"type": "structural_tag"}},
            "response_format.type",
            "'text' or 'json_object' or 'json_schema'; found 'structural_tag'",
        ),
        (
            chat,
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "Field required",
        ),
        (chat, of_chat(None), "response_format.json_schema.schema", "Field required"),
        (chat, of_chat("{}"), "response_format.json_schema.schema", "valid dictionary"),
        (
            chat,
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "name the form of the whole",
        ),
        (
            chat,
            {"structured_outputs": {"json": "{"}},
            "structured_outputs.json",
            "or its JSON as text: Expecting",
        ),
        (
            chat,
            {"guided_json": "[" * 100_000},
            "guided_json",
            "or its JSON as text: maximum recursion",
        ),
        (chat, {"guided_json": "[1]"}, "guided_json", ""),
        (
            chat,
            {"guided_json": " " * (FormConfig.schema_bytes + 1)},
            "guided_json",
            "262,144 bytes; this one has 262,145",
        ),
        (
            text,
            {"guided_choice": ["b", "a" * (FormConfig.forced_bytes + 1)]},
            "guided_choice",
            "20,000 bytes; this one has 20,001",
        ),
        (
            text,
            {"guided_regex": "a" * (FormConfig.text_bytes + 1)},
            "guided_regex",
            "65,536 bytes; this one has 65,537",
        ),
        (text, {"guided_grammar": "\ud800"}, "guided_grammar", "half of a surrogate pair"),
        (chat, {"json_schema": PET, "grammar": 'root ::= "a"'}, "grammar", "json_schema names one"),
        (text, {"guided_choice": ["a", "\ud800"]}, "guided_choice", "half of a surrogate pair"),
        (text, {"guided_choice": []}, "guided_choice", "not be empty"),
        (text, {"guided_choice": ["a", 7]}, "guided_choice[1]", "valid string; found 7"),
        (text, {"guided_choice": ["a"] * 10_001}, "guided_choice", "at most 10,000"),
        (text, {"guided_regex": 7}, "guided_regex", "valid string"),
        (
            chat,
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "a reply has one form, and response_format names one; leave one of them out",
        ),
        (
            chat,
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "structured_outputs.regex",
        ),
        (
            responses,
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            "Field required",
        ),
        (
            responses,
            {"text": {"format": {"type": "grammar"}}},
            "text.format.type",
            "found 'grammar'",
        ),
        (
            anthropic,
            {"output_format": {"type": "json_object"}},
            "output_format.type",
            "Input should be 'json_schema'",
        ),
        (
            anthropic,
            {**of_anthropic(PET), "output_format": {"type": "json_schema", "schema": PET}},
            "output_format.schema",
            "output_config.format.schema names one",
        ),
        (
            ollama,
            {"format": "yaml"},
            "format",
            "Input should be 'json' or a JSON schema; found 'yaml'",
        ),
        (ollama, {"format": 7}, "format", "valid dictionary; found 7"),
    ],
)
def test_errors_name_the_place_as_the_protocol_writes_it(
    parse: Any, body: Any, place: str, words: str
) -> None:
    with pytest.raises((FormError, InvalidRequestError)) as error:
        parse(**body)
    if parse is anthropic:
        status, message = anthropic_status(error.value)
    else:
        status, answer = openai_answer(error.value)
        message = answer["error"]["message"]
        assert answer["error"]["param"] == place
    assert (status, message.partition(": ")[0]) == (400, place)
    assert words in message.partition(": ")[2]


# -- tools -----------------------------------------------------------------------------------------


def openai_tool(name: str, strict: Any = None, schema: Any = PET) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}


def responses_tool(name: str, strict: Any = None, schema: Any = PET) -> dict[str, Any]:
    return {"type": "function", "name": name, "strict": strict, "parameters": schema}


def anthropic_tool(name: str, strict: Any = None, schema: Any = PET) -> dict[str, Any]:
    return {"name": name, "strict": strict, "input_schema": schema}


TOOLS: Any = [
    pytest.param(chat, openai_tool, "tools[{}].function.parameters", "required", id="chat"),
    pytest.param(responses, responses_tool, "tools[{}].parameters", "required", id="responses"),
    pytest.param(
        anthropic, anthropic_tool, "tools.{}.input_schema", {"type": "any"}, id="anthropic"
    ),
    pytest.param(ollama, openai_tool, "tools[{}].function.parameters", None, id="ollama"),
]


@pytest.mark.parametrize(("parse", "tool", "place", "must"), TOOLS)
def test_calls_are_held_to_schemas_where_a_tool_is_strict(
    parse: Any, tool: Any, place: str, must: Any
) -> None:
    pet = json.dumps(CLOSED, separators=(",", ":"))
    held = parse(tools=[tool("a"), tool("b", strict=True), tool("c", schema=BAD)]).held
    free = '{"type":"object","properties":{"legs":true},"additionalProperties":false}'
    assert held == (
        ToolFormat("a", pet, None),
        ToolFormat("b", pet, place.format(1)),
        ToolFormat("c", free, None),
    )
    assert parse(tools=[tool("a"), tool("b", strict=False)]).held == ()
    with pytest.raises(FormError) as error:
        parse(tools=[tool("a"), tool("b", strict=True, schema=BAD)])
    message = anthropic_status(error.value)[1] if parse is anthropic else str(error.value)
    assert message.startswith(
        place.format(1) + f".{LEGS}" + (".0.not" if parse is anthropic else "[0].not") + ": "
    )


@pytest.mark.parametrize(
    ("parse", "body", "tool"),
    [
        (chat, of_chat(PET), openai_tool),
        (responses, of_responses(PET), responses_tool),
        (anthropic, of_anthropic(PET), anthropic_tool),
        (ollama, {"format": PET}, openai_tool),
    ],
)
def test_calls_that_may_stand_in_place_of_a_form_are_held_too(
    parse: Any, body: Any, tool: Any
) -> None:
    request = parse(**body, tools=[tool("a")])
    assert request.form is not None
    assert [(one.name, one.place) for one in request.held] == [("a", None)]


@pytest.mark.parametrize(("parse", "tool", "place", "must"), TOOLS[:3])
def test_calls_that_a_reply_has_to_make_are_held_to_schemas(
    parse: Any, tool: Any, place: str, must: Any
) -> None:
    tools = [tool("a"), tool("b", strict=True)]
    assert [one.name for one in parse(tools=tools, tool_choice=must).held] == ["a", "b"]
    assert [one.name for one in parse(tools=tools[:1], tool_choice=must).held] == ["a"]
    assert (
        parse(tools=tools, tool_choice={"type": "none"} if parse is anthropic else "none").held
        == ()
    )
    named = (
        {"type": "function", "name": "b", "function": {"name": "b"}}
        if parse is not anthropic
        else {"type": "tool", "name": "b"}
    )
    (held,) = parse(tools=tools, tool_choice=named).held
    assert (held.name, held.place) == ("b", place.format(1))


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        (None, {"type": "object", "properties": {}, "additionalProperties": False}),
        (PET, CLOSED),
        (
            {
                **PET,
                "properties": {
                    "legs": {"type": "integer"},
                    "legs a": {"not": {}},
                    "b": {"items": {"if": {}}},
                },
            },
            {**CLOSED, "properties": {"legs": {"type": "integer"}, "legs a": True, "b": True}},
        ),
        (
            {
                **PET,
                "properties": {**PET["properties"], "b": {"$ref": "#/$defs/c"}},
                "$defs": {"c": {"not": {}}},
            },
            {"legs": True, "b": True},
        ),
        ({**PET, "if": {}}, {"legs": True}),
        ({"type": "object", "properties": {str(i): {} for i in range(5000)}}, None),
        ({"type": "object", "properties": 7}, None),
        ("text", None),
    ],
)
def test_tools_that_are_not_strict_keep_what_can_be_kept(schema: Any, kept: Any) -> None:
    (held,) = chat(tools=[openai_tool("a", schema=schema)], tool_choice="required").held
    found = json.loads(held.schema)
    if kept is None:
        assert found == ANY
    elif "type" in kept:
        assert found == kept
    else:
        assert found["properties"].keys() == kept.keys()
        assert found["properties"]["b" if "b" in kept else "legs"] is True
    assert held.place is None


SET = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
}


@pytest.mark.parametrize(("parse", "tool", "place", "must"), TOOLS)
def test_what_a_form_does_not_keep_is_named(parse: Any, tool: Any, place: str, must: Any) -> None:
    formed = {
        chat: of_chat,
        responses: of_responses,
        anthropic: of_anthropic,
        ollama: lambda schema: {"format": schema},
    }[parse]
    request = parse(
        **formed(SET),
        tools=[tool("a", strict=True, schema=SET), tool("b", schema=SET), tool("c", strict=True)],
    )
    assert request.form.unkept == (f"{request.form.place}.properties.tags.uniqueItems",)
    assert [one.unkept for one in request.held] == [
        (f"{place.format(0)}.properties.tags.uniqueItems",),
        (),
        (),
    ]
    kept = [
        json.loads(text)["properties"]["tags"]
        for text in (request.form.text, request.held[0].schema, request.held[1].schema)
    ]
    assert kept == [{"type": "array", "items": {"type": "string"}}] * 3
    unkept = [place for form in request.forms for place in form.unkept]
    assert unkept == [*request.form.unkept, *request.held[0].unkept]


def test_a_few_parameters_alone_are_loosened_one_by_one() -> None:
    """Each takes a walk over its schema: with more of them all parameters of the next tools may
    have any value.
    """
    schema = {
        "type": "object",
        "properties": {"good": {"type": "string"}, **{f"bad{i}": {"not": {}} for i in range(20)}},
    }
    held = chat(
        tools=[openai_tool(name, schema=schema) for name in "abc"] + [openai_tool("d")],
        tool_choice="required",
    ).held
    kept = [json.loads(tool.schema)["properties"].get("good") for tool in held]
    assert kept == [{"type": "string"}, True, True, None]
    assert json.loads(held[-1].schema) == CLOSED


def test_strict_tools_change_no_prompt() -> None:
    """Templates see what they see without `strict`, where the tools are translated."""
    for parse, tool in ((responses, responses_tool), (anthropic, anthropic_tool)):
        assert parse(tools=[tool("a", strict=True)]).tools == parse(tools=[tool("a")]).tools
    given = [openai_tool("a", strict=True)]
    assert chat(tools=copy.deepcopy(given)).tools == given


def test_functions_in_namespaces_are_strict_by_their_own_places() -> None:
    inner = responses_tool("b", strict=True)
    (held,) = responses(
        tools=[{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [inner]}]
    ).held
    assert (held.name, held.place) == ("n__b", "tools[1].tools[0].parameters")


def test_tools_that_are_no_functions_do_not_break_a_chat() -> None:
    odd: list[Any] = [
        7,
        {},
        {"function": 7},
        {"function": {"name": 7, "strict": True}},
        {"function": {"name": "a", "strict": True}},
    ]
    assert [tool.name for tool in chat(tools=odd).held] == ["a"]


def test_the_response_repeats_the_format_as_it_was_sent() -> None:
    format_ = {
        "type": "json_schema",
        "name": "Pet",
        "description": "A pet",
        "strict": True,
        "schema": PET,
    }
    body = {"input": "Hello", "text": {"format": format_, "verbosity": "low"}}
    assert responses_request.parse(body, OPTIONS, KeptResponses()).echo["text"] == {
        "format": format_
    }
    for plain in ({}, {"text": None}, {"text": {}}, {"text": {"format": None}}):
        echo = responses_request.parse({"input": "Hello", **plain}, OPTIONS, KeptResponses()).echo
        assert echo["text"] == {"format": {"type": "text"}}


ODD: list[Any] = [
    None,
    True,
    10**400,
    1.5,
    float("nan"),
    "",
    "\ud800",
    "json",
    [],
    [{}],
    {},
    {"a": 1},
    {"type": "text"},
    {"$ref": "#"},
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside of a value."""
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield (*path, key)
        yield from places(inner, (*path, key))


def with_value(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = value.copy()
    changed[path[0]] = with_value(value[path[0]], path[1:], new)
    return changed


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (chat, {**of_chat(PET), "tools": [openai_tool("a", strict=True)]}),
        (
            chat,
            {
                "structured_outputs": {"choice": ["a"]},
                "tools": [openai_tool("a", strict=True)],
                "tool_choice": "required",
            },
        ),
        (
            text,
            {
                "guided_json": PET,
                "guided_regex": None,
                "guided_grammar": None,
                "structured_outputs": {"json": None},
            },
        ),
        (responses, {**of_responses(PET), "tools": [responses_tool("a", strict=True)]}),
        (
            anthropic,
            {
                **of_anthropic(PET),
                "output_format": None,
                "tools": [anthropic_tool("a", strict=True)],
            },
        ),
        (ollama, {"format": PET, "tools": [openai_tool("a", strict=True)]}),
    ],
)
def test_whatever_stands_in_a_format_is_parsed_or_refused(parse: Any, body: Any) -> None:
    refused = []
    for path in places(body):
        for value in ODD:
            try:
                parse(**with_value(body, path, value))
            except (FormError, InvalidRequestError) as error:
                refused.append(str(error))
    assert len(refused) > 20
    assert all(
        place and what for place, _, what in (message.partition(": ") for message in refused)
    )
