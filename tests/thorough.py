"""How often random tests are run: rather seldom, or as often as was promised with BLOCKPOOL_THOROUGH=1."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("BLOCKPOOL_THOROUGH", "") not in ("", "0")


def times(usual: int, thorough: int) -> int:
    return thorough if THOROUGH else usual
