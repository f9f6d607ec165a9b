"""The record files in the store's folder, and what others changed there since the last look. Knows names, sizes and times.

Owned by the writer's thread once the store is open.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import BadRecordError
from .fs import TEMPORARY, Buffer, Disk, Entry, Stamp, sweep, write_whole
from .paths import FOLDERS, LEFTOVER_SECONDS
from .record import SUFFIX

log = logging.getLogger(__name__)

# Times of use of files that were used one after the other differ by this much, in seconds.
TICK = 1e-6


class ChangedFile(NamedTuple):
    """A file that is there and its bytes; `is_new`: it was not, or not as large, when we looked last."""

    name: str
    size: int
    is_new: bool


class FileChanges(NamedTuple):
    """What others have done: files that they wrote or used, the one used longest ago first, and names that are no more."""

    found: list[ChangedFile]
    gone: list[str]


class FileState(NamedTuple):
    """Bytes of a file, and when it was used; None: by us, and not looked at since. `stamp` None: it could not be asked for."""

    size: int
    used: float | None
    stamp: Stamp | None


class Folder:
    """The record files of all models below `root`. Names are paths below it, as in layout."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self.disk = disk
        self.root = root
        self._known: dict[str, dict[str, FileState]] = {}

    def look(self) -> FileChanges:
        """What has changed since the last look other than by this process; leftovers of writes that never ended go away.

        Raises OSError where nothing can be seen. What lies in a folder that cannot be read is taken to be as it was.
        """
        known, self._known = self._known, {}
        found: list[tuple[float, ChangedFile]] = []
        try:
            for shard in self._shards(known):
                before = known.get(shard, {})
                self._known[shard] = self._scan(shard, before)
                for file, (size, used, _) in self._known[shard].items():
                    was = before.get(file)
                    if was is None or was.size != size or was.used not in (None, used):
                        found.append((used or 0.0, ChangedFile(f"{shard}/{file}", size, was is None or was.size != size)))
        except OSError:
            self._known = known
            raise
        gone = [f"{shard}/{file}" for shard, files in known.items() for file in files if file not in self._known.get(shard, {})]
        return FileChanges([one for _, one in sorted(found)], gone)

    def write(self, name: str, buffers: Sequence[Buffer], size: int, keep_free: int = 0) -> None:
        """A whole file of `size` bytes that leaves `keep_free` free. Raises OSError; size_of() tells what is there then."""
        path = self.root / name
        try:
            self.disk.make_directory(path.parent)
            free = self.disk.free_bytes(path.parent)
            if free - size < keep_free:
                raise OSError(errno.ENOSPC, f"{free} bytes free, {keep_free} are to stay so", str(path))
            write_whole(self.disk, path, buffers)
        except OSError:
            self._note(name, self._ask(path))
            raise
        self._note(name, self._ask(path) or FileState(size, None, None))

    def remove(self, name: str) -> None:
        """Raises OSError if it cannot; what is gone already is as good."""
        with suppress(FileNotFoundError):
            self.disk.unlink(self.root / name)
        self._note(name, None)

    def touch(self, names: Iterable[str]) -> None:
        """These were used just now, one after the other. A file whose time cannot be set stays as it is."""
        moment = time.time()
        for number, name in enumerate(names):
            size = self.size_of(name)
            if size is not None:
                with suppress(OSError):
                    self.disk.touch(self.root / name, moment + number * TICK)
                    self._note(name, self._ask(self.root / name) or FileState(size, None, None))

    def size_of(self, name: str) -> int | None:
        """Bytes of a file as this process knows it; None: there is none."""
        found = self._get(name)
        return None if found is None else found.size

    def stamp_of(self, name: str) -> Stamp | None:
        """By what a file is known again; None: there is none, or it could not be asked for."""
        found = self._get(name)
        return None if found is None else found.stamp

    def _get(self, name: str) -> FileState | None:
        shard, _, file = name.rpartition("/")
        return self._known.get(shard, {}).get(file)

    def forget(self, name: str) -> None:
        """It was moved away."""
        self._note(name, None)

    def _note(self, name: str, known: FileState | None) -> None:
        shard, _, file = name.rpartition("/")
        if known is None:
            self._known.get(shard, {}).pop(file, None)
        else:
            self._known.setdefault(shard, {})[file] = known

    def _ask(self, path: Path) -> FileState | None:
        try:
            found = self.disk.stat(path)
        except (BadRecordError, OSError):
            # Should there be something after all, the next look finds it.
            return None
        return FileState(found.size, None, found.stamp)

    def _shards(self, known: Collection[str]) -> Iterator[str]:
        for model in _folders(self.disk, self.root / "models"):
            for kind in FOLDERS.values():
                place = f"models/{model}/{kind}"
                try:
                    yield from (f"{place}/{shard}" for shard in _folders(self.disk, self.root / place))
                except OSError:
                    yield from (shard for shard in known if shard.startswith(place + "/"))

    def _scan(self, shard: str, before: dict[str, FileState]) -> dict[str, FileState]:
        try:
            entries = self.disk.scan(self.root / shard)
        except FileNotFoundError:
            return {}
        except OSError as error:
            log.warning("prompt store: %s", error)
            return before
        if any(entry.name.startswith(TEMPORARY) for entry in entries):
            with suppress(OSError):
                sweep(self.disk, self.root / shard, time.time() - LEFTOVER_SECONDS)
        return {entry.name: FileState(entry.size, entry.modified, entry.stamp) for entry in entries if is_record(entry)}


def is_record(entry: Entry) -> bool:
    """Whether a file in a shard is a record, by its name."""
    # What is no regular file is not the store's: it is neither read nor counted, and a record takes its place.
    return entry.is_file and entry.name.endswith(SUFFIX) and not entry.name.startswith(TEMPORARY)


def _folders(disk: Disk, path: Path) -> list[str]:
    try:
        return [entry.name for entry in disk.scan(path) if entry.is_directory]
    except FileNotFoundError:
        return []
