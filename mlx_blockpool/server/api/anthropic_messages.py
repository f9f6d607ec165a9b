"""The conversation of Anthropic's Messages API as messages of OpenAI's shape, which mlx-lm's templates take.

Knows blocks, roles and where marks stand; no tokens, no sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...messages import Message
from ..fields import InvalidRequestError, checked, field, inside, known, one_of
from ..request import SECONDS
from .thinking import thinking_in

Part = dict[str, Any]
Kinds = dict[str, Callable[[Part, str], Part]]

ROLES = ("user", "assistant", "system")
MAX_MARKS = 4
# Between messages of one role that follow each other: to the protocol they are one turn.
SEAM: Part = {"type": "text", "text": "\n\n"}


class Conversation:
    """Collects `messages`. `begin`: the text of a last assistant message, which the reply goes on from.

    `image_at`: where the first image is. `marks`: how many cache_control were found.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.begin = ""
        self.image_at: str | None = None
        self.marks = 0
        self._tools_called: dict[str, str] = {}

    def add_system(self, system: Any) -> None:
        """The system prompt, text or text blocks. Raises InvalidRequestError, as all others here."""
        if system is None or system == "" or system == []:
            return
        content = system if isinstance(system, str) else self._parts(system, "system", {"text": self._text})
        self.messages.append({"role": "system", "content": content})

    def add_messages(self, messages: Any) -> None:
        """All turns."""
        if not checked(messages, list, "messages"):
            raise InvalidRequestError("messages", "at least one message is required")
        for i, message in enumerate(messages):
            place = f"messages.{i}"
            checked(message, dict, place)
            role = one_of(field(message, "role", place, str), ROLES, f"{place}.role")
            content = message.get("content")
            if content is None:
                raise InvalidRequestError(f"{place}.content", "Field required")
            if not isinstance(content, str | list):
                raise InvalidRequestError(f"{place}.content", "Input should be a valid string or list")
            if role == "user" and len(content) == 0:
                raise InvalidRequestError(f"{place}.content", "user messages must have non-empty content")
            {"user": self._user, "assistant": self._assistant, "system": self._later_system}[role](content, f"{place}.content")
        self._take_beginning()

    def mark_end(self, control: Any) -> None:
        """The cache_control of the request itself: it stands on the end of the conversation."""
        self.messages[-1].update(self.mark({"cache_control": control}, ""))

    def mark(self, block: Part, at: str) -> Part:
        """The block's cache_control, checked, where it has one."""
        control = field(block, "cache_control", at, dict, None)
        if control is None:
            return {}
        at = inside(at, "cache_control")
        known(field(control, "type", at, str), ("ephemeral",), f"{at}.type")
        ttl = known(field(control, "ttl", at, str, None), SECONDS, f"{at}.ttl") or "5m"
        self.marks += 1
        if self.marks > MAX_MARKS:
            found = f"A maximum of {MAX_MARKS} blocks with cache_control may be provided. Found {self.marks}."
            raise InvalidRequestError(at, found)
        return {"cache_control": {"type": "ephemeral", "ttl": ttl}}

    # -- roles ---------------------------------------------------------------------------------------------------------

    def _user(self, content: str | list[Any], place: str) -> None:
        if isinstance(content, str):
            self._append({"role": "user", "content": content})
            return
        texts: list[Part] = []
        shown: Kinds = {"text": self._text, "image": self._image, "document": self._document}
        for j, block in enumerate(content):
            at = inside(place, j)
            if isinstance(block, dict) and block.get("type") == "tool_result":
                self._append_parts("user", texts)
                texts = []
                self.messages.append(self._tool_result(block, at))
            else:
                texts.append(self._part(block, at, shown, ("tool_result",)))
        self._append_parts("user", texts)

    def _assistant(self, content: str | list[Any], place: str) -> None:
        message: Message = {"role": "assistant", "content": content if isinstance(content, str) else []}
        thoughts, calls = [], []
        for j, block in enumerate(content if isinstance(content, list) else ()):
            at = inside(place, j)
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "thinking":
                thoughts.append(thinking_in(field(block, "thinking", at, str), field(block, "signature", at, str, "")))
            elif kind == "tool_use":
                calls.append(self._tool_use(block, at))
                message.update(self.mark(block, at))
            elif kind != "redacted_thinking":
                others = ("thinking", "redacted_thinking", "tool_use")
                message["content"].append(self._part(block, at, {"text": self._text}, others))
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

    def _later_system(self, content: str | list[Any], place: str) -> None:
        parts = content if isinstance(content, str) else self._parts(content, place, {"text": self._text})
        self.messages.append({"role": "system", "content": parts})

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
        """A reply goes on from a last assistant message; its text is the beginning."""
        if self.messages[-1]["role"] != "assistant":
            return
        last = self.messages.pop()
        if "tool_calls" in last or "reasoning_content" in last:
            raise InvalidRequestError(
                "messages",
                "the last message is the assistant's, and has tool_use or thinking; needed a user's, or text to go on from",
            )
        if all(message["role"] == "system" for message in self.messages):
            raise InvalidRequestError("messages", "at least one user message is required")
        self.begin = "".join(part["text"] for part in _as_parts(last["content"]))

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _parts(self, blocks: Any, place: str, kinds: Kinds) -> list[Part]:
        return [self._part(block, inside(place, j), kinds) for j, block in enumerate(checked(blocks, list, place))]

    def _part(self, block: Any, at: str, kinds: Kinds, others: tuple[str, ...] = ()) -> Part:
        """A content part from a block whose type is one of `kinds`; `others` are types that could stand here too."""
        kind = field(checked(block, dict, at), "type", at, str)
        if kind not in kinds:
            needed = ", ".join([*kinds, *others])
            raise InvalidRequestError(f"{at}.type", f"found {kind[:50]!r}, which is not supported here; needed one of {needed}")
        return {**kinds[kind](block, at), **self.mark(block, at)}

    def _text(self, block: Part, at: str) -> Part:
        return {"type": "text", "text": field(block, "text", at, str)}

    def _image(self, block: Part, at: str) -> Part:
        source = field(block, "source", at, dict)
        kind = one_of(field(source, "type", f"{at}.source", str), ("base64", "url"), f"{at}.source.type")
        if kind == "url":
            url = field(source, "url", f"{at}.source", str)
        else:
            media, data = (field(source, name, f"{at}.source", str) for name in ("media_type", "data"))
            url = f"data:{media};base64,{data}"
        self.image_at = self.image_at or at
        return {"type": "image_url", "image_url": {"url": url}}

    def _document(self, block: Part, at: str) -> Part:
        """A document of plain text, as text."""
        source = field(block, "source", at, dict)
        kind = field(source, "type", f"{at}.source", str)
        if kind != "text":
            raise InvalidRequestError(f"{at}.source.type", f"found {kind[:50]!r}; only documents of plain text are supported")
        title = field(block, "title", at, str, "")
        text = field(source, "data", f"{at}.source", str)
        return {"type": "text", "text": f"{title}\n{text}" if title else text}

    def _reference(self, block: Part, at: str) -> Part:
        return {"type": "text", "text": field(block, "tool_name", at, str)}

    def _tool_use(self, block: Part, at: str) -> Message:
        name, called = field(block, "name", at, str), field(block, "id", at, str)
        self._tools_called[called] = name
        function = {"name": name, "arguments": field(block, "input", at, dict)}
        return {"id": called, "type": "function", "function": function}

    def _tool_result(self, block: Part, at: str) -> Message:
        called = field(block, "tool_use_id", at, str)
        content = block.get("content")
        if content is None or content == []:
            content = ""
        elif not isinstance(content, str):
            kinds: Kinds = {
                "text": self._text,
                "image": self._image,
                "document": self._document,
                "tool_reference": self._reference,
            }
            content = self._parts(content, f"{at}.content", kinds)
        if field(block, "is_error", at, bool, False):
            content = [{"type": "text", "text": "Error: "}, *_as_parts(content)]
        name = {"name": self._tools_called[called]} if called in self._tools_called else {}
        return {"role": "tool", "tool_call_id": called, **name, "content": content, **self.mark(block, at)}


def _as_parts(content: Any) -> list[Part]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)
