"""Bad files, kept aside for people to look at: so many bytes of them, and the oldest go. Knows names and sizes; no records.

Any thread may call anything here.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .fs import Disk, Entry, quarantine

log = logging.getLogger(__name__)

FOLDER = "quarantine"
# What disk.quarantine() makes, and the end of a reason's name.
ASIDE = re.compile("[0-9a-f]{16}-.+")
REASON = ".txt"
# However small they are: a folder of very many names is slow.
MOST_FILES = 1000


class Quarantine:
    """The quarantine of the store in `root`, at most `most_bytes` with the reasons. `nbytes`: what it held at the last look."""

    def __init__(self, disk: Disk, root: Path, most_bytes: int) -> None:
        self.folder = root / FOLDER
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._disk = disk
        self._bounding = threading.Lock()

    def set_aside(self, path: Path, reason: str) -> None:
        """Move a bad file here. Raises OSError if it can neither be moved nor is gone."""
        quarantine(self._disk, path, self.folder, reason)
        self.bound()

    def bound(self) -> None:
        """Remove what is over the bound, each file with its reason: what alone is too large, then what is here longest."""
        with self._bounding:
            try:
                found = self._disk.scan(self.folder)
            except FileNotFoundError:
                self.nbytes = 0
                return
            except OSError as error:
                log.warning("prompt store: %s", error)
                return
            # A directory is in nobody's budget, and not removed.
            entries = {entry.name: entry for entry in found if ASIDE.fullmatch(entry.name) and not entry.is_directory}
            self.nbytes = sum(entry.size for entry in entries.values())
            for names in list(self._to_go(entries)):
                self._remove([entries[name] for name in names])

    def _to_go(self, entries: dict[str, Entry]) -> Iterator[list[str]]:
        pairs: dict[str, list[str]] = {}
        for name in entries:
            pairs.setdefault(name.removesuffix(REASON), []).append(name)
        sizes = {pair: sum(entries[name].size for name in names) for pair, names in pairs.items()}
        since = {pair: max(entries[name].modified for name in names) for pair, names in pairs.items()}
        left, count = self.nbytes, len(pairs)
        for pair in sorted(pairs, key=lambda pair: (sizes[pair] <= self.most_bytes, since[pair])):
            if left <= self.most_bytes and count <= MOST_FILES:
                return
            left, count = left - sizes[pair], count - 1
            yield pairs[pair]

    def _remove(self, entries: list[Entry]) -> None:
        for entry in entries:
            try:
                with suppress(FileNotFoundError):
                    self._disk.unlink(self.folder / entry.name)
                self.nbytes -= entry.size
            except OSError as error:
                log.warning("prompt store: %s", error)
