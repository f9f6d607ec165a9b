"""A body of OpenAI's Responses API as a chat request and generation arguments.

A field that cannot be honoured is rejected by its place. Fields that change nothing here (service tiers, truncation)
are ignored, and so are tools that are not functions. The model sees functions of a namespace under longer names.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...messages import Message
from ...mlx_lm_compat import GenerationArguments
from ..bodies import InvalidRequestError
from ..request import ChatRequest, ParsedRequest
from ..validation import generation_arguments, validated
from . import responses_body
from .conversation import Conversation, Part, template_arguments
from .responses_body import LOGPROBS, FunctionTool, Items, Namespace, ResponsesBody, TextPart
from .responses_kept import Item, KeptResponses
from .thinking import thinking_in
from .tools import Calls, calls_of, function_tool, held_tools, tools_named

log = logging.getLogger(__name__)

# Fields that are for the client only, and are echoed in the response.
ECHOED = ("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "prompt_cache_retention", "user")
SECRET = "reasoning.encrypted_content"


@dataclass(frozen=True)
class Name:
    """A client's name for a function. `namespace`: None outside of any."""

    name: str
    namespace: str | None = None

    @property
    def flat(self) -> str:
        """The model's name for it."""
        if not self.namespace:
            return self.name
        between = "" if self.namespace.endswith("_") else "__"
        return f"{self.namespace}{between}{self.name}"


@dataclass(frozen=True)
class ResponsesRequest(ParsedRequest):
    """A parsed body of the Responses API.

    items:  the conversation, without instructions and without the reply.
    names:  what the client calls a function that the model has called.
    echo:   the fields of the response that the body has settled.
    """

    items: list[Item]
    names: Mapping[str, Name]
    echo: dict[str, Any]


def parse(
    body: dict[str, Any], options: Any, kept: KeptResponses, owner: str | None = None, counts: bool = False
) -> ResponsesRequest:
    """Parse a body of an owner of `kept` responses. `options`: the server's, for what the body leaves open.

    `counts`: only the prompt is of interest. Raises InvalidRequestError.
    """
    if isinstance(text := body.get("input"), str):
        message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        body = {**body, "input": [message]}
    given = validated(ResponsesBody, body)
    conversation = _conversation(given, body, kept, owner)
    tools = Tools(given.tools)
    calls, shown = _choice(given, tools)
    request = ChatRequest(
        "chat", "", conversation.end(), shown or None, None, calls=calls, only_count=counts, image_at=conversation.image_at
    )
    most = given.max_output_tokens or options.max_tokens
    effort = given.reasoning.effort
    template = template_arguments(None if effort is None else effort != "none", effort, answers_at_once=calls == "must")
    arguments = generation_arguments(given, options, most, [], template)
    if LOGPROBS in given.include or given.top_logprobs:
        arguments = replace(arguments, logprobs=True, top_logprobs=given.top_logprobs)
    request.form = given.text.format.wanted("text.format")
    request.held = held_tools(shown, calls, tools.strict, request.form)
    one_call = not given.parallel_tool_calls or not isinstance(given.tool_choice, str)
    echo = _echo(given, body, arguments)
    return ResponsesRequest(request, arguments, given, one_call, conversation.items, tools.names, echo)


def _conversation(given: ResponsesBody, body: dict[str, Any], kept: KeptResponses, owner: str | None) -> InputItems:
    """The earlier conversation that the body names, and its input after it."""
    conversation = InputItems(kept, owner, given.cache_salt)
    if given.instructions:
        conversation.messages.append({"role": "system", "content": given.instructions})
    before = given.previous_response_id
    if before is not None:
        earlier = kept.get(before, owner)
        if earlier is None:
            why = f"there is no response with id {before[:80]!r}; this server keeps the last ones only, and none over a restart"
            raise InvalidRequestError("previous_response_id", f"{why}. Send the whole conversation as input.")
        if earlier.cache_salt != given.cache_salt:
            why = "the response was made with another cache_salt, or with none"
            raise InvalidRequestError("previous_response_id", f"{why}. Continue it with its own.")
        conversation.add(earlier.items, validated(Items, {"input": earlier.items}), "previous_response_id")
    conversation.add(body.get("input") or [], given, "input")
    if not conversation.messages:
        raise InvalidRequestError("input", "Field required")
    return conversation


def _choice(given: ResponsesBody, tools: Tools) -> tuple[Calls, list[Any]]:
    """(ChatRequest.calls, the tools to show)."""
    choice = given.tool_choice
    if isinstance(choice, str):
        return calls_of(choice, tools.shown), tools.shown
    flat = Name(choice.name, choice.namespace).flat
    return "must", tools_named(tools.names[flat].flat if flat in tools.names else flat, tools.shown, "tool_choice.name")


def _echo(given: ResponsesBody, body: dict[str, Any], arguments: GenerationArguments) -> dict[str, Any]:
    for name, value in given.metadata.items():
        if not isinstance(value, str):
            raise InvalidRequestError(f"metadata.{name[:50]}", "Input should be a valid string")
    reasoning = body.get("reasoning") or {}
    return {
        **{name: body.get(name) for name in ECHOED},
        "background": False,
        "metadata": given.metadata,
        "parallel_tool_calls": given.parallel_tool_calls,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "store": given.store,
        "temperature": arguments.sampling.temperature,
        "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": given.top_logprobs,
        "top_p": arguments.sampling.top_p,
        "truncation": "disabled",
    }


class Tools:
    """The functions of a request. Raises InvalidRequestError.

    shown: in OpenAI's shape. names: by what the model calls them, and by their own name alone where only one function has it.
    strict: where the parameters of strict ones are, by what the model calls them.
    """

    def __init__(self, tools: Iterable[Any]) -> None:
        self.shown: list[dict[str, Any]] = []
        self.strict: dict[str, str] = {}
        self._names: dict[str, Name] = {}
        self._left_out: list[str] = []
        self._add(tools, "tools")
        counts = Counter(name.name for name in self._names.values())
        self.names = {name.name: name for name in self._names.values() if counts[name.name] == 1} | self._names
        if self._left_out:
            kinds = ", ".join(dict.fromkeys(self._left_out))
            log.info("left out tools that only a vendor's servers run, or that are no functions: %s", kinds)

    def _add(self, tools: Iterable[Any], place: str, namespace: str | None = None) -> None:
        for i, tool in enumerate(tools):
            if isinstance(tool, Namespace) and namespace is None:
                self._add(tool.tools, f"{place}[{i}].tools", tool.name)
            elif isinstance(tool, FunctionTool):
                name = Name(tool.name, namespace)
                if self._names.setdefault(name.flat, name) != name:
                    what = f"{name.flat[:80]!r} is the name of another function too; give each a name of its own"
                    raise InvalidRequestError(f"{place}[{i}].name", what)
                if tool.strict:
                    self.strict[name.flat] = f"{place}[{i}].parameters"
                self.shown.append(function_tool(name.flat, tool.description, tool.parameters))
            else:
                self._left_out.append("namespace" if isinstance(tool, Namespace) else tool.type[:50])


class InputItems(Conversation):
    """The items of a conversation as messages. `items`: as they came, with what references stood for."""

    def __init__(self, kept: KeptResponses, owner: str | None, cache_salt: str | None = None) -> None:
        super().__init__()
        self.items: list[Item] = []
        self._kept = kept
        self._owner = owner
        self._cache_salt = cache_salt

    def add(self, given: list[Item], parsed: Items, place: str) -> None:
        """Add the items of a body or of an earlier response. Raises InvalidRequestError."""
        for i, (item, model) in enumerate(zip(given, parsed.input, strict=True)):
            at = f"{place}[{i}]"
            if isinstance(model, responses_body.ReferenceItem):
                known = self._kept.item(model.id, self._owner, self._cache_salt)
                if known is None:
                    what = f"Item {model.id[:50]!r} is not known, or not any more; send the item itself in place of the reference"
                    raise InvalidRequestError(f"{at}.id", what)
                item, (model,) = known, validated(Items, {"input": [known]}).input
            self.items.append(item)
            self._add(model, at)

    def _add(self, item: responses_body.Item, at: str) -> None:
        match item:
            case responses_body.InputMessage(role=role, content=content):
                shown = self._content(content, f"{at}.content")
                self.messages.append({"role": "user" if role == "user" else "system", "content": shown})
            case responses_body.ReplyMessage(content=content):
                message = self._turn()
                message["content"] = "\n\n".join(filter(None, (message["content"], _text(content))))
            case responses_body.ReasoningItem():
                # Encrypted content of our own is all of the thinking, and so is a summary.
                packed = thinking_in("", item.encrypted_content)
                if thinking := _text(item.content) or packed or _text(item.summary, "\n\n"):
                    self._think(self._turn(), thinking)
            case responses_body.CallItem():
                self._call(self._turn(), item.call_id, Name(item.name, item.namespace).flat, item.arguments)
            case responses_body.OutputItem(call_id=called, output=output):
                self._result(called, self._content(output, f"{at}.output"))

    def _turn(self) -> Message:
        """The assistant's message in progress: its thinking, text and calls that follow each other are one message."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _content(self, content: str | list[Any], place: str) -> str | list[Part]:
        return content if isinstance(content, str) else [self._part(part, f"{place}[{j}]") for j, part in enumerate(content)]

    def _part(self, part: TextPart | responses_body.ImagePart, at: str) -> Part:
        if isinstance(part, TextPart):
            marked = {"cache_control": part.cache_control} if part.cache_control is not None else {}
            return {"type": "text", "text": part.text, **marked}
        if part.image_url is None:
            raise InvalidRequestError(f"{at}.image_url", "Field required; this server has no files that file_id could name")
        return self._image(part.image_url, at)


def _text(content: str | list[Any], between: str = "") -> str:
    """The text of parts; a refusal is its text."""
    if isinstance(content, str):
        return content
    return between.join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
