"""PromptStore: what is put is found, what is refused, and what is damaged."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store.chains import (
    SIZE,
    chain,
    data_of,
    file_of,
    is_right,
    put,
    put_all,
)
from store.clock import Clock
from store.disks import BrokenDisk, QuickDisk
from store.records import make_buffers
from store.stores import held, open_store, quarantined, record_files, temporaries

from mlx_blockpool.errors import BadRecordError


def test_records_are_found_after_a_restart_and_are_what_was_put(tmp_path: Path) -> None:
    records = chain(1, 5)
    store = open_store(tmp_path)
    assert store.open() == []
    put_all(store, records)
    assert store.close()
    again = open_store(tmp_path)
    found = again.open()
    assert {r.hash for r in found} == {r.hash for r in records}
    assert [r.tokens for r in sorted(found, key=lambda r: r.start)] == [r.tokens for r in records]
    for record in records:
        assert record.key in again
        assert data_of(again, record) == b"".join(make_buffers(record))
    assert again.counts == {"read": 5, "read_bytes": 5000}
    assert (
        again.report()["bytes"]
        == sum(path.stat().st_size for path in record_files(tmp_path))
        == 5 * SIZE
    )


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


def test_a_record_is_refused_before_its_bytes_are_made(tmp_path: Path) -> None:
    store = open_store(tmp_path, store_bytes=SIZE - 1)
    store.open()
    (record,) = chain(1, 1)
    decision = store.write(record, lambda: make_buffers(record))
    assert (decision.refusal, decision.dropped) == ("over budget", ())


def test_a_record_that_is_not_written_yet_can_be_read(tmp_path: Path) -> None:
    disk = BrokenDisk(
        read=OSError(errno.EIO, "not from the disk"), create=OSError(errno.EIO, "not yet")
    )
    store = open_store(tmp_path, disk)
    with held(store):
        record = chain(1, 1)[0]
        assert put(store, record) is None
        assert data_of(store, record) == b"".join(make_buffers(record))


def test_removals_are_never_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path, queue_bytes=1)
    store.open()
    first, second = chain(1, 2)
    put_all(store, [first])
    with held(store):
        assert put(store, second) is None
        store.remove([first.key])
    assert store.flush()
    assert record_files(tmp_path) == [file_of(tmp_path, second)]


def test_a_full_queue_refuses_counts_and_drops_nothing_for_it(tmp_path: Path) -> None:
    store = open_store(tmp_path, queue_bytes=SIZE, store_bytes=3 * SIZE)
    store.open()
    put_all(store, chain(1, 1))
    put_all(store, chain(2, 1))
    with held(store):
        assert put(store, chain(3, 1)[0]) is None
        assert put(store, chain(4, 1)[0]) == "queue full"
    assert store.counts["queue full"] == 1
    assert store.counts["dropped"] == 0
    assert store.flush()
    assert put(store, chain(4, 1)[0]) is None


def test_so_much_a_day_and_what_was_refused_does_not_count(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, daily_bytes=3 * SIZE, store_bytes=10 * SIZE, queue_bytes=SIZE)
    store.open()
    with held(store):
        assert [put(store, r) for r in chain(1, 4)] == [
            None,
            "queue full",
            "queue full",
            "queue full",
        ]
    assert store.flush()
    for record in chain(1, 3)[1:]:
        put_all(store, [record])
    assert put(store, chain(1, 4)[3]) == "daily limit"
    assert store.counts["daily limit"] == 1
    clock.now += 86400
    put_all(store, [chain(1, 4)[3]])


def test_whether_a_record_would_be_taken_is_known_before_it_is_made(
    tmp_path: Path, clock: Clock
) -> None:
    store = open_store(tmp_path, queue_bytes=2 * SIZE, daily_bytes=3 * SIZE)
    store.open()
    one, two, three, four = chain(1, 4)
    assert store.takes()
    with held(store):
        assert [put(store, record) for record in (one, two)] == [None, None]
        assert store.takes(), "nothing was refused yet"
        assert put(store, three) == "queue full"
        assert [store.takes() for _ in range(3)] == [False] * 3
        assert store.counts["queue full"] == 4
    assert store.flush()
    assert store.takes()
    put_all(store, [three])
    assert put(store, four) == "daily limit"
    assert not store.takes()
    clock.now += 86400
    assert store.takes()
    put_all(store, [four])


# -- damaged ---------------------------------------------------------------------------------------


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
    damages()[how](file_of(tmp_path, first), file_of(tmp_path, second))
    with pytest.raises(BadRecordError):
        store.read(first.key).result(30)
    store.gone(first.key)
    assert (store.counts["quarantined"], len(quarantined(tmp_path))) == (1, 1)
    assert not file_of(tmp_path, first).exists()
    assert store.report()["bytes"] == SIZE
    put_all(store, [first])
    assert is_right(store, first)


def test_a_start_sets_bad_headers_aside_and_counts_right(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open()
    records = chain(1, 40)
    put_all(store, records)
    store.close()
    for record in records[::2]:
        os.truncate(file_of(tmp_path, record), 100)
    again = open_store(tmp_path)
    assert {r.hash for r in again.open()} == {r.hash for r in records[1::2]}
    assert again.report()["bytes"] == 20 * SIZE
    assert again.counts["quarantined"] == len(quarantined(tmp_path)) == 20


def test_old_leftovers_are_swept_and_young_ones_may_be_somebodys(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open()
    (record,) = chain(1, 1)
    put_all(store, [record])
    shard = file_of(tmp_path, record).parent
    for name, age in (("old", 7200), ("young", 60)):
        (shard / f".writing-{name}").write_bytes(b"half")
        moment = time.time() - age
        os.utime(shard / f".writing-{name}", (moment, moment))
    open_store(tmp_path).open()
    assert [path.name for path in temporaries(tmp_path)] == [".writing-young"]


def test_a_quick_disk_is_a_disk(tmp_path: Path) -> None:
    QuickDisk().make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
