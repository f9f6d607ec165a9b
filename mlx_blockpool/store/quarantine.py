"""Quarantine: bad files, kept within a bound for people to look at. Knows names and sizes; no
records.

Any thread may call anything here.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path

from ..config import StoreConfig
from .fs import Disk, Entry, safe_name, write_synced

log = logging.getLogger(__name__)

FOLDER = "quarantine"
# The names of files in quarantine, and the end of a reason's name.
ASIDE = re.compile("[0-9a-f]{16}-.+")
REASON = ".txt"


class Quarantine:
    """The quarantine of the store in `root`, at most `most_bytes` with the reasons.

    `nbytes`: its bytes as bounded last.
    """

    def __init__(
        self,
        disk: Disk,
        root: Path,
        most_bytes: int,
        most_files: int = StoreConfig.quarantine_files,
    ) -> None:
        self.folder = root / FOLDER
        self.most_bytes, self._most_files = most_bytes, most_files
        self.nbytes = 0
        self._disk = disk
        self._bounding = threading.Lock()

    def set_aside(self, path: Path, reason: str) -> Path | None:
        """Move a bad file here, never over another one, with the reason next to it. Returns its
        path now, or None if it is gone.

        Raises OSError if it cannot be moved. Nothing is synced: after a power cut a bad file is as
        bad as before.
        """
        self._disk.make_directory(self.folder)
        aside = self.folder / f"{secrets.token_hex(8)}-{safe_name(path.name)}"
        try:
            self._disk.rename(path, aside)
        except FileNotFoundError:
            return None
        # From now on its time is the one at which it came here.
        with suppress(OSError):
            self._disk.touch(aside, time.time())
        # The reason is a service to the user; a disk without space for it must not stop the move.
        with suppress(OSError):
            text = f"{path}\n{reason}\n".encode(errors="backslashreplace")
            write_synced(self._disk, aside.with_name(aside.name + REASON), [text], sync=False)
        self.bound()
        return aside

    def bound(self) -> None:
        """Remove files over the bound, each with its reason: those that are too large alone,
        then the oldest.
        """
        with self._bounding:
            try:
                found = self._disk.scan(self.folder)
            except FileNotFoundError:
                self.nbytes = 0
                return
            except OSError as error:
                log.warning("prompt store: %s", error)
                return
            pairs: dict[str, list[Entry]] = {}
            for entry in found:
                # A directory counts for no budget, and is not removed.
                if ASIDE.fullmatch(entry.name) and not entry.is_directory:
                    pairs.setdefault(entry.name.removesuffix(REASON), []).append(entry)
            sizes = {name: sum(entry.size for entry in pair) for name, pair in pairs.items()}
            since = {name: max(entry.modified for entry in pair) for name, pair in pairs.items()}
            left, count = sum(sizes.values()), len(pairs)
            self.nbytes = left
            for name in sorted(
                pairs, key=lambda name: (sizes[name] <= self.most_bytes, since[name])
            ):
                if left <= self.most_bytes and count <= self._most_files:
                    break
                left, count = left - sizes[name], count - 1
                self._remove(pairs[name])

    def _remove(self, entries: list[Entry]) -> None:
        for entry in entries:
            try:
                with suppress(FileNotFoundError):
                    self._disk.unlink(self.folder / entry.name)
                self.nbytes -= entry.size
            except OSError as error:
                log.warning("prompt store: %s", error)
