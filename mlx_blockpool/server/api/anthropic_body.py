"""The body of Anthropic's Messages API: its fields and their types, and which blocks may stand where."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from ...config import RequestConfig
from ..request import SECONDS
from ..validation import Body, Count, List, Object, Sampling, Text, TextOr, known, only
from .formats import SchemaFormat

DISPLAYS = ("summarized", "omitted")
THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
EFFORTS = ("low", "medium", "high", "xhigh", "max")

FilledText: TypeAlias = Annotated[Text, Field(min_length=1)]


class CacheControl(Body):
    type: Annotated[Text, known(("ephemeral",), "cache_control.type")]
    ttl: Annotated[Text, known(SECONDS, "cache_control.ttl")] | None = None


class Block(Body):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: Text


class UrlSource(Body):
    type: Literal["url"]
    url: Text


class Base64Source(Body):
    type: Literal["base64"]
    media_type: Text
    data: Text


class ImageBlock(Block):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class TextSource(Body):
    type: Literal["text"]
    data: Text


class DocumentBlock(Block):
    """A document of plain text, which is all that templates can show."""

    type: Literal["document"]
    source: TextSource
    title: Text = ""


class ReferenceBlock(Block):
    type: Literal["tool_reference"]
    tool_name: Text


ResultPart: TypeAlias = Annotated[TextBlock | ImageBlock | DocumentBlock | ReferenceBlock, Field(discriminator="type")]


class ResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextOr[List[ResultPart]] = ""
    is_error: bool = False


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class RedactedBlock(Body):
    type: Literal["redacted_thinking"]


class UseBlock(Block):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Object


UserBlock: TypeAlias = Annotated[TextBlock | ImageBlock | DocumentBlock | ResultBlock, Field(discriminator="type")]
AssistantBlock: TypeAlias = Annotated[TextBlock | ThinkingBlock | RedactedBlock | UseBlock, Field(discriminator="type")]


class UserTurn(Body):
    role: Literal["user"]
    content: Annotated[TextOr[List[UserBlock]], Field(min_length=1)]


class AssistantTurn(Body):
    role: Literal["assistant"]
    content: TextOr[List[AssistantBlock]]


class SystemTurn(Body):
    role: Literal["system"]
    content: TextOr[List[TextBlock]]


Turn: TypeAlias = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class Tool(Block):
    type: Annotated[Text, only("custom", why="only tools that bring an input_schema are supported")] = "custom"
    name: FilledText
    description: Text | None = None
    input_schema: Object
    strict: bool = False


class Choice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedChoice(Body):
    type: Literal["tool"]
    disable_parallel_tool_use: bool = False
    name: Text


class ThinkingConfig(Body):
    type: Annotated[Text, known(THINKING, "thinking.type")]
    display: Annotated[Text, known(DISPLAYS, "thinking.display")] | None = None


class OutputConfig(Body):
    effort: Annotated[Text, known(EFFORTS, "output_config.effort")] | None = None
    format: SchemaFormat | None = None


class Metadata(Body):
    user_id: Text | None = None


Elsewhere: TypeAlias = Annotated[Any, only([], why="this server reaches no other; offer what it does as tools")]


class MessagesBody(Sampling):
    system: TextOr[List[TextBlock]] = ""
    tools: Annotated[List[Tool], Field(max_length=RequestConfig.tools)] = Field(default=[])
    messages: Annotated[List[Turn], Field(min_length=1)]
    cache_control: CacheControl | None = None
    tool_choice: Annotated[Choice | NamedChoice, Field(discriminator="type")] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: SchemaFormat | None = None
    mcp_servers: Elsewhere = None
    container: Elsewhere = None
    metadata: Metadata | None = None
    max_tokens: Count
    stop_sequences: List[FilledText] = Field(default=[])

    @property
    def shows_thinking(self) -> bool:
        """Return whether the client sees thinking, or only its signature."""
        return self.thinking is None or self.thinking.display != "omitted"
