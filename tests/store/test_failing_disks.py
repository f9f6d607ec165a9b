"""PromptStore on disks that fail: it lets them rest, tries again, and loses nothing that is
still there.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from store.chains import ROOT, SIZE, chain, file_of, is_right, put, put_all, settled
from store.clock import Clock
from store.disks import BrokenDisk
from store.records import prefix_hash
from store.stores import NAMESPACE, open_store, record_files, temporaries

from mlx_blockpool.store.db import DATABASE_FILE
from mlx_blockpool.store.hashing import encode
from mlx_blockpool.store.record import BLOCK, WINDOW, Part, Record


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "make_one_directory"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_left_alone_and_tried_again(
    tmp_path: Path, clock: Clock, call: str, number: int
) -> None:
    disk = BrokenDisk()
    store = open_store(tmp_path, disk, retry_seconds=30.0)
    store.open()
    put_all(store, chain(1, 1))
    disk.broken[call] = OSError(number, os.strerror(number))
    failing = chain(2, 1)[0]
    assert put(store, failing) is None
    assert store.flush()
    assert store.poll() == [failing.key]
    assert failing.key not in store
    assert store.report()["problem"] is not None
    assert os.strerror(number) in store.report()["problem"]
    assert temporaries(tmp_path) == []

    calls = len(disk.calls)
    assert put(store, failing) == "disk failed"
    clock.now += 29
    assert put(store, failing) == "disk failed"
    assert len(disk.calls) == calls
    clock.now += 2
    assert put(store, failing) is None
    assert put(store, chain(3, 1)[0]) == "disk failed", "one record tries"
    assert store.flush()
    assert store.poll() == [failing.key]
    disk.broken.clear()
    assert put(store, failing) == "disk failed"
    clock.now += 31
    put_all(store, [failing])
    assert store.problem is None
    put_all(store, chain(3, 3))
    assert store.counts["failed"] == 2
    assert store.counts["disk failed"] == 4
    assert len(record_files(tmp_path)) == 5


def test_a_refusal_does_not_use_up_the_try(tmp_path: Path, clock: Clock) -> None:
    disk = BrokenDisk(create=OSError(errno.EIO, "broken"))
    store = open_store(tmp_path, disk, store_bytes=2 * SIZE)
    disk.make_directory(tmp_path / "models" / NAMESPACE)
    (tmp_path / "models" / NAMESPACE / "model.json").write_text('{\n  "model": "none"\n}')
    store.open()
    assert put(store, chain(1, 1)[0]) is None
    assert store.flush()
    store.poll()
    disk.broken.clear()
    clock.now += 31
    large = Record(
        BLOCK,
        NAMESPACE,
        prefix_hash(ROOT, (5,)),
        ROOT,
        0,
        encode((5,)),
        (Part("data", "U8", (5000,)),),
    )
    assert put(store, large) == "over budget"
    put_all(store, chain(1, 1))


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = open_store(folder)
    store.open()
    before, after = chain(1, 3), chain(2, 3)
    put_all(store, before)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        store.read(before[0].key).result(30)
    store.gone(before[0].key)
    assert before[0].key not in store
    put_all(store, after)
    assert {r.hash for r in open_store(folder).open()} == {r.hash for r in after}


def test_a_folder_that_cannot_be_is_a_problem_and_no_error(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = open_store(tmp_path / "file" / "store")
    assert store.open() == []
    assert store.problem is not None
    (record,) = chain(1, 1)
    assert put(store, record) == "disk failed"
    clock.now += 31
    assert put(store, record) == "disk failed", "nobody has seen yet what is there"
    assert settled(store) == []
    (tmp_path / "file").unlink()
    clock.now += 31
    assert settled(store) == []
    assert store.problems.number == errno.ENOTDIR
    put_all(store, [record])
    assert (store.problem, store.problems.number) == (None, 0)
    assert store.close()


def test_what_was_there_is_found_once_the_disk_can_be_seen(tmp_path: Path, clock: Clock) -> None:
    first = open_store(tmp_path)
    first.open()
    records = chain(1, 5)
    put_all(first, records)
    first.close()
    store = open_store(
        tmp_path, disk := BrokenDisk(scan=OSError(errno.EIO, "asleep")), store_bytes=5 * SIZE
    )
    assert store.open() == []
    looked = len(disk.calls)
    settled(store)
    assert len(disk.calls) == looked, "it was left alone"
    clock.now += 31
    assert settled(store) == []
    assert len(disk.calls) > looked
    disk.broken.clear()
    clock.now += 31
    assert {record.hash for record in settled(store)} == {record.hash for record in records}
    assert store.report()["bytes"] == 5 * SIZE
    assert all(is_right(store, record) for record in records)
    put_all(store, chain(2, 1))
    assert (len(record_files(tmp_path)), store.problem) == (5, None)


def test_a_full_file_system_is_full_before_it_is(tmp_path: Path) -> None:
    store = open_store(tmp_path, min_free_bytes=1 << 60)
    store.open()
    record = chain(1, 1)[0]
    assert put(store, record) is None
    assert store.flush()
    assert store.poll() == [record.key]
    assert "free" in (store.problem or "")
    assert store.problems.number == errno.ENOSPC
    assert record_files(tmp_path) == []


def test_a_disk_that_cannot_be_touched_does_not_hinder_the_end(tmp_path: Path) -> None:
    disk = BrokenDisk(touch=OSError(errno.EROFS, "read-only"))
    store = open_store(tmp_path, disk)
    store.open()
    put_all(store, chain(1, 2))
    store.touch([r.key for r in chain(1, 2)])
    assert store.close()


def test_a_folder_that_cannot_be_written_can_be_read(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    first.open()
    put_all(first, records := chain(1, 3))
    first.close()
    (tmp_path / "models" / NAMESPACE / "model.json").unlink()
    store = open_store(tmp_path, BrokenDisk(create=OSError(errno.EROFS, "read-only")))
    assert len(store.open()) == 3
    assert "read-only" in (store.problem or "")
    assert not store.takes()
    assert all(is_right(store, record) for record in records)


# -- what cannot be read at present ----------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_what_cannot_be_read_at_present_stays_and_is_tried_again_later(
    tmp_path: Path, clock: Clock, number: int
) -> None:
    disk = BrokenDisk()
    store = open_store(tmp_path, disk)
    store.open()
    records = chain(1, 3)
    put_all(store, records)
    disk.broken["read"] = OSError(number, os.strerror(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        store.read(records[1].key).result(30)
    store.put_off(records[1].key)
    assert [store.is_put_off(record.key) for record in records] == [False, True, False]
    disk.broken.clear()
    settled(store)
    assert len(record_files(tmp_path)) == 3
    clock.now += 31
    assert not store.is_put_off(records[1].key)
    assert is_right(store, records[1])


def test_what_could_not_be_read_is_replaced_where_it_is_made_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open()
    (record,) = chain(1, 1)
    put_all(store, [record])
    put_all(store, [record])
    assert store.counts["written"] == 1
    store.put_off(record.key)
    put_all(store, [record])
    put_all(store, [record])
    assert store.counts["written"] == 2
    assert not store.is_put_off(record.key)


def test_a_header_that_cannot_be_read_at_the_start_counts_and_is_replaced(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    first.open()
    put_all(first, records := chain(1, 2))
    first.close()
    (tmp_path / DATABASE_FILE).unlink()
    store = open_store(tmp_path, disk := BrokenDisk(read=OSError(errno.EIO, "broken sector")))
    assert store.open() == []
    disk.broken.clear()
    assert (len(record_files(tmp_path)), store.report()["bytes"]) == (2, 2 * SIZE)
    assert store.counts["quarantined"] == 0
    put_all(store, records)
    assert store.counts["written"] == 2


def test_what_is_not_what_it_should_be_goes_from_the_disk_too(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open()
    records = chain(1, 2)
    put_all(store, records)
    store.gone(records[1].key)
    settled(store)
    assert record_files(tmp_path) == [file_of(tmp_path, records[0])]
    assert store.report()["bytes"] == SIZE


# -- what lies there after a failure ---------------------------------------------------------------


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "size"])
def test_a_record_that_could_not_be_replaced_is_still_the_old_one(
    tmp_path: Path, call: str
) -> None:
    """And the index knows; also where even that cannot be asked for, once the disk is seen
    again.
    """
    disk = BrokenDisk()
    store = open_store(tmp_path, disk, retry_seconds=0.0, look_bytes=1)
    store.open()
    (record,) = chain(1, 1, kind=WINDOW)
    put_all(store, [record])
    broken = {"rename": OSError(errno.EIO, "broken"), call: OSError(errno.EIO, "broken")}
    disk.broken.update(broken)
    assert put(store, record, anew=True) is None
    assert store.flush()
    assert store.poll() == [record.key]
    disk.broken.clear()
    settled(store)
    assert record.key in store
    assert store.report()["bytes"] == SIZE
    assert is_right(store, record)
    put_all(store, chain(2, 1))
    settled(store)
    assert (
        store.report()["bytes"]
        == 2 * SIZE
        == sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors"))
    )


def test_a_failure_that_something_newer_follows_does_not_speak_of_it(tmp_path: Path) -> None:
    """The first write of a name fails, the second is waiting already when that is heard."""
    disk = BrokenDisk(rename=OSError(errno.EIO, "broken"))
    store = open_store(tmp_path, disk, retry_seconds=0.0)
    store.open()
    (record,) = chain(1, 1, kind=WINDOW)
    assert put(store, record) is None
    assert store.flush()
    disk.broken.clear()
    assert put(store, record, anew=True) is None
    assert store.flush()
    assert store.poll() == []
    assert record.key in store
    assert store.report()["bytes"] == SIZE
    assert (store.counts["failed"], store.counts["written"]) == (1, 1)


def test_a_fault_that_is_not_the_disks_fails_one_record_and_the_disk_is_used_on(
    tmp_path: Path,
) -> None:
    disk = BrokenDisk()
    store = open_store(tmp_path, disk)
    store.open()
    failing, after = chain(1, 2)
    disk.broken["write"] = ValueError("odd")  # type: ignore[assignment]
    assert put(store, failing) is None
    assert store.flush()
    disk.broken.clear()
    assert store.poll() == [], "what is no fault of the disk is not tried again at once"
    assert store.take_changes().lost == [failing.key]
    assert failing.key not in store
    put_all(store, [after])
    assert (store.counts["failed"], store.counts["faults"], store.problem) == (1, 1, None)
    assert store.close()


def test_the_log_says_once_that_a_disk_fails_and_repeats_it_after_ten_minutes(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    disk = BrokenDisk()
    store = open_store(tmp_path, disk, retry_seconds=30.0)
    store.open()

    def write(chains: int) -> None:
        for record in chain(chains, 1):
            assert put(store, record) is None
        assert store.flush()
        store.poll()
        clock.now += 31

    for attempt in range(19):
        disk.broken["create"] = OSError(errno.EIO, "broken")
        write(2 * attempt)
        # It works for a moment, so that there is not one failure but many.
        disk.broken.clear()
        write(2 * attempt + 1)
        assert len(caplog.messages) == 1 + (attempt >= 10), attempt
    disk.broken["create"] = OSError(errno.EROFS, "read-only now")
    write(100)
    assert [message.partition(": '")[0] for message in caplog.messages] == [
        "prompt store: records: [Errno 5] broken",
        "prompt store: records: [Errno 5] broken",
        "prompt store: records: [Errno 30] read-only now",
    ]
