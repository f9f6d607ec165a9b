"""PromptStore: what is asked of it, what it refuses, its budget, disks that fail, and several of them in one folder."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store.records import make_buffers
from store.stores import (
    NAMESPACE,
    BrokenDisk,
    QuickDisk,
    WatchedDisk,
    open_store,
    quarantined,
    record_files,
    temporaries,
)

from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.prefix.stored import naming
from mlx_blockpool.store import store as store_module
from mlx_blockpool.store.record import Expected, Part, Record, file_size
from mlx_blockpool.store.store import BLOCK, PromptStore

PARTS = (Part("data", "U8", (1000,)),)
ROOT = hashlib.blake2b(b"root", digest_size=32).digest()


def chain(start: int, count: int, namespace: str = NAMESPACE) -> list[Record]:
    """A path of records, each after the one before it."""
    records: list[Record] = []
    for n in range(count):
        parent = records[-1].hash if records else ROOT
        tokens = (start, n)
        records.append(Record(BLOCK, namespace, naming(parent, tokens), parent, 2 * n, tokens, PARTS))
    return records


SIZE = file_size(chain(0, 1)[0])


def put(store: PromptStore, record: Record, *spared: Record) -> str | None:
    found = store.put(record, lambda: make_buffers(record), {r.hash for r in spared})
    return found.refusal


def put_all(store: PromptStore, records: list[Record]) -> None:
    for record in records:
        assert put(store, record) is None
    assert store.flush()
    assert store.poll() == []


def expected_of(record: Record) -> Expected:
    return Expected(NAMESPACE, BLOCK, record.hash, record.parts)


def data_of(store: PromptStore, record: Record) -> bytes:
    return b"".join(bytes(view) for view in store.read(expected_of(record)).result(30)[1])


def path_of(folder: Path, record: Record) -> Path:
    text = record.hash.hex()
    return folder / "models" / NAMESPACE / "blocks" / text[:2] / f"{text}.safetensors"


class Clock:
    """In place of the module time: moves only by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(store_module, "time", clock)
    return clock


# -- what is put is found ----------------------------------------------------------------------------------------------


def test_records_are_found_after_a_restart_and_are_what_was_put(tmp_path: Path) -> None:
    records = chain(1, 5)
    store = open_store(tmp_path)
    assert store.open() == []
    put_all(store, records)
    assert store.close()
    again = open_store(tmp_path)
    assert {r.hash for r in again.open()} == {r.hash for r in records}
    assert [r.tokens for r in sorted(again.open(), key=lambda r: r.start)] == [r.tokens for r in records]
    for record in records:
        assert record.hash in again
        assert data_of(again, record) == b"".join(make_buffers(record))
    assert again.counts == {"read": 5, "read_bytes": 5000}
    assert again.report()["bytes"] == sum(path.stat().st_size for path in record_files(tmp_path)) == 5 * SIZE


def test_files_and_folders_are_their_owners_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new")
    store.open()
    put_all(store, chain(1, 3))
    found = {(path.is_dir(), path.stat().st_mode & 0o777) for path in (tmp_path / "new").rglob("*")}
    assert found == {(True, 0o700), (False, 0o600)}


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open()
    (record,) = chain(1, 1)
    put_all(store, [record])
    assert put(store, record) is None
    assert store.flush()
    store.poll()
    assert store.counts["written"] == 1


def test_buffers_are_asked_for_only_where_a_record_is_taken(tmp_path: Path) -> None:
    store = open_store(tmp_path, store_bytes=SIZE - 1)
    store.open()

    def copy() -> list[bytes]:
        raise AssertionError("copied in vain")

    assert store.put(chain(1, 1)[0], copy).refusal == "over budget"


def test_a_record_that_is_not_written_yet_can_be_read(tmp_path: Path) -> None:
    disk = BrokenDisk(read=OSError(errno.EIO, "not from the disk"), create=OSError(errno.EIO, "not yet"))
    store = open_store(tmp_path, disk)
    with store._writer._changed:
        record = chain(1, 1)[0]
        assert put(store, record) is None
        assert data_of(store, record) == b"".join(make_buffers(record))


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


# -- budget ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue_bytes", [1, 3 * SIZE, 10**9])
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
            store.touch([r.hash for r in path if r.hash in store])
    assert store.close()
    assert disk.written > 10 * budget
    assert 15 * SIZE < disk.most <= budget
    assert store.report()["bytes"] == sum(path.stat().st_size for path in record_files(tmp_path)) <= budget


def test_leaves_go_before_what_they_stand_on_and_what_is_spared_stays(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path)
    store = open_store(tmp_path, disk, store_bytes=6 * SIZE)
    store.open()
    old, new = chain(1, 3), chain(2, 3)
    for path in (old, new):
        put_all(store, path)
        store.touch([r.hash for r in path])
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
    store.touch([r.hash for r in records])
    assert store.close()
    smaller = open_store(tmp_path, store_bytes=3 * SIZE)
    found = smaller.open()
    dropped = smaller.settle([r.hash for r in records])
    assert smaller.flush()
    assert len(found) == 6
    assert dropped == [r.hash for r in reversed(records[3:])]
    assert len(record_files(tmp_path)) == 3


def test_a_file_that_cannot_be_removed_still_counts(tmp_path: Path, clock: Clock) -> None:
    disk = BrokenDisk()
    store = open_store(tmp_path, disk, store_bytes=3 * SIZE)
    store.open()
    records = chain(1, 3)
    put_all(store, records)
    disk.broken["unlink"] = OSError(errno.EIO, "cannot")
    store.forget([records[0].hash])
    assert store.flush()
    store.poll()
    assert store.report()["bytes"] == 3 * SIZE
    assert store.problem is not None
    disk.broken.clear()
    clock.now += 31
    assert put(store, chain(2, 1)[0]) is None
    assert store.flush()
    store.poll()
    assert not path_of(tmp_path, records[0]).exists()
    assert store.report()["bytes"] == sum(path.stat().st_size for path in record_files(tmp_path)) == 3 * SIZE


def test_removals_are_never_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path, queue_bytes=1)
    store.open()
    first, second = chain(1, 2)
    put_all(store, [first])
    with store._writer._changed:
        assert put(store, second) is None
        store.forget([first.hash])
    assert store.flush()
    assert record_files(tmp_path) == [path_of(tmp_path, second)]


def test_what_was_used_is_younger_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open()
    records = [chain(n, 1)[0] for n in range(4)]
    put_all(store, records)
    for n, record in enumerate(records):
        os.utime(path_of(tmp_path, record), (n, n))
    store.touch([records[0].hash])
    assert store.close()
    again = open_store(tmp_path, store_bytes=4 * SIZE)
    assert [r.hash for r in again.open()] == [r.hash for r in [*records[1:], records[0]]]
    assert again.put(chain(9, 1)[0], lambda: make_buffers(records[0])).dropped == [records[1].hash]


# -- refused -----------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_counts_and_drops_nothing_for_it(tmp_path: Path) -> None:
    store = open_store(tmp_path, queue_bytes=SIZE, store_bytes=3 * SIZE)
    store.open()
    put_all(store, chain(1, 1))
    put_all(store, chain(2, 1))
    with store._writer._changed:
        assert put(store, chain(3, 1)[0]) is None
        assert put(store, chain(4, 1)[0]) == "queue full"
    assert store.counts["queue full"] == 1
    assert store.counts["dropped"] == 0
    assert store.flush()
    assert put(store, chain(4, 1)[0]) is None


def test_so_much_a_day_and_what_was_refused_does_not_count(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, daily_bytes=3 * SIZE, store_bytes=10 * SIZE, queue_bytes=SIZE)
    store.open()
    with store._writer._changed:
        assert [put(store, r) for r in chain(1, 4)] == [None, "queue full", "queue full", "queue full"]
    assert store.flush()
    for record in chain(1, 3)[1:]:
        put_all(store, [record])
    assert put(store, chain(1, 4)[3]) == "daily limit"
    assert store.counts["daily limit"] == 1
    clock.now += 86400
    put_all(store, [chain(1, 4)[3]])


# -- disks that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "make_one_directory"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_left_alone_and_tried_again(tmp_path: Path, clock: Clock, call: str, number: int) -> None:
    disk = BrokenDisk()
    store = open_store(tmp_path, disk, retry_seconds=30.0)
    store.open()
    put_all(store, chain(1, 1))
    disk.broken[call] = OSError(number, os.strerror(number))
    failing = chain(2, 1)[0]
    assert put(store, failing) is None
    assert store.flush()
    assert store.poll() == [failing.hash]
    assert failing.hash not in store
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
    assert store.poll() == [failing.hash]
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
    large = Record(BLOCK, NAMESPACE, naming(ROOT, (5,)), ROOT, 0, (5,), (Part("data", "U8", (5000,)),))
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
        store.read(expected_of(before[0])).result(30)
    store.gone(before[0].hash)
    assert before[0].hash not in store
    put_all(store, after)
    assert {r.hash for r in open_store(folder).open()} == {r.hash for r in after}


def test_a_folder_that_cannot_be_is_a_problem_and_no_error(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = open_store(tmp_path / "file" / "store")
    assert store.open() == []
    assert store.problem is not None
    assert put(store, chain(1, 1)[0]) == "disk failed"
    clock.now += 31
    record = chain(1, 1)[0]
    assert put(store, record) is None
    assert store.flush()
    assert store.poll() == [record.hash]
    (tmp_path / "file").unlink()
    clock.now += 31
    put_all(store, [record])
    assert store.problem is None
    assert store.close()


def test_a_full_file_system_is_full_before_it_is(tmp_path: Path) -> None:
    store = open_store(tmp_path, min_free_bytes=1 << 60)
    store.open()
    record = chain(1, 1)[0]
    assert put(store, record) is None
    assert store.flush()
    assert store.poll() == [record.hash]
    assert "free" in (store.problem or "")
    assert record_files(tmp_path) == []


def test_a_disk_that_cannot_be_touched_does_not_hinder_the_end(tmp_path: Path) -> None:
    disk = BrokenDisk(touch=OSError(errno.EROFS, "read-only"))
    store = open_store(tmp_path, disk)
    store.open()
    put_all(store, chain(1, 2))
    store.touch([r.hash for r in chain(1, 2)])
    assert store.close()


# -- damage ------------------------------------------------------------------------------------------------------------


def damages() -> dict[str, Callable[[Path, Path], Any]]:
    def flip(path: Path, other: Path) -> None:
        data = bytearray(path.read_bytes())
        data[-3] ^= 4
        path.write_bytes(data)

    return {
        "flip": flip,
        "truncate": lambda path, other: os.truncate(path, SIZE - 1),
        "empty": lambda path, other: path.write_bytes(b""),
        "swap": lambda path, other: shutil.copy(other, path),
    }


@pytest.mark.parametrize("how", damages())
def test_what_is_damaged_after_the_start_is_set_aside(tmp_path: Path, how: str) -> None:
    store = open_store(tmp_path)
    store.open()
    first, second = chain(1, 2)
    put_all(store, [first, second])
    damages()[how](path_of(tmp_path, first), path_of(tmp_path, second))
    with pytest.raises(BadRecordError):
        store.read(expected_of(first)).result(30)
    store.gone(first.hash)
    assert (store.counts["quarantined"], len(quarantined(tmp_path))) == (1, 1)
    assert not path_of(tmp_path, first).exists()
    assert store.report()["bytes"] == SIZE
    put_all(store, [first])
    assert data_of(store, first) == b"".join(make_buffers(first))


def test_what_cannot_be_read_goes_from_the_disk_too(tmp_path: Path) -> None:
    disk = BrokenDisk()
    store = open_store(tmp_path, disk)
    store.open()
    records = chain(1, 2)
    put_all(store, records)
    disk.broken["read"] = OSError(errno.EIO, "broken sector")
    with pytest.raises(OSError, match="broken sector"):
        store.read(expected_of(records[1])).result(30)
    store.gone(records[1].hash)
    assert store.flush()
    assert record_files(tmp_path) == [path_of(tmp_path, records[0])]
    assert store.report()["bytes"] == SIZE


def test_a_start_sets_bad_headers_aside_and_counts_right(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open()
    records = chain(1, 40)
    put_all(store, records)
    store.close()
    for record in records[::2]:
        os.truncate(path_of(tmp_path, record), 100)
    again = open_store(tmp_path)
    assert {r.hash for r in again.open()} == {r.hash for r in records[1::2]}
    assert again.report()["bytes"] == 20 * SIZE
    assert again.counts["quarantined"] == len(quarantined(tmp_path)) == 20


def test_old_leftovers_are_swept_and_young_ones_may_be_somebodys(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open()
    (record,) = chain(1, 1)
    put_all(store, [record])
    shard = path_of(tmp_path, record).parent
    for name, age in (("old", 7200), ("young", 60)):
        (shard / f".writing-{name}").write_bytes(b"half")
        moment = store_module.time.time() - age
        os.utime(shard / f".writing-{name}", (moment, moment))
    open_store(tmp_path).open()
    assert [path.name for path in temporaries(tmp_path)] == [".writing-young"]


# -- several in one folder ---------------------------------------------------------------------------------------------


def test_two_stores_write_the_same_and_find_each_others(tmp_path: Path) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)
    for store in (one, two):
        store.open()
    common, ones, twos = chain(1, 5), chain(2, 5), chain(3, 5)
    for a, b in zip([*common, *ones], [*common, *twos], strict=True):
        assert put(one, a) is None
        assert put(two, b) is None
    for store in (one, two):
        assert store.close()
        assert (store.problem, store.counts["failed"]) == (None, 0)
    again = open_store(tmp_path)
    assert {r.hash for r in again.open()} == {r.hash for r in (*common, *ones, *twos)}
    assert {data_of(again, r) for r in common} == {b"".join(make_buffers(common[0]))}


def test_what_another_one_drops_is_a_miss(tmp_path: Path) -> None:
    one = open_store(tmp_path)
    one.open()
    records = chain(1, 2)
    put_all(one, records)
    two = open_store(tmp_path)
    two.open()
    two.forget([records[1].hash])
    assert two.flush()
    with pytest.raises(FileNotFoundError):
        one.read(expected_of(records[1])).result(30)
    one.gone(records[1].hash)
    assert one.flush()
    one.poll()
    assert one.problem is None
    put_all(one, [records[1]])


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from store.stores import open_store
from store.test_store import chain, put
store = open_store(Path(sys.argv[2]), store_bytes=int(sys.argv[3]))
store.open()
for start in range(30):
    for record in chain(start, 5):
        put(store, record)
        store.poll()
assert store.close() and store.problem is None and not store.counts["failed"], store.report()
"""


def test_two_processes_churn_in_one_folder(tmp_path: Path) -> None:
    tests = str(Path(__file__).parent.parent)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, tests, str(tmp_path), str(30 * SIZE)], stderr=subprocess.PIPE, text=True
    )
    store = open_store(tmp_path, store_bytes=30 * SIZE)
    store.open()
    misses = 0
    while child.poll() is None:
        for start in range(30):
            path = chain(start, 5)
            for record in path:
                put(store, record)
                store.poll()
                try:
                    assert data_of(store, record) == b"".join(make_buffers(record))
                except FileNotFoundError:
                    misses += 1
                    store.gone(record.hash)
    complaint = child.communicate()[1]
    assert child.returncode == 0, complaint
    assert store.close()
    assert (store.problem, store.counts["failed"], store.counts["quarantined"]) == (None, 0, 0)
    assert store.counts["written"] > 0
    again = open_store(tmp_path)
    for record in again.open():
        assert data_of(again, record) == b"".join(make_buffers(record))
    assert again.counts["quarantined"] == 0
    assert temporaries(tmp_path) == []


def test_a_quick_disk_is_a_disk(tmp_path: Path) -> None:
    QuickDisk().make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
