"""The body of OpenAI's Responses API: its fields and their types, items, and tools."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from ...config import RequestConfig
from ..validation import Body, Int, List, Object, Positive, Sampling, Text, TextOr, known, only
from .conversation import EFFORTS
from .formats import PLAIN, ReplyFormat
from .tools import ToolChoice

SUMMARIES = ("auto", "concise", "detailed")
LOGPROBS = "message.output_text.logprobs"
STORES_NONE = "this server stores none; send its content as input"

# -- items -------------------------------------------------------------------------------------------------------------


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
    try:
        return json.loads(written or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Input should be JSON: {error}") from error


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


Message: TypeAlias = Annotated[InputMessage | ReplyMessage, Field(discriminator="role")]
Item: TypeAlias = Annotated[
    Message | ReasoningItem | CallItem | OutputItem | ReferenceItem, Field(discriminator="type"), BeforeValidator(_with_type)
]

# -- tools -------------------------------------------------------------------------------------------------------------


class FunctionTool(Body):
    name: Text
    description: Text | None = None
    parameters: Object = Field(default={"type": "object", "properties": {}})
    strict: bool = False


class OtherTool(Body):
    """A tool that is no function."""

    type: Text


class Namespace(Body):
    name: Text
    tools: List[Tool]


def _kind_of(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return f"<{kind}>" if kind in ("function", "namespace") else "<other>"


Tool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[Namespace, Tag("<namespace>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(_kind_of),
]


class NamedTool(Body):
    type: Literal["function"]
    name: Text
    namespace: Text | None = None


# -- the body ----------------------------------------------------------------------------------------------------------


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
    tool_choice: ToolChoice[NamedTool] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Positive | None = None
    store: bool = True
    include: list[Any] = Field(default=[])
    reasoning: Reasoning = Reasoning()
    text: ReplyText = ReplyText()
    metadata: Object = Field(default={})
    conversation: Annotated[Any, _nothing(STORES_NONE)] = None
    prompt: Annotated[Any, _nothing(STORES_NONE)] = None
    background: Annotated[Any, _nothing("responses are not computed in the background; leave it out")] = None
    top_logprobs: Annotated[Int, Field(ge=0, le=RequestConfig.top_logprobs)] = 0
