"""Messages in OpenAI's shape, which mlx-lm's templates take: the base of each protocol's
translation.

Knows no tokens and no sockets.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from ...hooks import Message
from ..bodies import Json

Part = Json

# The efforts that templates take, by those that clients name.
EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


def template_arguments(thinks: bool | None, effort: str | None, answers_at_once: bool) -> Json:
    """Arguments of a chat template, without those that it decides itself.

    A reply that `answers_at_once` does not think first.
    """
    arguments = {
        "enable_thinking": False if answers_at_once else thinks,
        "reasoning_effort": EFFORTS.get(effort or ""),
    }
    return {name: value for name, value in arguments.items() if value is not None}


_OBJECT: TypeAdapter[Json] = TypeAdapter(Json)


def arguments_of(written: str) -> Any:
    """The arguments of a call that a client sends back.

    A stream leaves those of a malformed call incomplete, and its text follows as content: the call
    has none then. Raises ValueError for other text that is not JSON, also in its beginning.
    """
    text = written.strip() or "{}"
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if "Extra data" not in str(error) and text.startswith("{") and _is_beginning(text):
            return {}
        raise ValueError(f"Input should be JSON: {error}") from error


def _is_beginning(written: str) -> bool:
    """Return whether a text is JSON that ends too early."""
    try:
        _OBJECT.validate_json(written, experimental_allow_partial="trailing-strings")
    except ValueError:
        return False
    return True


class ChatMessages:
    """Collects `messages`. `image_at`: the place of the first image in the body.

    item_place: how the protocol writes the place of an item of a list, after that of the list.
    """

    item_place = "[{}]"

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.image_at: str | None = None
        self._tools_called: dict[str, str] = {}

    def end(self) -> list[Message]:
        """The messages, once all are added."""
        for message in self.messages:
            if "reasoning" in message and not (message.get("tool_calls") and message["content"]):
                # gpt-oss's template refuses text and thinking in one message with calls.
                message["thinking"] = message["reasoning"]
        return self.messages

    def _content(self, content: str | list[Any], place: str) -> str | list[Part]:
        """Content, which is text or a list of parts at a `place` of the body."""
        if isinstance(content, str):
            return content
        return [
            self._part(part, place + self.item_place.format(i)) for i, part in enumerate(content)
        ]

    def _part(self, part: Any, at: str) -> Part:
        raise NotImplementedError

    def _image(self, url: str, at: str) -> Part:
        self.image_at = self.image_at or at
        return {"type": "image_url", "image_url": {"url": url}}

    def _think(self, message: Message, thinking: str) -> None:
        """Add thinking under the names by which templates of mlx-lm's models look for it."""
        if thinking:
            thinking = "\n\n".join(filter(None, (message.get("reasoning"), thinking)))
            message.update(reasoning_content=thinking, reasoning=thinking)

    def _call(self, message: Message, called: str, name: str, arguments: Json) -> None:
        self._tools_called[called] = name
        call = {
            "id": called,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        message.setdefault("tool_calls", []).append(call)

    def _result(self, called: str, content: str | list[Part]) -> Message:
        """The message of a tool's result, which is added."""
        name = {"name": self._tools_called[called]} if called in self._tools_called else {}
        self.messages.append({"role": "tool", "tool_call_id": called, **name, "content": content})
        return self.messages[-1]
