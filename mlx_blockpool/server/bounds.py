"""How many messages, tools, biases and stop words one request may have, so that checking it does not hold up others."""

from __future__ import annotations

from typing import Any

from ..config import RequestConfig
from .fields import InvalidRequestError


def check_bounds(request: Any, args: Any, config: RequestConfig) -> None:
    """Raises InvalidRequestError with the field that has too much."""
    check_count("messages", request.messages, config.messages)
    check_count("tools", request.tools or (), config.tools)
    check_count("logit_bias", args.logits.logit_bias or (), config.logit_bias)
    check_count("stop", args.stop_words, config.stop_words)
    longest = max(map(len, args.stop_words), default=0)
    if longest > config.stop_characters:
        raise InvalidRequestError("stop", f"a stop string may have {config.stop_characters:,} characters; found {longest:,}")


def check_count(place: str, values: Any, most: int) -> None:
    """Raises InvalidRequestError for more than `most` values."""
    if len(values) > most:
        raise InvalidRequestError(place, f"there may be {most:,} of them in a request; found {len(values):,}")
