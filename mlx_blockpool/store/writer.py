"""The writer thread: records written and removed behind the generation thread, in order, within a bound.

Whoever hands work over polls for what became of it.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .disk import Buffer, Disk, write_whole
from .record import Record, encode


@dataclass(frozen=True)
class Job:
    """A record to write at `path`, or without one: a file to remove. `size`: bytes of the file."""

    name: str
    path: Path
    record: Record | None = None
    buffers: Sequence[Buffer] = ()
    size: int = 0


@dataclass(frozen=True)
class Done:
    """What became of a job; None: it is on disk, or gone from it."""

    job: Job
    error: OSError | None


class Writer:
    """At most `queue_bytes` wait to be written; more is refused, so that nobody ever waits for the disk.

    A file system that would have less than `min_free_bytes` left is full.
    """

    def __init__(self, disk: Disk, queue_bytes: int, min_free_bytes: int) -> None:
        self.disk = disk
        self.queue_bytes = queue_bytes
        self.min_free_bytes = min_free_bytes
        self.queued_bytes = 0
        self._jobs: deque[Job] = deque()
        self._done: deque[Done] = deque()
        self._writing: dict[str, Job] = {}
        self._changed = threading.Condition()
        self._busy = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="prompt store", daemon=True)
        self._thread.start()

    def accepts(self, size: int) -> bool:
        """Whether a record of so many bytes may wait with the others."""
        with self._changed:
            return not self.queued_bytes or self.queued_bytes + size <= self.queue_bytes

    def put(self, job: Job) -> bool:
        """Hand a job over. False, and nothing happens, if it is a record and too much is waiting."""
        with self._changed:
            if job.record is not None:
                if self.queued_bytes and self.queued_bytes + job.size > self.queue_bytes:
                    return False
                self.queued_bytes += job.size
                self._writing[job.name] = job
            self._jobs.append(job)
            self._changed.notify_all()
        return True

    def waiting(self, name: str) -> Job | None:
        """The record that is to be written under a name, as long as it is not."""
        with self._changed:
            return self._writing.get(name)

    def poll(self) -> list[Done]:
        """What became of jobs since the last call."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def flush(self, seconds: float) -> bool:
        """Wait until all is written, at most so long. Whether it is."""
        until = time.monotonic() + seconds
        with self._changed:
            while (self._jobs or self._busy) and time.monotonic() < until:
                self._changed.wait(max(0.0, until - time.monotonic()))
            return not (self._jobs or self._busy)

    def close(self, seconds: float) -> bool:
        """flush(), and end the thread. What is not written by then is lost."""
        flushed = self.flush(seconds)
        with self._changed:
            self._closing = True
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(seconds if flushed else 0.1)
        return flushed

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._jobs:
                    if self._closing:
                        return
                    self._changed.wait()
                job, self._busy = self._jobs.popleft(), True
            error = self._do(job)
            with self._changed:
                if job.record is not None:
                    self.queued_bytes -= job.size
                if self._writing.get(job.name) is job:
                    del self._writing[job.name]
            self._done.append(Done(job, error))

    def _do(self, job: Job) -> OSError | None:
        try:
            if job.record is None:
                self.disk.unlink(job.path)
                return None
            self.disk.make_directory(job.path.parent)
            free = self.disk.free_bytes(job.path.parent)
            if free - job.size < self.min_free_bytes:
                raise OSError(errno.ENOSPC, f"{free} bytes free, {self.min_free_bytes} are to stay so", str(job.path))
            write_whole(self.disk, job.path, encode(job.record, job.buffers))
        except FileNotFoundError as error:
            # Somebody else removed it first.
            return None if job.record is None else error
        except OSError as error:
            return error
        return None
