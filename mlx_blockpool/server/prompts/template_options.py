"""Checks `chat_template_kwargs`: a request may have the switches that chat templates read, and names that the operator allows.

Every other argument of a tokenizer's apply_chat_template() (a template of one's own, padding, lengths) is the operator's.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ..bodies import InvalidRequestError
from ..validation import Body, Int, Text, validated

Line = Annotated[Text, Field(max_length=4096)]
PLACE = "chat_template_kwargs"


class Switches(Body):
    """Arguments that templates of well-known models read, beside messages and tools. None leaves it to the template."""

    add_vision_id: bool | None = None
    available_tools: list[Any] | None = None
    builtin_tools: list[Any] | None = None
    citation_mode: Line | None = None
    clear_thinking: bool | None = None
    controls: dict[str, Any] | None = None
    current_date: Line | None = None
    custom_tools: list[Any] | None = None
    date_string: Line | None = None
    documents: list[Any] | None = None
    enable_citations: bool | None = None
    enable_thinking: bool | None = None
    force_reasoning: bool | None = None
    keep_past_thinking: bool | None = None
    low_effort: bool | None = None
    model_identity: Line | None = None
    preserve_thinking: bool | None = None
    python_tools: list[Any] | None = None
    reasoning_effort: Line | None = None
    safety_mode: Line | None = None
    thinking: bool | Line | None = None
    thinking_budget: Int | None = None
    thinking_mode: Line | None = None
    today: Line | None = None
    tools_in_user_message: bool | None = None
    xml_tools: list[Any] | None = None


def check_template_options(options: dict[str, Any] | None, allowed: tuple[str, ...] | None) -> None:
    """Raises InvalidRequestError, with the name of the option, for an option that a request may not have.

    `allowed`: names beside Switches, with any value; None: any name.
    """
    given = {name: value for name, value in (options or {}).items() if allowed is not None and name not in allowed}
    for name in given.keys() - Switches.model_fields.keys():
        raise InvalidRequestError(
            f"{PLACE}.{name[:50]}",
            f"requests may not give templates this argument; start the server with --allow-template-kwargs {name[:50]} "
            f"to let them. They may give {', '.join(Switches.model_fields)}.",
        )
    validated(Switches, given, lambda path: f"{PLACE}.{path[0]}")
