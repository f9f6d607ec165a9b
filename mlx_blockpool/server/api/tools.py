"""The tools of a request in OpenAI's shape: those that are shown, whether they must be called,
and the schemas of calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Tag

from ...config import FormConfig
from ...forms.exact import exact
from ...forms.output_format import OutputFormat, ToolFormat
from ...forms.schema import JsonSchema, SchemaError, without_refused
from ...hooks import Message
from ..bodies import InvalidRequestError, Json
from ..request import ChatRequest
from ..validation import IS_TEXT
from .formats import ANY_OBJECT

Calls = Literal["may", "must", "never"]
T = TypeVar("T")

CALLS: dict[str, Calls] = {"auto": "may", "none": "never", "any": "must", "required": "must"}
# A tool choice of OpenAI's protocols: a word, or the one tool that the reply has to call.
ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<text>")] | Annotated[T, Tag("<other>")],
    IS_TEXT,
]
# The parameters of a function that names none.
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def calls_of(choice: str, tools: list[Any]) -> Calls:
    """ChatRequest.calls for a choice that names no tool. Raises InvalidRequestError."""
    if CALLS[choice] == "must" and not tools:
        raise InvalidRequestError(
            "tool_choice", f"{choice!r} needs tools that are functions, and there are none"
        )
    return CALLS[choice]


def tools_named(name: str, tools: list[Any], place: str) -> list[Any]:
    """The tools of a name.

    To force a tool, no other is shown and the reply begins with a call. Raises InvalidRequestError.
    """
    found = [tool for tool in tools if _name_of(tool) == name]
    if not found:
        raise InvalidRequestError(place, f"Tool {name[:50]!r} not found in tools")
    return found


def _name_of(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def strict_places(tools: list[Any]) -> dict[str, str]:
    """Where the parameters of strict tools in OpenAI's shape are, by the tools' names."""
    return {
        _name_of(tool): f"tools[{i}].function.parameters"
        for i, tool in enumerate(tools)
        if isinstance(_name_of(tool), str) and tool["function"].get("strict") is True
    }


def chat_request(
    messages: list[Message],
    tools: list[Any],
    calls: Calls,
    strict: Mapping[str, str],
    form: OutputFormat | None,
    **more: Any,
) -> ChatRequest:
    """A chat with the form of its reply. Its calls are held to all of the tools if one is strict,
    or if the reply is a call, or a call or else the form; or else to none.

    `tools`: in OpenAI's shape. `strict`: where the parameters of strict ones are, by name;
    SchemaError if they cannot be kept.
    """
    named = [tool["function"] for tool in tools if isinstance(_name_of(tool), str)]
    is_strict = any(function["name"] in strict for function in named)
    if calls == "never" or (calls == "may" and form is None and not is_strict):
        named = []
    spare = iter(range(FormConfig.loosened))
    held = tuple(_held(function, strict.get(function["name"]), spare) for function in named)
    return ChatRequest(
        "chat", "", messages, tools or None, None, calls=calls, form=form, held=held, **more
    )


def _held(function: Json, place: str | None, spare: Iterator[int]) -> ToolFormat:
    given = function.get("parameters")
    schema = NO_PARAMETERS if given is None else given
    unkept: list[str] = []
    found = _loosened(schema, spare) if place is None else exact(schema, place, unkept=unkept)
    return ToolFormat(
        function["name"], json.dumps(found, separators=(",", ":")), place, tuple(unkept)
    )


def _loosened(schema: Any, spare: Iterator[int]) -> JsonSchema:
    """An exact schema of an object that allows more: any value where that of a parameter cannot be
    kept.

    `spare`: ends when other parameters have taken all that may be tried.
    """
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return ANY_OBJECT
    found = without_refused(schema, lambda each: exact(each, "", unkept=[]), spare)
    if found is not None:
        return found
    try:
        return exact({"type": "object", "properties": dict.fromkeys(properties, True)}, "")
    except SchemaError:
        return ANY_OBJECT


def function_tool(name: str, description: str | None, parameters: Json) -> Json:
    """A tool in OpenAI's shape."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}
