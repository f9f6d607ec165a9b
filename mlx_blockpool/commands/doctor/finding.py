"""A finding of the doctor: what was checked, the result, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ...errors import BlockpoolError

# problem: the server will not work as it is. warning: it works, and something should be done. note:
# a fact.
State = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """`about`: what was checked; `text`: the result; `figures`: the result for programs."""

    about: str
    state: State
    text: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def looked_at(about: str, check: Callable[..., list[Finding]], *args: Any) -> list[Finding]:
    """The findings of a check. A check that raises is a finding, and the others continue."""
    try:
        return check(*args)
    except BlockpoolError as error:
        return [Finding(about, "problem", str(error))]
    except Exception as error:
        # Devices, disks and model files may raise anything.
        advice = "Run the doctor again; if it fails again, report this line."
        return [
            Finding(about, "problem", f"The check failed: {type(error).__name__}: {error}", advice)
        ]
