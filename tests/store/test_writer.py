"""Writer: in order, behind, within its bound, and it says what became of each job."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store.disks import BrokenDisk, QuickDisk
from store.records import make_buffers, make_record
from store.stores import temporaries

from mlx_blockpool.store.fs import Buffer, Disk
from mlx_blockpool.store.headers import Headers
from mlx_blockpool.store.record import encode, file_size
from mlx_blockpool.store.scan import Folder, FolderChanges
from mlx_blockpool.store.writer import ScanJob, WriteJob, Writer


class SlowDisk(QuickDisk):
    """Begins no file before the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()

    def create(self, path: Path) -> int:
        self.begun.set()
        assert self.gate.wait(30)
        return super().create(path)


@pytest.fixture
def disk() -> Iterator[SlowDisk]:
    disk = SlowDisk()
    yield disk
    disk.gate.set()


def open_writer(
    folder: Path, disk: Disk, queue_bytes: int = 10**9, min_free_bytes: int = 0
) -> Writer:
    return Writer(Folder(disk, folder), Headers(folder, "none"), queue_bytes, min_free_bytes)


def job(number: int) -> WriteJob:
    record = make_record((number, number + 1))
    return WriteJob(f"aa/{record.file_name}", record, make_buffers(record), file_size(record))


def scan(look: Callable[[], FolderChanges]) -> ScanJob:
    """A scan by a scanner that does only this."""
    scanner: Any = SimpleNamespace(again=lambda used: look())
    return ScanJob(scanner, ())


def removal(job: WriteJob) -> WriteJob:
    return WriteJob(job.name, size=job.size)


def test_records_are_written_whole_and_told_in_order(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, QuickDisk())
    jobs = [job(n) for n in range(20)]
    assert all(writer.put(j) for j in jobs)
    assert writer.flush(30)
    assert [(done.job, done.error) for done in writer.poll()] == [(j, None) for j in jobs]
    assert writer.poll() == []
    assert all(is_whole(tmp_path, j) for j in jobs)
    assert {(tmp_path / j.name).stat().st_mode & 0o777 for j in jobs} == {0o600}
    assert (tmp_path / "aa").stat().st_mode & 0o777 == 0o700
    assert (writer.queued_bytes, temporaries(tmp_path)) == (0, [])
    assert writer.close(30)


def test_a_removal_comes_after_the_write_before_it(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, QuickDisk())
    first, second = job(1), job(2)
    for j in (first, second, removal(first), removal(second), second):
        assert writer.put(j)
    assert writer.flush(30)
    assert [done.error for done in writer.poll()] == [None] * 5
    assert [(tmp_path / j.name).exists() for j in (first, second)] == [False, True]


def test_what_is_gone_already_is_no_failure(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, QuickDisk())
    writer.put(removal(job(1)))
    assert writer.flush(30)
    assert [done.error for done in writer.poll()] == [None]


def test_a_full_queue_refuses_records_and_never_removals(tmp_path: Path, disk: SlowDisk) -> None:
    jobs = [job(n) for n in range(4)]
    writer = open_writer(tmp_path, disk, queue_bytes=2 * jobs[0].size)
    assert writer.accepts(jobs[0].size)
    assert [writer.put(j) for j in jobs] == [True, True, False, False]
    assert not writer.accepts(1)
    assert writer.put(removal(jobs[0]))
    assert writer.queued_bytes == 2 * jobs[0].size
    disk.gate.set()
    assert writer.flush(30)
    assert [done.job.name for done in writer.poll()] == [jobs[0].name, jobs[1].name, jobs[0].name]
    assert not (tmp_path / jobs[0].name).exists()
    assert writer.queued_bytes == 0
    assert writer.put(jobs[2])


def test_one_record_that_is_larger_than_the_queue_is_written(
    tmp_path: Path, disk: SlowDisk
) -> None:
    writer = open_writer(tmp_path, disk, queue_bytes=1)
    jobs = [job(n) for n in range(2)]
    assert writer.accepts(jobs[0].size)
    assert writer.put(jobs[0])
    assert not writer.put(jobs[1])
    assert writer.put(removal(jobs[1])), "a removal takes no room"
    disk.gate.set()
    assert writer.flush(30)


def test_flush_and_close_end_in_time_where_the_disk_does_not(
    tmp_path: Path, disk: SlowDisk
) -> None:
    writer = open_writer(tmp_path, disk)
    jobs = [job(n) for n in range(3)]
    for j in jobs:
        writer.put(j)
    assert disk.begun.wait(30)
    assert not writer.flush(0)
    assert not writer.close(0)
    disk.gate.set()
    writer._thread.join(30)
    assert not writer._thread.is_alive()
    # The one that was under way is whole, the others are lost.
    assert [(tmp_path / j.name).exists() for j in jobs] == [True, False, False]
    assert is_whole(tmp_path, jobs[0])


def is_whole(folder: Path, j: WriteJob) -> bool:
    assert j.record is not None
    return (folder / j.name).read_bytes() == b"".join(bytes(b) for b in encode(j.record, j.buffers))


@pytest.mark.parametrize("call", ["make_one_directory", "create", "write", "sync", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_failure_is_told_leaves_nothing_torn_and_the_next_job_is_tried(
    tmp_path: Path, call: str, number: int
) -> None:
    disk = BrokenDisk(**{call: OSError(number, "broken")})
    writer = open_writer(tmp_path, disk)
    failing, after = job(1), job(2)
    writer.put(failing)
    assert writer.flush(30)
    disk.broken.clear()
    writer.put(after)
    assert writer.flush(30)
    found = writer.poll()
    assert [done.error.errno if done.error else None for done in found] == [number, None]
    assert not (tmp_path / failing.name).exists()
    assert (tmp_path / after.name).exists()
    assert temporaries(tmp_path) == []


def test_a_file_system_that_would_be_too_full_is_full(tmp_path: Path) -> None:
    class Full(QuickDisk):
        free = 0

        def free_bytes(self, path: Path) -> int:
            return self.free

    disk = Full()
    writer = open_writer(tmp_path, disk, min_free_bytes=1000)
    jobs = [job(n) for n in range(2)]
    for j, free in zip(jobs, [1000 + jobs[0].size - 1, 1000 + jobs[0].size], strict=True):
        disk.free = free
        writer.put(j)
        assert writer.flush(30)
    first, second = writer.poll()
    assert first.error is not None
    assert (first.error.errno, second.error) == (errno.ENOSPC, None)
    assert [(tmp_path / j.name).exists() for j in jobs] == [False, True]


def test_buffers_are_written_as_they_are(tmp_path: Path) -> None:
    """Not copied on the way: what is handed over must not change."""
    seen: list[Buffer] = []

    class Seeing(QuickDisk):
        def write(self, fd: int, buffers: object) -> None:
            seen.extend(buffers)  # type: ignore[call-overload]

    j = job(1)
    writer = open_writer(tmp_path, Seeing())
    writer.put(j)
    assert writer.flush(30)
    assert all(any(b is s for s in seen) for b in j.buffers)


def test_a_look_is_taken_after_what_was_handed_over_before_it(
    tmp_path: Path, disk: SlowDisk
) -> None:
    writer = open_writer(tmp_path, disk)
    first, second = job(1), job(2)
    seen = FolderChanges([], [])
    there: list[bool] = []

    def take() -> FolderChanges:
        there.extend((tmp_path / j.name).exists() for j in (first, second))
        return seen

    def fail() -> FolderChanges:
        raise OSError(errno.EIO, "blind")

    for j in (first, scan(take), second, scan(fail)):
        assert writer.put(j)
    disk.gate.set()
    assert writer.flush(30)
    done = writer.poll()
    assert there == [True, False]
    assert [d.seen for d in done] == [None, seen, None, None]
    assert [d.error and d.error.errno for d in done] == [None, None, None, errno.EIO]


@pytest.mark.parametrize("times", [1, 2])
def test_a_folder_that_somebody_clears_away_is_made_once_more(tmp_path: Path, times: int) -> None:
    """`store clear` and `check --fix` remove empty folders, and may do so between the making and
    the write.
    """

    class Cleared(QuickDisk):
        left = times

        def create(self, path: Path) -> int:
            if self.left:
                self.left -= 1
                path.parent.rmdir()
            return super().create(path)

    writer = open_writer(tmp_path, Cleared())
    j = job(1)
    writer.put(j)
    assert writer.flush(30)
    (done,) = writer.poll()
    assert (done.error is None, (tmp_path / j.name).exists()) == (
        (True, True) if times == 1 else (False, False)
    )


def test_a_failure_tells_what_lies_there_now(tmp_path: Path) -> None:
    disk = BrokenDisk()
    writer = open_writer(tmp_path, disk)
    old, new = job(1), job(2)
    writer.put(old)
    assert writer.flush(30)
    disk.broken["rename"] = disk.broken["unlink"] = OSError(errno.EIO, "broken")
    for j in (old, new, removal(old)):
        writer.put(j)
    assert writer.flush(30)
    assert [(done.error is None, done.left) for done in writer.poll()] == [
        (True, None),
        (False, old.size),
        (False, None),
        (False, old.size),
    ]


@pytest.mark.parametrize(
    "error", [ValueError("odd"), MemoryError(), SystemExit(3)], ids=["value", "memory", "exit"]
)
def test_whatever_a_job_raises_fails_that_job_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    disk = FaultyDisk(error)
    writer = open_writer(tmp_path, disk)

    def fail() -> FolderChanges:
        raise error

    failing, look, after = job(1), scan(fail), job(2)
    writer.put(failing)
    assert writer.flush(30)
    writer.put(look)
    assert writer.flush(30)
    disk.error = None
    writer.put(after)
    assert writer.flush(30)
    assert [(done.job, done.error) for done in writer.poll()] == [
        (failing, error),
        (look, error),
        (after, None),
    ]
    assert (writer.queued_bytes, temporaries(tmp_path)) == (0, [])
    assert [(tmp_path / j.name).exists() for j in (failing, after)] == [False, True]
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error, error]
    assert writer.close(30)
    assert not writer._thread.is_alive()


class FaultyDisk(QuickDisk):
    """Raises `error` in the middle of a write."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def write(self, fd: int, buffers: Iterable[Buffer]) -> None:
        if self.error is not None:
            raise self.error
        super().write(fd, buffers)


def test_nobody_waits_for_a_thread_that_has_ended(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, QuickDisk())
    assert writer.close(30)
    writer.put(job(1))
    assert not writer.flush(10**9)
    assert not writer.close(10**9)
