"""What the translations of all protocols do alike: messages of OpenAI's shape, which mlx-lm's templates take.

Knows no tokens, no sockets.
"""

from __future__ import annotations

from typing import Any

from ...messages import Message

Part = dict[str, Any]

# What templates know of the efforts that clients name.
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def template_arguments(thinks: bool | None, effort: str | None, answers_at_once: bool) -> dict[str, Any]:
    """Arguments of a chat template, which itself decides what is None. A reply that has its beginning does not think before."""
    arguments = {"enable_thinking": False if answers_at_once else thinks, "reasoning_effort": EFFORTS.get(effort or "")}
    return {name: value for name, value in arguments.items() if value is not None}


class Conversation:
    """Collects `messages`. `image_at`: where the first image is."""

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

    def _image(self, url: str, at: str) -> Part:
        self.image_at = self.image_at or at
        return {"type": "image_url", "image_url": {"url": url}}

    def _think(self, message: Message, thinking: str) -> None:
        """Add thinking under the names by which templates of mlx-lm's models look for it."""
        if thinking:
            thinking = "\n\n".join(filter(None, (message.get("reasoning"), thinking)))
            message.update(reasoning_content=thinking, reasoning=thinking)

    def _call(self, message: Message, called: str, name: str, arguments: dict[str, Any]) -> None:
        self._tools_called[called] = name
        call = {"id": called, "type": "function", "function": {"name": name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(call)

    def _result(self, called: str, content: str | list[Part]) -> Message:
        """The message of a tool's result, which is added."""
        name = {"name": self._tools_called[called]} if called in self._tools_called else {}
        self.messages.append({"role": "tool", "tool_call_id": called, **name, "content": content})
        return self.messages[-1]
