"""What a prompt normaliser is: it makes the volatile parts of a chat stay the same, so that its prefix is known again.

It changes what the model sees, so it is off unless a user asks for it by name, or it leaves out only what is not meant for the
model. Knows messages as OpenAI's API has them; no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]


class Replayed(dict[str, Any]):
    """An assistant message whose reply this server has generated: `tokens`, as they were sampled. No client can send one."""

    tokens: Sequence[int]

    @classmethod
    def of(cls, message: Message, tokens: Sequence[int]) -> Replayed:
        replayed = cls(message)
        replayed.tokens = tokens
        return replayed


class Replies(Protocol):
    """What this server has generated lately."""

    def sampled(self, messages: Sequence[Message]) -> dict[int, Sequence[int]]:
        """The tokens of the replies of this very conversation, by the numbers of the messages that repeat them."""


@dataclass(frozen=True)
class Normaliser:
    """`does`: one sentence that says exactly what the model sees instead. `apply` gets a chat, and returns another one.

    `is_default`: on unless a user says `none`.
    """

    name: str
    does: str
    apply: Callable[[Sequence[Message], Replies], list[Message]]
    is_default: bool = False


def map_text(message: Message, change: Callable[[str], str]) -> Message:
    """A message whose text, given as a string or in parts, has been changed."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    if isinstance(content, list):
        parts = [
            {**part, "text": change(part["text"])} if isinstance(part, dict) and isinstance(part.get("text"), str) else part
            for part in content
        ]
        return {**message, "content": parts}
    return message
