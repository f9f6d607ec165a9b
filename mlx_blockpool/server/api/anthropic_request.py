"""A body of Anthropic's Messages API as what mlx-lm's ResponseGenerator takes: a chat request and generation arguments.

A field that cannot be honoured is rejected by its place. Fields that change nothing here (service tiers, betas, budgets) are
ignored, and unknown values of optional fields are logged.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ...config import RequestConfig
from ..arguments import generation_arguments
from ..bounds import check_count
from ..fields import InvalidRequestError, known
from ..request import SECONDS, ChatRequest, Mark, ParsedRequest
from ..validation import dotted, validated
from .anthropic_body import Choice, MessagesBody, NamedChoice, Tool
from .anthropic_messages import Conversation

log = logging.getLogger(__name__)

Json = dict[str, Any]

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


def parse(body: Json, options: Any, counts: bool = False) -> MessagesRequest:
    """Parse a body. `options`: the server's, for what the body leaves open; `counts`: only the prompt is of interest.

    Raises InvalidRequestError.
    """
    # A request that only counts has no use for max_tokens.
    given = validated(MessagesBody, body | {"max_tokens": 1} if counts else body, dotted)
    if given.max_tokens is None:
        raise InvalidRequestError("max_tokens", "Field required")
    conversation = Conversation()
    conversation.add_system(given.system)
    tools, tool_marks = _tools(given.tools, conversation)
    conversation.add_turns(given.messages)
    if given.cache_control is not None:
        conversation.mark_end(given.cache_control)
    calls, tools, tool_marks = _choice(given.tool_choice, tools, tool_marks)
    kwargs, shows_thinking = _thinking(given, answers_at_once=bool(conversation.begin) or calls == "must")
    _refuse(given)
    request = ChatRequest(
        "chat", "", conversation.messages, tools or None, None,
        tool_marks=tool_marks,
        calls=calls,
        begin=conversation.begin,
        only_count=counts,
        image_at=conversation.image_at,
    )  # fmt: skip
    stop_words = list(dict.fromkeys(given.stop_sequences))
    return MessagesRequest(
        request,
        generation_arguments(body, options, given.model, max(given.max_tokens, 1), stop_words, kwargs),
        given.model,
        given.stream,
        given.tool_choice is not None and given.tool_choice.disable_parallel_tool_use,
        given.max_tokens,
        shows_thinking,
    )


def _tools(given: list[Tool], conversation: Conversation) -> tuple[list[Any], tuple[Mark, ...]]:
    """Tools in OpenAI's shape, and the marks on them."""
    check_count("tools", given, RequestConfig.tools)
    tools: list[Any] = []
    marks = []
    for i, tool in enumerate(given):
        if any(other["function"]["name"] == tool.name for other in tools):
            raise InvalidRequestError("tools", f"Tool names must be unique; found {tool.name[:50]!r} twice")
        described = {} if tool.description is None else {"description": tool.description}
        function = {"name": tool.name, **described, "parameters": tool.input_schema}
        tools.append({"type": "function", "function": function})
        if marked := conversation.mark(tool.cache_control, f"tools.{i}.cache_control"):
            marks.append(Mark(None, len(tools), SECONDS[marked["cache_control"]["ttl"]]))
    return tools, tuple(marks)


def _choice(choice: Choice | None, tools: list[Any], marks: tuple[Mark, ...]) -> tuple[Any, list[Any], tuple[Mark, ...]]:
    """(ChatRequest.calls, the tools to show, their marks).

    To force one certain tool, no other is shown and the reply begins with a call.
    """
    if choice is None:
        return "may", tools, marks
    if choice.type in ("any", "tool") and not tools:
        raise InvalidRequestError("tool_choice", f"{choice.type!r} needs tools, and there are none")
    if isinstance(choice, NamedChoice):
        tools = [tool for tool in tools if tool["function"]["name"] == choice.name]
        if not tools:
            raise InvalidRequestError("tool_choice.name", f"Tool {choice.name[:50]!r} not found in provided tools")
        marks = tuple(Mark(None, 1, mark.seconds) for mark in marks[-1:])
    return {"auto": "may", "none": "never"}.get(choice.type, "must"), tools, marks


def _thinking(given: MessagesBody, answers_at_once: bool) -> tuple[Json, bool]:
    """Arguments for the template, and whether thinking is shown. The template decides what the body leaves open."""
    kwargs: Json = {}
    shown = True
    if given.thinking is not None:
        kind = known(given.thinking.type, THINKING, "thinking.type")
        if kind is not None:
            kwargs["enable_thinking"] = THINKING[kind]
        shown = known(given.thinking.display, DISPLAYS, "thinking.display") != "omitted"
    if answers_at_once:
        kwargs["enable_thinking"] = False
    if (effort := known(given.output_config.effort, EFFORTS, "output_config.effort")) is not None:
        kwargs["reasoning_effort"] = EFFORTS[effort]
    return kwargs, shown


def _refuse(given: MessagesBody) -> None:
    """Raises InvalidRequestError for what the reply would need and cannot have. A schema is a wish: clients parse any reply."""
    for place, schema in (("output_config.format", given.output_config.format), ("output_format", given.output_format)):
        if schema is not None:
            log.info("%s has no effect: mlx-lm cannot hold a reply to a schema", place)
    for place, value in (("mcp_servers", given.mcp_servers), ("container", given.container)):
        if value not in (None, []):
            raise InvalidRequestError(place, "this server reaches no other; offer what it does as tools")
