"""Noted headers: a start reads no file that was noted, and whatever becomes of the notes costs
reads alone.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from store.chains import chain, file_of, is_right, put_all, settled
from store.damages import ODD_FILES, make_sparse
from store.disks import QuickDisk
from store.stores import open_store
from thorough import seeds

from mlx_blockpool.commands.store import clear
from mlx_blockpool.store.db import DATABASE_FILE, DATABASE_FILES, Database
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.fsck import judge
from mlx_blockpool.store.record import SUFFIX, WINDOW, Record
from mlx_blockpool.store.scan import Listing


class ReadingDisk(QuickDisk):
    """`records`: how often one was read."""

    def __init__(self) -> None:
        self.records = 0

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        self.records += path.suffix == SUFFIX
        return super().read(path, start, size)


def forget(root: Path) -> None:
    for name in DATABASE_FILES:
        (root / name).unlink(missing_ok=True)


def write(root: Path, *paths: list[Record], disk: Disk | None = None) -> None:
    store = open_store(root, disk)
    store.open()
    for records in paths:
        put_all(store, records)
    assert store.close()


def start(root: Path) -> tuple[list[Record], int]:
    """What a start finds, in the order of the names, and how many files it reads."""
    store = open_store(root, disk := ReadingDisk())
    found = store.open()
    assert store.close()
    return sorted(found, key=lambda record: record.hash), disk.records


def facts(records: Iterable[Record]) -> list[tuple[object, ...]]:
    """What the files themselves say, and notes too."""
    found = [
        (r.kind, r.namespace, r.hash, r.parent, r.start, r.tokens, dict(r.extra)) for r in records
    ]
    return sorted(found, key=lambda fact: fact[2])  # type: ignore[arg-type, return-value]


def test_a_start_reads_no_record_that_was_noted(tmp_path: Path) -> None:
    records = [*chain(1, 20), *chain(-(1 << 60), 5), *chain(3, 2, kind=WINDOW)]
    write(tmp_path, records)
    found, reads = start(tmp_path)
    assert (facts(found), reads) == (facts(records), 0)


def test_what_was_not_noted_is_read_once(tmp_path: Path) -> None:
    write(tmp_path, records := chain(1, 10))
    forget(tmp_path)
    assert [start(tmp_path)[1] for _ in range(3)] == [10, 0, 0]
    assert facts(start(tmp_path)[0]) == facts(records)


def test_a_file_that_was_used_replaced_or_changed_in_place(tmp_path: Path) -> None:
    write(tmp_path, records := chain(1, 6))
    used, replaced, changed, removed = (file_of(tmp_path, record) for record in records[:4])
    # Another process, or nobody that the store knows of.
    os.utime(used, (1000, 1000))
    replaced.with_name("other").write_bytes(replaced.read_bytes())
    os.replace(replaced.with_name("other"), replaced)
    data = bytearray(changed.read_bytes())
    data[30] ^= 1
    changed.write_bytes(data)
    removed.unlink()
    found, reads = start(tmp_path)
    assert (facts(found), reads) == (facts([*records[:2], *records[4:]]), 3)
    assert start(tmp_path)[1] == 0


def test_what_is_used_and_dropped_here_stays_noted(tmp_path: Path) -> None:
    store = open_store(tmp_path, look_bytes=1)
    store.open()
    put_all(store, records := chain(1, 6))
    store.touch(record.key for record in records[:3])
    put_all(store, chain(2, 1))
    settled(store)
    store.remove([records[5].key])
    store.touch(record.key for record in records[2:4])
    assert store.close()
    found, reads = start(tmp_path)
    assert (facts(found), reads) == (facts([*records[:5], *chain(2, 1)]), 0)


def test_notes_do_not_grow_without_end(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open()
    put_all(store, records := chain(1, 3))
    for number in range(200):
        put_all(store, other := chain(100 + number, 1))
        store.remove([other[0].key])
    assert store.close()
    assert (tmp_path / DATABASE_FILE).stat().st_size < 100_000
    assert (facts(start(tmp_path)[0]), start(tmp_path)[1]) == (facts(records), 0)


def test_notes_of_records_that_are_gone_go_too(tmp_path: Path) -> None:
    write(tmp_path, records := chain(1, 10))
    for record in records[3:]:
        file_of(tmp_path, record).unlink()
    start(tmp_path)
    with sqlite3.connect(tmp_path / DATABASE_FILE) as connection:
        assert connection.execute("SELECT count(*) FROM headers").fetchone() == (3,)
    connection.close()


def test_notes_of_models_that_are_gone_go_with_the_next_start_of_another(tmp_path: Path) -> None:
    write(tmp_path, chain(1, 10))
    shutil.rmtree(tmp_path / "models")
    store = open_store(tmp_path, namespace="another")
    store.open()
    assert store.close()
    with sqlite3.connect(tmp_path / DATABASE_FILE) as connection:
        assert connection.execute("SELECT count(*) FROM headers").fetchone() == (0,)
    connection.close()


def test_clearing_a_store_leaves_no_tokens_in_its_notes(tmp_path: Path) -> None:
    write(tmp_path, records := chain(1, 10))
    clear(tmp_path, yes=True)
    with sqlite3.connect(tmp_path / DATABASE_FILE) as connection:
        assert connection.execute("SELECT count(*) FROM headers").fetchone() == (0,)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = (tmp_path / DATABASE_FILE).read_bytes()
    assert [record for record in records if record.hash.hex().encode() in content] == []


def test_two_servers_note_what_each_of_them_wrote(tmp_path: Path) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)
    one.open()
    two.open()
    for number in range(10):
        put_all(one, chain(number, 2))
        put_all(two, chain(100 + number, 2))
    assert one.close()
    assert two.close()
    found, reads = start(tmp_path)
    assert (len(found), reads) == (40, 0)


# -- what becomes of the notes ---------------------------------------------------------------------


def _lie(root: Path, rng: random.Random) -> None:
    """Change one byte, or one value, of one note."""
    with sqlite3.connect(root / DATABASE_FILE) as connection:
        rows = connection.execute("SELECT * FROM headers ORDER BY name").fetchall()
        row = list(rows[rng.randrange(len(rows))])
        name, column = row[0], rng.randrange(1, 7)
        value = row[column]
        if rng.random() < 0.3:
            row[column] = rng.choice([None, "", b"", -1, "x" * 50, b"\xff", rows[0][column]])
        elif isinstance(value, int):
            row[column] = value + 1
        else:
            data = bytearray(value if isinstance(value, bytes) else value.encode())
            data[rng.randrange(len(data))] ^= 1
            row[column] = bytes(data) if isinstance(value, bytes) else data.decode()
        connection.execute("DELETE FROM headers WHERE name = ?", (name,))
        connection.execute("INSERT INTO headers VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    connection.close()


def _cut(root: Path, rng: random.Random) -> None:
    path = root / DATABASE_FILE
    os.truncate(path, rng.randrange(path.stat().st_size))


def _flip(root: Path, rng: random.Random) -> None:
    path = root / DATABASE_FILE
    data = bytearray(path.read_bytes())
    for at in rng.sample(range(len(data)), rng.choice((1, 10, 500))):
        data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


@pytest.mark.parametrize("seed", seeds(1, 8))
@pytest.mark.parametrize("damage", [_lie, _cut, _flip])
def test_damaged_notes_cost_reads_and_never_a_wrong_answer(
    tmp_path: Path, damage: Callable[[Path, random.Random], None], seed: int
) -> None:
    rng = random.Random(seed)
    records = [*chain(1, 8), *chain(5, 4, kind=WINDOW)]
    write(tmp_path, records)
    for _ in range(20):
        damage(tmp_path, rng)
        found, reads = start(tmp_path)
        assert facts(found) == facts(records)
        assert reads <= len(records)
        # What was in doubt has been noted anew, or its database has been set aside and is begun
        # anew.
        start(tmp_path)
        assert start(tmp_path)[1] == 0
    store = open_store(tmp_path)
    store.open()
    assert all(is_right(store, record) for record in records)
    assert store.close()


@pytest.mark.parametrize("make", [*ODD_FILES.values(), make_sparse], ids=[*ODD_FILES, "sparse"])
def test_something_else_in_its_place(tmp_path: Path, make: Callable[[Path], None]) -> None:
    write(tmp_path, records := chain(1, 4))
    forget(tmp_path)
    make(tmp_path / DATABASE_FILE)
    assert start(tmp_path)[1] == 4
    store = open_store(tmp_path)
    assert facts(store.open()) == facts(records)
    put_all(store, chain(2, 2))
    assert store.problem is None
    assert store.close()
    assert len(start(tmp_path)[0]) == 6


def test_a_database_that_fails_costs_the_notes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "broken")

    write(tmp_path, records := chain(1, 4))
    with monkeypatch.context() as patched:
        patched.setattr(Database, "_open", fail)
        store = open_store(tmp_path, disk := ReadingDisk())
        assert facts(store.open()) == facts(records)
        put_all(store, more := chain(2, 2))
        assert (store.problem, store.counts["faults"]) == (None, 0)
        assert store.close()
    assert disk.records == 4
    assert start(tmp_path)[1] == 2
    assert facts(start(tmp_path)[0]) == facts([*records, *more])


def test_commands_that_change_nothing_take_notes_for_it_and_others_read(tmp_path: Path) -> None:
    write(tmp_path, chain(1, 6))
    files = Listing(tmp_path).records
    disk = ReadingDisk()
    noted = list(judge(files, noted=True, disk=disk))
    assert disk.records == 0
    assert sorted(noted, key=lambda j: j.file.path) == list(judge(files, disk=disk))
    assert disk.records == 6
