"""Reader: reads records, several at a time, and proves their content before it returns any of it;
bad files go into quarantine.

Knows bytes and tokens; no arrays, no index, no budget. Any thread may call anything here.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from ..errors import BadRecordError
from .fs import Disk, Into
from .hashing import edge_hash
from .paths import KINDS
from .quarantine import Quarantine
from .record import MAX_HEADER_BYTES, Expected, Record, decode_header, header_size, need

log = logging.getLogger(__name__)

# The threads that wait for records never read: they would hang with the disk.
READERS = 2 if (os.cpu_count() or 1) <= 2 else 3
PIECE_BYTES = 1 << 24
# The first read of a header; few headers are longer.
_FIRST_BYTES = 1 << 14


class RecordData(NamedTuple):
    """A record and the bytes of each part; `begun`, `ended`: when it was read
    (time.perf_counter()), 0 if it was in memory.
    """

    record: Record
    views: list[memoryview]
    begun: float = 0.0
    ended: float = 0.0


# -- one file --------------------------------------------------------------------------------------


def read_header(disk: Disk, path: Path, expected: Expected) -> Record:
    """The record in a file, by its header and length alone: its data are not read and may be bad.

    Raises BadRecordError, and OSError if the file cannot be read.
    """
    with _named(path):
        data = disk.read(path, 0, _FIRST_BYTES)
        if header_size(data) > len(data):
            data = disk.read(path, 0, header_size(data))
        return _checked(decode_header(data), path, disk.size(path), header_size(data), expected)


def read(disk: Disk, path: Path, expected: Expected, into: Into | None = None) -> RecordData:
    """A record and the bytes of each part, views of what `into` gave, after everything about them
    was verified.

    Errors as in read_header. Reading and checksums release the GIL: to be faster, read several at a
    time.
    """
    begun = time.perf_counter()
    with _named(path):
        largest = (
            expected.max_bytes
            if expected.parts is None
            else sum(part.nbytes for part in expected.parts)
        )
        most = MAX_HEADER_BYTES + largest + 1
        if expected.parts is None:
            claimed = disk.size(path) - header_size(disk.read(path, 0, 8))
            need(claimed <= largest, "bytes of data", claimed, f"at most {largest}")
        data = (
            memoryview(disk.read(path, 0, most))
            if into is None
            else disk.read_into(path, into, most)
        )
        head = header_size(data)
        record = _checked(decode_header(data, expected.parts), path, len(data), head, expected)
        need(record.nbytes <= largest, "bytes of data", record.nbytes, f"at most {largest}")
        starts = accumulate((part.nbytes for part in record.parts), initial=head)
        views = [data[start:end] for start, end in pairwise(starts)]
        for number, view in enumerate(views):
            _need_checksum(record, number, zlib.crc32(view))
        return RecordData(record, views, begun, time.perf_counter())


def check(disk: Disk, path: Path, expected: Expected) -> Record:
    """Prove a record of any size without returning its bytes: at most PIECE_BYTES of them are in
    memory.
    """
    record = read_header(disk, path, expected)
    with _named(path):
        start = disk.size(path) - record.nbytes
        for number, part in enumerate(record.parts):
            end, found = start + part.nbytes, 0
            for at in range(start, end, PIECE_BYTES):
                data = disk.read(path, at, min(PIECE_BYTES, end - at))
                need(
                    len(data) == min(PIECE_BYTES, end - at),
                    "bytes of the file",
                    at + len(data),
                    "those of its header",
                )
                found = zlib.crc32(data, found)
            _need_checksum(record, number, found)
            start = end
    return record


def inspect(
    disk: Disk, path: Path, namespace: str, with_data: bool = False
) -> Record | BadRecordError | OSError:
    """A record file by its name, place, length and header, or to its last byte: the record, or
    the error that there is none.
    """
    try:
        record = (check if with_data else read_header)(
            disk, path, Expected(namespace, KINDS[path.parents[1].name])
        )
        with _named(path):
            need(path.parent.name == path.name[:2], "folder", path.parent.name, path.name[:2])
    except (BadRecordError, OSError) as error:
        return error
    return record


def _checked(record: Record, path: Path, size: int, header: int, expected: Expected) -> Record:
    """The record, if it fits its file and is the expected one."""
    need(size == header + record.nbytes, "bytes of the file", size, header + record.nbytes)
    need(path.name == record.file_name, "a record named", record.file_name, path.name)
    need(record.namespace == expected.namespace, "namespace", record.namespace, expected.namespace)
    need(record.kind == expected.kind, "kind", record.kind, expected.kind)
    named = edge_hash(record.parent, record.tokens)
    need(named == record.hash, "parent and tokens of hash", named.hex(), record.hash.hex())
    if expected.parts is not None and record.parts is not expected.parts:
        need(
            len(record.parts) == len(expected.parts),
            "parts",
            len(record.parts),
            len(expected.parts),
        )
        for found, needed in zip(record.parts, expected.parts, strict=True):
            need(found == needed, "part", found, needed)
    return record


def _need_checksum(record: Record, part: int, found: int) -> None:
    needed = record.checksums[part]
    need(found == needed, f"checksum of {record.parts[part].name}", f"{found:08x}", f"{needed:08x}")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the path before the message of a BadRecordError."""
    try:
        yield
    except BadRecordError as error:
        raise type(error)(f"{path}: {error}") from None


# -- many files ------------------------------------------------------------------------------------


class Reader:
    """Records below `root`. `counts`: read, read_bytes, quarantined."""

    def __init__(
        self, disk: Disk, root: Path, counts: Counter[str], quarantine: Quarantine
    ) -> None:
        self._disk = disk
        self._root = root
        self._quarantine = quarantine
        self._counts = counts
        self._counting = threading.Lock()
        self._threads = ThreadPoolExecutor(READERS, "prompt store reader")

    def headers(
        self, namespace: str, names: Iterable[str]
    ) -> list[Record | BadRecordError | OSError]:
        """header() of several files at a time."""
        return list(self._threads.map(lambda name: self.header(namespace, name), names))

    def header(self, namespace: str, name: str) -> Record | BadRecordError | OSError:
        """The record in a file by its header; FileNotFoundError if there is none (any more),
        another error if it may be later.
        """
        found = inspect(self._disk, self._root / name, namespace)
        if isinstance(found, BadRecordError):
            return FileNotFoundError(name) if self._set_aside(self._root / name, found) else found
        if isinstance(found, OSError) and not isinstance(found, FileNotFoundError):
            log.warning("prompt store: %s", found)
        return found

    def read(self, name: str, expected: Expected, into: Into | None = None) -> Future[RecordData]:
        """A record and the bytes of its parts, proven.

        Raises BadRecordError, the file is in quarantine then, or OSError.
        """
        return self._threads.submit(self._read, self._root / name, expected, into)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _read(self, path: Path, expected: Expected, into: Into | None) -> RecordData:
        try:
            found = read(self._disk, path, expected, into)
        except BadRecordError as error:
            self._set_aside(path, error)
            raise
        with self._counting:
            self._counts["read"] += 1
            self._counts["read_bytes"] += found.record.nbytes
        return found

    def _set_aside(self, path: Path, error: BadRecordError) -> bool:
        """Move a bad file into quarantine. Returns whether it is gone from its place."""
        log.warning("prompt store: %s", error)
        with self._counting:
            self._counts["quarantined"] += 1
        try:
            self._quarantine.set_aside(path, str(error))
        except OSError as failed:
            log.warning("prompt store: %s", failed)
            return False
        return True
