"""The memory of this machine."""

from __future__ import annotations

import ctypes
import os
import sys


def memory_bytes() -> int:
    """The device's recommended limit for a process (Metal), or its memory, or else the machine's. In bytes."""
    import mlx.core as mx

    info = mx.device_info()
    total = info.get("max_recommended_working_set_size") or info.get("total_memory")
    return int(total or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def trim_memory() -> None:
    """Return freed memory to the system: glibc keeps arrays that are smaller than the largest one freed before."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
