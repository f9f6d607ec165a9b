"""PromptStore: the records of one model on disk, under one budget for the whole folder.

Knows records and files; no trie, no arrays. Asked by the generation thread alone; a thread of its own writes, others read.
The files are the only truth: what is known here is found by their headers at start.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import StoreConfig
from ..errors import BadRecordError
from .disk import Buffer, Disk, Entry, quarantine, sweep, write_whole
from .index import Index
from .record import SUFFIX, Expected, Naming, Record, file_size, read, read_header
from .writer import Job, Writer

log = logging.getLogger(__name__)

READERS = 2
# Younger temporary files may be live writes of another process.
LEFTOVER_SECONDS = 3600.0
BLOCK = "block"
OVER_BUDGET = "over budget"


@dataclass(frozen=True)
class Put:
    """Why a record was not taken, and the hashes of those of the same model that had to go for it."""

    refusal: str | None
    dropped: list[bytes]

    @property
    def taken(self) -> bool:
        return self.refusal is None


class PromptStore:
    """Records under `namespace`, whose hashes are made by `naming`. `about` is written beside them for people to read.

    `counts`: written, written_bytes, read, read_bytes, dropped, quarantined, and what was refused and why. `problem`: why the
    disk is left alone at present.
    """

    def __init__(
        self, config: StoreConfig, namespace: str, naming: Naming, about: dict[str, Any], disk: Disk | None = None
    ) -> None:
        self.config = config
        self.namespace = namespace
        self.root = config.folder or default_folder()
        self.counts: Counter[str] = Counter()
        self.problem: str | None = None
        self._about = about
        self._naming = naming
        self._disk = disk or Disk()
        self._index = Index()
        self._touched: set[str] = set()
        self._retry_at = 0.0
        self._day = (0, 0)
        self._counting = threading.Lock()
        self._writer = Writer(self._disk, config.queue_bytes, config.min_free_bytes)
        self._readers = ThreadPoolExecutor(READERS, "prompt store reader")

    # -- at start ------------------------------------------------------------------------------------------------------

    def open(self) -> list[Record]:
        """Make the folder, and read the headers of all records of this model. Those of others count for the budget only.

        What is not a record goes into quarantine. A disk that does not let us is left alone, and nothing is known.
        """
        try:
            self._disk.make_directory(self.root / self._folder)
            self._describe()
            found = sorted(self._files(), key=lambda item: (item[1].modified, item[0]))
            for name, entry in found:
                self._index.add(name, entry.size)
        except OSError as error:
            self._suspend(error)
            return []
        mine = [name for name, _ in found if name.startswith(self._folder + "/")]
        records = list(self._readers.map(self._header, mine))
        for name in (name for name, record in zip(mine, records, strict=True) if record is None):
            self._index.remove(name)
        return [record for record in records if record is not None]

    def settle(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Say what of the found is needed most, that first, and drop() what is over the budget."""
        self._index.arrange(map(self._name, hashes))
        return self.drop(self._index.victims(self._index.nbytes - self.config.store_bytes))

    def _describe(self) -> None:
        path = self.root / self._folder / "model.json"
        text = json.dumps(self._about, indent=2).encode()
        if not path.exists() or path.read_bytes() != text:
            write_whole(self._disk, path, [text])

    def _files(self) -> Iterable[tuple[str, Entry]]:
        """Every record file of every model, by its name below the root."""
        for model in self._folders(self.root / "models"):
            for shard in self._folders(model / "blocks"):
                sweep(self._disk, shard, time.time() - LEFTOVER_SECONDS)
                for entry in self._disk.scan(shard):
                    if entry.name.endswith(SUFFIX):
                        yield (shard / entry.name).relative_to(self.root).as_posix(), entry

    def _folders(self, path: Path) -> list[Path]:
        try:
            return [path / entry.name for entry in self._disk.scan(path) if entry.is_directory]
        except FileNotFoundError:
            return []

    def _header(self, name: str) -> Record | None:
        path = self.root / name
        try:
            return read_header(self._disk, path, Expected(self.namespace, BLOCK), self._naming)
        except BadRecordError as error:
            self._set_aside(path, error)
        except OSError as error:
            log.warning("prompt store: %s", error)
        return None

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, record: Record, copy: Callable[[], Sequence[Buffer]], spared: Collection[bytes] = ()) -> Put:
        """Hand a record to the writer. Records used longest ago make room, but none of `spared`.

        Refused and counted where disk, budget, the day's limit or the queue does not allow it; nobody waits. Only if it is
        taken, its buffers are asked for: they must not change.
        """
        name, size = self._name(record.hash), file_size(record)
        if name in self._index:
            return Put(None, [])
        surplus = self._index.nbytes + size - self.config.store_bytes
        victims = self._index.victims(surplus, {self._name(h) for h in spared})
        refusal = OVER_BUDGET if surplus > 0 and not victims else self._refusal(size)
        if refusal is not None:
            self.counts[refusal] += 1
            return Put(refusal, [])
        dropped = self.drop(victims)
        self._writer.put(Job(name, self.root / name, record, copy(), size))
        self._index.add(name, size)
        return Put(None, dropped)

    def drop(self, names: Iterable[str]) -> list[bytes]:
        """Remove files. Returns the hashes of those that were of this model."""
        mine = []
        for name in names:
            self._remove(name)
            self.counts["dropped"] += 1
            if name.startswith(self._folder + "/"):
                mine.append(bytes.fromhex(Path(name).stem))
        return mine

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Remove the records of these hashes, where there are any."""
        self.drop([name for name in map(self._name, hashes) if name in self._index])

    def _remove(self, name: str) -> None:
        self._writer.put(Job(name, self.root / name, size=self._index.remove(name)))

    def poll(self) -> list[bytes]:
        """Take note of what the writer has done. Returns the hashes of records that could not be written."""
        failed = []
        for done in self._writer.poll():
            if done.error is not None:
                self._suspend(done.error)
            if done.job.record is not None and done.error is None:
                self.problem = None
                self.counts["written"] += 1
                self.counts["written_bytes"] += done.job.size
            elif done.job.record is not None:
                self._index.remove(done.job.name)
                self.counts["failed"] += 1
                failed.append(done.job.record.hash)
            elif done.error is not None:
                self._index.put_back(done.job.name, done.job.size)
        return failed

    def _refusal(self, size: int) -> str | None:
        limit, today = self.config.daily_bytes, int(time.time() // 86400)
        day, written = self._day if self._day[0] == today else (today, 0)
        if limit is not None and written + size > limit:
            return "daily limit"
        if not self._writer.accepts(size):
            return "queue full"
        if self.problem is not None:
            if time.monotonic() < self._retry_at:
                return "disk failed"
            # One record tries whether the disk is well again.
            self._retry_at = time.monotonic() + self.config.retry_seconds
        self._day = (day, written + size)
        return None

    def _suspend(self, error: OSError) -> None:
        if self.problem is None:
            log.warning("prompt store: %s; nothing is written for %s seconds", error, self.config.retry_seconds)
        self.problem = str(error)
        self._retry_at = time.monotonic() + self.config.retry_seconds

    # -- reading -------------------------------------------------------------------------------------------------------

    def __contains__(self, digest: bytes) -> bool:
        return self._name(digest) in self._index

    def read(self, expected: Expected) -> Future[tuple[Record, list[memoryview]]]:
        """A record and the bytes of its parts, proven. Raises BadRecordError, the file is in quarantine then, or OSError."""
        assert expected.hash is not None
        job = self._writer.waiting(self._name(expected.hash))
        if job is not None and job.record is not None:
            found: Future[tuple[Record, list[memoryview]]] = Future()
            found.set_result((job.record, [memoryview(buffer) for buffer in job.buffers]))
            return found
        return self._readers.submit(self._read, self.root / self._name(expected.hash), expected)

    def _read(self, path: Path, expected: Expected) -> tuple[Record, list[memoryview]]:
        try:
            record, views = read(self._disk, path, expected, self._naming)
        except BadRecordError as error:
            self._set_aside(path, error)
            raise
        with self._counting:
            self.counts["read"] += 1
            self.counts["read_bytes"] += record.nbytes
        return record, views

    def gone(self, digest: bytes) -> None:
        """A record could not be read: what may be left of its file is of no use."""
        if digest in self:
            self._remove(self._name(digest))

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Used now, from the beginning of a path to its end."""
        names = [self._name(h) for h in hashes]
        self._index.touch(names)
        self._touched.update(names)

    def _set_aside(self, path: Path, error: BadRecordError) -> None:
        log.warning("prompt store: %s", error)
        with self._counting:
            self.counts["quarantined"] += 1
        try:
            quarantine(self._disk, path, self.root / "quarantine", str(error))
        except OSError as failed:
            log.warning("prompt store: %s", failed)

    # -- at the end ----------------------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Wait until all is written, but no longer than flush_seconds. Whether it is."""
        return self._writer.flush(self.config.flush_seconds)

    def close(self) -> bool:
        """flush(), note what was used on the files themselves, and end the threads."""
        flushed = self._writer.close(self.config.flush_seconds)
        self._readers.shutdown(cancel_futures=True)
        self.poll()
        for name in [name for name in self._index if name in self._touched]:
            try:
                self._disk.touch(self.root / name)
            except OSError:
                continue
        return flushed

    def report(self) -> dict[str, Any]:
        """Figures; sizes in bytes."""
        return {
            "folder": str(self.root),
            "records": len(self._index),
            "bytes": self._index.nbytes,
            "store_bytes": self.config.store_bytes,
            "queued_bytes": self._writer.queued_bytes,
            "problem": self.problem,
            **self.counts,
        }

    @property
    def _folder(self) -> str:
        return f"models/{self.namespace}"

    def _name(self, digest: bytes) -> str:
        text = digest.hex()
        return f"{self._folder}/blocks/{text[:2]}/{text}{SUFFIX}"


def default_folder() -> Path:
    """Where this user's caches belong: $XDG_CACHE_HOME if it is set, else ~/Library/Caches on macOS and ~/.cache elsewhere."""
    own = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or own) / "mlx-blockpool"
