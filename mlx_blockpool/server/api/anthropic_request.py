"""A body of Anthropic's Messages API as what mlx-lm's ResponseGenerator takes: a chat request and generation arguments.

What cannot be honoured is refused with the place that asked for it; what changes nothing here (service tiers, betas, budgets) is
passed over, and unknown values of optional fields are logged.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ...config import RequestConfig
from ...mlx_lm_compat import GenerationArguments
from ..arguments import generation_arguments
from ..bounds import check_count
from ..fields import InvalidRequestError, checked, field, inside, known, one_of
from ..request import SECONDS, ChatRequest, Mark, ParsedRequest
from .anthropic_messages import Conversation

log = logging.getLogger(__name__)

Body = dict[str, Any]

CHOICES = ("auto", "any", "tool", "none")
DISPLAYS = ("summarized", "omitted")
THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


@dataclass(frozen=True)
class MessagesRequest(ParsedRequest):
    """A parsed body of the Messages API.

    max_tokens:      as the client says; 0 only computes the prompt.
    shows_thinking:  whether the client sees thinking, or only its signature.
    """

    max_tokens: int
    shows_thinking: bool


def parse(body: Body, options: Any, counts: bool = False) -> MessagesRequest:
    """Parse a body. `options`: the server's, for what the body leaves open; `counts`: only the prompt is of interest.

    Raises InvalidRequestError.
    """
    conversation = Conversation()
    conversation.add_system(body.get("system"))
    tools, tool_marks = _tools(body, conversation)
    conversation.add_messages(body.get("messages"))
    if body.get("cache_control") is not None:
        conversation.mark_end(body["cache_control"])
    calls, tools, tool_marks, one_call = _choice(body, tools, tool_marks)
    kwargs, shows_thinking = _thinking(body, answers_at_once=bool(conversation.begin) or calls == "must")
    _refuse(body)
    field(field(body, "metadata", "", dict, {}), "user_id", "metadata", str, None)
    request = ChatRequest(
        "chat", "", conversation.messages, tools or None, None,
        tool_marks=tool_marks,
        calls=calls,
        begin=conversation.begin,
        only_count=counts,
        image_at=conversation.image_at,
    )  # fmt: skip
    max_tokens = 1 if counts else int(field(body, "max_tokens", "", int))
    if max_tokens < 0:
        raise InvalidRequestError("max_tokens", "Input should be greater than or equal to 0")
    model = field(body, "model", "", str, "default_model")
    return MessagesRequest(
        request,
        _arguments(body, options, model, max(max_tokens, 1), kwargs),
        model,
        field(body, "stream", "", bool, False),
        one_call,
        max_tokens,
        shows_thinking,
    )


def _tools(body: Body, conversation: Conversation) -> tuple[list[Any], tuple[Mark, ...]]:
    """Tools in OpenAI's shape, and the marks on them."""
    tools: list[Any] = []
    marks = []
    given = field(body, "tools", "", list, [])
    check_count("tools", given, RequestConfig.tools)
    for i, tool in enumerate(given):
        at = inside("tools", i)
        kind = field(checked(tool, dict, at), "type", at, str, "custom")
        if kind != "custom":
            raise InvalidRequestError(f"{at}.type", f"found {kind[:50]!r}; only tools that bring an input_schema are supported")
        function = {"name": field(tool, "name", at, str)}
        if not function["name"]:
            raise InvalidRequestError(f"{at}.name", "String should have at least 1 character")
        if any(other["function"]["name"] == function["name"] for other in tools):
            raise InvalidRequestError("tools", f"Tool names must be unique; found {function['name'][:50]!r} twice")
        description = field(tool, "description", at, str, None)
        if description is not None:
            function["description"] = description
        function["parameters"] = field(tool, "input_schema", at, dict)
        tools.append({"type": "function", "function": function})
        if marked := conversation.mark(tool, at):
            marks.append(Mark(None, len(tools), SECONDS[marked["cache_control"]["ttl"]]))
    return tools, tuple(marks)


def _choice(body: Body, tools: list[Any], marks: tuple[Mark, ...]) -> tuple[Any, list[Any], tuple[Mark, ...], bool]:
    """(ChatRequest.calls, the tools to show, their marks, whether one call is enough).

    A call of one certain tool is had by showing no other and beginning the reply with a call.
    """
    choice = field(body, "tool_choice", "", dict, None)
    if choice is None:
        return "may", tools, marks, False
    kind = one_of(field(choice, "type", "tool_choice", str), CHOICES, "tool_choice.type")
    one_call = field(choice, "disable_parallel_tool_use", "tool_choice", bool, False)
    if kind in ("any", "tool") and not tools:
        raise InvalidRequestError("tool_choice", f"{kind!r} needs tools, and there are none")
    if kind == "tool":
        name = field(choice, "name", "tool_choice", str)
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise InvalidRequestError("tool_choice.name", f"Tool {name[:50]!r} not found in provided tools")
        marks = tuple(Mark(None, 1, mark.seconds) for mark in marks[-1:])
    return {"auto": "may", "none": "never"}.get(kind, "must"), tools, marks, one_call


def _thinking(body: Body, answers_at_once: bool) -> tuple[Body, bool]:
    """Arguments for the template, and whether thinking is shown. Without a word about it the template decides."""
    thinking = field(body, "thinking", "", dict, None)
    kwargs: Body = {}
    shown = True
    if thinking is not None:
        kind = known(field(thinking, "type", "thinking", str), THINKING, "thinking.type")
        if kind is not None:
            kwargs["enable_thinking"] = THINKING[kind]
        display = field(thinking, "display", "thinking", str, None)
        shown = known(display, DISPLAYS, "thinking.display") != "omitted"
    if answers_at_once:
        kwargs["enable_thinking"] = False
    effort = field(field(body, "output_config", "", dict, {}), "effort", "output_config", str, None)
    if (effort := known(effort, EFFORTS, "output_config.effort")) is not None:
        kwargs["reasoning_effort"] = EFFORTS[effort]
    return kwargs, shown


def _refuse(body: Body) -> None:
    """What asks for something that the reply would have to have, and cannot. A schema is a wish: clients parse what comes."""
    config = field(body, "output_config", "", dict, {})
    for place, schema in (("output_config.format", config.get("format")), ("output_format", body.get("output_format"))):
        if schema is not None:
            log.info("%s has no effect: mlx-lm cannot hold a reply to a schema", place)
    for place in ("mcp_servers", "container"):
        if body.get(place) not in (None, []):
            raise InvalidRequestError(place, "this server reaches no other; offer what it does as tools")


def _arguments(body: Body, options: Any, model: str, max_tokens: int, kwargs: Body) -> GenerationArguments:
    stops = field(body, "stop_sequences", "", list, [])
    for i, stop in enumerate(stops):
        if not checked(stop, str, f"stop_sequences.{i}"):
            raise InvalidRequestError(f"stop_sequences.{i}", "String should have at least 1 character")
    return generation_arguments(body, options, model, max_tokens, list(dict.fromkeys(stops)), kwargs)
