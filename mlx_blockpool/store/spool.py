"""Files on their way in or out: whole on disk before anything is done with them, and gone afterwards. Knows bytes only.

Any thread may call anything here.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import NoRoomError
from .fs import TEMPORARY, Disk, sweep
from .paths import LEFTOVER_SECONDS
from .record import SUFFIX

# So many files are on their way at a time.
MOST = 4


class Spool:
    """Room for such files in the store's folder, or where there is none in that of the system's temporary files.

    All together leave `min_free_bytes` of the file system free.
    """

    def __init__(self, root: Path | None, min_free_bytes: int, disk: Disk | None = None) -> None:
        self.root = Path(tempfile.gettempdir()) if root is None else root
        self.min_free_bytes = min_free_bytes
        self._disk = disk or Disk()
        self._is_own = root is not None
        self._promised: dict[str, int] = {}
        self._changing = threading.Lock()

    @contextmanager
    def file(self, n_bytes: int) -> Iterator[Path]:
        """The path of a new empty file that will have at most so many bytes; it is gone behind the block.

        Raises NoRoomError, before anything is sent or read, if there is no room for it, and OSError.
        """
        self._disk.make_directory(self.root)
        name = f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}{SUFFIX}"
        self._promise(name, n_bytes)
        path = self.root / name
        try:
            if self._is_own:
                sweep(self._disk, self.root, time.time() - LEFTOVER_SECONDS)
            self._disk.close(self._disk.create(path))
            yield path
        finally:
            with suppress(FileNotFoundError):
                self._disk.unlink(path)
            with self._changing:
                del self._promised[name]

    def _promise(self, name: str, n_bytes: int) -> None:
        with self._changing:
            if len(self._promised) >= MOST:
                raise NoRoomError(
                    f"Found {MOST} files on their way in or out; needed fewer. Try again once one of them is through."
                )
            # What the others have written already counts twice, which errs on the safe side.
            free = self._disk.free_bytes(self.root) - sum(self._promised.values()) - self.min_free_bytes
            if free < n_bytes:
                raise NoRoomError(
                    f"Found room for {max(0, free)} bytes beside what the disk keeps free; needed {n_bytes} for a file. "
                    "Make room on the disk of the store's folder."
                )
            self._promised[name] = n_bytes
