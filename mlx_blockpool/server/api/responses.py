"""A body of OpenAI's Responses API as what mlx-lm's ResponseGenerator takes: a chat request and generation arguments.

A field that cannot be honoured is rejected by its place. Fields that change nothing here (service tiers, strict schemas,
truncation) are ignored, and so are tools that are not functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...mlx_lm_compat import GenerationArguments
from ..arguments import generation_arguments
from ..fields import InvalidRequestError, checked, field, known, one_of
from ..request import ChatRequest, ParsedRequest
from .responses_items import Conversation, Item
from .responses_kept import KeptResponses, OwnResponses
from .responses_tools import Name, Tools, tools_of

Body = dict[str, Any]

CHOICES = ("auto", "none", "required")
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
SUMMARIES = ("auto", "concise", "detailed")
# Fields that are for the client only, and are echoed in the response.
ECHOED = ("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "prompt_cache_retention", "user")
SECRET = "reasoning.encrypted_content"


@dataclass(frozen=True)
class ResponsesRequest(ParsedRequest):
    """A parsed body of the Responses API.

    items:       the conversation, without instructions and without the reply.
    store:       whether a later request may continue from here.
    names:       what the client calls a function that the model has called.
    summarises:  whether thinking is rendered as its summary, which is the whole of it, or as what it is.
    packs:       whether thinking is rendered in a packed form too, for clients that keep nothing else of it.
    echo:        the fields of the response that the body has settled.
    """

    items: list[Item]
    store: bool
    names: Mapping[str, Name]
    summarises: bool
    packs: bool
    echo: Body


def parse(body: Body, options: Any, kept: KeptResponses | OwnResponses, counts: bool = False) -> ResponsesRequest:
    """Parse a body. `options`: the server's, for what the body leaves open; `counts`: only the prompt is of interest.

    Raises InvalidRequestError.
    """
    _refuse(body)
    conversation = _conversation(body, kept)
    tools = tools_of(body)
    calls, shown = _choice(body, tools)
    kwargs = _thinking(body, answers_at_once=calls == "must")
    include = field(body, "include", "", list, [])
    request = ChatRequest(
        "chat", "", conversation.end(), shown or None, None, calls=calls, only_count=counts, image_at=conversation.image_at
    )  # fmt: skip
    max_tokens = field(body, "max_output_tokens", "", int, options.max_tokens)
    if max_tokens < 1:
        raise InvalidRequestError("max_output_tokens", "Input should be greater than or equal to 1")
    model = field(body, "model", "", str, "default_model")
    arguments = generation_arguments(body, options, model, max_tokens, [], kwargs)
    return ResponsesRequest(
        request,
        arguments,
        model,
        stream=field(body, "stream", "", bool, False),
        items=conversation.items,
        store=field(body, "store", "", bool, True),
        names=tools.names(),
        one_call=not field(body, "parallel_tool_calls", "", bool, True),
        summarises=_summary(body) is not None,
        packs=SECRET in include,
        echo=_echo(body, arguments),
    )


def _conversation(body: Body, kept: KeptResponses | OwnResponses) -> Conversation:
    """The earlier conversation that the body names, and its input behind it."""
    conversation = Conversation(kept.item)
    conversation.add_instructions(field(body, "instructions", "", str, None))
    before = field(body, "previous_response_id", "", str, None)
    if before is not None:
        earlier = kept.get(before)
        if earlier is None:
            why = f"found no response with id {before[:80]!r}; this server keeps the last ones only, and none over a restart"
            raise InvalidRequestError("previous_response_id", f"{why}. Send the whole conversation as input.")
        conversation.add(earlier.items, "previous_response_id")
    if body.get("input") is not None:
        conversation.add(body["input"], "input")
    if not conversation.messages:
        raise InvalidRequestError("input", "Field required")
    return conversation


def _choice(body: Body, tools: Tools) -> tuple[Any, list[Any]]:
    """(ChatRequest.calls, the tools to show).

    To force one certain tool, no other is shown and the reply begins with a call.
    """
    choice: Any = body.get("tool_choice")
    if choice is None:
        return "may", tools.shown
    if isinstance(choice, str):
        one_of(choice, CHOICES, "tool_choice")
        if choice == "required" and not tools.shown:
            raise InvalidRequestError("tool_choice", "'required' needs tools that are functions, and there are none")
        return {"auto": "may", "none": "never", "required": "must"}[choice], tools.shown
    one_of(field(checked(choice, dict, "tool_choice"), "type", "tool_choice", str), ("function",), "tool_choice.type")
    name = Name(field(choice, "name", "tool_choice", str), field(choice, "namespace", "tool_choice", str, None))
    chosen = tools.chosen(name)
    if not chosen:
        raise InvalidRequestError("tool_choice.name", f"Tool {name.name[:50]!r} not found in tools")
    return "must", chosen


def _thinking(body: Body, answers_at_once: bool) -> Body:
    """Arguments for the template, which decides what the body leaves open."""
    kwargs: Body = {}
    effort = field(field(body, "reasoning", "", dict, {}), "effort", "reasoning", str, None)
    if (effort := known(effort, ("none", *EFFORTS), "reasoning.effort")) is not None:
        kwargs["enable_thinking"] = effort != "none"
        if effort != "none":
            kwargs["reasoning_effort"] = EFFORTS[effort]
    if answers_at_once:
        kwargs["enable_thinking"] = False
    return kwargs


def _summary(body: Body) -> str | None:
    summary = field(field(body, "reasoning", "", dict, {}), "summary", "reasoning", str, None)
    return known(summary, SUMMARIES, "reasoning.summary")


def _refuse(body: Body) -> None:
    """Raises InvalidRequestError for what the response would need and cannot have."""
    shape = field(field(body, "text", "", dict, {}), "format", "text", dict, {})
    kind = field(shape, "type", "text.format", str, "text")
    if kind != "text":
        why = "mlx-lm cannot hold a reply to a schema; describe it in the prompt, or use a tool"
        raise InvalidRequestError("text.format", f"found {kind[:50]!r}; {why}")
    elsewhere = "this server stores none; send its content as input"
    wanted = {"conversation": elsewhere, "prompt": elsewhere}
    wanted |= {
        "background": "responses are not computed in the background; leave it out",
        "top_logprobs": "this endpoint returns no logprobs",
    }
    for place, why in wanted.items():
        if body.get(place) not in (None, False, 0, []):
            raise InvalidRequestError(place, why)
    if "message.output_text.logprobs" in field(body, "include", "", list, []):
        raise InvalidRequestError("include", "found 'message.output_text.logprobs'; this endpoint returns no logprobs")


def _echo(body: Body, arguments: GenerationArguments) -> Body:
    metadata = field(body, "metadata", "", dict, {})
    for name, value in metadata.items():
        checked(value, str, f"metadata.{name[:50]}")
    reasoning = field(body, "reasoning", "", dict, {})
    return {
        **{name: body.get(name) for name in ECHOED},
        "background": False,
        "metadata": metadata,
        "parallel_tool_calls": field(body, "parallel_tool_calls", "", bool, True),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "store": field(body, "store", "", bool, True),
        "temperature": arguments.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": 0,
        "top_p": arguments.sampling.top_p,
        "truncation": "disabled",
    }
