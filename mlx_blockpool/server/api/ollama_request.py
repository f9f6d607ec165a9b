"""The bodies of Ollama's API: their fields and their types, and their translation into requests.

Raises InvalidRequestError for what a reply cannot honour. Knows no sockets.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag

from ...config import WHAT_FITS
from ...forms.output_format import OutputFormat
from ..bodies import InvalidRequestError, Json
from ..models.catalog import DEFAULT
from ..request import ChatRequest, ParsedRequest
from ..validation import (
    IS_TEXT,
    LARGEST,
    AllSampling,
    Body,
    Count,
    Int,
    List,
    NotNegative,
    Number,
    Object,
    Serving,
    Share,
    Text,
    TextOr,
    TopLogprobs,
    generation_arguments,
    only,
    validated,
)
from .conversation import ChatMessages, Part, template_arguments
from .formats import ANY_OBJECT, schema_form
from .tools import chat_request, strict_places

# The units of durations.
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"([+-]?)((?:\d+(?:\.\d*)?(?:ns|us|ms|s|m|h))+|\d+(?:\.\d*)?)")
PART = re.compile(r"(\d+(?:\.\d*)?)([a-z]*)")
# Clients may name a model with the tag that Ollama gives to models without one.
LATEST = ":latest"


def seconds_of(given: Any) -> float:
    """A duration such as 5m, 1h30m, 300 or "300" in seconds; one below zero is endless."""
    if (
        isinstance(given, int | float)
        and not isinstance(given, bool)
        and -LARGEST <= given <= LARGEST
    ):
        return float(given) if given >= 0 else math.inf
    found = DURATION.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None:
        raise ValueError(
            "Input should be a number of seconds or a duration such as 5m, 1h30m or -1"
        )
    seconds = sum(float(number) * SECONDS[unit or "s"] for number, unit in PART.findall(found[2]))
    return math.inf if found[1] == "-" and seconds else seconds


KeepAlive = Annotated[float, BeforeValidator(seconds_of)]


class Options(Body):
    """Options for drawing tokens.

    The server's options replace those that are None; options of Ollama's runner have no effect.
    """

    num_predict: Int | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: TextOr[List[Text]] = ""
    repeat_penalty: NotNegative | None = None
    repeat_last_n: Annotated[Int, Field(ge=-1)] | None = None
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0


Think = Annotated[
    Annotated[Literal["low", "medium", "high", "max"], Tag("<text>")]
    | Annotated[bool, Tag("<other>")],
    IS_TEXT,
]


def _json_or_schema(shape: str | Json) -> str | Json:
    if isinstance(shape, str) and shape not in ("", "json"):
        raise ValueError(f"Input should be 'json' or a JSON schema; found {shape[:50]!r}")
    return shape


Format = Annotated[TextOr[Object], AfterValidator(_json_or_schema)]
NO_FIELD = "this server takes no {}; send messages to /api/chat"


class Named(Body):
    """A body that names a model. Older clients write `name`."""

    model: Text | None = None
    name: Text | None = None

    @property
    def id(self) -> str:
        """The model's id among this server's."""
        return (self.model or self.name or DEFAULT).removesuffix(LATEST)

    @property
    def shown(self) -> str:
        """The name that the reply repeats: the client's own."""
        return self.model or self.name or self.id


class ReplyBody(Named, Serving):
    """The fields of both endpoints that reply."""

    stream: bool = True
    options: Options = Options()
    format: Format = ""
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0

    def form(self) -> OutputFormat | None:
        """The form of the reply. Raises SchemaError for a schema that cannot be kept."""
        return (
            schema_form(ANY_OBJECT if self.format == "json" else self.format, "format")
            if self.format
            else None
        )

    @property
    def unloads(self) -> bool:
        """Return whether the model is to be kept for no time."""
        return self.keep_alive == 0


class CalledFunction(Body):
    name: Text
    arguments: Object = Field(default={})


class ToolCall(Body):
    id: Text = ""
    function: CalledFunction


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text = ""
    images: List[Text] = Field(default=[])
    tool_calls: List[ToolCall] = Field(default=[])
    tool_name: Text = ""
    tool_call_id: Text = ""


class OllamaChatBody(ReplyBody):
    messages: List[OllamaMessage] = Field(default=[])
    tools: List[Object] = Field(default=[])


class GenerateBody(ReplyBody):
    """`raw`: the prompt goes to the model as it is, without a template."""

    prompt: Text = ""
    system: Text = ""
    images: List[Text] = Field(default=[])
    raw: bool = False
    suffix: Annotated[Text, only("", why=NO_FIELD.format("text after the reply"))] = ""
    template: Annotated[Text, only("", why=NO_FIELD.format("templates from requests"))] = ""
    context: Annotated[List[Any], only([], why=NO_FIELD.format("contexts of earlier replies"))] = (
        Field(default=[])
    )


# Ollama's own, for requests with a penalty and without `repeat_last_n`.
REPEAT_LAST_N = 64
# In place of "the whole context".
WHOLE_CONTEXT = 1 << 20


def parse_chat(body: Json, options: Any) -> ParsedRequest:
    """Parse a chat's body.

    Without messages its request is empty. `options`: the server's, for what the body leaves open.
    """
    given = validated(OllamaChatBody, body)
    turns = OllamaTurns()
    for i, message in enumerate(given.messages):
        turns.add(message, f"messages[{i}]")
    begin = turns.take_beginning()
    strict = strict_places(given.tools)
    request = chat_request(
        turns.end(), given.tools, "may", strict, given.form(), begin=begin, image_at=turns.image_at
    )
    return _parsed(given, request, options)


def parse_generate(body: Json, options: Any) -> ParsedRequest:
    """As parse_chat(), for a prompt. Unless it is `raw` it is the message after the system's."""
    given = validated(GenerateBody, body)
    if given.raw and (given.images or (given.system and given.prompt)):
        raise InvalidRequestError("raw", "a raw prompt has neither images nor a system prompt")
    if given.raw or not (given.prompt or given.images):
        return _parsed(
            given, ChatRequest("text", given.prompt, [], None, None, form=given.form()), options
        )
    turns = OllamaTurns()
    if given.system:
        turns.add(OllamaMessage(role="system", content=given.system), "system")
    turns.add(OllamaMessage(role="user", content=given.prompt, images=given.images), "")
    return _parsed(
        given,
        chat_request(turns.end(), [], "may", {}, given.form(), image_at=turns.image_at),
        options,
    )


def _parsed(given: ReplyBody, request: ChatRequest, options: Any) -> ParsedRequest:
    drawn, thinks = given.options, given.think
    words = [drawn.stop] if isinstance(drawn.stop, str) else drawn.stop
    effort, thinks = (thinks, True) if isinstance(thinks, str) else (None, thinks)
    template = template_arguments(thinks, effort, answers_at_once=bool(request.begin))
    most = (
        options.max_tokens
        if drawn.num_predict is None
        else drawn.num_predict
        if drawn.num_predict > 0
        else WHAT_FITS
    )
    words = list(dict.fromkeys(filter(None, words)))
    arguments = generation_arguments(_sampling(given.id, drawn), options, most, words, template)
    arguments = replace(
        arguments, logprobs=given.logprobs, top_logprobs=given.top_logprobs if given.logprobs else 0
    )
    return ParsedRequest(request, arguments, given, one_call=False)


def _sampling(model: str, drawn: Options) -> AllSampling:
    """The options by mlx-lm's names.

    A penalty of 1 changes nothing, and a negative seed stands for any.
    """
    last = REPEAT_LAST_N if drawn.repeat_last_n is None else drawn.repeat_last_n
    size = WHOLE_CONTEXT if last < 0 else last
    penalty = drawn.repeat_penalty if drawn.repeat_penalty != 1 and size else None
    return AllSampling(
        model=model,
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        min_p=drawn.min_p,
        seed=drawn.seed if drawn.seed is None or drawn.seed >= 0 else None,
        repetition_penalty=penalty or 0.0,
        repetition_context_size=size,
        presence_penalty=drawn.presence_penalty if size else 0.0,
        presence_context_size=size,
        frequency_penalty=drawn.frequency_penalty if size else 0.0,
        frequency_context_size=size,
    )


class OllamaTurns(ChatMessages):
    """The turns of a conversation as messages.

    Calls without an id get one, and results without belong to the first open call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, str]] = []

    def add(self, given: OllamaMessage, place: str) -> None:
        """One message; `place`: where it is in the body."""
        content = self._with_images(given, place)
        if given.role == "tool":
            self._result(self._answered(given), content)
            return
        message = {"role": given.role, "content": content}
        self.messages.append(message)
        self._think(message, given.thinking)
        for call in given.tool_calls:
            called = call.id or f"call_{len(self._tools_called)}"
            self._open.append((called, call.function.name))
            self._call(message, called, call.function.name, call.function.arguments)

    def take_beginning(self) -> str:
        """The text of a last message that is the assistant's, which the reply continues; empty
        if it is not.
        """
        if len(self.messages) < 2:
            return ""
        last = self.messages[-1]
        if last["role"] != "assistant" or "tool_calls" in last or "reasoning" in last:
            return ""
        return str(self.messages.pop()["content"])

    def _with_images(self, given: OllamaMessage, place: str) -> str | list[Part]:
        if not given.images:
            return given.content
        at = f"{place}.images".removeprefix(".")
        images = [self._image(_data_url(data), at) for data in given.images]
        return [*images, {"type": "text", "text": given.content}]

    def _answered(self, result: OllamaMessage) -> str:
        """The id of the call that a result answers."""
        matching = (each for each in self._open if result.tool_name in ("", each[1]))
        found = next(matching, None)
        if result.tool_call_id or found is None:
            return result.tool_call_id or result.tool_name or "call"
        self._open.remove(found)
        return found[0]


def _data_url(data: str) -> str:
    """An image as it stands in OpenAI's messages. Its type is read from its bytes."""
    return data if data.startswith("data:") else f"data:image;base64,{data}"
