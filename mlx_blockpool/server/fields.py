"""Checks of a request's fields, for the protocols whose bodies are no pydantic models. Errors name the field's place."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Any

log = logging.getLogger(__name__)

KINDS = {str: "string", bool: "boolean", int: "integer", dict: "dictionary", list: "list"}
REQUIRED: Any = object()
# mlx takes integers of 64 bits; Python's may be larger.
LARGEST = 2**63 - 1


class InvalidRequestError(ValueError):
    """A request that breaks the protocol at a `place` such as `messages.1.content.0.text`."""

    def __init__(self, place: str, what: str) -> None:
        self.place = place
        super().__init__(f"{place}: {what}" if place else what)


def field(source: dict[str, Any], name: str, place: str, kind: type, default: Any = REQUIRED) -> Any:
    """source[name], of `kind`; where it is absent or null: `default`, without one an InvalidRequestError."""
    at = inside(place, name)
    value = source.get(name)
    if value is None:
        if default is REQUIRED:
            raise InvalidRequestError(at, "Field required")
        return default
    return checked(value, kind, at)


def number(source: dict[str, Any], name: str, default: float, low: float, high: float = math.inf) -> float:
    """A finite number of the request itself within [low, high]."""
    value = source.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_number(value):
        raise InvalidRequestError(name, "Input should be a valid number")
    if not low <= value <= high:
        span = f"greater than or equal to {low}" if high == math.inf else f"between {low} and {high}"
        raise InvalidRequestError(name, f"Input should be {span}")
    return value


def is_number(value: float) -> bool:
    """Whether a number is finite and within 64 bits."""
    return abs(value) <= LARGEST


def checked(value: Any, kind: type, at: str) -> Any:
    """`value`, of `kind`; a boolean is no integer. Raises InvalidRequestError."""
    is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not is_kind or (isinstance(value, int) and not is_number(value)):
        raise InvalidRequestError(at, f"Input should be a valid {KINDS[kind]}")
    return value


def one_of(value: str, names: tuple[str, ...], at: str) -> str:
    """`value`, one of `names`. Raises InvalidRequestError."""
    if value not in names:
        raise InvalidRequestError(at, f"Input should be {' or '.join(map(repr, names))}; found {value[:50]!r}")
    return value


def known(value: str | None, names: Collection[str], at: str) -> str | None:
    """`value` where it is one of `names`. Others, which newer versions of the protocol may have, are logged and count as None."""
    if value is None or value in names:
        return value
    log.info("%s: %r is not known here and has no effect", at, value[:50])
    return None


def inside(place: str, name: str | int) -> str:
    return f"{place}.{name}" if place else str(name)
