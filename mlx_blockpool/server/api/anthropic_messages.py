"""The conversation of Anthropic's Messages API as messages of OpenAI's shape, which mlx-lm's templates take.

Knows blocks, roles and breakpoints; no tokens, no sockets.
"""

from __future__ import annotations

from typing import Any

from ...messages import Message
from ..fields import InvalidRequestError, inside, known
from ..request import SECONDS
from .anthropic_body import (
    AssistantTurn,
    Base64Source,
    Block,
    CacheControl,
    DocumentBlock,
    ImageBlock,
    RedactedBlock,
    ReferenceBlock,
    ResultBlock,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    UseBlock,
    UserTurn,
)
from .thinking import thinking_in

Part = dict[str, Any]

MAX_MARKS = 4
# Between messages of one role that follow each other: to the protocol they are one turn.
SEAM: Part = {"type": "text", "text": "\n\n"}


class Conversation:
    """Collects `messages`. `begin`: the text of a last assistant message, which the reply continues.

    `image_at`: where the first image is. `marks`: how many cache_control were found. Its methods raise InvalidRequestError.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.begin = ""
        self.image_at: str | None = None
        self.marks = 0
        self._tools_called: dict[str, str] = {}

    def add_system(self, system: str | list[TextBlock]) -> None:
        """The system prompt."""
        if system:
            self.messages.append({"role": "system", "content": self._texts(system, "system")})

    def add_turns(self, turns: list[UserTurn | AssistantTurn | SystemTurn]) -> None:
        """All turns."""
        for i, turn in enumerate(turns):
            place = f"messages.{i}.content"
            if isinstance(turn, UserTurn):
                self._user(turn.content, place)
            elif isinstance(turn, AssistantTurn):
                self._assistant(turn.content, place)
            else:
                self.messages.append({"role": "system", "content": self._texts(turn.content, place)})
        self._take_beginning()

    def mark_end(self, control: CacheControl) -> None:
        """The cache_control of the request itself: it stands on the end of the conversation."""
        self.messages[-1].update(self.mark(control, "cache_control"))

    def mark(self, control: CacheControl | None, at: str) -> Part:
        """A cache_control in the shape that messages have it in; empty without one."""
        if control is None:
            return {}
        known(control.type, ("ephemeral",), f"{at}.type")
        ttl = known(control.ttl, SECONDS, f"{at}.ttl") or "5m"
        self.marks += 1
        if self.marks > MAX_MARKS:
            found = f"A maximum of {MAX_MARKS} blocks with cache_control may be provided. Found {self.marks}."
            raise InvalidRequestError(at, found)
        return {"cache_control": {"type": "ephemeral", "ttl": ttl}}

    # -- roles ---------------------------------------------------------------------------------------------------------

    def _user(self, content: Any, place: str) -> None:
        if isinstance(content, str):
            self._append({"role": "user", "content": content})
            return
        parts: list[Part] = []
        for j, block in enumerate(content):
            at = inside(place, j)
            if isinstance(block, ResultBlock):
                self._append_parts("user", parts)
                parts = []
                self.messages.append(self._tool_result(block, at))
            else:
                parts.append(self._part(block, at))
        self._append_parts("user", parts)

    def _assistant(self, content: Any, place: str) -> None:
        message: Message = {"role": "assistant", "content": content if isinstance(content, str) else []}
        thoughts, calls = [], []
        for j, block in enumerate(() if isinstance(content, str) else content):
            if isinstance(block, ThinkingBlock):
                thoughts.append(thinking_in(block.thinking, block.signature))
            elif isinstance(block, UseBlock):
                calls.append(self._tool_use(block))
                message.update(self._mark_of(block, inside(place, j)))
            elif not isinstance(block, RedactedBlock):
                message["content"].append(self._part(block, inside(place, j)))
        thinking = "\n\n".join(thought for thought in thoughts if thought)
        if thinking:
            # Templates of mlx-lm's models look under one of these names.
            message.update(reasoning_content=thinking, reasoning=thinking)
            if not (calls and message["content"]):
                # gpt-oss's refuses text and thinking in one message with calls.
                message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        self._append({**message, "content": message["content"] or ""})

    def _append_parts(self, role: str, parts: list[Part]) -> None:
        if parts:
            self._append({"role": role, "content": parts})

    def _append(self, message: Message) -> None:
        """Add a message, to the one before it if that has the same role."""
        if not self.messages or self.messages[-1]["role"] != message["role"]:
            self.messages.append(message)
            return
        last = self.messages[-1]
        before, added = _as_parts(last["content"]), _as_parts(message["content"])
        seam = [SEAM] if before and added else []
        last["content"] = [*before, *seam, *added] or ""
        for name in ("reasoning_content", "reasoning", "thinking"):
            if name in message:
                last[name] = "\n\n".join(filter(None, (last.get(name), message[name])))
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            last["tool_calls"] = calls
        if "cache_control" in message:
            last["cache_control"] = message["cache_control"]

    def _take_beginning(self) -> None:
        """If the last message is the assistant's, the reply continues it: its text is the beginning."""
        if self.messages[-1]["role"] != "assistant":
            return
        last = self.messages.pop()
        if "tool_calls" in last or "reasoning_content" in last:
            raise InvalidRequestError(
                "messages",
                "the last message is the assistant's, and has tool_use or thinking; a reply can only continue text",
            )
        if all(message["role"] == "system" for message in self.messages):
            raise InvalidRequestError("messages", "at least one user message is required")
        self.begin = "".join(part["text"] for part in _as_parts(last["content"]))

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _texts(self, content: Any, place: str) -> str | list[Part]:
        return content if isinstance(content, str) else [self._part(block, inside(place, j)) for j, block in enumerate(content)]

    def _part(self, block: Any, at: str) -> Part:
        return {**self._content(block, at), **self._mark_of(block, at)}

    def _content(self, block: TextBlock | ImageBlock | DocumentBlock | ReferenceBlock, at: str) -> Part:
        if isinstance(block, ImageBlock):
            self.image_at = self.image_at or at
            source = block.source
            url = f"data:{source.media_type};base64,{source.data}" if isinstance(source, Base64Source) else source.url
            return {"type": "image_url", "image_url": {"url": url}}
        if isinstance(block, DocumentBlock):
            title, text = block.title, block.source.data
            return {"type": "text", "text": f"{title}\n{text}" if title else text}
        return {"type": "text", "text": block.tool_name if isinstance(block, ReferenceBlock) else block.text}

    def _mark_of(self, block: Block, at: str) -> Part:
        return self.mark(block.cache_control, inside(at, "cache_control"))

    def _tool_use(self, block: UseBlock) -> Message:
        self._tools_called[block.id] = block.name
        return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}

    def _tool_result(self, block: ResultBlock, at: str) -> Message:
        content = self._texts(block.content, f"{at}.content") or ""
        if block.is_error:
            content = [{"type": "text", "text": "Error: "}, *_as_parts(content)]
        called = block.tool_use_id
        name = {"name": self._tools_called[called]} if called in self._tools_called else {}
        return {"role": "tool", "tool_call_id": called, **name, "content": content, **self._mark_of(block, at)}


def _as_parts(content: Any) -> list[Part]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)
