"""Chats as the template of a model writes them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from ...messages import SYSTEM, Message, parts_of
from ...mlx_lm_compat import process_message_content

# What templates raise over messages that they do not take.
REFUSED = (TemplateError, ValueError, TypeError, KeyError, IndexError)


def rendered(tokenizer: Any, messages: Sequence[Message], tools: list[Any] | None, **options: Any) -> str:
    """A chat as text; the text parts of a message are joined. `options`: other arguments of the template. Raises REFUSED."""
    joined = copy.deepcopy(list(messages))
    process_message_content(joined)
    return str(tokenizer.apply_chat_template(joined, tools=tools or None, tokenize=False, **options))


def without_later_system(messages: list[Message]) -> list[Message]:
    """The same chat for a template that takes a system message at the beginning only: others join the user's text before them."""
    lowered: list[Message] = []
    for message in messages:
        last = lowered[-1]["role"] if lowered else None
        if message["role"] == "system" and last not in (None, "system"):
            message = {**message, "role": "user"}
        if message["role"] == last and last in ("user", "system"):
            before, added = (parts_of(m["content"]) for m in (lowered[-1], message))
            lowered[-1] = {**lowered[-1], **message, "content": [*before, {"type": "text", "text": "\n\n"}, *added]}
        else:
            lowered.append(message)
    return lowered


def num_leading(messages: Sequence[Message]) -> int:
    """Count the instructions that a chat begins with."""
    return next((i for i, message in enumerate(messages) if message.get("role") not in SYSTEM), len(messages))
