"""Whether mlx can compute on this machine, the machine's memory, and what of it Metal may wire."""

from __future__ import annotations

import ctypes
import os
import sys


def mlx_problem() -> tuple[str, str] | None:
    """Return why mlx cannot be imported and what to do about it, or None if mlx can be imported."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        # On a Mac mlx requires its backend; elsewhere the backend is an extra, and libmlx is a part
        # of it.
        is_backend = "libmlx" in str(error)
        what = (
            f"{'mlx has no backend to compute with' if is_backend else 'mlx cannot be imported'} "
            f"({error})."
        )
        if sys.platform == "darwin":
            return what, "Reinstall it: pip install --force-reinstall mlx mlx-metal"
        return (
            what,
            "Install its backend: pip install 'mlx-blockpool[cpu]', or 'mlx-blockpool[cuda]' for "
            "an NVIDIA GPU.",
        )
    return None


def memory_bytes() -> int:
    """The device's recommended limit for a process (Metal), or its memory, or else the machine's.

    In bytes.
    """
    import mlx.core as mx

    info = mx.device_info()
    total = info.get("max_recommended_working_set_size") or info.get("total_memory")
    return int(total or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def trim_memory() -> None:
    """Return freed memory to the system: glibc keeps arrays that are smaller than the largest
    one freed before.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class WiredLimit:
    """How much memory Metal keeps from being paged out, until restore().

    n_bytes: None: what the device recommends, as mlx-lm does; 0: the limit is left alone.
    """

    def __init__(self, n_bytes: int | None) -> None:
        import mlx.core as mx
        from mlx_lm.utils import maybe_set_recommended_wired_limit

        # None where nothing was set.
        self._before: int | None = None
        if n_bytes is None:
            self._before = maybe_set_recommended_wired_limit()
        elif n_bytes and mx.metal.is_available():
            self._before = int(mx.set_wired_limit(n_bytes))

    def restore(self) -> None:
        """Give back the limit that was there before. Waits for the device."""
        import mlx.core as mx

        if self._before is not None:
            mx.synchronize()
            mx.set_wired_limit(self._before)
            self._before = None
