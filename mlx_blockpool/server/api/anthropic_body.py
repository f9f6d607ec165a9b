"""The body of Anthropic's Messages API: its fields and their types, and which blocks may stand where.

Lists fail fast: to collect every error of a large body would hold up other threads.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Discriminator, Field, InstanceOf, field_validator

from ..validation import FAIL_FAST, TEXT_OR_LIST, Body, Int, Text, by, tag

Object = InstanceOf[dict[str, Any]]


def _not_blank(text: str) -> str:
    if not text:
        raise ValueError("String should have at least 1 character")
    return text


class CacheControl(Body):
    type: Text
    ttl: Text | None = None


class Block(Body):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    text: Text


class UrlSource(Body):
    url: Text


class Base64Source(Body):
    type: Literal["base64", "url"]
    media_type: Text
    data: Text


class ImageBlock(Block):
    source: Annotated[
        Annotated[UrlSource, tag("url")] | Annotated[Base64Source, tag("base64")],
        Discriminator(lambda value: "<url>" if isinstance(value, dict) and value.get("type") == "url" else "<base64>"),
    ]


class TextSource(Body):
    type: Literal["text"]
    data: Text


class DocumentBlock(Block):
    """A document of plain text, which is all that templates can show."""

    source: TextSource
    title: Text = ""


class ReferenceBlock(Block):
    tool_name: Text


ResultPart: TypeAlias = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ImageBlock, tag("image")]
    | Annotated[DocumentBlock, tag("document")]
    | Annotated[ReferenceBlock, tag("tool_reference")],
    by("type", "text"),
]


class ResultBlock(Block):
    tool_use_id: Text
    content: Annotated[Annotated[Text, tag("text")] | Annotated[list[ResultPart], FAIL_FAST, tag("list")], TEXT_OR_LIST] = ""
    is_error: bool = False


class ThinkingBlock(Body):
    thinking: Text
    signature: Text = ""


class RedactedBlock(Body):
    pass


class UseBlock(Block):
    id: Text
    name: Text
    input: Object


SystemBlock: TypeAlias = Annotated[Annotated[TextBlock, tag("text")], by("type", "text")]
UserBlock: TypeAlias = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ImageBlock, tag("image")]
    | Annotated[DocumentBlock, tag("document")]
    | Annotated[ResultBlock, tag("tool_result")],
    by("type", "text"),
]
AssistantBlock: TypeAlias = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ThinkingBlock, tag("thinking")]
    | Annotated[RedactedBlock, tag("redacted_thinking")]
    | Annotated[UseBlock, tag("tool_use")],
    by("type", "text"),
]
SystemText: TypeAlias = Annotated[
    Annotated[Text, tag("text")] | Annotated[list[SystemBlock], FAIL_FAST, tag("list")], TEXT_OR_LIST
]


class UserTurn(Body):
    content: Annotated[Annotated[Text, tag("text")] | Annotated[list[UserBlock], FAIL_FAST, tag("list")], TEXT_OR_LIST]

    @field_validator("content")
    @classmethod
    def _not_empty(cls, content: Any) -> Any:
        if len(content) == 0:
            raise ValueError("user messages must have non-empty content")
        return content


class AssistantTurn(Body):
    content: Annotated[Annotated[Text, tag("text")] | Annotated[list[AssistantBlock], FAIL_FAST, tag("list")], TEXT_OR_LIST]


class SystemTurn(Body):
    content: SystemText


Turn: TypeAlias = Annotated[
    Annotated[UserTurn, tag("user")] | Annotated[AssistantTurn, tag("assistant")] | Annotated[SystemTurn, tag("system")],
    by("role", "user"),
]


class Tool(Block):
    type: Text = "custom"
    name: Annotated[Text, AfterValidator(_not_blank)]
    description: Text | None = None
    input_schema: Object

    @field_validator("type")
    @classmethod
    def _is_custom(cls, kind: str) -> str:
        if kind != "custom":
            raise ValueError(f"found {kind[:50]!r}; only tools that bring an input_schema are supported")
        return kind


class Choice(Body):
    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool = False


class NamedChoice(Choice):
    name: Text


class ThinkingConfig(Body):
    type: Text
    display: Text | None = None


class OutputConfig(Body):
    effort: Text | None = None
    format: Any = None


class Metadata(Body):
    user_id: Text | None = None


class MessagesBody(Body):
    system: SystemText = ""
    tools: Annotated[list[Tool], FAIL_FAST] = Field(default=[])
    messages: Annotated[list[Turn], FAIL_FAST]
    cache_control: CacheControl | None = None
    tool_choice: (
        Annotated[
            Annotated[NamedChoice, tag("tool")] | Annotated[Choice, tag("others")],
            Discriminator(lambda value: "<tool>" if isinstance(value, dict) and value.get("type") == "tool" else "<others>"),
        ]
        | None
    ) = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: Any = None
    mcp_servers: Any = None
    container: Any = None
    metadata: Metadata | None = None
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    model: Text = "default_model"
    stop_sequences: Annotated[list[Annotated[Text, AfterValidator(_not_blank)]], FAIL_FAST] = Field(default=[])
    stream: bool = False

    @field_validator("messages")
    @classmethod
    def _has_messages(cls, messages: list[Any]) -> list[Any]:
        if not messages:
            raise ValueError("at least one message is required")
        return messages
