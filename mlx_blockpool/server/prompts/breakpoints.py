"""Cache breakpoints of a chat's prompt: those of its client, and the checkpoints of models with
windows or states.

Such models can resume only at a checkpoint: after the system prompt and tools, after the
conversation, and after what clients replace at its end in each turn, system messages and
reminders. Positions are found by rendering the template again, so that they are right for any
template, also where the last message is a tool's result.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...hooks import SYSTEM, Message, is_text, parts_of
from ...prefix.trie import common_prefix
from .templates import REFUSED, Template

log = logging.getLogger(__name__)

SECONDS = {"5m": 300, "1h": 3600}
# Some templates refuse a chat without a user's message.
EMPTY: Message = {"role": "user", "content": ""}
# A part of the user's message such as <system-reminder>, or what separates it from others.
REMINDER = re.compile(r"\s*(<([\w-]+)>.*</\2>\s*)?", re.DOTALL)


@dataclass(frozen=True)
class Breakpoint:
    """A beginning of a chat that is worth keeping for `seconds`.

    It ends after `parts` content parts of message number `message`, after the whole message where
    `parts` is None, and after `parts` tools where `message` is None.
    """

    message: int | None
    parts: int | None
    seconds: int


def message_breakpoints(messages: list[Message]) -> list[Breakpoint]:
    """The breakpoints in messages, in their order."""
    breakpoints = []
    for i, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        breakpoints += [
            Breakpoint(i, j, s)
            for j, part in enumerate(parts, 1)
            if isinstance(part, dict) and (s := seconds_of(part))
        ]
        if seconds := seconds_of(message):
            breakpoints.append(Breakpoint(i, None, seconds))
    return breakpoints


def seconds_of(marked: Mapping[str, Any]) -> int:
    """Seconds for which a `cache_control` keeps its prefix; 0 without one, and for an unknown
    kind.
    """
    control = marked.get("cache_control")
    if not isinstance(control, dict):
        return 0
    ttl = control.get("ttl", "5m")
    return SECONDS.get(ttl, 0) if isinstance(ttl, str) else 0


def without_reminders(messages: list[Message]) -> list[Message]:
    """A chat without the system messages and reminders at its end."""
    end = len(messages)
    while end and messages[end - 1].get("role") in SYSTEM:
        end -= 1
    if not end:
        return messages
    *before, last = messages[:end]
    parts = parts_of(last.get("content")) if last.get("role") == "user" else []
    kept = len(parts)
    while kept and is_text(part := parts[kept - 1]) and REMINDER.fullmatch(part["text"]):
        kept -= 1
    if kept < len(parts):
        if kept:
            return [*before, {**last, "content": parts[:kept]}]
        if before and before[-1].get("role") in ("tool", "user"):
            return before
    return messages[:end]


def checkpoint_positions(
    template: Template, prompt: array[int], messages: list[Message], so_far: list[Message]
) -> list[tuple[int, str]]:
    """(tokens, kind) of the beginnings of a chat's prompt that other prompts will have too; none
    without a template.

    `so_far`: the chat without reminders.
    """
    if not template.tokenizer.has_chat_template:
        return []
    leading = next(
        (i for i, m in enumerate(messages) if m.get("role") not in SYSTEM), len(messages)
    )
    # Of the same kind, the later one would supersede what the next turn begins with.
    beginnings = (
        [("user", so_far)] if so_far == messages else [("assistant", messages), ("user", so_far)]
    )
    if leading or template.tools:
        beginnings.append(("system", [*messages[:leading], EMPTY]))
    checkpoints = {}
    for kind, beginning in beginnings:
        text = _rendered(template, beginning)
        end = common_prefix(template.tokenizer.encode(text, add_special_tokens=False), prompt)
        if 0 < end < len(prompt):
            checkpoints[end] = kind
    return sorted(checkpoints.items())


def _rendered(template: Template, beginning: list[Message]) -> str:
    """The text of the beginning of a chat; "" where the template does not take it."""
    try:
        return template.text(beginning, add_generation_prompt=False)
    except REFUSED as error:
        log.debug(
            "no breakpoint: the template does not take %d messages: %s", len(beginning), error
        )
        return ""


def breakpoint_positions(
    template: Template, prompt: array[int], messages: list[Message], breakpoints: list[Breakpoint]
) -> list[tuple[int, int]]:
    """(tokens, seconds) of each breakpoint whose place the rendered text shows, in order of the
    tokens.

    `messages`: as the client gave them, parts not joined.
    """
    found: dict[int, int] = {}
    text = template.text(messages, add_generation_prompt=True)
    for point in breakpoints:
        beginning = text[: _end_of(point, template, messages, text)]
        encoded = template.tokenizer.encode(beginning, add_special_tokens=False)
        if tokens := common_prefix(encoded, prompt):
            found[tokens] = max(point.seconds, found.get(tokens, 0))
    return sorted(found.items())


def _end_of(point: Breakpoint, template: Template, messages: list[Message], text: str) -> int:
    """Count the characters of the rendered chat `text` that a marked beginning takes.

    0 if that cannot be found.
    """
    if point.message is None:
        return _end_of_tools((template.tools or [])[: point.parts], template, messages, text)
    message = messages[point.message]
    if point.parts is not None:
        message = {name: value for name, value in message.items() if name != "tool_calls"}
        message["content"] = message["content"][: point.parts]
    return _common(template, [*messages[: point.message], message], text)


def _end_of_tools(tools: list[Any], template: Template, messages: list[Message], text: str) -> int:
    """Tools stand before the system prompt in some templates, and after it in others."""
    shown = replace(template, tools=tools)
    name = f"_{tools[-1]['function']['name']}"
    another = {**tools[-1], "function": {**tools[-1]["function"], "name": name}}
    alone = _common(shown, [EMPTY], text)
    if alone > _common(replace(template, tools=[*tools[:-1], another]), [EMPTY], text):
        return alone
    leading = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    return _common(shown, messages[:leading], text)


def _common(template: Template, beginning: list[Message], text: str) -> int:
    if not beginning or beginning[-1]["role"] == "system":
        beginning = [*beginning, EMPTY]
    return common_prefix(text, _rendered(template, beginning))
