"""Checks the files of a prompt store: what is wrong with each, what nothing leads to, and what may go. Knows records; no trie.

Works beside servers that run on the same files: what goes away meanwhile was never there. Follows no links below the store's
folder, and touches nothing there that the store does not make itself.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..config import StoreConfig
from ..errors import BadRecordError
from ..spec import BLOCK_TOKENS
from .fs import TEMPORARY, Disk, Stamp
from .headers import Headers
from .paths import KINDS, OF_A_MODEL
from .quarantine import ASIDE, Quarantine
from .record import BLOCK, SUFFIX, Expected, Naming, Record
from .scan import SHARD, File
from .verify import check, read_header

READERS = 4
_RECORD = re.compile(f"[0-9a-f]{{64}}{re.escape(SUFFIX)}")


@dataclass(frozen=True)
class RecordPlace:
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
    header: RecordPlace | None = None
    problem: str | None = None


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


def _header(record: Record) -> RecordPlace:
    return RecordPlace(record.kind, record.hash, record.parent, record.start, record.start + len(record.tokens))


def orphans(found: Iterable[Judged]) -> list[File]:
    """The good records of one namespace that no chain of parents leads to from a beginning: a restart would not find them."""
    good = [(judged.file, judged.header) for judged in found if judged.header is not None]
    children: dict[bytes, list[RecordPlace]] = {}
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
    in_shard = SHARD.fullmatch(path.parent.name) and _RECORD.fullmatch(path.name)
    aside = path.parent.name == "quarantine" and ASIDE.fullmatch(path.name)
    return bool(in_shard or aside or path.name.startswith(TEMPORARY) or path.name in OF_A_MODEL)
