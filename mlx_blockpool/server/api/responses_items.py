"""The items of OpenAI's Responses API as messages of the chat's shape, which mlx-lm's templates take.

Knows items and roles; no tokens, no sockets.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ...messages import Message
from ..fields import InvalidRequestError, checked, field, one_of
from .responses_tools import Name
from .thinking import thinking_in

Item = dict[str, Any]
Part = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Conversation:
    """Collects `messages`. `items`: as they came, with what references stood for. `image_at`: where the first image is.

    `known`: an item of an earlier response by its id, None where there is none.
    """

    def __init__(self, known: Callable[[str], Item | None]) -> None:
        self.messages: list[Message] = []
        self.items: list[Item] = []
        self.image_at: str | None = None
        self._known = known
        self._names: dict[str, str] = {}
        self._kinds: dict[str, Callable[[Item, str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "function_call_output": self._output,
        }

    def add_instructions(self, instructions: str | None) -> None:
        """The system prompt of this request; it is no item."""
        if instructions:
            self.messages.append({"role": "system", "content": instructions})

    def add(self, given: Any, place: str) -> None:
        """Text of the user's, or items. Raises InvalidRequestError, as all others here."""
        if isinstance(given, str):
            given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
        if not isinstance(given, list):
            raise InvalidRequestError(place, "Input should be a valid string or list")
        for i, item in enumerate(given):
            self._add(checked(item, dict, f"{place}[{i}]"), f"{place}[{i}]")

    def end(self) -> list[Message]:
        """The messages, once all is added."""
        for message in self.messages:
            if "reasoning" in message and not (message.get("tool_calls") and message["content"]):
                # gpt-oss's template refuses text and thinking in one message with calls.
                message["thinking"] = message["reasoning"]
        return self.messages

    # -- items ---------------------------------------------------------------------------------------------------------

    def _add(self, item: Item, at: str) -> None:
        kind = field(item, "type", at, str, "message" if "role" in item else "item_reference")
        if kind == "item_reference":
            name = field(item, "id", at, str)
            known = self._known(name)
            if known is None:
                raise InvalidRequestError(
                    f"{at}.id", f"Item {name[:50]!r} is not known, or not any more; needed the item itself, not a reference to it"
                )
            kind, item = known["type"], known
        if kind not in self._kinds:
            needed = ", ".join([*self._kinds, "item_reference"])
            raise InvalidRequestError(f"{at}.type", f"found {kind[:50]!r}, which is not supported; needed one of {needed}")
        self._kinds[kind](item, at)
        self.items.append(item)

    def _message(self, item: Item, at: str) -> None:
        role = one_of(field(item, "role", at, str), ROLES, f"{at}.role")
        if item.get("content") is None:
            raise InvalidRequestError(f"{at}.content", "Field required")
        if role == "assistant":
            text, message = self._text(item["content"], f"{at}.content"), self._turn()
            message["content"] = "\n\n".join(filter(None, (message["content"], text)))
        else:
            content = self._content(item["content"], f"{at}.content")
            self.messages.append({"role": "user" if role == "user" else "system", "content": content})

    def _reasoning(self, item: Item, at: str) -> None:
        thinking = self._text(field(item, "content", at, list, []), f"{at}.content")
        if not thinking:
            # Encrypted content of our own is all of the thinking, and so is a summary.
            summary = self._text(field(item, "summary", at, list, []), f"{at}.summary", "\n\n")
            thinking = thinking_in("", field(item, "encrypted_content", at, str, "")) or summary
        if thinking:
            message = self._turn()
            thinking = "\n\n".join(filter(None, (message.get("reasoning"), thinking)))
            # Templates of mlx-lm's models look under one of these names.
            message.update(reasoning_content=thinking, reasoning=thinking)

    def _call(self, item: Item, at: str) -> None:
        name = Name(field(item, "name", at, str), field(item, "namespace", at, str, None)).flat
        called = field(item, "call_id", at, str)
        written = field(item, "arguments", at, str)
        try:
            arguments = json.loads(written or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{at}.arguments", f"found no JSON: {error}") from error
        self._names[called] = name
        function = {"name": name, "arguments": checked(arguments, dict, f"{at}.arguments")}
        self._turn().setdefault("tool_calls", []).append({"id": called, "type": "function", "function": function})

    def _output(self, item: Item, at: str) -> None:
        called = field(item, "call_id", at, str)
        if item.get("output") is None:
            raise InvalidRequestError(f"{at}.output", "Field required")
        content = self._content(item["output"], f"{at}.output")
        name = {"name": self._names[called]} if called in self._names else {}
        self.messages.append({"role": "tool", "tool_call_id": called, **name, "content": content})

    def _turn(self) -> Message:
        """The assistant's message that is going on: what it thinks, says and calls one after the other is one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _content(self, content: Any, place: str) -> str | list[Part]:
        if isinstance(content, str):
            return content
        return [self._part(checked(part, dict, f"{place}[{j}]"), f"{place}[{j}]") for j, part in _numbered(content, place)]

    def _part(self, part: Part, at: str) -> Part:
        kind = field(part, "type", at, str)
        if kind == "input_image":
            url = field(part, "image_url", at, str, None)
            if url is None:
                raise InvalidRequestError(f"{at}.image_url", "Field required; this server has no files that file_id could name")
            self.image_at = self.image_at or at
            return {"type": "image_url", "image_url": {"url": url}}
        if kind not in TEXTS:
            raise InvalidRequestError(f"{at}.type", f"found {kind[:50]!r}; needed input_text or input_image")
        marked = {"cache_control": part["cache_control"]} if "cache_control" in part else {}
        return {"type": "text", "text": field(part, "text", at, str), **marked}

    def _text(self, content: Any, place: str, between: str = "") -> str:
        """The text of parts that have nothing else; what was refused is said as text."""
        if isinstance(content, str):
            return content
        texts = []
        for j, part in _numbered(content, place):
            at = f"{place}[{j}]"
            kind = field(checked(part, dict, at), "type", at, str)
            if kind not in (*TEXTS, "refusal"):
                raise InvalidRequestError(f"{at}.type", f"found {kind[:50]!r}; needed text")
            texts.append(field(part, "refusal" if kind == "refusal" else "text", at, str))
        return between.join(texts)


def _numbered(content: Any, place: str) -> list[tuple[int, Any]]:
    if not isinstance(content, list):
        raise InvalidRequestError(place, "Input should be a valid string or list")
    return list(enumerate(content))
