"""Every default, in one place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import BlockpoolError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}

DECODE_PATHS = ("auto", "ragged", "shared", "padded")


@dataclass(frozen=True)
class PoolConfig:
    """How the pool takes memory.

    pool_bytes:   hard limit for keys and values, in bytes; None: half of the memory that the model leaves free.
    preallocate:  take all of it at the start instead of slab by slab.
    slabs:        an ordinary slab is at most this part of the budget, ...
    slab_blocks:  ... and at most this many blocks; larger ones make longer runs, smaller ones take memory later.
    max_tokens:   room that a fetch in a script reserves after the prompt unless told otherwise.
    decode_path:  how a batch reads its keys and values; auto: by a measured rule (cache/paths.py).
    """

    pool_bytes: int | None = None
    preallocate: bool = False
    slabs: int = 4
    slab_blocks: int = 64
    max_tokens: int = 512
    decode_path: str = "auto"


@dataclass(frozen=True)
class EngineConfig:
    """How the engine shares its time and memory.

    prefill_tokens: a prefill is computed in chunks that end at multiples of this.
    prefill_rows:   at most this many short prompts go into one chunk.
    decode_share:   part of the time that decode gets while prompts wait for their prefill, 0 to below 1.
    max_members:    at most this many requests have caches at a time.
    shared_tokens:  fewer tokens than these are computed again rather than waited for.
    join_seconds:   requests that arrive within this time of each other start together.
    stall_seconds:  a server that has work and computes nothing for so long is not healthy.
    """

    prefill_tokens: int = 512
    prefill_rows: int = 8
    decode_share: float = 0.5
    max_members: int = 32
    shared_tokens: int = 64
    join_seconds: float = 0.01
    stall_seconds: float = 120.0


@dataclass(frozen=True)
class StoreConfig:
    """The prompt store on disk.

    folder:          None: the user's cache folder.
    store_bytes:     hard limit for all records together.
    bits:            8 or 4: quantise on disk; None: as it is in memory.
    queue_bytes:     at most so much waits to be written; what is more stays in memory only.
    step_bytes:      at most so much is copied out of the pool between two steps.
    min_free_bytes:  what the file system keeps free.
    daily_bytes:     at most so much is written in a day; None: no limit.
    idle_seconds:    once nothing was asked for so long, the partial blocks at the ends of conversations are written too.
    flush_seconds:   how long a shutdown waits for what is not written yet.
    retry_seconds:   how long a disk that failed is left alone.
    """

    folder: Path | None = None
    store_bytes: int = 20 * 10**9
    bits: int | None = None
    queue_bytes: int = 256 * 10**6
    step_bytes: int = 32 * 10**6
    min_free_bytes: int = 2 * 10**9
    daily_bytes: int | None = None
    idle_seconds: float = 60.0
    flush_seconds: float = 10.0
    retry_seconds: float = 30.0


def parse_bytes(text: str) -> int:
    """'4GB', '512 MiB' or '1000' in bytes. Raises BlockpoolError on anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([A-Z]*)", text.strip().upper())
    if found is None or found[2] not in _UNITS:
        raise BlockpoolError(f"Found size {text!r}; needed a number with a unit, such as 4GB or 512MiB.")
    return int(float(found[1]) * _UNITS[found[2]])
