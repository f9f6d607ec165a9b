"""The body of Anthropic's Messages API: its fields and their types, and its translation into a chat
request.

A field that cannot be honoured is rejected by its place. Fields that change nothing here (service
tiers, betas, budgets) are ignored, and unknown values of optional fields are logged. Knows no
sockets.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from ...config import RequestConfig
from ...hooks import parts_of
from ..bodies import InvalidRequestError, Json
from ..prompts.breakpoints import SECONDS, Breakpoint
from ..request import ParsedRequest
from ..validation import (
    Body,
    Count,
    List,
    Object,
    Sampling,
    Text,
    TextOr,
    dotted,
    generation_arguments,
    known,
    only,
    validated,
)
from .conversation import ChatMessages, Part, template_arguments
from .formats import SchemaFormat, only_form
from .thinking import thinking_in
from .tools import Calls, calls_of, chat_request, function_tool, tools_named

DISPLAYS = ("summarized", "omitted")
THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
EFFORTS = ("low", "medium", "high", "xhigh", "max")

FilledText: TypeAlias = Annotated[Text, Field(min_length=1)]


class CacheControl(Body):
    type: Annotated[Text, known(("ephemeral",), "cache_control.type")]
    ttl: Annotated[Text, known(SECONDS, "cache_control.ttl")] | None = None


class CacheableBlock(Body):
    cache_control: CacheControl | None = None


class TextBlock(CacheableBlock):
    type: Literal["text"]
    text: Text


class UrlSource(Body):
    type: Literal["url"]
    url: Text


class Base64Source(Body):
    type: Literal["base64"]
    media_type: Text
    data: Text


class ImageBlock(CacheableBlock):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    @property
    def url(self) -> str:
        """The image as templates find it in messages."""
        source = self.source
        return (
            source.url
            if isinstance(source, UrlSource)
            else f"data:{source.media_type};base64,{source.data}"
        )


class PlainTextSource(Body):
    type: Literal["text"]
    data: Text


class DocumentBlock(CacheableBlock):
    """A document of plain text, because templates show nothing else."""

    type: Literal["document"]
    source: PlainTextSource
    title: Text = ""

    @property
    def text(self) -> str:
        return f"{self.title}\n{self.source.data}" if self.title else self.source.data


class ReferenceBlock(CacheableBlock):
    type: Literal["tool_reference"]
    tool_name: Text

    @property
    def text(self) -> str:
        return self.tool_name


ResultPart: TypeAlias = Annotated[
    TextBlock | ImageBlock | DocumentBlock | ReferenceBlock, Field(discriminator="type")
]


class ResultBlock(CacheableBlock):
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


class UseBlock(CacheableBlock):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Object


UserBlock: TypeAlias = Annotated[
    TextBlock | ImageBlock | DocumentBlock | ResultBlock, Field(discriminator="type")
]
AssistantBlock: TypeAlias = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | UseBlock, Field(discriminator="type")
]


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


class Tool(CacheableBlock):
    type: Annotated[
        Text, only("custom", why="only tools that bring an input_schema are supported")
    ] = "custom"
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


Elsewhere: TypeAlias = Annotated[
    Any, only([], why="this server reaches no other; offer what it does as tools")
]


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


MAX_BREAKPOINTS = 4
# Between messages of one role that follow each other: to the protocol they are one turn.
SEAM: Part = {"type": "text", "text": "\n\n"}


def parse(body: Json, options: Any, counts: bool = False) -> ParsedRequest:
    """Parse a body. `options`: the server's, for what the body leaves open; `counts`: only the
    prompt is of interest.

    Raises InvalidRequestError.
    """
    # A request that only counts has no use for max_tokens.
    given = validated(MessagesBody, body | {"max_tokens": 1} if counts else body, dotted)
    turns = MessageTurns()
    turns.add_system(given.system)
    tools, breakpoints = _tools(given.tools, turns)
    turns.add(given.messages)
    if given.cache_control is not None:
        turns.messages[-1].update(turns.cache_control(given.cache_control, "cache_control"))
    calls, tools, tool_breakpoints = _choice(given, tools, breakpoints)
    strict = {
        tool.name: f"tools.{i}.input_schema" for i, tool in enumerate(given.tools) if tool.strict
    }
    formats = {
        "output_config.format": given.output_config.format,
        "output_format": given.output_format,
    }
    form = only_form(
        format_.wanted(place) for place, format_ in formats.items() if format_ is not None
    )
    more = {
        "tool_breakpoints": tool_breakpoints,
        "begin": turns.begin,
        "only_count": counts,
        "image_at": turns.image_at,
    }
    request = chat_request(turns.end(), tools, calls, strict, form, **more)
    thinks = None if given.thinking is None else THINKING.get(given.thinking.type or "")
    template = template_arguments(
        thinks, given.output_config.effort, answers_at_once=bool(turns.begin) or calls == "must"
    )
    stop_words = list(dict.fromkeys(given.stop_sequences))
    arguments = generation_arguments(given, options, max(given.max_tokens, 1), stop_words, template)
    one_call = given.tool_choice is not None and given.tool_choice.disable_parallel_tool_use
    return ParsedRequest(request, arguments, given, one_call)


def _tools(given: list[Tool], turns: MessageTurns) -> tuple[list[Any], list[Breakpoint]]:
    """Tools in OpenAI's shape, and the breakpoints on them."""
    tools, breakpoints = {}, []
    for i, tool in enumerate(given):
        if tool.name in tools:
            raise InvalidRequestError(
                "tools", f"Tool names must be unique; found {tool.name[:50]!r} twice"
            )
        tools[tool.name] = function_tool(tool.name, tool.description, tool.input_schema)
        if marked := turns.cache_control(tool.cache_control, f"tools.{i}.cache_control"):
            breakpoints.append(Breakpoint(None, i + 1, SECONDS[marked["cache_control"]["ttl"]]))
    return list(tools.values()), breakpoints


def _choice(
    given: MessagesBody, tools: list[Any], breakpoints: list[Breakpoint]
) -> tuple[Calls, list[Any], tuple[Breakpoint, ...]]:
    """(ChatRequest.calls, the tools to show, their breakpoints)."""
    if isinstance(given.tool_choice, NamedChoice):
        tools = tools_named(given.tool_choice.name, tools, "tool_choice.name")
        return (
            "must",
            tools,
            tuple(Breakpoint(None, 1, point.seconds) for point in breakpoints[-1:]),
        )
    return (
        calls_of("auto" if given.tool_choice is None else given.tool_choice.type, tools),
        tools,
        tuple(breakpoints),
    )


class MessageTurns(ChatMessages):
    """The turns of a conversation as messages. Its methods raise InvalidRequestError.

    `begin`: the text of a last assistant message, which the reply continues. `breakpoints`: how
    many cache_control were found.
    """

    item_place = ".{}"

    def __init__(self) -> None:
        super().__init__()
        self.begin = ""
        self.breakpoints = 0

    def add_system(self, system: str | list[Any]) -> None:
        """The system prompt."""
        if system:
            self.messages.append({"role": "system", "content": self._content(system, "system")})

    def add(self, turns: list[Turn]) -> None:
        """All turns."""
        for i, turn in enumerate(turns):
            place = f"messages.{i}.content"
            if isinstance(turn, SystemTurn):
                self.messages.append(
                    {"role": "system", "content": self._content(turn.content, place)}
                )
            elif isinstance(turn.content, str):
                self._add(turn.role, turn.content)
            elif isinstance(turn, UserTurn):
                self._user(turn.content, place)
            else:
                self._assistant(turn.content, place)
        self._take_beginning()

    def cache_control(self, control: CacheControl | None, at: str) -> Part:
        """A cache_control in the shape that messages have it in; empty without one."""
        if control is None:
            return {}
        self.breakpoints += 1
        if self.breakpoints > MAX_BREAKPOINTS:
            found = (
                f"A maximum of {MAX_BREAKPOINTS} blocks with cache_control may be provided. Found "
                f"{self.breakpoints}."
            )
            raise InvalidRequestError(at, found)
        return {"cache_control": {"type": "ephemeral", "ttl": control.ttl or "5m"}}

    def _user(self, turn: list[UserBlock], place: str) -> None:
        parts: list[Part] = []
        for j, block in enumerate(turn):
            at = f"{place}.{j}"
            if isinstance(block, ResultBlock):
                if parts:
                    self._add("user", parts)
                    parts = []
                content = self._content(block.content, f"{at}.content") or ""
                if block.is_error:
                    content = [{"type": "text", "text": "Error: "}, *parts_of(content)]
                self._result(block.tool_use_id, content).update(
                    self.cache_control(block.cache_control, f"{at}.cache_control")
                )
            else:
                parts.append(self._part(block, at))
        if parts:
            self._add("user", parts)

    def _assistant(self, turn: list[AssistantBlock], place: str) -> None:
        places = [(block, f"{place}.{j}") for j, block in enumerate(turn)]
        parts = [self._part(block, at) for block, at in places if block.type == "text"]
        message = self._add("assistant", parts or "")
        for block, at in places:
            if isinstance(block, ThinkingBlock):
                self._think(message, thinking_in(block.thinking, block.signature))
            elif isinstance(block, UseBlock):
                self._call(message, block.id, block.name, block.input)
                message.update(self.cache_control(block.cache_control, f"{at}.cache_control"))

    def _add(self, role: str, content: str | list[Part]) -> Json:
        """Add content to the last message if that has the same role, or else as a message.

        Returns the message.
        """
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": content})
        else:
            before, added = parts_of(self.messages[-1]["content"]), parts_of(content)
            before += [SEAM] if before and added else []
            before += added
            self.messages[-1]["content"] = before or ""
        return self.messages[-1]

    def _take_beginning(self) -> None:
        """If the last message is the assistant's, the reply continues it: its text is the
        beginning.
        """
        if self.messages[-1]["role"] != "assistant":
            return
        last = self.messages.pop()
        if "tool_calls" in last or "reasoning" in last:
            what = (
                "the last message is the assistant's, and has tool_use or thinking; a reply can "
                "only continue text"
            )
            raise InvalidRequestError("messages", what)
        if all(message["role"] == "system" for message in self.messages):
            raise InvalidRequestError("messages", "at least one user message is required")
        self.begin = "".join(part["text"] for part in parts_of(last["content"]))

    def _part(self, block: Any, at: str) -> Part:
        control = self.cache_control(block.cache_control, f"{at}.cache_control")
        if isinstance(block, ImageBlock):
            return {**self._image(block.url, at), **control}
        return {"type": "text", "text": block.text, **control}
