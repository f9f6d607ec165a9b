"""Whether the tests were asked to be thorough: by pytest's option --thorough, or BLOCKPOOL_THOROUGH=1 in the environment."""

from __future__ import annotations

import os


def is_thorough() -> bool:
    return os.environ.get("BLOCKPOOL_THOROUGH", "") not in ("", "0")


def examples(quick: int, thorough: int) -> int:
    """How many examples a property is tried with."""
    return thorough if is_thorough() else quick
