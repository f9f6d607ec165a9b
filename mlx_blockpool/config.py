"""Every default, in one place."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import BlockpoolError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


@dataclass(frozen=True)
class PoolConfig:
    """How the pool takes memory.

    pool_bytes:   hard limit for keys and values, in bytes; None: half of the memory that the model leaves free.
    preallocate:  take all of it at the start instead of slab by slab.
    slabs:        an ordinary slab is at most this part of the budget, ...
    slab_blocks:  ... and at most this many blocks; larger ones make longer runs, smaller ones take memory later.
    max_tokens:   room that a fetch in a script reserves after the prompt unless told otherwise.
    """

    pool_bytes: int | None = None
    preallocate: bool = False
    slabs: int = 4
    slab_blocks: int = 64
    max_tokens: int = 512


def parse_bytes(text: str) -> int:
    """'4GB', '512 MiB' or '1000' in bytes. Raises BlockpoolError on anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([A-Z]*)", text.strip().upper())
    if found is None or found[2] not in _UNITS:
        raise BlockpoolError(f"Found size {text!r}; needed a number with a unit, such as 4GB or 512MiB.")
    return int(float(found[1]) * _UNITS[found[2]])
