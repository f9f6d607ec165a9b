"""PromptStore: the budget of the folder, who goes first, and who never goes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from store.chains import SIZE, chain, file_of, put, put_all, settled
from store.clock import Clock
from store.disks import BrokenDisk, WatchedDisk
from store.records import make_buffers
from store.stores import NAMESPACE, open_store, record_files
from thorough import only


@pytest.mark.parametrize("queue_bytes", only([1, 3 * SIZE, 10**9], 1))
def test_the_disk_never_has_more_than_the_budget(tmp_path: Path, queue_bytes: int) -> None:
    budget = 20 * SIZE + 500
    disk = WatchedDisk(tmp_path)
    store = open_store(tmp_path, disk, store_bytes=budget, queue_bytes=queue_bytes)
    store.open()
    for start in range(40):
        path = chain(start, 6)
        for record in path:
            if put(store, record, *path) == "queue full":
                assert store.flush()
                store.poll()
                assert put(store, record, *path) is None
            store.touch([r.key for r in path if r.key in store])
    assert store.close(60)
    assert disk.written > 10 * budget
    assert 15 * SIZE < disk.most <= budget
    assert (
        store.report()["bytes"]
        == sum(path.stat().st_size for path in record_files(tmp_path))
        <= budget
    )


def test_others_models_are_not_ours_but_count_for_the_budget(tmp_path: Path) -> None:
    other = open_store(tmp_path, namespace="other")
    other.open()
    theirs = chain(1, 4, "other")
    put_all(other, theirs)
    store = open_store(tmp_path, store_bytes=6 * SIZE)
    assert store.open() == []
    assert store.report()["records"] == 4
    put_all(store, chain(1, 4))
    assert len(record_files(tmp_path)) == 6
    assert {path.parents[2].name for path in record_files(tmp_path)} == {"other", NAMESPACE}


def test_leaves_go_before_what_they_stand_on_and_what_is_spared_stays(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path)
    store = open_store(tmp_path, disk, store_bytes=6 * SIZE)
    store.open()
    old, new = chain(1, 3), chain(2, 3)
    for path in (old, new):
        put_all(store, path)
        store.touch([r.key for r in path])
    more = chain(3, 5)
    for record in more[:3]:
        assert put(store, record, *old, *more) is None
    assert store.flush()
    assert disk.unlinked == [r.hash.hex() for r in reversed(new)]
    assert put(store, more[3], *old, *more) == "over budget"
    assert store.counts["over budget"] == 1
    assert put(store, more[3], *more) is None
    assert store.flush()
    assert disk.unlinked[3:] == [old[2].hash.hex()]


def test_a_smaller_budget_holds_from_the_start_on(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open()
    records = chain(1, 6)
    put_all(store, records)
    store.touch([r.key for r in records])
    assert store.close()
    smaller = open_store(tmp_path, store_bytes=3 * SIZE)
    found = smaller.open()
    dropped = smaller.settle([r.key for r in records])
    assert smaller.flush()
    assert len(found) == 6
    assert dropped == [r.key for r in reversed(records[3:])]
    assert len(record_files(tmp_path)) == 3


def test_a_file_that_cannot_be_removed_still_counts(tmp_path: Path, clock: Clock) -> None:
    disk = BrokenDisk()
    store = open_store(tmp_path, disk, store_bytes=3 * SIZE)
    store.open()
    records = chain(1, 3)
    put_all(store, records)
    disk.broken["unlink"] = OSError(errno.EIO, "cannot")
    store.remove([records[0].key])
    assert store.flush()
    store.poll()
    assert store.report()["bytes"] == 3 * SIZE
    assert store.problem is not None
    disk.broken.clear()
    clock.now += 31
    assert put(store, chain(2, 1)[0]) is None
    assert store.flush()
    store.poll()
    assert not file_of(tmp_path, records[0]).exists()
    assert (
        store.report()["bytes"]
        == sum(path.stat().st_size for path in record_files(tmp_path))
        == 3 * SIZE
    )


def test_what_was_used_is_younger_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open()
    records = [chain(n, 1)[0] for n in range(4)]
    put_all(store, records)
    for n, record in enumerate(records):
        os.utime(file_of(tmp_path, record), (n, n))
    store.touch([records[0].key])
    assert store.close()
    again = open_store(tmp_path, store_bytes=4 * SIZE)
    assert [r.hash for r in again.open()] == [r.hash for r in [*records[1:], records[0]]]
    (record,) = chain(9, 1)
    assert again.write(record, lambda: make_buffers(record)).dropped == [records[1].key]


# -- pins ------------------------------------------------------------------------------------------


def test_what_is_pinned_never_goes(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path)
    store = open_store(tmp_path, disk, store_bytes=6 * SIZE)
    store.open()
    kept, other = chain(1, 3), chain(2, 3)
    store.pinned = {record.key for record in kept}
    for n in range(10):
        put_all(store, kept if not n else chain(10 + n, 1))
    put_all(store, other)
    assert all(file_of(tmp_path, record).exists() for record in (*kept, *other))
    assert len(record_files(tmp_path)) == 6
    store.pinned = ()
    put_all(store, chain(3, 4))
    assert [file_of(tmp_path, record).exists() for record in kept] == [False] * 3


def test_a_budget_that_is_full_of_pins_refuses_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, store_bytes=4 * SIZE)
    store.open()
    kept = chain(1, 4)
    put_all(store, kept)
    store.pinned = [record.key for record in kept]
    assert [put(store, record) for record in chain(2, 3)] == ["over budget"] * 3
    assert store.counts["over budget"] == 3
    told = [record.getMessage() for record in caplog.records]
    found = f"pinned records take {4 * SIZE} of {4 * SIZE} bytes"
    assert told == [f"prompt store: {found}; no more fits. Raise --store-bytes."]
    assert len(record_files(tmp_path)) == 4


def test_a_record_that_is_too_large_without_any_pins_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, store_bytes=SIZE - 1)
    store.open()
    assert put(store, chain(1, 1)[0]) == "over budget"
    assert caplog.records == []


def test_pins_hold_from_the_start_on(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    first.open()
    kept, other = chain(1, 3), chain(2, 5)
    put_all(first, [*kept, *other])
    first.close()
    store = open_store(tmp_path, store_bytes=2 * SIZE)
    store.pinned = {record.key for record in kept}
    store.open()
    assert set(store.settle([])) == {record.key for record in other}
    settled(store)
    assert set(record_files(tmp_path)) == {file_of(tmp_path, record) for record in kept}
