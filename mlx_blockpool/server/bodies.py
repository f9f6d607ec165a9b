"""Bodies of requests as JSON, within bounds that keep other threads going while one is parsed.

Python parses JSON without a pause, so large bodies are parsed in a worker process first, which
rejects slow ones.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from ..config import RequestConfig
from ..errors import BlockpoolError

Json = dict[str, Any]

# Larger bodies are checked in a worker process before they are parsed here.
UNCHECKED_BYTES = 256 << 10

# One large body at a time: each stops all threads while it is parsed.
_reading = threading.Lock()


class InvalidRequestError(ValueError):
    """A request that breaks the protocol at a `place` such as `messages.1.content.0.text`."""

    def __init__(self, place: str, what: str) -> None:
        self.place = place
        super().__init__(f"{place}: {what}" if place else what)


class StatusError(BlockpoolError):
    """A request that is not served, and the status of its answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def parse_json(data: bytes) -> Any:
    """Parse a body.

    Raises InvalidRequestError for malformed JSON, and for integers and depths that Python does not
    take.
    """
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
        raise InvalidRequestError(
            "", f"The body has an integer that is too long: {str(error).partition(':')[0]}"
        ) from error


def check_json(data: bytes) -> None:
    """Raises InvalidRequestError for malformed JSON, and for a body that takes too long to parse.

    Runs in a worker process.
    """
    escapes = data.count(b"\\")
    if escapes > RequestConfig.escapes:
        raise InvalidRequestError(
            "",
            f"The body has {escapes:,} escaped characters; at most {RequestConfig.escapes:,} are "
            "read",
        )
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
        if values > RequestConfig.values:
            raise InvalidRequestError(
                "",
                f"The body has more than {RequestConfig.values:,} values; send less, or more of "
                "it as text",
            )
        if depth > RequestConfig.depth:
            raise InvalidRequestError(
                "", f"The body is nested too deeply: more than {RequestConfig.depth} levels"
            )
        level = [inner for outer in level for inner in _inside(outer)]


def _inside(value: Any) -> list[Any]:
    """Children of a JSON value; object keys count too."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else []


def _short(digits: str) -> int:
    if len(digits) > RequestConfig.digits:
        raise InvalidRequestError(
            "",
            f"The body has an integer of {len(digits):,} digits; at most {RequestConfig.digits} "
            "are read",
        )
    return int(digits)
