"""Writer: in order, behind, within its bound, and it says what became of each job."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from store.records import make_buffers, make_record
from store.stores import BrokenDisk, QuickDisk, temporaries

from mlx_blockpool.store.disk import Buffer, Disk
from mlx_blockpool.store.record import Record, encode, file_size
from mlx_blockpool.store.writer import Job, Writer


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


def open_writer(disk: Disk, queue_bytes: int = 10**9, min_free_bytes: int = 0) -> Writer:
    return Writer(disk, queue_bytes, min_free_bytes)


def job(folder: Path, number: int) -> Job:
    record = make_record((number, number + 1))
    return Job(record.file_name, folder / "aa" / record.file_name, record, make_buffers(record), file_size(record))


def removal(job: Job) -> Job:
    return Job(job.name, job.path, size=job.size)


def test_records_are_written_whole_and_told_in_order(tmp_path: Path) -> None:
    writer = open_writer(QuickDisk())
    jobs = [job(tmp_path, n) for n in range(20)]
    assert all(writer.put(j) for j in jobs)
    assert writer.flush(30)
    assert [(done.job, done.error) for done in writer.poll()] == [(j, None) for j in jobs]
    assert writer.poll() == []
    assert all(j.path.read_bytes() == b"".join(bytes(b) for b in encode(_record(j), j.buffers)) for j in jobs)
    assert {j.path.stat().st_mode & 0o777 for j in jobs} == {0o600}
    assert (tmp_path / "aa").stat().st_mode & 0o777 == 0o700
    assert (writer.queued_bytes, temporaries(tmp_path)) == (0, [])
    assert writer.close(30)


def _record(j: Job) -> Record:
    assert j.record is not None
    return j.record


def test_a_removal_comes_after_the_write_before_it(tmp_path: Path) -> None:
    writer = open_writer(QuickDisk())
    first, second = job(tmp_path, 1), job(tmp_path, 2)
    for j in (first, second, removal(first), removal(second), second):
        assert writer.put(j)
    assert writer.flush(30)
    assert [done.error for done in writer.poll()] == [None] * 5
    assert [first.path.exists(), second.path.exists()] == [False, True]


def test_what_is_gone_already_is_no_failure(tmp_path: Path) -> None:
    writer = open_writer(QuickDisk())
    writer.put(removal(job(tmp_path, 1)))
    assert writer.flush(30)
    assert [done.error for done in writer.poll()] == [None]


def test_a_full_queue_refuses_records_and_never_removals(tmp_path: Path, disk: SlowDisk) -> None:
    jobs = [job(tmp_path, n) for n in range(4)]
    writer = open_writer(disk, queue_bytes=2 * jobs[0].size)
    assert writer.accepts(jobs[0].size)
    assert [writer.put(j) for j in jobs] == [True, True, False, False]
    assert not writer.accepts(1)
    assert writer.put(removal(jobs[0]))
    assert writer.queued_bytes == 2 * jobs[0].size
    disk.gate.set()
    assert writer.flush(30)
    assert [done.job.path for done in writer.poll()] == [jobs[0].path, jobs[1].path, jobs[0].path]
    assert not jobs[0].path.exists()
    assert writer.queued_bytes == 0
    assert writer.put(jobs[2])


def test_one_record_that_is_larger_than_the_queue_is_written(tmp_path: Path, disk: SlowDisk) -> None:
    writer = open_writer(disk, queue_bytes=1)
    jobs = [job(tmp_path, n) for n in range(2)]
    assert writer.accepts(jobs[0].size)
    assert writer.put(jobs[0])
    assert not writer.put(jobs[1])
    assert writer.put(removal(jobs[1])), "a removal takes no room"
    disk.gate.set()
    assert writer.flush(30)


def test_what_waits_can_be_asked_for(tmp_path: Path, disk: SlowDisk) -> None:
    writer = open_writer(disk)
    first, second = job(tmp_path, 1), job(tmp_path, 2)
    writer.put(first)
    assert disk.begun.wait(30)
    writer.put(second)
    assert [writer.waiting(first.name), writer.waiting(second.name), writer.waiting("other")] == [first, second, None]
    disk.gate.set()
    assert writer.flush(30)
    assert [writer.waiting(first.name), writer.waiting(second.name)] == [None, None]


def test_flush_and_close_end_in_time_where_the_disk_does_not(tmp_path: Path, disk: SlowDisk) -> None:
    writer = open_writer(disk)
    jobs = [job(tmp_path, n) for n in range(3)]
    for j in jobs:
        writer.put(j)
    assert disk.begun.wait(30)
    assert not writer.flush(0)
    assert not writer.close(0)
    disk.gate.set()
    writer._thread.join(30)
    assert not writer._thread.is_alive()
    # The one that was under way is whole, the others are lost.
    assert [j.path.exists() for j in jobs] == [True, False, False]
    assert read_turn_of(jobs[0])


def read_turn_of(j: Job) -> bool:
    return j.path.read_bytes() == b"".join(bytes(b) for b in encode(_record(j), j.buffers))


@pytest.mark.parametrize("call", ["make_one_directory", "create", "write", "sync", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_failure_is_told_leaves_nothing_torn_and_the_next_job_is_tried(tmp_path: Path, call: str, number: int) -> None:
    disk = BrokenDisk(**{call: OSError(number, "broken")})
    writer = open_writer(disk)
    failing, after = job(tmp_path, 1), job(tmp_path, 2)
    writer.put(failing)
    assert writer.flush(30)
    disk.broken.clear()
    writer.put(after)
    assert writer.flush(30)
    found = writer.poll()
    assert [done.error.errno if done.error else None for done in found] == [number, None]
    assert not failing.path.exists()
    assert after.path.exists()
    assert temporaries(tmp_path) == []


def test_a_file_system_that_would_be_too_full_is_full(tmp_path: Path) -> None:
    class Full(QuickDisk):
        free = 0

        def free_bytes(self, path: Path) -> int:
            return self.free

    disk = Full()
    writer = open_writer(disk, min_free_bytes=1000)
    jobs = [job(tmp_path, n) for n in range(2)]
    for j, free in zip(jobs, [1000 + jobs[0].size - 1, 1000 + jobs[0].size], strict=True):
        disk.free = free
        writer.put(j)
        assert writer.flush(30)
    first, second = writer.poll()
    assert first.error is not None
    assert (first.error.errno, second.error) == (errno.ENOSPC, None)
    assert [j.path.exists() for j in jobs] == [False, True]


def test_buffers_are_written_as_they_are(tmp_path: Path) -> None:
    """Not copied on the way: what is handed over must not change."""
    seen: list[Buffer] = []

    class Seeing(QuickDisk):
        def write(self, fd: int, buffers: object) -> None:
            seen.extend(buffers)  # type: ignore[call-overload]

    j = job(tmp_path, 1)
    writer = open_writer(Seeing())
    writer.put(j)
    assert writer.flush(30)
    assert all(any(b is s for s in seen) for b in j.buffers)
