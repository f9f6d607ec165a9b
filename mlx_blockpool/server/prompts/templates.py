"""Renders chats with the template of a model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from ...forms.tags import SAMPLE, SAMPLE_NAME
from ...hooks import Message, parts_of
from ...mlx_lm_compat import process_message_content

# What templates raise over messages that they do not take.
REFUSED = (TemplateError, ValueError, TypeError, KeyError, IndexError)


@dataclass(frozen=True)
class Template:
    """The template of `tokenizer` with the tools of a chat.

    `options`: its arguments other than messages and tools.
    """

    tokenizer: Any
    tools: list[Any] | None
    options: Mapping[str, Any]

    def text(self, messages: Sequence[Message], **more: Any) -> str:
        """A chat as text; the text parts of a message are joined. Raises REFUSED."""
        joined = copy.deepcopy(list(messages))
        process_message_content(joined)
        return str(
            self.tokenizer.apply_chat_template(
                joined, tools=self.tools or None, tokenize=False, **self.options, **more
            )
        )


def sample_call(tokenizer: Any) -> str:
    """What the model's own template writes between the markers of a call with the sample's
    arguments; "" where it writes none.
    """
    if not (tokenizer.has_chat_template and tokenizer.has_tool_calling):
        return ""
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in SAMPLE}}
    tool = {
        "type": "function",
        "function": {"name": SAMPLE_NAME, "description": "A sample.", "parameters": parameters},
    }
    # Mistral's templates take ids of nine characters.
    call = {
        "id": "sample000",
        "type": "function",
        "function": {"name": SAMPLE_NAME, "arguments": dict(SAMPLE)},
    }
    chat: list[Message] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    try:
        text = Template(tokenizer, [tool], {}).text(chat)
    except REFUSED:
        return ""
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    first, last = sorted(text.find(value) for value in SAMPLE.values())
    begin, stop = text.rfind(start, 0, max(first, 0)), text.find(end, last) if end else len(text)
    return text[begin + len(start) : stop] if begin >= 0 and stop >= 0 else ""


def without_later_system(messages: list[Message]) -> list[Message]:
    """The same chat for a template that takes a system message at the beginning only: others
    join the user's text before them.
    """
    lowered: list[Message] = []
    for message in messages:
        last = lowered[-1]["role"] if lowered else None
        if message["role"] == "system" and last not in (None, "system"):
            message = {**message, "role": "user"}
        if message["role"] == last and last in ("user", "system"):
            before, added = (parts_of(m["content"]) for m in (lowered[-1], message))
            lowered[-1] = {
                **lowered[-1],
                **message,
                "content": [*before, {"type": "text", "text": "\n\n"}, *added],
            }
        else:
            lowered.append(message)
    return lowered
