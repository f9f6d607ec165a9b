"""Several prompt stores on one folder: what the others write, use and remove."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store.chains import (
    PARTS,
    SIZE,
    chain,
    data_of,
    file_of,
    is_right,
    put,
    put_all,
    settled,
)
from store.clock import Clock
from store.disks import BrokenDisk, QuickDisk
from store.records import make_buffers
from store.stores import open_store, quarantined, record_files, temporaries
from thorough import only

from mlx_blockpool.store.prompt_store import PromptStore
from mlx_blockpool.store.record import Record


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
    two.remove([records[1].key])
    assert two.flush()
    with pytest.raises(FileNotFoundError):
        one.read(records[1].key).result(30)
    one.gone(records[1].key)
    assert one.flush()
    one.poll()
    assert one.problem is None
    put_all(one, [records[1]])


# -- what others do while we run -------------------------------------------------------------------


def pair(folder: Path, **config: Any) -> tuple[PromptStore, PromptStore]:
    """Two that look whenever they have written anything."""
    stores = open_store(folder, look_bytes=1, **config), open_store(folder, look_bytes=1, **config)
    for store in stores:
        assert store.open() == []
    return stores


def look(store: PromptStore) -> list[Record]:
    """New records of others."""
    store._look()
    return settled(store)


def test_new_records_of_another_are_learned_and_counted(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    records = chain(1, 3)
    put_all(one, records)
    assert [record.hash for record in look(two)] == [record.hash for record in records]
    assert two.report()["bytes"] == 3 * SIZE
    assert all(is_right(two, record) for record in records)
    put_all(two, records)
    assert two.counts["written"] == 0, "they are there"
    assert look(two) == look(one) == []


def test_records_of_another_model_are_counted_and_not_read(tmp_path: Path) -> None:
    other, store = (
        open_store(tmp_path, namespace="other"),
        open_store(tmp_path, disk := BrokenDisk()),
    )
    other.open()
    store.open()
    put_all(other, chain(1, 3, "other"))
    disk.calls.clear()
    assert look(store) == []
    assert store.report()["bytes"] == other.report()["bytes"] > 0
    assert disk.calls.count("read") == 1, "only its own model.json"


def test_what_another_one_drops_is_told(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    records = chain(1, 3)
    put_all(one, records)
    look(two)
    two.remove([records[1].key])
    assert two.flush()
    one._look()
    assert one.flush()
    one.poll()
    assert one.take_changes().lost == [records[1].key]
    assert one.report()["bytes"] == 2 * SIZE


def test_what_is_no_record_goes_into_quarantine_when_it_is_found(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    records = chain(1, 2)
    put_all(one, records)
    os.truncate(file_of(tmp_path, records[0]), 20)
    assert [record.hash for record in look(two)] == [records[1].hash]
    assert (two.report()["bytes"], len(quarantined(tmp_path))) == (SIZE, 1)


def test_what_another_one_uses_outlives_what_nobody_does(tmp_path: Path) -> None:
    one, two = pair(tmp_path, store_bytes=6 * SIZE)
    old, new = chain(1, 3), chain(2, 3)
    put_all(one, [*old, *new])
    look(two)
    one.touch([record.key for record in old])
    look(one)
    look(two)
    for store in (one, two):
        put_all(store, chain(3 if store is one else 4, 1))
    left = {path.stem for path in record_files(tmp_path)}
    assert {record.hash.hex() for record in old} <= left
    # The end of the path goes first, for whoever makes room.
    put_all(two, chain(5, 1))
    assert [file_of(tmp_path, record).exists() for record in old] == [True, True, True]
    put_all(two, chain(6, 2))
    assert [file_of(tmp_path, record).exists() for record in old] == [True, False, False]


def test_what_is_removed_after_a_look_began_does_not_come_back_with_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open()
    (record,) = chain(1, 1)
    put_all(store, [record])
    # Another process uses the file, so that the look finds it.
    os.utime(file_of(tmp_path, record), (1, 1))
    store._look()
    store.remove([record.key])
    assert settled(store) == []
    assert (record.key in store, store.report()["bytes"]) == (False, 0)


def test_an_idle_store_does_not_look(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, disk := BrokenDisk(), look_bytes=1)
    store.open()
    disk.calls.clear()
    for _ in range(5):
        clock.now += 3600
        settled(store)
    assert disk.calls == []


# -- the budget of all together --------------------------------------------------------------------


class TalliedDisk(QuickDisk):
    """Adds up the records of all stores that use it, whole or being written; `most` bytes at any
    time.
    """

    def __init__(self) -> None:
        self.sizes: dict[Path, int] = {}
        self.most = self.written = 0
        self.changing = threading.Lock()

    def rename(self, old: Path, new: Path) -> None:
        with self.changing:
            super().rename(old, new)
            if new.suffix == ".safetensors":
                self.sizes[new] = size = new.stat().st_size
                self.written += size
                self.most = max(self.most, sum(self.sizes.values()))

    def unlink(self, path: Path) -> None:
        with self.changing:
            super().unlink(path)
            self.sizes.pop(path, None)


@pytest.mark.parametrize("look_bytes", only([None, SIZE, 8 * SIZE]))
def test_two_that_churn_exceed_the_budget_by_no_more_than_what_one_writes_between_two_looks(
    tmp_path: Path, look_bytes: int | None
) -> None:
    budget = 64 * SIZE
    disk = TalliedDisk()
    stores = [
        open_store(tmp_path, disk, store_bytes=budget, look_bytes=look_bytes) for _ in range(2)
    ]
    for store in stores:
        store.open()
    rng = random.Random(look_bytes)
    for start in range(1000):
        # One of them writes more than the other, and neither waits for its looks.
        store = stores[rng.choice([0, 0, 0, 1])]
        for record in chain(start, 1):
            if put(store, record) is not None or not rng.randrange(4):
                store.flush()
        store.poll()
    for store in stores:
        settled(store)
        assert store.counts["looks"] > 10
    assert disk.written > 10 * budget
    assert budget < disk.most <= budget + 2 * max(SIZE, look_bytes or budget // 32) + SIZE
    for store in stores:
        look(store)
        look(store)
    for store in stores:
        assert (
            store.report()["bytes"]
            == sum(path.stat().st_size for path in record_files(tmp_path))
            <= budget
        )
        assert store.close()
        assert (store.problem, store.counts["failed"], store.counts["quarantined"]) == (None, 0, 0)


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from typing import Any
import os, random
import pytest
from store.disks import BrokenDisk, QuickDisk
from store.clock import Clock
from store.stores import open_store, quarantined, record_files
from store.chains import SIZE, chain, file_of, is_right, put, put_all, settled
from mlx_blockpool.store.record import Record
from mlx_blockpool.store.prompt_store import PromptStore
from store.stores import open_store
from store.chains import chain, put
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
        [sys.executable, "-c", CHILD, tests, str(tmp_path), str(30 * SIZE)],
        stderr=subprocess.PIPE,
        text=True,
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
                    store.gone(record.key)
    complaint = child.communicate()[1]
    assert child.returncode == 0, complaint
    assert store.close()
    assert (store.problem, store.counts["failed"], store.counts["quarantined"]) == (None, 0, 0)
    assert store.counts["written"] > 0
    again = open_store(tmp_path)
    for record in again.open():
        assert data_of(again, record) == b"".join(make_buffers(replace(record, parts=PARTS)))
    assert again.counts["quarantined"] == 0
    assert temporaries(tmp_path) == []
