"""Every default, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import BlockpoolError

_UNITS = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "KB": 10**3,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
    "T": 10**12,
    "TB": 10**12,
}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


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
    stripped = text.strip().upper()
    number = stripped.rstrip("KMGTIB ")
    unit = stripped[len(number) :].strip()
    try:
        return int(float(number) * _UNITS[unit])
    except (KeyError, ValueError):
        raise BlockpoolError(f"Found size {text!r}; needed a number with a unit, such as 4GB or 512MiB.") from None
