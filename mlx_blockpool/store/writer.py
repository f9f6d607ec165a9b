"""The writer thread: writes and removes records in the background, and scans the folder, in order,
within a bound.

The generation thread passes jobs to it and polls for their results.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue

from .fs import Buffer
from .headers import Headers
from .record import Record, encode
from .scan import Folder, FolderChanges, FolderScanner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WriteJob:
    """A record to write under `name`, or without one: a file to remove.

    `size`: bytes of the file.
    """

    name: str
    record: Record | None = None
    buffers: Sequence[Buffer] = ()
    size: int = 0


@dataclass(frozen=True)
class ScanJob:
    """Set the times of files that this process `used`, and write the notes of headers; then scan
    the folder, if it `scans`.

    A failure before the scan is logged and has no further effect.
    """

    scanner: FolderScanner
    used: Sequence[str] = ()
    scans: bool = True


Job = WriteJob | ScanJob


@dataclass(frozen=True)
class JobResult:
    """The result of a job.

    error   None if the file is on disk, or removed. An OSError is the disk's fault, any other error
            our own.
    left    after an error, bytes of the file under its name now; None if there is none.
    seen    what a scan has found.
    """

    job: Job
    error: BaseException | None = None
    left: int | None = None
    seen: FolderChanges | None = None


class Writer:
    """A queue of at most `queue_bytes`, and its thread. More is rejected, so that generation never
    waits for the disk.

    A file system that would have less than `min_free_bytes` left is full.
    """

    def __init__(
        self, folder: Folder, headers: Headers, queue_bytes: int, min_free_bytes: int
    ) -> None:
        self.folder = folder
        self.headers = headers
        self.queue_bytes = queue_bytes
        self.min_free_bytes = min_free_bytes
        self.queued_bytes = 0
        self._counting = threading.Lock()
        # None ends the thread.
        self._jobs: Queue[Job | None] = Queue()
        self._done: deque[JobResult] = deque()
        # A daemon: a disk that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="prompt store", daemon=True)
        self._thread.start()

    def accepts(self, size: int) -> bool:
        """Return whether a record of this many bytes may wait with the others."""
        return not self.queued_bytes or self.queued_bytes + size <= self.queue_bytes

    def put(self, job: Job) -> bool:
        """Pass a job on. False, and nothing happens, if it is a record and too much is waiting."""
        if isinstance(job, WriteJob) and job.record is not None:
            if not self.accepts(job.size):
                return False
            self._count(job.size)
        self._jobs.put(job)
        return True

    def _count(self, size: int) -> None:
        with self._counting:
            self.queued_bytes += size

    def poll(self) -> list[JobResult]:
        """The results of jobs since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def flush(self, seconds: float) -> bool:
        """Wait for at most `seconds` until every job was tried, unless the thread has ended.

        Returns whether all were tried.
        """
        jobs = self._jobs
        with jobs.all_tasks_done:
            jobs.all_tasks_done.wait_for(
                lambda: not (jobs.unfinished_tasks and self._thread.is_alive()), seconds
            )
            return not jobs.unfinished_tasks

    def close(self, seconds: float) -> bool:
        """flush(), and end the thread. The jobs left then are lost."""
        flushed = self.flush(seconds)
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        self._thread.join(seconds if flushed else 0.1)
        return flushed

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            done = self._do(job)
            if isinstance(job, WriteJob) and job.record is not None:
                self._count(-job.size)
            self._done.append(done)
            self._jobs.task_done()
        self.headers.close()

    def _do(self, job: Job) -> JobResult:
        try:
            if isinstance(job, WriteJob):
                self._write(job)
            elif job.scans:
                return JobResult(job, seen=job.scanner.again(job.used))
            else:
                job.scanner.use(job.used)
            self.headers.write(at_once=self._jobs.empty())
        except BaseException as error:
            # The top of the thread: any error fails that job alone.
            if not isinstance(error, OSError):
                what = (
                    job.name if isinstance(job, WriteJob) else "a look at the folder or its notes"
                )
                log.error(
                    "prompt store: %s failed by a fault that is not the disk's",
                    what,
                    exc_info=error,
                )
            return JobResult(
                job, error, self.folder.size_of(job.name) if isinstance(job, WriteJob) else None
            )
        return JobResult(job)

    def _write(self, job: WriteJob) -> None:
        if job.record is None:
            self.folder.remove(job.name)
            self.headers.remove(job.name)
            return
        buffers = encode(job.record, job.buffers)
        try:
            self.folder.write(job.name, buffers, job.size, self.min_free_bytes)
        except FileNotFoundError:
            # `store clear` may remove a folder between its making and the write.
            self.folder.write(job.name, buffers, job.size, self.min_free_bytes)
        if job.name in self.folder.files:
            self.headers.add(job.record, job.name, self.folder.files[job.name].stamp)
