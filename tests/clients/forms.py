"""What SDKs are asked for in tests: types with the parts of a schema that users write, and how
often a try is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

MODEL = "default_model"
LIMIT = 300
TRIES = 6


class Step(BaseModel):
    why: str
    result: int | None


class Answer(BaseModel):
    """Nested, optional, and one of several."""

    steps: list[Step]
    verdict: Literal["yes", "no", "it depends"]
    sure: bool


class Bounded(BaseModel):
    """With bounds, which Anthropic's SDK does not send."""

    name: str = Field(min_length=2, max_length=8, pattern="^[a-z]+$")
    days: int = Field(ge=1, le=7)
    tags: list[Literal["warm", "wet"]] = Field(max_length=2)


class Finite(BaseModel):
    """Without anything that could go on for ever."""

    verdict: Literal["yes", "no"]
    sure: bool | None


class Weather(BaseModel):
    """Looks the weather up."""

    city: str
    unit: Literal["celsius", "fahrenheit"]
    days: int | None


def ended(
    ask: Callable[[int], Any], is_cut: Callable[[Any], bool], *cut_errors: type[Exception]
) -> Any:
    """The first reply to `ask(seed)` that ended by itself.

    Most do, so that a few tries are enough.
    """
    for seed in range(TRIES):
        try:
            reply = ask(seed)
        except cut_errors:
            continue
        if not is_cut(reply):
            return reply
    raise AssertionError(f"none of {TRIES} replies ended by itself")
