"""Scans the store's folder: every file by its name, the records of a model at start, and later what
other processes changed.

Knows names, sizes, times and headers; no budget. Folder and FolderScanner belong to the writer's
thread once the store is open:
they see what the jobs before theirs have done. A Listing belongs to its caller.
"""

from __future__ import annotations

import errno
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BadRecordError
from ..formatting import human_bytes
from .db import DATABASE_FILES
from .fs import TEMPORARY, Buffer, Disk, Entry, Stamp, write_whole
from .headers import Headers
from .paths import KINDS, LEFTOVER_SECONDS, MODEL_FILE, describe, described, folder_of, key_of
from .quarantine import ASIDE
from .reader import Reader
from .record import SUFFIX, VERSION, Key, Record

log = logging.getLogger(__name__)

# Times of use of files that were used one after the other differ by this much, in seconds.
TICK = 1e-6
# The folders of a store, as paths below its own; records are in the innermost ones.
_SHARD = re.compile(rf"models/[^/]+/(?:{'|'.join(KINDS)})/[0-9a-f]{{2}}")
_FOLDER = re.compile(rf"quarantine|models(?:/[^/]+(?:/(?:{'|'.join(KINDS)}))?)?|{_SHARD.pattern}")


# -- all files -------------------------------------------------------------------------------------


class File(NamedTuple):
    """A file of the store in `root`.

    `name`: its path below that; `used`: in seconds since the epoch.
    """

    root: Path
    name: str
    size: int = 0
    used: float = 0.0
    stamp: Stamp = Stamp(0, 0, 0)

    @classmethod
    def of(cls, root: Path, name: str, entry: Entry) -> File:
        return cls(root, name, entry.size, entry.modified, entry.stamp)

    @property
    def path(self) -> Path:
        return self.root / self.name

    @property
    def namespace(self) -> str:
        """The namespace that the file belongs to; empty if it belongs to no model."""
        first, *rest = self.name.split("/")
        return rest[0] if first == "models" and len(rest) > 1 else ""


class Listing:
    """Every file of the store in `root`, sorted by what its name says; `below`: only those in that
    folder, which may be a link.

    namespaces   folders of models.
    leftovers    of writes that never ended; younger ones may be live and are not listed.
    foreign      files and folders that the store did not make, links among them.
    unreadable   folders, and why.
    """

    def __init__(self, root: Path, disk: Disk | None = None, below: str = "") -> None:
        self.root = root
        self.namespaces: list[str] = []
        self.records: list[File] = []
        self.leftovers: list[File] = []
        self.quarantined: list[File] = []
        self.foreign: list[Path] = []
        self.unreadable: list[tuple[Path, OSError]] = []
        self.folders: list[Path] = []
        self._disk = disk or Disk()
        self._young = time.time() - LEFTOVER_SECONDS
        self._walk(below)

    @cached_property
    def models(self) -> dict[str, dict[str, Any] | None]:
        """What the model.json of each namespace says; None if nothing can be read."""
        return {name: described(self._disk, self.root, name) for name in self.namespaces}

    def of(self, namespace: str) -> list[File]:
        """The records of one namespace."""
        return [file for file in self.records if file.namespace == namespace]

    def _walk(self, folder: str) -> None:
        is_shard = _SHARD.fullmatch(folder) is not None
        for entry in self._scan(folder):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if (
                is_shard
                and entry.is_file
                and entry.name.endswith(SUFFIX)
                and not entry.name.startswith(TEMPORARY)
            ):
                self.records.append(File.of(self.root, name, entry))
            elif entry.is_directory and _FOLDER.fullmatch(name):
                self.namespaces += [entry.name] if folder == "models" else []
                self.folders.append(self.root / name)
                self._walk(name)
            else:
                self._add_other(folder, File.of(self.root, name, entry), entry)

    def _add_other(self, folder: str, file: File, entry: Entry) -> None:
        if folder == "quarantine" and ASIDE.fullmatch(entry.name) and not entry.is_directory:
            self.quarantined.append(file)
        elif not entry.is_file:
            self.foreign.append(file.path)
        elif entry.name.startswith(TEMPORARY):
            self.leftovers += [file] if file.used < self._young else []
        elif entry.name not in (
            (MODEL_FILE,) if folder.count("/") == 1 else () if folder else DATABASE_FILES
        ):
            self.foreign.append(file.path)

    def _scan(self, folder: str) -> list[Entry]:
        try:
            return sorted(self._disk.scan(self.root / folder))
        except FileNotFoundError:
            return []
        except OSError as error:
            self.unreadable.append((self.root / folder, error))
            return []


# -- the files of this process and of others -------------------------------------------------------


class ChangedFile(NamedTuple):
    """A file and its bytes; `is_new`: the last look did not find it, or found another size."""

    name: str
    size: int
    is_new: bool


@dataclass
class FolderChanges:
    """What other processes changed in the folder.

    found     files that they wrote or used, the least recently used first.
    gone      names of files that were removed.
    records   headers of new files of our own model.
    unread    keys of new files of our own model that cannot be read at present.
    """

    found: list[ChangedFile]
    gone: list[str]
    records: list[Record] = field(default_factory=list)
    unread: list[Key] = field(default_factory=list)


class Folder:
    """The record files of all models below `root`: `files` as this process has seen them last.

    Names are paths below it.
    """

    def __init__(self, disk: Disk, root: Path) -> None:
        self.disk = disk
        self.root = root
        self.files: dict[str, File] = {}
        self._unreadable: set[Path] = set()

    def look(self) -> FolderChanges:
        """What other processes changed since the last look; removes leftovers of records whose
        writes never ended.

        Raises OSError if the folder of the models cannot be read. The files of an inner one that
        cannot count as unchanged.
        """
        # By its name: `models` may be a link to another disk, and writes follow it.
        listing = Listing(self.root, self.disk, "models")
        before, files = self.files, {file.name: file for file in listing.records}
        was_unreadable, self._unreadable = (
            self._unreadable,
            {path for path, _ in listing.unreadable},
        )
        for path, error in listing.unreadable:
            if path == self.root / "models":
                raise error
            if path not in was_unreadable:
                log.warning("prompt store: %s", error)
            inside = f"{path.relative_to(self.root).as_posix()}/"
            files |= {name: file for name, file in before.items() if name.startswith(inside)}
        for leftover in listing.leftovers:
            if leftover.namespace:
                with suppress(OSError):
                    self.disk.unlink(leftover.path)
        self.files = files
        found = []
        for file in files.values():
            was = before.get(file.name)
            if was is None or (was.size, was.used) != (file.size, file.used):
                found.append(
                    (
                        file.used,
                        ChangedFile(file.name, file.size, was is None or was.size != file.size),
                    )
                )
        return FolderChanges(
            [changed for _, changed in sorted(found)],
            [name for name in before if name not in files],
        )

    def write(self, name: str, buffers: Sequence[Buffer], size: int, keep_free: int = 0) -> None:
        """Write a whole file of `size` bytes, and leave `keep_free` bytes free.

        Raises OSError; size_of() knows what is left.
        """
        path = self.root / name
        try:
            self.disk.make_directory(path.parent)
            free = self.disk.free_bytes(path.parent)
            if free - size < keep_free:
                raise OSError(
                    errno.ENOSPC,
                    f"the disk is full: {human_bytes(free)} are free, and the store leaves "
                    f"{human_bytes(keep_free)} to others. Free space or give another --store-dir",
                    str(path),
                )
            write_whole(self.disk, path, buffers)
        finally:
            self._see(name)

    def remove(self, name: str) -> None:
        """Remove a file, which may be gone already. Raises OSError."""
        with suppress(FileNotFoundError):
            self.disk.unlink(self.root / name)
        self.drop(name)

    def touch(self, names: Iterable[str]) -> None:
        """Set the times of files used just now, one after the other.

        A file whose time cannot be set stays as it is.
        """
        moment = time.time()
        for number, name in enumerate(names):
            if name in self.files:
                with suppress(OSError):
                    self.disk.touch(self.root / name, moment + number * TICK)
                    self._see(name)

    def namespaces(self) -> list[str]:
        """The namespaces of all files."""
        return sorted({file.namespace for file in self.files.values()})

    def size_of(self, name: str) -> int | None:
        """Bytes of a file as this process has seen it; None if there is none."""
        return self.files[name].size if name in self.files else None

    def drop(self, name: str) -> None:
        """A file was moved away: the next one of its name is new."""
        self.files.pop(name, None)

    def _see(self, name: str) -> None:
        try:
            self.files[name] = File.of(self.root, name, self.disk.stat(self.root / name))
        except (BadRecordError, OSError):
            # If there is a file after all, the next look finds it.
            self.drop(name)


@dataclass(frozen=True)
class RecordChanges:
    """Records of our own model that other processes wrote, and keys of those that they removed."""

    found: list[Record]
    lost: list[Key]


@dataclass
class FolderScanner:
    """Scans the folder for the records under a namespace.

    `_about` is written next to them for people to read.
    """

    _folder: Folder
    _reader: Reader
    _headers: Headers
    _namespace: str
    _about: dict[str, Any]

    def describe(self) -> None:
        """Make the namespace's folder, and write down there what it belongs to. Raises OSError."""
        describe(self._folder.disk, self._folder.root, self._namespace, self._about)

    def first(self) -> FolderChanges:
        """Every file; headers that are not noted are read, several at a time.

        Raises OSError if the folder cannot be read.
        """
        changes = self._scan(self._noted_or_read)
        with suppress(OSError):
            self._headers.forget_others(self._folder.namespaces())
        return changes

    def _noted_or_read(self, names: list[str]) -> list[Record | Exception]:
        stamps = {name: self._folder.files[name].stamp for name in names}
        found: dict[str, Record | Exception] = {**self._headers.load(stamps)}
        missing = [name for name in names if name not in found]
        for name, header in zip(
            missing, self._reader.headers(self._namespace, missing), strict=True
        ):
            found[name] = header
            if isinstance(header, Record):
                self._headers.add(header, name, stamps[name])
        return [found[name] for name in names]

    def has_outdated(self) -> bool:
        """Return whether the folder has records of an older format, by the model.json next to
        them.
        """
        about = (
            described(self._folder.disk, self._folder.root, name)
            for name in self._folder.namespaces()
        )
        return any(
            found is not None and found.get("format") in range(1, VERSION) for found in about
        )

    def use(self, names: Sequence[str]) -> None:
        """Set the times of files used just now, the last of them last, for other processes and
        for the next start.
        """
        self._folder.touch(names)
        for name in names:
            if name in self._folder.files:
                self._headers.touch(name, self._folder.files[name].stamp)
        self._headers.write()

    def again(self, used: Sequence[str]) -> FolderChanges:
        """What has changed since the last scan.

        `used`: files that this process used meanwhile, the last of them last.
        """
        self.use(used)
        with suppress(OSError):
            self.describe()
        return self._scan(
            lambda names: [self._reader.header(self._namespace, name) for name in names]
        )

    def _scan(self, read: Callable[[list[str]], list[Record | Exception]]) -> FolderChanges:
        changes = self._folder.look()
        own = f"{folder_of(self._namespace)}/"
        new = [found.name for found in changes.found if found.is_new and found.name.startswith(own)]
        gone = set()
        for name, header in zip(new, read(new), strict=True):
            key = key_of(name)
            if isinstance(header, Record):
                changes.records.append(header)
            elif isinstance(header, FileNotFoundError):
                # No record, or gone again; there may have been one before.
                self._folder.drop(name)
                gone.add(name)
            elif key is not None:
                changes.unread.append(key)
        changes.found = [found for found in changes.found if found.name not in gone]
        changes.gone += gone
        return changes
