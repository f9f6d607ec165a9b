"""Cache breakpoints of a chat's prompt: those of its client, and the checkpoints of models with windows or states.

Such models can resume only at a checkpoint: after the system prompt and tools, and after the last message. Positions are found
by rendering the template again, so that they are right for any template, also where the last message is a tool's result.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from ...messages import Message
from ...prefix.trie import common_prefix
from ..request import Breakpoint
from .templates import REFUSED, num_leading, rendered

log = logging.getLogger(__name__)

# Some templates refuse a chat without a user's message.
EMPTY: Message = {"role": "user", "content": ""}


def checkpoint_positions(
    tokenizer: Any, prompt: list[int], messages: list[Message], tools: list[Any] | None, options: dict[str, Any]
) -> list[tuple[int, str]]:
    """(tokens, kind) of the beginnings of a chat's prompt that other prompts will have too.

    `options`: arguments of the template beside messages and tools. A prompt without a template has no such beginnings.
    """
    if not tokenizer.has_chat_template:
        return []
    options = {**options, "tools": tools}
    leading = num_leading(messages)
    beginnings = [("user", messages)]
    if leading or tools:
        beginnings.append(("system", [*messages[:leading], EMPTY]))
    checkpoints = {}
    for kind, beginning in beginnings:
        end = _end_of(tokenizer, prompt, beginning, options)
        if 0 < end < len(prompt):
            checkpoints[end] = kind
    return sorted(checkpoints.items())


def _end_of(tokenizer: Any, prompt: list[int], beginning: list[dict[str, Any]], options: dict[str, Any]) -> int:
    """Count the tokens that a rendered beginning has in common with the prompt; 0 where the template does not take it."""
    try:
        tokens = tokenizer.apply_chat_template(beginning, add_generation_prompt=False, tokenize=True, **options)
    except REFUSED as error:
        log.debug("no breakpoint: the template does not take %d messages: %s", len(beginning), error)
        return 0
    return common_prefix(list(tokens), prompt)


def breakpoint_positions(
    tokenizer: Any,
    prompt: list[int],
    messages: list[Message],
    tools: list[Any] | None,
    breakpoints: list[Breakpoint],
    options: dict[str, Any],
) -> list[tuple[int, int]]:
    """(tokens, seconds) of each breakpoint whose place the rendered text shows, in order of the tokens.

    `messages`: as the client gave them, parts not joined. `options`: arguments of the template beside them and `tools`.
    """
    chat = _Chat(tokenizer, messages, tools or [], options)
    found: dict[int, int] = {}
    text = chat.text(messages, tools or [], add_generation_prompt=True)
    count = _counter(tokenizer, prompt, text)
    for point in breakpoints:
        if tokens := count(chat.end_of(point, text)):
            found[tokens] = max(point.seconds, found.get(tokens, 0))
    return sorted(found.items())


class _Chat:
    """One chat, of which beginnings are rendered."""

    def __init__(self, tokenizer: Any, messages: list[Message], tools: list[Any], options: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._messages = messages
        self._tools = tools
        self._options = options

    def end_of(self, point: Breakpoint, text: str) -> int:
        """Count the characters of the rendered chat that a marked beginning takes; 0 where that is not known."""
        if point.message is None:
            return self._end_of_tools(point.parts or 0, text)
        message = self._messages[point.message]
        if point.parts is not None:
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            message["content"] = message["content"][: point.parts]
        return self._common([*self._messages[: point.message], message], self._tools, text)

    def _end_of_tools(self, count: int, text: str) -> int:
        """Tools stand before the system prompt in some templates, and after it in others."""
        tools = self._tools[:count]
        name = f"_{tools[-1]['function']['name']}"
        another = {**tools[-1], "function": {**tools[-1]["function"], "name": name}}
        alone, changed = (self._common([EMPTY], shown, text) for shown in (tools, [*tools[:-1], another]))
        if alone > changed:
            return alone
        leading = next((i for i, m in enumerate(self._messages) if m["role"] != "system"), len(self._messages))
        return self._common(self._messages[:leading], tools, text)

    def _common(self, beginning: list[Message], tools: list[Any], text: str) -> int:
        if not beginning or beginning[-1]["role"] == "system":
            beginning = [*beginning, EMPTY]
        try:
            return common_prefix(text, self.text(beginning, tools))
        except REFUSED as error:
            log.debug("no breakpoint: the template does not take %d messages: %s", len(beginning), error)
            return 0

    def text(self, messages: list[Message], tools: list[Any], add_generation_prompt: bool = False) -> str:
        return rendered(self._tokenizer, messages, tools, add_generation_prompt=add_generation_prompt, **self._options)


def _counter(tokenizer: Any, prompt: list[int], text: str) -> Callable[[int], int]:
    """A function from characters of the rendered text to tokens of the prompt: how many tokens lie before."""
    try:
        encoded = tokenizer._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    except (NotImplementedError, TypeError, KeyError):
        ids, offsets = None, ()
    if ids is not None and list(prompt[: len(ids)]) == list(ids):
        behind = [end for _, end in offsets]
        return lambda chars: bisect_right(behind, chars)
    # The tokenizer reports no offsets.
    return lambda chars: common_prefix(tokenizer.encode(text[:chars], add_special_tokens=False), prompt)
