"""A finding of the doctor: what was looked at, what it found, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ...errors import BlockpoolError

# problem: the server will not work as it is. warning: it works, and something should be done. note: a fact.
State = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """`about`: what was looked at; `figures`: the same for programs."""

    about: str
    state: State
    text: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[], list[Finding]]


def looked_at(about: str, check: Check) -> list[Finding]:
    """The findings of a check. A check that fails is a finding: the others go on."""
    try:
        return check()
    except BlockpoolError as error:
        return [Finding(about, "problem", str(error))]
    except Exception as error:
        # Devices, disks and files of models fail in any way.
        advice = "Run the doctor again; if it stays so, report this line."
        return [Finding(about, "problem", f"The check failed: {type(error).__name__}: {error}", advice)]


def status_of(findings: list[Finding]) -> int:
    """The exit status: 1 if something is a problem."""
    return int(any(finding.state == "problem" for finding in findings))
