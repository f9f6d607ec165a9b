"""Which `chat_template_kwargs` a request may have: the switches that chat templates read, and names that the operator allows.

Every other argument of a tokenizer's apply_chat_template() (a template of one's own, padding, lengths) is the operator's.
"""

from __future__ import annotations

from typing import Any

from ..bodies import InvalidRequestError

# Characters of a switch that is text.
LONGEST = 4096
# What templates of well-known models read, beside messages and tools, and as what. None means what the template makes of it.
SWITCHES: dict[str, tuple[type, ...]] = {
    "add_vision_id": (bool,),
    "available_tools": (list,),
    "builtin_tools": (list,),
    "citation_mode": (str,),
    "clear_thinking": (bool,),
    "controls": (dict,),
    "current_date": (str,),
    "custom_tools": (list,),
    "date_string": (str,),
    "documents": (list,),
    "enable_citations": (bool,),
    "enable_thinking": (bool,),
    "force_reasoning": (bool,),
    "keep_past_thinking": (bool,),
    "low_effort": (bool,),
    "model_identity": (str,),
    "preserve_thinking": (bool,),
    "python_tools": (list,),
    "reasoning_effort": (str,),
    "safety_mode": (str,),
    "thinking": (bool, str),
    "thinking_budget": (int,),
    "thinking_mode": (str,),
    "today": (str,),
    "tools_in_user_message": (bool,),
    "xml_tools": (list,),
}
NAMES = {bool: "boolean", str: "string", int: "integer", list: "list", dict: "dictionary"}
PLACE = "chat_template_kwargs"


def check_template_options(options: dict[str, Any] | None, allowed: tuple[str, ...] | None) -> None:
    """Raises InvalidRequestError, with the name of the option, for an option that a request may not have.

    `allowed`: names beside SWITCHES, with any value; None: any name.
    """
    for name, value in (options or {}).items():
        if allowed is None or name in allowed:
            continue
        if name not in SWITCHES:
            known = ", ".join(SWITCHES)
            raise InvalidRequestError(
                f"{PLACE}.{name[:50]}",
                f"requests may not give templates this argument; start the server with --allow-template-kwargs {name[:50]} "
                f"to let them. They may give {known}.",
            )
        kinds = SWITCHES[name]
        right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if value is not None and not right:
            needed = " or ".join(NAMES[kind] for kind in kinds)
            raise InvalidRequestError(f"{PLACE}.{name}", f"Input should be a valid {needed}")
        if isinstance(value, str) and len(value) > LONGEST:
            raise InvalidRequestError(f"{PLACE}.{name}", f"String should have at most {LONGEST} characters; found {len(value)}")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise InvalidRequestError(f"{PLACE}.{name}", "Input should be an integer of 64 bits")
