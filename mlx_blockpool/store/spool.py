"""Spool: files on their way in or out, whole on disk before anything is done with them, and removed afterwards. Knows bytes only.

Any thread may call anything here.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..config import StoreConfig
from ..errors import NoRoomError
from .fs import Disk, sweep, temporary_for
from .paths import LEFTOVER_SECONDS, default_folder
from .record import SUFFIX

# The most files at a time.
MOST = 4


class Spool:
    """Files in the folder `root`; None: the system's for temporary files. All together leave `min_free_bytes` free together."""

    def __init__(self, root: Path | None, min_free_bytes: int, disk: Disk | None = None) -> None:
        self.root = Path(tempfile.gettempdir()) if root is None else root
        self.min_free_bytes = min_free_bytes
        self._disk = disk or Disk()
        self._is_own = root is not None
        self._reserved: dict[Path, int] = {}
        self._changing = threading.Lock()

    @staticmethod
    def of(store: StoreConfig | None) -> Spool:
        """In the store's folder, or without a store with the system's temporary files."""
        if store is None:
            return Spool(None, StoreConfig.min_free_bytes)
        return Spool(store.folder or default_folder(), store.min_free_bytes)

    @contextmanager
    def file(self, n_bytes: int) -> Iterator[Path]:
        """The path of a new empty file for at most this many bytes; it is removed when the block ends.

        Raises NoRoomError, before anything is sent or read, if there is no room for it, and OSError.
        """
        self._disk.make_directory(self.root)
        path = temporary_for(self.root / "file").with_suffix(SUFFIX)
        self._reserve(path, n_bytes)
        try:
            if self._is_own:
                sweep(self._disk, self.root, time.time() - LEFTOVER_SECONDS)
            self._disk.close(self._disk.create(path))
            yield path
        finally:
            with suppress(FileNotFoundError):
                self._disk.unlink(path)
            with self._changing:
                del self._reserved[path]

    def progress(self) -> list[tuple[int, int]]:
        """Bytes written, and bytes announced, of each file that is being written."""
        with self._changing:
            reserved = list(self._reserved.items())
        found = []
        for path, n_bytes in reserved:
            with suppress(OSError):
                found.append((path.stat().st_size, n_bytes))
        return [(done, total) for done, total in found if done < total]

    def _reserve(self, path: Path, n_bytes: int) -> None:
        with self._changing:
            if len(self._reserved) >= MOST:
                raise NoRoomError(f"{MOST} files are on their way in or out already. Try again once one of them is through.")
            # Bytes of the others that are written already count twice, which errs on the safe side.
            free = self._disk.free_bytes(self.root) - sum(self._reserved.values()) - self.min_free_bytes
            if free < n_bytes:
                raise NoRoomError(
                    f"The file has {n_bytes} bytes, and the disk has {max(0, free)} beside those that it keeps free. "
                    "Make room on the disk of the store's folder."
                )
            self._reserved[path] = n_bytes
