"""Checks the files of a prompt store: what is wrong with each, which records nothing leads to, and
removing files.

Knows records; no trie. Works while servers run on the same files: a file that goes away meanwhile
was never there. Follows no links below the store's folder, and touches nothing there that the store
does not make itself.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from ..config import StoreConfig
from ..formatting import progress
from .fs import TEMPORARY, Disk
from .headers import Headers
from .paths import KINDS, MODEL_FILE
from .quarantine import ASIDE, Quarantine
from .reader import inspect
from .record import SUFFIX, Record
from .scan import File, Listing

READERS = 4
_OWN = re.compile(
    rf"models/[^/]+/(?:{'|'.join(KINDS)})/[0-9a-f]{{2}}/[0-9a-f]{{64}}{re.escape(SUFFIX)}"
    rf"|quarantine/{ASIDE.pattern}|(?:.+/)?{re.escape(TEMPORARY)}[^/]*|models/[^/]+/{re.escape(MODEL_FILE)}"
)


@dataclass(frozen=True)
class Judged:
    """A file and its header without the parts, or what is wrong with it; neither if it is gone."""

    file: File
    header: Record | None = None
    problem: str | None = None


def judge(
    files: Sequence[File], with_data: bool = False, noted: bool = False, disk: Disk | None = None
) -> Iterator[Judged]:
    """Each record file by its name, length and header, or to its last byte. Reads several at a
    time.

    `noted`: believe the headers that a server has noted, for reports that change nothing.
    """
    used = disk or Disk()
    headers = _noted(files) if noted else {}
    yield from (Judged(file, headers[file]) for file in files if file in headers)
    readers = ThreadPoolExecutor(READERS)
    try:
        rest = [file for file in files if file not in headers]
        yield from readers.map(lambda file: _judge(used, file, with_data), rest)
    finally:
        readers.shutdown(cancel_futures=True)


def judge_all(
    root: Path,
    with_data: bool = False,
    noted: bool = False,
    namespaces: Collection[str] | None = None,
) -> tuple[Listing, list[Judged], list[Judged]]:
    """judge() for a store's records (of these namespaces): the listing, its records, and those that
    were written since.

    A server may write parents after their folder was listed: only a second look proves that there
    are none.
    """

    def wanted(listing: Listing) -> list[File]:
        return [f for f in listing.records if namespaces is None or f.namespace in namespaces]

    listing = Listing(root)
    files = wanted(listing)
    judged = list(
        progress(
            judge(files, with_data, noted), len(files), "checksums" if with_data else "headers"
        )
    )
    seen = {file.name for file in files}
    later = [file for file in wanted(Listing(root)) if file.name not in seen]
    return listing, judged, list(judge(later))


def _noted(files: Sequence[File]) -> dict[File, Record]:
    found: dict[File, Record] = {}
    for (root, namespace), group in groupby(files, lambda file: (file.root, file.namespace)):
        own = {file.name: file for file in group}
        noted = Headers(root, namespace).load({name: file.stamp for name, file in own.items()})
        found |= {own[name]: record for name, record in noted.items()}
    return found


def _judge(disk: Disk, file: File, with_data: bool) -> Judged:
    found = inspect(disk, file.path, file.namespace, with_data)
    if isinstance(found, Record):
        return Judged(file, replace(found, parts=(), checksums=()))
    return Judged(file, problem=None if isinstance(found, FileNotFoundError) else str(found))


def set_aside(root: Path, path: Path, problem: str) -> None:
    """Move a bad file into the quarantine of the store in `root`. Raises OSError."""
    Quarantine(Disk(), root, StoreConfig().quarantine_bytes).set_aside(path, problem)


def remove(files: Iterable[File]) -> list[File]:
    """Unlink regular files with names that the store gives.

    Returns those that are gone by it. Raises OSError.
    """
    gone = []
    for file in files:
        with suppress(FileNotFoundError):
            if _OWN.fullmatch(file.name) and stat.S_ISREG(os.lstat(file.path).st_mode):
                os.unlink(file.path)
                gone.append(file)
    return gone


def remove_empty(folders: Iterable[Path]) -> list[Path]:
    """Remove the folders of the store that hold nothing, inner ones first.

    Returns those that are gone by it.
    """
    gone = []
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        with suppress(OSError):
            os.rmdir(folder)
            gone.append(folder)
    return gone
