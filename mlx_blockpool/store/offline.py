"""A prompt store as files alone: what is there, what is wrong with it, and what may go. Knows records; no trie, no arrays.

Works beside servers that run on the same files: what goes away meanwhile was never there. Follows no links below the store's
folder, and touches nothing there that the store does not make itself.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import StoreConfig
from ..errors import BadRecordError
from ..spec import BLOCK_TOKENS
from .fs import TEMPORARY, Disk, Entry, Stamp
from .headers import Headers
from .paths import KINDS, LEFTOVER_SECONDS, OF_A_MODEL, OF_THE_STORE, described
from .quarantine import ASIDE, Quarantine
from .record import BLOCK, SUFFIX, Expected, Naming, Record
from .verify import check, read_header

READERS = 4
_SHARD = re.compile("[0-9a-f]{2}")
_RECORD = re.compile(f"[0-9a-f]{{64}}{re.escape(SUFFIX)}")


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


@dataclass(frozen=True)
class Header:
    """What a good record says of its place: the tokens [start, end) behind the prefix `parent`."""

    kind: str
    hash: bytes
    parent: bytes
    start: int
    end: int


@dataclass(frozen=True)
class Judged:
    """A record file and its header, or what is wrong with it; neither: it went away meanwhile."""

    file: File
    header: Header | None = None
    problem: str | None = None


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
                if _SHARD.fullmatch(shard.name):
                    self._add_shard(shard, folder.name)
                else:
                    self.foreign.append(shard)

    def _add_shard(self, shard: Path, namespace: str) -> None:
        self.folders.append(shard)
        for entry in self._scan(shard):
            file = File(shard / entry.name, namespace, entry.size, entry.modified, entry.stamp)
            if entry.name.endswith(SUFFIX) and not entry.name.startswith(TEMPORARY) and entry.is_file:
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


def judge(files: Sequence[File], naming: Naming, with_data: bool = False, disk: Disk | None = None) -> Iterator[Judged]:
    """Each file in turn, by its name, length and header, or to its last byte. Reads several at a time."""
    used = disk or Disk()
    readers = ThreadPoolExecutor(READERS)
    try:
        yield from readers.map(lambda file: _judge(used, file, naming, with_data), files)
    finally:
        readers.shutdown(cancel_futures=True)


def seen(root: Path, files: Sequence[File], naming: Naming, disk: Disk | None = None) -> Iterator[Judged]:
    """The same for who changes nothing by it: headers that a server has noted are not read again."""
    used = disk or Disk()
    stamps: dict[str, dict[str, Stamp]] = {}
    for file in files:
        if file.stamp is not None:
            stamps.setdefault(file.namespace, {})[str(file.path.relative_to(root))] = file.stamp
    noted = {
        root / name: record
        for namespace, own in stamps.items()
        for name, record in Headers(used, root, namespace, naming).load(own).items()
    }
    yield from (Judged(file, _header(noted[file.path])) for file in files if file.path in noted)
    yield from judge([file for file in files if file.path not in noted], naming, disk=used)


def _judge(disk: Disk, file: File, naming: Naming, with_data: bool) -> Judged:
    expected = Expected(file.namespace, KINDS[file.path.parents[1].name])
    try:
        record = (check if with_data else read_header)(disk, file.path, expected, naming)
    except FileNotFoundError:
        return Judged(file)
    except (BadRecordError, OSError) as error:
        return Judged(file, problem=str(error))
    if file.path.parent.name != file.path.name[:2]:
        return Judged(file, problem=f"{file.path}: found in folder {file.path.parent.name}, needed in {file.path.name[:2]}.")
    return Judged(file, _header(record))


def _header(record: Record) -> Header:
    return Header(record.kind, record.hash, record.parent, record.start, record.start + len(record.tokens))


def orphans(found: Iterable[Judged]) -> list[File]:
    """The good records of one namespace that no chain of parents leads to from a beginning: a restart would not find them."""
    good = [(judged.file, judged.header) for judged in found if judged.header is not None]
    children: dict[bytes, list[Header]] = {}
    for _, header in good:
        children.setdefault(header.parent, []).append(header)
    reached = [header for _, header in good if header.start == 0]
    reachable = set(reached)
    for parent in reached:
        if parent.kind == BLOCK and parent.end - parent.start == BLOCK_TOKENS:
            nearer = [h for h in children.get(parent.hash, []) if h.start == parent.end and h not in reachable]
            reached += nearer
            reachable.update(nearer)
    return [file for file, header in good if header not in reachable]


def set_aside(root: Path, judged: Judged, disk: Disk | None = None) -> None:
    """A bad file into quarantine. Raises OSError."""
    assert judged.problem is not None, f"{judged.file.path} is good"
    Quarantine(disk or Disk(), root, StoreConfig().quarantine_bytes).set_aside(judged.file.path, judged.problem)


def remove(files: Iterable[File], disk: Disk | None = None) -> list[File]:
    """Unlink files of the store; other ones stay. Returns those that are gone by it. Raises OSError."""
    gone = []
    for file in files:
        if _is_own(file.path) and is_plain(file.path):
            with suppress(FileNotFoundError):
                (disk or Disk()).unlink(file.path)
                gone.append(file)
    return gone


def remove_empty(folders: Iterable[Path]) -> list[Path]:
    """Remove the folders of the store that hold nothing, inner ones first. Returns those that are gone by it."""
    gone = []
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        with suppress(OSError):
            os.rmdir(folder)
            gone.append(folder)
    return gone


def is_plain(path: Path) -> bool:
    """Whether this is a file: no link, no pipe, nothing that reading could wait for."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _is_own(path: Path) -> bool:
    """Whether the store gives files such names."""
    in_shard = _SHARD.fullmatch(path.parent.name) and _RECORD.fullmatch(path.name)
    aside = path.parent.name == "quarantine" and ASIDE.fullmatch(path.name)
    return bool(in_shard or aside or path.name.startswith(TEMPORARY) or path.name in OF_A_MODEL)
