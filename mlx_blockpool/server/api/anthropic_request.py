"""A body of Anthropic's Messages API as a chat request and generation arguments.

A field that cannot be honoured is rejected by its place. Fields that change nothing here (service tiers, betas, budgets) are
ignored, and unknown values of optional fields are logged.
"""

from __future__ import annotations

from typing import Any

from ...messages import parts_of
from ..bodies import InvalidRequestError
from ..request import SECONDS, Breakpoint, ChatRequest, ParsedRequest
from ..validation import dotted, generation_arguments, validated
from . import anthropic_body as blocks
from .anthropic_body import MessagesBody
from .conversation import Conversation, Part, template_arguments
from .formats import only_form
from .thinking import thinking_in
from .tools import Calls, calls_of, function_tool, held_tools, tools_named

MAX_BREAKPOINTS = 4
# Between messages of one role that follow each other: to the protocol they are one turn.
SEAM: Part = {"type": "text", "text": "\n\n"}


def parse(body: dict[str, Any], options: Any, counts: bool = False) -> ParsedRequest:
    """Parse a body. `options`: the server's, for what the body leaves open; `counts`: only the prompt is of interest.

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
    strict = {tool.name: f"tools.{i}.input_schema" for i, tool in enumerate(given.tools) if tool.strict}
    formats = {"output_config.format": given.output_config.format, "output_format": given.output_format}
    form = only_form(format_.wanted(place) for place, format_ in formats.items() if format_ is not None)
    request = ChatRequest(
        "chat", "", turns.end(), tools or None, None,
        tool_breakpoints=tool_breakpoints,
        calls=calls,
        begin=turns.begin,
        only_count=counts,
        image_at=turns.image_at,
        held=held_tools(tools, calls, strict, form),
        form=form,
    )  # fmt: skip
    thinks = None if given.thinking is None else blocks.THINKING.get(given.thinking.type or "")
    template = template_arguments(thinks, given.output_config.effort, answers_at_once=bool(turns.begin) or calls == "must")
    stop_words = list(dict.fromkeys(given.stop_sequences))
    arguments = generation_arguments(given, options, max(given.max_tokens, 1), stop_words, template)
    one_call = given.tool_choice is not None and given.tool_choice.disable_parallel_tool_use
    return ParsedRequest(request, arguments, given, one_call)


def _tools(given: list[blocks.Tool], turns: MessageTurns) -> tuple[list[Any], list[Breakpoint]]:
    """Tools in OpenAI's shape, and the breakpoints on them."""
    tools, breakpoints = {}, []
    for i, tool in enumerate(given):
        if tool.name in tools:
            raise InvalidRequestError("tools", f"Tool names must be unique; found {tool.name[:50]!r} twice")
        tools[tool.name] = function_tool(tool.name, tool.description, tool.input_schema)
        if marked := turns.cache_control(tool.cache_control, f"tools.{i}.cache_control"):
            breakpoints.append(Breakpoint(None, i + 1, SECONDS[marked["cache_control"]["ttl"]]))
    return list(tools.values()), breakpoints


def _choice(
    given: MessagesBody, tools: list[Any], breakpoints: list[Breakpoint]
) -> tuple[Calls, list[Any], tuple[Breakpoint, ...]]:
    """(ChatRequest.calls, the tools to show, their breakpoints)."""
    if isinstance(given.tool_choice, blocks.NamedChoice):
        tools = tools_named(given.tool_choice.name, tools, "tool_choice.name")
        return "must", tools, tuple(Breakpoint(None, 1, point.seconds) for point in breakpoints[-1:])
    return calls_of("auto" if given.tool_choice is None else given.tool_choice.type, tools), tools, tuple(breakpoints)


class MessageTurns(Conversation):
    """The turns of a conversation as messages. Its methods raise InvalidRequestError.

    `begin`: the text of a last assistant message, which the reply continues. `breakpoints`: how many cache_control were found.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin = ""
        self.breakpoints = 0

    def add_system(self, system: str | list[Any]) -> None:
        """The system prompt."""
        if system:
            self.messages.append({"role": "system", "content": self._content(system, "system")})

    def add(self, turns: list[blocks.Turn]) -> None:
        """All turns."""
        for i, turn in enumerate(turns):
            place = f"messages.{i}.content"
            if isinstance(turn, blocks.SystemTurn):
                self.messages.append({"role": "system", "content": self._content(turn.content, place)})
            elif isinstance(turn.content, str):
                self._add(turn.role, turn.content)
            elif isinstance(turn, blocks.UserTurn):
                self._user(turn.content, place)
            else:
                self._assistant(turn.content, place)
        self._take_beginning()

    def cache_control(self, control: blocks.CacheControl | None, at: str) -> Part:
        """A cache_control in the shape that messages have it in; empty without one."""
        if control is None:
            return {}
        self.breakpoints += 1
        if self.breakpoints > MAX_BREAKPOINTS:
            found = f"A maximum of {MAX_BREAKPOINTS} blocks with cache_control may be provided. Found {self.breakpoints}."
            raise InvalidRequestError(at, found)
        return {"cache_control": {"type": "ephemeral", "ttl": control.ttl or "5m"}}

    def _user(self, turn: list[blocks.UserBlock], place: str) -> None:
        parts: list[Part] = []
        for j, block in enumerate(turn):
            at = f"{place}.{j}"
            if isinstance(block, blocks.ResultBlock):
                if parts:
                    self._add("user", parts)
                    parts = []
                content = self._content(block.content, f"{at}.content") or ""
                if block.is_error:
                    content = [{"type": "text", "text": "Error: "}, *parts_of(content)]
                self._result(block.tool_use_id, content).update(self.cache_control(block.cache_control, f"{at}.cache_control"))
            else:
                parts.append(self._part(block, at))
        if parts:
            self._add("user", parts)

    def _assistant(self, turn: list[blocks.AssistantBlock], place: str) -> None:
        places = [(block, f"{place}.{j}") for j, block in enumerate(turn)]
        parts = [self._part(block, at) for block, at in places if block.type == "text"]
        message = self._add("assistant", parts or "")
        for block, at in places:
            if isinstance(block, blocks.ThinkingBlock):
                self._think(message, thinking_in(block.thinking, block.signature))
            elif isinstance(block, blocks.UseBlock):
                self._call(message, block.id, block.name, block.input)
                message.update(self.cache_control(block.cache_control, f"{at}.cache_control"))

    def _add(self, role: str, content: str | list[Part]) -> dict[str, Any]:
        """Add content to the last message if that has the same role, or else as a message. Returns the message."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": content})
        else:
            before, added = parts_of(self.messages[-1]["content"]), parts_of(content)
            before += [SEAM] if before and added else []
            before += added
            self.messages[-1]["content"] = before or ""
        return self.messages[-1]

    def _take_beginning(self) -> None:
        """If the last message is the assistant's, the reply continues it: its text is the beginning."""
        if self.messages[-1]["role"] != "assistant":
            return
        last = self.messages.pop()
        if "tool_calls" in last or "reasoning" in last:
            what = "the last message is the assistant's, and has tool_use or thinking; a reply can only continue text"
            raise InvalidRequestError("messages", what)
        if all(message["role"] == "system" for message in self.messages):
            raise InvalidRequestError("messages", "at least one user message is required")
        self.begin = "".join(part["text"] for part in parts_of(last["content"]))

    def _content(self, content: str | list[Any], place: str) -> str | list[Part]:
        return content if isinstance(content, str) else [self._part(block, f"{place}.{j}") for j, block in enumerate(content)]

    def _part(self, block: Any, at: str) -> Part:
        control = self.cache_control(block.cache_control, f"{at}.cache_control")
        if isinstance(block, blocks.ImageBlock):
            source = block.source
            url = f"data:{source.media_type};base64,{source.data}" if isinstance(source, blocks.Base64Source) else source.url
            return {**self._image(url, at), **control}
        if isinstance(block, blocks.DocumentBlock):
            text = f"{block.title}\n{block.source.data}" if block.title else block.source.data
        else:
            text = block.tool_name if isinstance(block, blocks.ReferenceBlock) else block.text
        return {"type": "text", "text": text, **control}
