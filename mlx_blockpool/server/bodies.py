"""Bodies of requests as JSON, within bounds that keep other threads going while one is parsed.

Python parses JSON without a pause, so large bodies are parsed in a worker process first, which rejects slow ones.
"""

from __future__ import annotations

import json
import threading
from typing import Any

# Larger bodies are checked in a worker process before they are parsed here.
UNCHECKED_BYTES = 256 << 10
MOST_VALUES = 200_000
MOST_ESCAPES = 1_000_000
MOST_DIGITS = 400
DEEPEST = 200

# One large body at a time: each stops all threads while it is parsed.
_reading = threading.Lock()


class InvalidRequestError(ValueError):
    """A request that breaks the protocol at a `place` such as `messages.1.content.0.text`."""

    def __init__(self, place: str, what: str) -> None:
        self.place = place
        super().__init__(f"{place}: {what}" if place else what)


def parse_json(data: bytes) -> Any:
    """Parse a body. Raises InvalidRequestError for malformed JSON, and for integers and depths that Python does not take."""
    if len(data) <= UNCHECKED_BYTES:
        return _parse(data)
    with _reading:
        return _parse(data)


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise InvalidRequestError("", f"The body is not UTF-8: {error}") from error
    except RecursionError as error:
        raise InvalidRequestError("", "The body is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise InvalidRequestError("", f"Invalid JSON in request body: {error}") from error
    except ValueError as error:
        # Python's limit for digits.
        raise InvalidRequestError("", f"The body has an integer that is too long: {str(error).partition(':')[0]}") from error


def check_json(data: bytes) -> None:
    """Raises InvalidRequestError for malformed JSON, and for a body that takes too long to parse. Runs in a worker process."""
    escapes = data.count(b"\\")
    if escapes > MOST_ESCAPES:
        raise InvalidRequestError("", f"The body has {escapes:,} escaped characters; at most {MOST_ESCAPES:,} are read")
    try:
        value = json.loads(data, parse_int=_short)
    except InvalidRequestError:
        raise
    except (ValueError, RecursionError):
        _parse(data)
        raise
    values, level, depth = 0, [value], 0
    while level:
        values, depth = values + len(level), depth + 1
        if values > MOST_VALUES:
            raise InvalidRequestError("", f"The body has more than {MOST_VALUES:,} values; send less, or more of it as text")
        if depth > DEEPEST:
            raise InvalidRequestError("", f"The body is nested too deeply: more than {DEEPEST} levels")
        level = [inner for outer in level for inner in _inside(outer)]


def _inside(value: Any) -> list[Any]:
    """The values in a value; a name counts as one."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else []


def _short(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise InvalidRequestError("", f"The body has an integer of {len(digits):,} digits; at most {MOST_DIGITS} are read")
    return int(digits)
