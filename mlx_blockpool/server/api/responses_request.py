"""The body of OpenAI's Responses API: its fields, items and tools, and its translation into a chat
request.

A field that cannot be honoured is rejected by its place. Fields that change nothing here (service
tiers, truncation) are ignored, and so are tools that are not functions. The model sees functions of
a namespace under longer names.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from ...hooks import Message
from ...mlx_lm_compat import GenerationArguments
from ..bodies import InvalidRequestError, Json
from ..kept_responses import KeptResponses
from ..request import ParsedRequest
from ..validation import (
    Body,
    List,
    Object,
    Positive,
    Sampling,
    Text,
    TextOr,
    TopLogprobs,
    generation_arguments,
    known,
    only,
    validated,
)
from .conversation import EFFORTS, ChatMessages, Part, arguments_of, template_arguments
from .formats import PLAIN, ReplyFormat
from .thinking import thinking_in
from .tools import Calls, ToolChoice, calls_of, chat_request, function_tool, tools_named

SUMMARIES = ("auto", "concise", "detailed")
LOGPROBS = "message.output_text.logprobs"
STORES_NONE = "this server stores none; send its content as input"

# -- items -----------------------------------------------------------------------------------------


class TextPart(Body):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text
    cache_control: Any = None


class ImagePart(Body):
    type: Literal["input_image"]
    image_url: Text | None = None


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: Text


InputContent: TypeAlias = TextOr[List[Annotated[TextPart | ImagePart, Field(discriminator="type")]]]
SpokenPart: TypeAlias = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class InputMessage(Body):
    type: Literal["message"]
    role: Literal["user", "system", "developer"]
    content: InputContent


class ReplyMessage(Body):
    type: Literal["message"]
    role: Literal["assistant"]
    content: TextOr[List[SpokenPart]]


class ReasoningItem(Body):
    type: Literal["reasoning"]
    content: List[SpokenPart] = Field(default=[])
    summary: List[SpokenPart] = Field(default=[])
    encrypted_content: Text = ""


def _from_json(written: Any) -> Any:
    if not isinstance(written, str):
        raise ValueError("Input should be a valid string")
    return arguments_of(written)


class CallItem(Body):
    type: Literal["function_call"]
    name: Text
    namespace: Text | None = None
    call_id: Text
    arguments: Annotated[Object, BeforeValidator(_from_json)]


class OutputItem(Body):
    type: Literal["function_call_output"]
    call_id: Text
    output: InputContent


class ReferenceItem(Body):
    type: Literal["item_reference"]
    id: Text


def _with_type(item: Any) -> Any:
    """Messages and references may leave their type out."""
    if not isinstance(item, dict) or item.get("type") is not None:
        return item
    return {**item, "type": "message" if "role" in item else "item_reference"}


ItemMessage: TypeAlias = Annotated[InputMessage | ReplyMessage, Field(discriminator="role")]
Item: TypeAlias = Annotated[
    ItemMessage | ReasoningItem | CallItem | OutputItem | ReferenceItem,
    Field(discriminator="type"),
    BeforeValidator(_with_type),
]

# -- tools -----------------------------------------------------------------------------------------


class FunctionTool(Body):
    name: Text
    description: Text | None = None
    parameters: Object = Field(default={"type": "object", "properties": {}})
    strict: bool = False


class OtherTool(Body):
    """A tool that is not a function."""

    type: Text


class Namespace(Body):
    name: Text
    tools: List[Tool]


def _kind_of(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return f"<{kind}>" if kind in ("function", "namespace") else "<other>"


Tool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[Namespace, Tag("<namespace>")]
    | Annotated[OtherTool, Tag("<other>")],
    Discriminator(_kind_of),
]


class NamedFunction(Body):
    type: Literal["function"]
    name: Text
    namespace: Text | None = None


# -- the body --------------------------------------------------------------------------------------


class Reasoning(Body):
    effort: Annotated[Text, known(("none", *EFFORTS), "reasoning.effort")] | None = None
    summary: Annotated[Text, known(SUMMARIES, "reasoning.summary")] | None = None


class ReplyText(Body):
    format: ReplyFormat = PLAIN


def _nothing(why: str) -> AfterValidator:
    return only(False, 0, [], why=why)


class Items(Body):
    input: List[Item] = Field(default=[])


class ResponsesBody(Items, Sampling):
    instructions: Text | None = None
    previous_response_id: Text | None = None
    tools: List[Tool] = Field(default=[])
    tool_choice: ToolChoice[NamedFunction] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Positive | None = None
    store: bool = True
    include: list[Any] = Field(default=[])
    reasoning: Reasoning = Reasoning()
    text: ReplyText = ReplyText()
    metadata: Object = Field(default={})
    conversation: Annotated[Any, _nothing(STORES_NONE)] = None
    prompt: Annotated[Any, _nothing(STORES_NONE)] = None
    background: Annotated[
        Any, _nothing("responses are not computed in the background; leave it out")
    ] = None
    top_logprobs: TopLogprobs = 0


log = logging.getLogger(__name__)

# Fields that are for the client only, and are echoed in the response.
ECHOED = (
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "prompt_cache_key",
    "prompt_cache_retention",
    "user",
)
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

    items: list[Json]
    names: Mapping[str, Name]
    echo: Json


def parse(
    body: Json,
    options: Any,
    kept: KeptResponses,
    owner: str | None = None,
    counts: bool = False,
) -> ResponsesRequest:
    """Parse a body of an owner of `kept` responses. `options`: the server's, for what the body
    leaves open.

    `counts`: only the prompt is of interest. Raises InvalidRequestError.
    """
    if isinstance(text := body.get("input"), str):
        message = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": text}],
        }
        body = {**body, "input": [message]}
    given = validated(ResponsesBody, body)
    conversation = _conversation(given, body, kept, owner)
    tools = Tools(given.tools)
    calls, shown = _choice(given, tools)
    most = given.max_output_tokens or options.max_tokens
    effort = given.reasoning.effort
    template = template_arguments(
        None if effort is None else effort != "none", effort, answers_at_once=calls == "must"
    )
    arguments = generation_arguments(given, options, most, [], template)
    if LOGPROBS in given.include or given.top_logprobs:
        arguments = replace(arguments, logprobs=True, top_logprobs=given.top_logprobs)
    form = given.text.format.wanted("text.format")
    more = {"only_count": counts, "image_at": conversation.image_at}
    request = chat_request(conversation.end(), shown, calls, tools.strict, form, **more)
    one_call = not given.parallel_tool_calls or not isinstance(given.tool_choice, str)
    echo = _echo(given, body, arguments)
    return ResponsesRequest(
        request, arguments, given, one_call, conversation.items, tools.names, echo
    )


def _conversation(
    given: ResponsesBody, body: Json, kept: KeptResponses, owner: str | None
) -> InputItems:
    """The earlier conversation that the body names, and its input after it."""
    conversation = InputItems(kept, owner, given.cache_salt)
    if given.instructions:
        conversation.messages.append({"role": "system", "content": given.instructions})
    before = given.previous_response_id
    if before is not None:
        earlier = kept.get(before, owner)
        if earlier is None:
            why = (
                f"there is no response with id {before[:80]!r}; this server keeps the last ones "
                "only, and none over a restart"
            )
            raise InvalidRequestError(
                "previous_response_id", f"{why}. Send the whole conversation as input."
            )
        if earlier.cache_salt != given.cache_salt:
            why = "the response was made with another cache_salt, or with none"
            raise InvalidRequestError("previous_response_id", f"{why}. Continue it with its own.")
        conversation.add(
            earlier.items, validated(Items, {"input": earlier.items}), "previous_response_id"
        )
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
    return "must", tools_named(
        tools.names[flat].flat if flat in tools.names else flat, tools.shown, "tool_choice.name"
    )


def _echo(given: ResponsesBody, body: Json, arguments: GenerationArguments) -> Json:
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

    shown: in OpenAI's shape. names: by the model's name for them, and by their bare name where only
    one function has it.
    strict: the places of the parameters of strict ones, by the model's name for them.
    """

    def __init__(self, tools: Iterable[Any]) -> None:
        self.shown: list[Json] = []
        self.strict: dict[str, str] = {}
        self._names: dict[str, Name] = {}
        self._left_out: list[str] = []
        self._add(tools, "tools")
        counts = Counter(name.name for name in self._names.values())
        self.names = {
            name.name: name for name in self._names.values() if counts[name.name] == 1
        } | self._names
        if self._left_out:
            kinds = ", ".join(dict.fromkeys(self._left_out))
            log.info(
                "left out tools that only a vendor's servers run, or that are not functions: %s",
                kinds,
            )

    def _add(self, tools: Iterable[Any], place: str, namespace: str | None = None) -> None:
        for i, tool in enumerate(tools):
            if isinstance(tool, Namespace) and namespace is None:
                self._add(tool.tools, f"{place}[{i}].tools", tool.name)
            elif isinstance(tool, FunctionTool):
                name = Name(tool.name, namespace)
                if self._names.setdefault(name.flat, name) != name:
                    what = (
                        f"{name.flat[:80]!r} is also the name of another function; give each "
                        "another name"
                    )
                    raise InvalidRequestError(f"{place}[{i}].name", what)
                if tool.strict:
                    self.strict[name.flat] = f"{place}[{i}].parameters"
                self.shown.append(function_tool(name.flat, tool.description, tool.parameters))
            else:
                self._left_out.append(
                    "namespace" if isinstance(tool, Namespace) else tool.type[:50]
                )


class InputItems(ChatMessages):
    """The items of a conversation as messages.

    `items`: as they came, with what references stood for.
    """

    def __init__(
        self, kept: KeptResponses, owner: str | None, cache_salt: str | None = None
    ) -> None:
        super().__init__()
        self.items: list[Json] = []
        self._kept = kept
        self._owner = owner
        self._cache_salt = cache_salt

    def add(self, given: list[Json], parsed: Items, place: str) -> None:
        """Add the items of a body or of an earlier response. Raises InvalidRequestError."""
        for i, (item, model) in enumerate(zip(given, parsed.input, strict=True)):
            at = f"{place}[{i}]"
            if isinstance(model, ReferenceItem):
                known = self._kept.item(model.id, self._owner, self._cache_salt)
                if known is None:
                    what = (
                        f"Item {model.id[:50]!r} is not known, or not any more; send the item "
                        "itself in place of the reference"
                    )
                    raise InvalidRequestError(f"{at}.id", what)
                item, (model,) = known, validated(Items, {"input": [known]}).input
            self.items.append(item)
            self._add(model, at)

    def _add(self, item: Item, at: str) -> None:
        match item:
            case InputMessage(role=role, content=content):
                shown = self._content(content, f"{at}.content")
                self.messages.append(
                    {"role": "user" if role == "user" else "system", "content": shown}
                )
            case ReplyMessage(content=content):
                message = self._turn()
                message["content"] = "\n\n".join(filter(None, (message["content"], _text(content))))
            case ReasoningItem():
                # Encrypted content that this server made is all of the thinking, and so is a
                # summary.
                packed = thinking_in("", item.encrypted_content)
                if thinking := _text(item.content) or packed or _text(item.summary, "\n\n"):
                    self._think(self._turn(), thinking)
            case CallItem():
                self._call(
                    self._turn(), item.call_id, Name(item.name, item.namespace).flat, item.arguments
                )
            case OutputItem(call_id=called, output=output):
                self._result(called, self._content(output, f"{at}.output"))

    def _turn(self) -> Message:
        """The assistant's message in progress: its thinking, text and calls that follow each
        other are one message.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _part(self, part: TextPart | ImagePart, at: str) -> Part:
        if isinstance(part, TextPart):
            marked = {"cache_control": part.cache_control} if part.cache_control is not None else {}
            return {"type": "text", "text": part.text, **marked}
        if part.image_url is None:
            raise InvalidRequestError(
                f"{at}.image_url",
                "Field required; this server has no files that file_id could name",
            )
        return self._image(part.image_url, at)


def _text(content: str | list[Any], between: str = "") -> str:
    """The text of parts; a refusal is its text."""
    if isinstance(content, str):
        return content
    return between.join(
        part.text if isinstance(part, TextPart) else part.refusal for part in content
    )
