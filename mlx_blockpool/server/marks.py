"""Where a chat prompt is worth a checkpoint: behind the system prompt and tools, and behind the last message.

For models with windows or states; what they held at other tokens is gone. Positions are found by rendering the template again, so
that they are right for any template, also where the last message is a tool's result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from ..engine.request import common_prefix
from ..messages import Message

log = logging.getLogger(__name__)

SYSTEM = ("system", "developer")


def checkpoint_positions(
    tokenizer: Any, prompt: Sequence[int], messages: list[Message], tools: list[Any] | None, options: dict[str, Any]
) -> list[tuple[int, str]]:
    """(tokens, kind) of the beginnings of a chat's prompt that other prompts will have too.

    `options`: what is given to the template beside messages and tools. A prompt without a template has none.
    """
    if not tokenizer.has_chat_template:
        return []
    options = {**options, "tools": tools}
    leading = next((i for i, m in enumerate(messages) if m.get("role") not in SYSTEM), len(messages))
    beginnings = [("user", messages)]
    if leading or tools:
        beginnings.append(("system", [*messages[:leading], {"role": "user", "content": ""}]))
    marks = {}
    for kind, beginning in beginnings:
        end = _end_of(tokenizer, prompt, beginning, options)
        if 0 < end < len(prompt):
            marks[end] = kind
    return sorted(marks.items())


def pins_of(request: Any) -> list[tuple[int, int]]:
    """(tokens, seconds) of the beginnings that its client has marked to be kept, once its prompt was tokenized."""
    rendered = getattr(request, "rendered", None)
    return [] if rendered is None else list(rendered.marks or ())


def _end_of(tokenizer: Any, prompt: Sequence[int], beginning: list[dict[str, Any]], options: dict[str, Any]) -> int:
    """How many tokens a rendered beginning has in common with the prompt; 0 where the template does not take it."""
    try:
        tokens = tokenizer.apply_chat_template(beginning, add_generation_prompt=False, tokenize=True, **options)
    except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
        log.debug("no mark: the template does not take %d messages: %s", len(beginning), error)
        return 0
    return common_prefix(list(tokens), prompt)
