"""Prompt normalisers, which keep the volatile parts of a chat the same, so that its prefix is found in the cache.

They change what the model sees, so each is off unless a user names it or it only removes text that is not meant for the model.
Knows messages in the shape of OpenAI's API; no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]
# The roles of instructions.
SYSTEM = ("system", "developer")


class Replayed(dict[str, Any]):
    """An assistant message that this server has generated, with the sampled `tokens` of its reply. No client can send one."""

    tokens: Sequence[int]

    @classmethod
    def of(cls, message: Message, tokens: Sequence[int]) -> Replayed:
        replayed = cls(message)
        replayed.tokens = tokens
        return replayed


class Replies(Protocol):
    """The replies that this server has generated lately."""

    def sampled(self, messages: Sequence[Message]) -> dict[int, Sequence[int]]:
        """The sampled tokens of this conversation's replies, by the index of the message that repeats each."""


@dataclass(frozen=True)
class Normaliser:
    """A normaliser of chats.

    does:       one sentence that says exactly what the model sees instead.
    apply:      returns the changed chat.
    is_default: on unless a user says `none`.
    """

    name: str
    does: str
    apply: Callable[[Sequence[Message], Replies], list[Message]]
    is_default: bool = False


def is_text(part: Any) -> bool:
    """Return whether a part of a message's content is text."""
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def text_of(message: Message, between: str = "") -> str:
    """The text of a message, which is a string or parts."""
    content = message.get("content")
    if isinstance(content, list):
        return between.join(part["text"] for part in content if is_text(part))
    return content if isinstance(content, str) else ""


def map_text(message: Message, change: Callable[[str], str]) -> Message:
    """A message with its text changed, which is a string or parts."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    if isinstance(content, list):
        return {**message, "content": [{**part, "text": change(part["text"])} if is_text(part) else part for part in content]}
    return message


def parts_of(content: Any) -> list[dict[str, Any]]:
    """The content of a message as parts; an empty text has none."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or ())
