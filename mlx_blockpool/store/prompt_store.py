"""PromptStore: the records of one model on disk, under one budget for the whole folder.

Knows records and files; no trie, no arrays. Used by the generation thread alone; other threads
write and read. The files are the only truth: the store learns them from their headers at start, and
scans later for changes of other processes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from ..config import StoreConfig
from .fs import Buffer, Disk, Into
from .headers import Headers
from .index import Index
from .limits import FolderWatcher, WriteDecision, WriteLimits
from .paths import default_folder, folder_of, key_of, keys_in, name_of
from .problems import StoreProblems
from .quarantine import Quarantine
from .reader import Reader, RecordData
from .record import MAX_DATA_BYTES, Expected, Key, Part, Record, file_size
from .scan import Folder, FolderChanges, FolderScanner, RecordChanges
from .writer import JobResult, ScanJob, WriteJob, Writer

log = logging.getLogger(__name__)


class PromptStore:
    """Records under `namespace`. `about` is written next to them for people to read.

    `trie_name` is what the hashes of its prefixes begin with: the namespace, or a name that the
    ranks of a group have in common. Several processes may use one folder. Each scans it after it
    has written look_bytes, and writes no more than that, or one record, during the scan: each
    process after the first exceeds the budget by at most twice that and a record.

    `problems`: what fails in the folder at present, for other users of the folder too.
    `counts`: written, written_bytes, failed, faults (not the disk's), read, read_bytes, dropped,
    quarantined, looks, and refused records by the reason.
    """

    def __init__(
        self,
        config: StoreConfig,
        namespace: str,
        about: dict[str, Any],
        disk: Disk | None = None,
        trie_name: str | None = None,
    ) -> None:
        self.config = config
        self.namespace = namespace
        self.trie_name = trie_name or namespace
        self.root = config.folder or default_folder()
        self.counts: Counter[str] = Counter()
        self._index = Index(config.store_bytes, f"{folder_of(namespace)}/")
        # Records that could not be read, and when to try again: they are written again if they are
        # made again.
        self._unread: dict[Key, float] = {}
        self._changes = RecordChanges([], [])
        # The last job of each name whose result was not taken yet.
        self._jobs: dict[str, WriteJob] = {}
        disk, look_bytes = (
            disk or Disk(),
            config.store_bytes // 32 if config.look_bytes is None else config.look_bytes,
        )
        self._quarantine = Quarantine(
            disk, self.root, config.quarantine_bytes, config.quarantine_files
        )
        self._reader = Reader(disk, self.root, self.counts, self._quarantine)
        folder, headers = Folder(disk, self.root), Headers(self.root, namespace)
        self._scanner = FolderScanner(folder, self._reader, headers, namespace, about)
        self._watcher = FolderWatcher(look_bytes, config.look_seconds)
        self._writer = Writer(folder, headers, config.queue_bytes, config.min_free_bytes)
        self.problems = StoreProblems(config.log_seconds)
        self._limits = WriteLimits(config, self.problems)

    # -- at start ----------------------------------------------------------------------------------

    def open(self) -> list[Record]:
        """Read the headers of all records of this model, and make its folder. Those of others count
        for the budget only.

        Bad files go into quarantine. If the folder cannot be read, the store has no records until a
        later scan can, whose result take_changes() returns.
        """
        try:
            changes = self._scanner.first()
        except OSError as error:
            self._limits.is_away = True
            self._limits.suspend(error)
            return []
        self._quarantine.bound()
        self._apply(changes)
        try:
            self._scanner.describe()
        except OSError as error:
            if _is_of_the_disk(error):
                self._limits.suspend(error)
        if self._scanner.has_outdated():
            _log_outdated(self.root)
        self._writer.put(ScanJob(self._scanner, scans=False))
        return changes.records

    def settle(self, keys: Iterable[Key]) -> list[Key]:
        """Order the found records by need, the most needed first, and drop() what is over the
        budget.
        """
        self._index.arrange(map(self._name, keys))
        return self._shrink()

    def _shrink(self) -> list[Key]:
        """drop() what is over the budget."""
        self._index.aside = self._quarantine.nbytes
        return self.drop(self._index.surplus())

    # -- writing -----------------------------------------------------------------------------------

    def takes(self) -> bool:
        """Return whether a record of the size that was refused last would be accepted now. Call it
        before a record is made.

        A refusal is counted.
        """
        refusal = self._limits.still(self._has_room(self._limits.refused or 0))
        if refusal is not None:
            self.counts[refusal] += 1
        return refusal is None

    def write(
        self,
        record: Record,
        copy: Callable[[], Sequence[Buffer]],
        spared: Container[Key] = (),
        anew: bool = False,
    ) -> WriteDecision:
        """Pass a record to the writer unless it is on disk. `anew`: it replaces an older one.

        `copy` is called for its buffers, which must not change afterwards. The least recently used
        records make way, but none of `spared`. A record is refused, and the refusal counted, if the
        disk, the budget, the day's limit or the queue do not allow it. Never waits.
        """
        name, size = self._name(record.key), file_size(record)
        if name in self._index and not anew and record.key not in self._unread:
            return WriteDecision()
        self._index.aside = self._quarantine.nbytes
        victims = self._index.room_for(size, lambda other: other == name or key_of(other) in spared)
        if victims is None:
            refusal: str | None = self._limits.over_budget(self._index.pinned_bytes)
        else:
            refusal = self._limits.refusal(size, self._has_room(size))
        if refusal is not None:
            self.counts[refusal] += 1
            return WriteDecision(refusal)
        dropped = self.drop(victims or ())
        self._limits.charge(size)
        self._unread.pop(record.key, None)
        self._pass(WriteJob(name, record, copy(), size))
        self._index.add(name, size)
        return WriteDecision(dropped=dropped)

    def _has_room(self, size: int) -> bool:
        """Return whether the writer's queue, and the limit between two scans, allow this many
        bytes.
        """
        return self._writer.accepts(size) and self._watcher.allows(size)

    def drop(self, names: Iterable[str]) -> list[Key]:
        """Remove files. Returns the keys of those that were of this model."""
        dropped = list(names)
        for name in dropped:
            self._remove(name)
            self.counts["dropped"] += 1
        return keys_in(self.namespace, dropped)

    def remove(self, keys: Iterable[Key]) -> None:
        """drop() these records, where there are any."""
        self.drop([name for name in map(self._name, keys) if name in self._index])

    def poll(self) -> list[Key]:
        """Apply the results of the writer's jobs, and scan if it is time.

        Returns the keys of records that were not written.
        """
        if self._watcher.is_due(
            self._index.has_touched, self._limits.is_away and self._limits.may_retry()
        ):
            self._look()
        return self._take_results()

    def _take_results(self) -> list[Key]:
        failed: list[Key] = []
        for result in self._writer.poll():
            if isinstance(result.job, ScanJob) and not result.job.scans:
                continue
            if _is_of_the_disk(result.error):
                self._limits.suspend(result.error)
            elif result.error is not None:
                self.counts["faults"] += 1
            if isinstance(result.job, WriteJob):
                failed += self._take_written(result.job, result)
            else:
                self._take_scanned(result.seen)
        return failed

    def _take_written(self, job: WriteJob, result: JobResult) -> list[Key]:
        """Returns the key of a record that could not be written, unless a later job has the same
        name.
        """
        is_last = self._jobs.get(job.name) is job
        if is_last:
            del self._jobs[job.name]
        if job.record is not None and result.error is None:
            self._limits.resume()
            self.counts["written"] += 1
            self.counts["written_bytes"] += job.size
        elif job.record is not None:
            self.counts["failed"] += 1
            if is_last:
                self._index.remove(job.name)
                if result.left is not None:
                    self._index.add(job.name, result.left)
                if _is_of_the_disk(result.error):
                    return [job.record.key]
                # A fault that is not the disk's would come again.
                self._changes.lost.append(job.record.key)
        elif result.error is not None and is_last:
            self._index.put_back(job.name, job.size)
        return []

    def _pass(self, job: WriteJob) -> None:
        self._watcher.add(0 if job.record is None else job.size)
        self._jobs[job.name] = job
        self._writer.put(job)

    def _remove(self, name: str) -> None:
        self._pass(WriteJob(name, size=self._index.remove(name)))

    # -- what the budget spares --------------------------------------------------------------------

    @property
    def pinned(self) -> Collection[Key]:
        """Records of this model that the budget never takes, whether they are on disk or not."""
        return keys_in(self.namespace, self._index.pinned)

    @pinned.setter
    def pinned(self, keys: Collection[Key]) -> None:
        self._index.pinned = frozenset(map(self._name, keys))

    def keep(self, keys: Iterable[Key]) -> None:
        """Spare these records too, until the next call."""
        self._index.kept = frozenset(map(self._name, keys))

    # -- changes by other processes ----------------------------------------------------------------

    def take_changes(self) -> RecordChanges:
        """The changes by other processes that scans have found since the last call."""
        changes, self._changes = self._changes, RecordChanges([], [])
        return changes

    def _look(self) -> None:
        """Have the writer scan the folder after the jobs before."""
        used = self._index.take_touched()
        self._watcher.begin()
        if self._limits.is_away:
            self._limits.wait()
        self._writer.put(ScanJob(self._scanner, used))

    def _take_scanned(self, changes: FolderChanges | None) -> None:
        self._watcher.is_looking = False
        if changes is not None:
            self.counts["looks"] += 1
            self._limits.come_back()
            # Files that were passed to the writer after the scan began are as the index has them.
            changes.found = [each for each in changes.found if each.name not in self._jobs]
            changes.gone = [name for name in changes.gone if name not in self._jobs]
            self._apply(changes)
            self._changes.found.extend(changes.records)
            self._changes.lost.extend(keys_in(self.namespace, changes.gone) + self._shrink())

    def _apply(self, changes: FolderChanges) -> None:
        for found in changes.found:
            self._index.add(found.name, found.size)
        for name in changes.gone:
            self._index.remove(name)
        self._unread.update((key, 0.0) for key in changes.unread)

    # -- reading -----------------------------------------------------------------------------------

    def __contains__(self, key: Key) -> bool:
        return self._name(key) in self._index

    def size(self, key: Key) -> int:
        """Bytes of a file; 0 if there is none."""
        return self._index.size(self._name(key)) if key in self else 0

    def read(
        self,
        key: Key,
        parts: tuple[Part, ...] | None = None,
        max_bytes: int = MAX_DATA_BYTES,
        into: Into | None = None,
    ) -> Future[RecordData]:
        """A record and the bytes of its parts, proven; those of a file are read into the memory
        that `into` gives. `parts` and `max_bytes` as in Expected.

        Raises BadRecordError, the file is in quarantine then, or OSError.
        """
        name = self._name(key)
        job = self._jobs.get(name)
        if job is None or job.record is None:
            expected = Expected(self.namespace, key.kind, parts, max_bytes)
            return self._reader.read(name, expected, into)
        found = Future[RecordData]()
        found.set_result(RecordData(job.record, [memoryview(buffer) for buffer in job.buffers]))
        return found

    def gone(self, key: Key) -> None:
        """Remove the file of a record that was bad or missing."""
        if key in self:
            self._remove(self._name(key))

    def put_off(self, key: Key) -> None:
        """A record could not be read, and perhaps can later: its file stays."""
        self._unread[key] = time.monotonic() + self.config.retry_seconds

    def is_put_off(self, key: Key) -> bool:
        """Return whether it would be of no use to read it now."""
        return bool(self._unread) and self._unread.get(key, 0.0) > time.monotonic()

    def touch(self, keys: Iterable[Key]) -> None:
        """Used now, from the beginning of a path to its end."""
        self._index.touch(map(self._name, keys))

    # -- at the end --------------------------------------------------------------------------------

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until all is written, for at most `seconds` (None: flush_seconds).

        Returns whether it is.
        """
        return self._writer.flush(self.config.flush_seconds if seconds is None else seconds)

    def close(self, seconds: float | None = None) -> bool:
        """flush() after the times of the files that were used are set, and end the threads."""
        if self._index.has_touched:
            self._writer.put(ScanJob(self._scanner, self._index.take_touched(), scans=False))
        flushed = self._writer.close(self.config.flush_seconds if seconds is None else seconds)
        self._reader.close()
        self._take_results()
        return flushed

    def report(self) -> dict[str, Any]:
        """Figures; sizes in bytes."""
        return {
            "folder": str(self.root),
            **self._index.report(),
            "queued_bytes": self._writer.queued_bytes,
            "problem": self.problems.text,
            **self.counts,
        }

    @property
    def is_writing(self) -> bool:
        """Return whether records wait for the writer."""
        return self._writer.queued_bytes > 0

    @property
    def problem(self) -> str | None:
        """Why no records are written at present."""
        return None if self._limits.failure is None else str(self._limits.failure)

    def _name(self, key: Key) -> str:
        return name_of(self.namespace, key)


@cache
def _log_outdated(root: Path) -> None:
    """Log once in a process that the folder has records of an older format."""
    log.info(
        "prompt store: records of an older format are not read. They are removed when the budget "
        "needs their space; "
        "`mlx-blockpool store check --fix --store-dir %s` moves them to quarantine now.",
        root,
    )


def _is_of_the_disk(error: BaseException | None) -> TypeGuard[OSError]:
    """Return whether other writes would fail like this one.

    A directory under the name of a record is in its way alone.
    """
    return isinstance(error, OSError) and not isinstance(error, IsADirectoryError)
