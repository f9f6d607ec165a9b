"""Bodies of mlx-lm's own endpoints: the checks beside mlx-lm's, for values that would only fail later or fail others."""

from __future__ import annotations

from typing import Any

from ...config import RequestConfig
from ..bounds import check_count
from ..fields import is_number

# Fields of mlx-lm's handler that must be finite numbers.
NUMBERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "num_draft_tokens",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "presence_context_size",
    "frequency_penalty",
    "frequency_context_size",
    "top_logprobs",
    "xtc_probability",
    "xtc_threshold",
)


def check_logit_bias(body: dict[str, Any]) -> None:
    """Raises ValueError for biases that mlx-lm's own conversion cannot take."""
    bias = body.get("logit_bias")
    bias = bias if isinstance(bias, dict) else {}
    check_count("logit_bias", bias, RequestConfig.logit_bias)
    if not all(isinstance(value, int | float) and is_number(value) for value in bias.values()):
        raise ValueError("logit_bias must be a dict of int to float")


def check_numbers(handler: Any) -> None:
    """Raises ValueError for a field of the handler that mlx-lm takes and mlx cannot compute with."""
    for name in NUMBERS:
        value = getattr(handler, name)
        if isinstance(value, bool) or not is_number(value):
            raise ValueError(f"{name} must be a finite number")


def check_body(body: dict[str, Any]) -> None:
    """Raises ValueError for fields that mlx-lm does not check."""
    stop = body.get("stop")
    if not (stop is None or isinstance(stop, str) or (isinstance(stop, list) and all(isinstance(s, str) for s in stop))):
        raise ValueError("stop must be a string or a list of strings")
    if not isinstance(body.get("stream_options"), dict | None):
        raise ValueError("stream_options must be a dict")
    if not isinstance(body.get("chat_template_kwargs"), dict | None):
        raise ValueError("chat_template_kwargs must be of type dict")
    if "messages" in body:
        _check_messages(body["messages"])
    if "prompt" in body and not isinstance(body["prompt"], str):
        raise ValueError("prompt must be a string")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list with at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}] must be a dict with a role")
