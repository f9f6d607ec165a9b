"""Scans the store's folder: all of it by what names say, the records of a model at start, and later what other processes changed.

Knows names and headers; no budget. A FolderScanner works in the writer's thread, in the order of its jobs: what was handed to the
writer after that is not in its result. A Listing belongs to its caller.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .folder import ChangedFile, Folder, is_record
from .fs import TEMPORARY, Disk, Entry, Stamp
from .headers import Headers
from .paths import KINDS, LEFTOVER_SECONDS, OF_A_MODEL, OF_THE_STORE, described, folder_of, key_of
from .quarantine import ASIDE
from .reader import HeaderRead, Reader
from .record import Key, Record

SHARD = re.compile("[0-9a-f]{2}")


# -- all files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A file of the store; `namespace` is empty where it belongs to no model. `used`: when, in seconds since the epoch.

    `stamp`: by what it is known again; None: it is no record.
    """

    path: Path
    namespace: str
    size: int
    used: float
    stamp: Stamp | None = None


class Listing:
    """Every file of the store in `root`, by what its name says.

    models       what is known of each namespace, from its model.json; None: nothing.
    leftovers    of writes that never ended; younger ones may be live and are not listed.
    foreign      what the store did not make, links among it.
    unreadable   folders, and why.
    """

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self.models: dict[str, dict[str, Any] | None] = {}
        self.records: list[File] = []
        self.leftovers: list[File] = []
        self.quarantined: list[File] = []
        self.agents: list[File] = []
        self.foreign: list[Path] = []
        self.unreadable: list[tuple[Path, str]] = []
        self.folders: list[Path] = []
        self._disk = disk or Disk()
        self._young = time.time() - LEFTOVER_SECONDS
        for folder in self._inside(root):
            if folder.name == "models":
                for model in self._inside(folder):
                    self._add_model(model)
            elif folder.name in ("agents", "quarantine"):
                self._add_plain(folder)
            else:
                self.foreign.append(folder)

    def of(self, namespace: str) -> list[File]:
        return [file for file in self.records if file.namespace == namespace]

    def _add_model(self, folder: Path) -> None:
        self.models[folder.name] = described(self._disk, self.root, folder.name)
        for inner in self._inside(folder, folder.name):
            if inner.name not in KINDS:
                self.foreign.append(inner)
                continue
            for shard in self._inside(inner, folder.name):
                if SHARD.fullmatch(shard.name):
                    self._add_shard(shard, folder.name)
                else:
                    self.foreign.append(shard)

    def _add_shard(self, shard: Path, namespace: str) -> None:
        self.folders.append(shard)
        for entry in self._scan(shard):
            file = File(shard / entry.name, namespace, entry.size, entry.modified, entry.stamp)
            if is_record(entry):
                self.records.append(file)
            else:
                self._add_other(file, entry.is_file)

    def _add_plain(self, folder: Path) -> None:
        self.folders.append(folder)
        for entry in self._scan(folder):
            file = File(folder / entry.name, "", entry.size, entry.modified)
            if folder.name == "agents" and entry.name.endswith(".json") and entry.is_file:
                self.agents.append(file)
            elif folder.name == "quarantine" and ASIDE.fullmatch(entry.name) and not entry.is_directory:
                self.quarantined.append(file)
            else:
                self._add_other(file, entry.is_file)

    def _add_other(self, file: File, is_file: bool) -> None:
        if not (file.path.name.startswith(TEMPORARY) and is_file):
            self.foreign.append(file.path)
        elif file.used < self._young:
            self.leftovers.append(file)

    def _inside(self, folder: Path, namespace: str = "") -> list[Path]:
        """The folders in a folder, by name. Files among them are leftovers, model.json or foreign."""
        if folder != self.root:
            self.folders.append(folder)
        found = []
        for entry in self._scan(folder):
            if entry.is_directory:
                found.append(folder / entry.name)
            elif not (entry.is_file and entry.name in self._expected(folder, namespace)):
                self._add_other(File(folder / entry.name, namespace, entry.size, entry.modified), entry.is_file)
        return sorted(found)

    def _expected(self, folder: Path, namespace: str) -> tuple[str, ...]:
        """The names of what lies in a folder beside others, and is neither a record nor left over."""
        if folder == self.root:
            return OF_THE_STORE
        return OF_A_MODEL if namespace and folder.name == namespace else ()

    def _scan(self, folder: Path) -> list[Entry]:
        try:
            return sorted(self._disk.scan(folder))
        except FileNotFoundError:
            return []
        except OSError as error:
            self.unreadable.append((folder, str(error)))
            return []


# -- beside other processes -----------------------------------------------------------------------------------------------


@dataclass
class FolderChanges:
    """What other processes changed in the folder.

    found     files that they wrote or used, the one used longest ago first.
    gone      names of files that are not there any more.
    records   headers of new files of our own model.
    unread    keys of new files of our own model that cannot be read at present.
    """

    found: list[ChangedFile]
    gone: list[str]
    records: list[Record] = field(default_factory=list)
    unread: list[Key] = field(default_factory=list)


@dataclass(frozen=True)
class RecordChanges:
    """Records of our own model that other processes wrote, and keys of those that are not there any more."""

    found: list[Record]
    lost: list[Key]


class FolderScanner:
    """Scans `folder` for the records under `namespace`. `describe` writes down what they belong to, or raises OSError."""

    def __init__(self, folder: Folder, reader: Reader, headers: Headers, namespace: str, describe: Callable[[], None]) -> None:
        self._folder = folder
        self._headers = headers
        self._unnoted: list[tuple[Record, Stamp]] = []
        self._reader = reader
        self._describe = describe
        self._own = folder_of(namespace) + "/"
        self._namespace = namespace

    def first(self) -> FolderChanges:
        """Every file; headers that are not noted are read, several at a time. Raises OSError if the folder cannot be read."""
        return self._seen(self._noted_or_read)

    def _noted_or_read(self, names: list[str]) -> list[HeaderRead]:
        stamps = {name: stamp for name in names if (stamp := self._folder.stamp_of(name)) is not None}
        found = {name: HeaderRead(record) for name, record in self._headers.load(stamps).items()}
        noted = set(found) if self._headers.is_whole else set()
        missing = [name for name in names if name not in found]
        found |= zip(missing, self._reader.headers(self._namespace, missing), strict=True)
        self._unnoted = [(r, stamps[name]) for name in stamps if name not in noted and (r := found[name].record) is not None]
        return [found[name] for name in names]

    def note(self) -> None:
        """Note the headers that first() had to read, for the next start."""
        for record, stamp in self._unnoted:
            self._headers.add(record, stamp)
        self._unnoted = []
        self._headers.write()

    def use(self, names: Sequence[str]) -> None:
        """Set the times of files used just now, the last of them last, for other processes and for the next start."""
        self._folder.touch(names)
        for name in names:
            stamp = self._folder.stamp_of(name)
            if stamp is not None:
                self._headers.touch(name, stamp)
        self._headers.write()

    def again(self, used: Sequence[str]) -> FolderChanges:
        """What has changed since the last scan. `used`: files that this process used meanwhile, the last of them last."""
        self.use(used)
        with suppress(OSError):
            self._describe()
        return self._seen(lambda names: [self._reader.header(self._namespace, name) for name in names])

    def _seen(self, read: Callable[[list[str]], list[HeaderRead]]) -> FolderChanges:
        changes = self._folder.look()
        seen = FolderChanges(changes.found, changes.gone)
        new = [found.name for found in changes.found if found.is_new and found.name.startswith(self._own)]
        bad = set()
        for name, header in zip(new, read(new), strict=True):
            key = key_of(name)
            if not header.is_there:
                # No record, or gone again; it may have been one before.
                bad.add(name)
                self._folder.forget(name)
                seen.gone.append(name)
            elif header.record is not None:
                seen.records.append(header.record)
            elif key is not None:
                seen.unread.append(key)
        seen.found = [found for found in changes.found if found.name not in bad]
        return seen


class FolderWatcher:
    """Decides when the folder is scanned again, and which results of a scan are out of date. Owned by the generation thread.

    A scan is due once `look_bytes` were passed to the writer since the last one, or `seconds` after anything was written or used.
    While one is under way, at most `look_bytes` are passed on.
    """

    def __init__(self, look_bytes: int, seconds: float) -> None:
        self.look_bytes = look_bytes
        self.seconds = seconds
        self.is_looking = False
        self.names: set[str] = set()
        self._handed = 0
        self._asked_at = time.monotonic()

    def hand(self, name: str, size: int) -> None:
        self.names.add(name)
        self._handed += size

    def allows(self, size: int) -> bool:
        return not self.is_looking or not self._handed or self._handed + size <= self.look_bytes

    def is_due(self, has_news: bool, at_once: bool) -> bool:
        """Whether to scan now. `has_news`: files were used here since; `at_once`: the folder was never read yet."""
        waited = time.monotonic() - self._asked_at >= self.seconds
        wrote = 0 < self._handed >= self.look_bytes
        return not self.is_looking and (at_once or wrote or (waited and (has_news or self._handed > 0)))

    def ask(self) -> None:
        self.is_looking, self._handed, self._asked_at = True, 0, time.monotonic()
        self.names = set()

    def sift(self, seen: FolderChanges) -> FolderChanges:
        """The changes, without files that were passed to the writer since the scan was asked for."""
        found = [found for found in seen.found if found.name not in self.names]
        return replace(seen, found=found, gone=[name for name in seen.gone if name not in self.names])
