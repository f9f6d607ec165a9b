"""How much memory this machine has for a model."""

from __future__ import annotations

import os


def memory_bytes() -> int:
    """Bytes that the device recommends as a process's limit (Metal), or that it has; without either, the machine's memory."""
    import mlx.core as mx

    info = mx.device_info()
    total = info.get("max_recommended_working_set_size") or info.get("total_memory")
    return int(total or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
