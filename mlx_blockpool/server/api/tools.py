"""The tools of a request in OpenAI's shape: which are shown, whether they have to be called, and the schemas that calls keep."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Tag

from ...forms.schema import Schema, SchemaError, exact
from ...forms.wanted import Wanted, WantedTool
from ..bodies import InvalidRequestError
from ..validation import IS_TEXT
from .formats import ANY_OBJECT

Calls = Literal["may", "must", "never"]
T = TypeVar("T")

CALLS: dict[str, Calls] = {"auto": "may", "none": "never", "any": "must", "required": "must"}
# A tool choice of OpenAI's protocols: a word, or the one tool that the reply has to call.
ToolChoice = Annotated[Annotated[Literal["auto", "none", "required"], Tag("<text>")] | Annotated[T, Tag("<other>")], IS_TEXT]
# The parameters of a function that says nothing of any.
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
# Of so many parameters of a request's tools the schemas are left out one by one.
MOST_LOOSENED = 32


def calls_of(choice: str, tools: list[Any]) -> Calls:
    """ChatRequest.calls for a choice that names no tool. Raises InvalidRequestError."""
    if CALLS[choice] == "must" and not tools:
        raise InvalidRequestError("tool_choice", f"{choice!r} needs tools that are functions, and there are none")
    return CALLS[choice]


def tools_named(name: str, tools: list[Any], place: str) -> list[Any]:
    """The tools of a name. To force a tool, no other is shown and the reply begins with a call. Raises InvalidRequestError."""
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


def held_tools(
    shown: list[Any], calls: Calls, strict: Mapping[str, str], content: Wanted | None = None
) -> tuple[WantedTool, ...]:
    """ChatRequest.held: all of the tools if one is strict, or if the reply is a call, or a call or else `content`; or else none.

    `shown`: in OpenAI's shape. `strict`: where the parameters of strict ones are, by name; SchemaError if they cannot be kept.
    """
    named = [tool["function"] for tool in shown if isinstance(_name_of(tool), str)]
    is_strict = any(function["name"] in strict for function in named)
    if calls == "never" or (calls == "may" and content is None and not is_strict):
        return ()
    spare = iter(range(MOST_LOOSENED))
    return tuple(_held(function, strict.get(function["name"]), spare) for function in named)


def _held(function: dict[str, Any], place: str | None, spare: Iterator[int]) -> WantedTool:
    given = function.get("parameters")
    schema = NO_PARAMETERS if given is None else given
    found = _loosened(schema, spare) if place is None else exact(schema, place)
    return WantedTool(function["name"], json.dumps(found, separators=(",", ":")), place)


def _loosened(schema: Any, spare: Iterator[int]) -> Schema:
    """An exact schema of an object that allows more: any value where that of a parameter cannot be kept.

    `spare`: ends when other parameters have taken all that may be tried.
    """
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return ANY_OBJECT
    kept = dict(properties)
    while True:
        try:
            return exact({**schema, "properties": kept}, "")
        except SchemaError as error:
            bad = next((key for key in kept if _is_of(key, error.place)), None)
        if bad is None or next(spare, None) is None:
            break
        kept[bad] = True
    try:
        return exact({"type": "object", "properties": dict.fromkeys(properties, True)}, "")
    except SchemaError:
        return ANY_OBJECT


def _is_of(key: str, place: str) -> bool:
    """Return whether a place in a schema is in the property of this name."""
    return f"{place}.".startswith((f".properties.{key}.", f".properties.{key}[", f".properties[{json.dumps(key)}]"))


def function_tool(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's shape."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}
