"""Reads records, several at a time; what does not prove itself goes into quarantine. Knows no index and no budget.

Any thread may call anything here.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..errors import BadRecordError
from .fs import Buffer, Disk, Into
from .paths import KINDS
from .quarantine import Quarantine
from .record import Expected, Naming, Record
from .verify import read, read_header

log = logging.getLogger(__name__)

# Who waits for them does not read: it would hang with the disk.
READERS = 2 if (os.cpu_count() or 1) <= 2 else 3
RecordData = tuple[Record, list[memoryview]]


class HeaderRead(NamedTuple):
    """What a file says of itself. None: it could not be read; `is_there`: it may be read later."""

    record: Record | None
    is_there: bool = True


class Reading(Future[RecordData]):
    """A record on its way: read by whoever runs this first, from `begun` to `ended` (time.perf_counter())."""

    def __init__(self, read: Callable[[], RecordData]) -> None:
        super().__init__()
        self.begun = self.ended = 0.0
        self._read = read
        self._is_begun = threading.Lock()

    @classmethod
    def of(cls, record: Record, buffers: Sequence[Buffer]) -> Reading:
        """One that is in memory already."""
        reading = cls(lambda: (record, [memoryview(buffer) for buffer in buffers]))
        reading.run()
        return reading

    def run(self) -> bool:
        """Read it in this thread, unless another has begun. Whether it was read here."""
        if not self._is_begun.acquire(blocking=False):
            return False
        self.begun = time.perf_counter()
        try:
            found = self._read()
        except BaseException as error:
            # As in a thread of a pool: it is for whoever asks for the result.
            self.set_exception(error)
            return True
        self.ended = time.perf_counter()
        self.set_result(found)
        return True


class Reader:
    """Records below `root` whose hashes are made by `naming`. `counts`: read, read_bytes, quarantined."""

    def __init__(self, disk: Disk, root: Path, naming: Naming, counts: Counter[str], quarantine: Quarantine) -> None:
        self._disk = disk
        self._root = root
        self._naming = naming
        self._quarantine = quarantine
        self._counts = counts
        self._counting = threading.Lock()
        self._threads = ThreadPoolExecutor(READERS, "prompt store reader")

    def headers(self, namespace: str, names: Iterable[str]) -> list[HeaderRead]:
        """Several at a time."""
        return list(self._threads.map(lambda name: self.header(namespace, name), names))

    def header(self, namespace: str, name: str) -> HeaderRead:
        path = self._root / name
        try:
            return HeaderRead(read_header(self._disk, path, Expected(namespace, KINDS[path.parent.parent.name]), self._naming))
        except BadRecordError as error:
            return HeaderRead(None, not self._set_aside(path, error))
        except FileNotFoundError:
            return HeaderRead(None, False)
        except OSError as error:
            log.warning("prompt store: %s", error)
            return HeaderRead(None)

    def read(self, name: str, expected: Expected, into: Into | None = None) -> Reading:
        """A record and the bytes of its parts, proven. Raises BadRecordError, the file is in quarantine then, or OSError."""
        reading = Reading(partial(self._read, self._root / name, expected, into))
        self._threads.submit(reading.run)
        return reading

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _read(self, path: Path, expected: Expected, into: Into | None) -> RecordData:
        try:
            record, views = read(self._disk, path, expected, self._naming, into)
        except BadRecordError as error:
            self._set_aside(path, error)
            raise
        with self._counting:
            self._counts["read"] += 1
            self._counts["read_bytes"] += record.nbytes
        return record, views

    def _set_aside(self, path: Path, error: BadRecordError) -> bool:
        """Whether it is gone from its place."""
        log.warning("prompt store: %s", error)
        with self._counting:
            self._counts["quarantined"] += 1
        try:
            self._quarantine.set_aside(path, str(error))
        except OSError as failed:
            log.warning("prompt store: %s", failed)
            return False
        return True
