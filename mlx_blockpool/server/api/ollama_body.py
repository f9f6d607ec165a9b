"""The bodies of Ollama's API: their fields and their types, and the parts that a reply cannot honour."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag

from ...config import RequestConfig
from ...forms.wanted import Wanted
from ..models.catalog import DEFAULT
from ..validation import IS_TEXT, LARGEST, Body, Count, Int, List, Number, Object, Serving, Share, Text, TextOr, only
from .formats import ANY_OBJECT, schema_form

# The units of durations.
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"([+-]?)((?:\d+(?:\.\d*)?(?:ns|us|ms|s|m|h))+|\d+(?:\.\d*)?)")
PART = re.compile(r"(\d+(?:\.\d*)?)([a-z]*)")
# Clients may name a model with the tag that Ollama gives to models without one.
LATEST = ":latest"


def seconds_of(given: Any) -> float:
    """A duration such as 5m, 1h30m, 300 or "300" in seconds; one below zero is endless."""
    if isinstance(given, int | float) and not isinstance(given, bool) and -LARGEST <= given <= LARGEST:
        return float(given) if given >= 0 else math.inf
    found = DURATION.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None:
        raise ValueError("Input should be a number of seconds or a duration such as 5m, 1h30m or -1")
    seconds = sum(float(number) * SECONDS[unit or "s"] for number, unit in PART.findall(found[2]))
    return math.inf if found[1] == "-" and seconds else seconds


KeepAlive = Annotated[float, BeforeValidator(seconds_of)]


class Options(Body):
    """Options for drawing tokens. None: the server's options hold. Options of Ollama's own runner have no effect here."""

    num_predict: Int | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: TextOr[List[Text]] = ""
    repeat_penalty: Annotated[Number, Field(ge=0)] | None = None
    repeat_last_n: Annotated[Int, Field(ge=-1)] | None = None
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0


Think = Annotated[
    Annotated[Literal["low", "medium", "high", "max"], Tag("<text>")] | Annotated[bool, Tag("<other>")],
    IS_TEXT,
]


def _json_or_schema(shape: str | dict[str, Any]) -> str | dict[str, Any]:
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
    top_logprobs: Annotated[Int, Field(ge=0, le=RequestConfig.top_logprobs)] = 0

    def form(self) -> Wanted | None:
        """The form of the reply. Raises SchemaError for a schema that cannot be kept."""
        return schema_form(ANY_OBJECT if self.format == "json" else self.format, "format") if self.format else None

    @property
    def unloads(self) -> bool:
        """Return whether the model is to be kept for no time."""
        return self.keep_alive == 0


class Function(Body):
    name: Text
    arguments: Object = Field(default={})


class ToolCall(Body):
    id: Text = ""
    function: Function


class Message(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text = ""
    images: List[Text] = Field(default=[])
    tool_calls: List[ToolCall] = Field(default=[])
    tool_name: Text = ""
    tool_call_id: Text = ""


class ChatBody(ReplyBody):
    messages: List[Message] = Field(default=[])
    tools: List[Object] = Field(default=[])


class GenerateBody(ReplyBody):
    """`raw`: the prompt goes to the model as it is, without a template."""

    prompt: Text = ""
    system: Text = ""
    images: List[Text] = Field(default=[])
    raw: bool = False
    suffix: Annotated[Text, only("", why=NO_FIELD.format("text after the reply"))] = ""
    template: Annotated[Text, only("", why=NO_FIELD.format("templates from requests"))] = ""
    context: Annotated[List[Any], only([], why=NO_FIELD.format("contexts of earlier replies"))] = Field(default=[])
