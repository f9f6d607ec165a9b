"""The outcome of a check. Knows no models."""

from __future__ import annotations

from dataclasses import dataclass

PASSED, FAILED, NOT_CHECKED = "passed", "FAILED", "not checked"


class ConformanceError(AssertionError):
    """A check failed. The message says what the check got, what it expected and what to do."""

    def __init__(self, found: str, needed: str, hint: str) -> None:
        super().__init__(f"Got {found}; expected {needed}. {hint}")


class NotCheckedError(Exception):
    """A check does not apply to the model; the message says why."""


@dataclass(frozen=True)
class Result:
    """The result of one check: "passed", "FAILED" or "not checked". `text`: what was checked, found, or why not."""

    check: str
    outcome: str
    text: str

    @property
    def passed(self) -> bool:
        """True if the check passed or did not apply."""
        return self.outcome != FAILED

    def __str__(self) -> str:
        return f"{self.check}: {self.outcome}. {self.text}"
