"""Noted headers: a start reads no file that was noted, and whatever becomes of the notes costs reads alone."""

from __future__ import annotations

import os
import random
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from store.chains import chain, file_of, is_right, put_all, settled
from store.damages import ODD_FILES, make_sparse
from store.disks import CountedDisk, QuickDisk
from store.stores import NAMESPACE, open_store
from thorough import seeds

from mlx_blockpool.store import headers
from mlx_blockpool.store.fs import Buffer, Disk, Stamp
from mlx_blockpool.store.fsck import judge
from mlx_blockpool.store.headers import MAGIC, Headers
from mlx_blockpool.store.paths import HEADERS_FILE, folder_of
from mlx_blockpool.store.record import SUFFIX, WINDOW, Record
from mlx_blockpool.store.scan import Listing

FILE = f"{folder_of(NAMESPACE)}/{HEADERS_FILE}"


class ReadingDisk(QuickDisk):
    """`records`: how often one was read; `noted`: bytes that were written to the notes."""

    def __init__(self) -> None:
        self.records = self.noted = 0

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        self.records += path.suffix == SUFFIX
        return super().read(path, start, size)

    def append(self, path: Path, data: Buffer) -> None:
        self.noted += len(data)
        super().append(path, data)


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
    found = [(r.kind, r.namespace, r.hash, r.parent, r.start, r.tokens, dict(r.extra)) for r in records]
    return sorted(found, key=lambda fact: fact[2])  # type: ignore[arg-type, return-value]


def test_a_start_reads_no_record_that_was_noted(tmp_path: Path) -> None:
    records = [*chain(1, 20), *chain(-(1 << 60), 5), *chain(3, 2, kind=WINDOW)]
    write(tmp_path, records)
    found, reads = start(tmp_path)
    assert (facts(found), reads) == (facts(records), 0)


def test_what_was_not_noted_is_read_once(tmp_path: Path) -> None:
    write(tmp_path, records := chain(1, 10))
    (tmp_path / FILE).unlink()
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


def test_notes_do_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "SMALL_BYTES", 2000)
    store = open_store(tmp_path, disk := ReadingDisk())
    store.open()
    put_all(store, records := chain(1, 3))
    for number in range(200):
        put_all(store, other := chain(100 + number, 1))
        store.remove([other[0].key])
    assert store.close()
    assert disk.noted > 20_000
    assert (tmp_path / FILE).stat().st_size < 6000
    assert (facts(start(tmp_path)[0]), start(tmp_path)[1]) == (facts(records), 0)


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
    assert len(found) == 40
    assert reads <= 2, "the two may both have made the file"


# -- what becomes of the file ------------------------------------------------------------------------------------------


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _noise(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.randrange(1, 500)) + data[at:]


def _lie(data: bytes, rng: random.Random) -> bytes:
    """Frames that are whole, of which one says something else."""
    notes = list(headers._frames(data))
    at = rng.randrange(len(notes))
    changed = bytearray(notes[at])
    for _ in range(rng.choice((1, 1, 5))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    notes[at] = bytes(changed)[: rng.choice((len(changed), len(changed), rng.randrange(len(changed) + 1)))]
    return MAGIC + b"".join(map(headers._framed, notes))


def _endless(data: bytes, rng: random.Random) -> bytes:
    return data + struct.pack("<II", 1 << 31, zlib.crc32(b"")) + data


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [_cut, _flip, _noise, _lie, _endless]


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_damaged_notes_cost_reads_and_never_a_wrong_answer(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    records = [*chain(1, 8), *chain(5, 4, kind=WINDOW)]
    write(tmp_path, records)
    good, told = (tmp_path / FILE).read_bytes(), facts(records)
    for turn in range(25):
        (tmp_path / FILE).write_bytes(DAMAGES[turn % len(DAMAGES)](good, rng))
        found, reads = start(tmp_path)
        # Only where a token begins and what else is said is not part of the hash: whoever reads the record compares that.
        assert [(*fact[:4], fact[5]) for fact in facts(found)] == [(*fact[:4], fact[5]) for fact in told]
        assert reads <= len(records)
        if DAMAGES[turn % len(DAMAGES)] is not _lie:
            assert facts(found) == told
            assert start(tmp_path)[1] == 0, "it was written anew"
        store = open_store(tmp_path)
        store.open()
        assert all(is_right(store, record) for record in records)
        assert store.close()


@pytest.mark.parametrize("make", [*ODD_FILES.values(), make_sparse], ids=[*ODD_FILES, "sparse"])
def test_something_else_in_its_place(tmp_path: Path, make: Callable[[Path], None]) -> None:
    write(tmp_path, records := chain(1, 4))
    (tmp_path / FILE).unlink()
    make(tmp_path / FILE)
    assert start(tmp_path)[1] == 4
    store = open_store(tmp_path)
    assert facts(store.open()) == facts(records)
    put_all(store, chain(2, 2))
    assert store.problem is None
    assert store.close()
    assert len(start(tmp_path)[0]) == 6


class Dying(CountedDisk):
    """The process ends in the k-th of the calls that write notes."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.is_noting = False

    def at(self, call: str) -> None:
        super().at(call)
        if self.is_noting and len(self.calls) > self.k:
            raise SystemExit

    def append(self, path: Path, data: Buffer) -> None:
        self.at("append")
        # As much of it as had come to the disk.
        super().append(path, data[: len(data) // 2])
        self.at("half")
        super().append(path, data[len(data) // 2 :])
        self.at("appended")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("k", range(9))
def test_a_crash_at_any_point_costs_reads_alone(tmp_path: Path, k: int, whole: bool) -> None:
    write(tmp_path, records := chain(1, 5))
    if whole:
        (tmp_path / FILE).unlink()
    disk = Dying(k)
    notes = Headers(disk, tmp_path, NAMESPACE)
    stamps = {file.path.relative_to(tmp_path).as_posix(): file.stamp for file in Listing(tmp_path).records}
    noted = notes.load({name: stamp for name, stamp in stamps.items() if stamp is not None})
    assert len(noted) == (0 if whole else 5)
    for record in records:
        notes.add(record, Stamp(1, 2, 3) if k % 2 else stamps[f"{file_of(tmp_path, record).relative_to(tmp_path)}"])  # type: ignore[arg-type]
    disk.is_noting = True
    with_end = pytest.raises(SystemExit) if k < (8 if whole else 3) else None
    if with_end is None:
        notes.write()
    else:
        with with_end:
            notes.write()
    found, _ = start(tmp_path)
    assert facts(found) == facts(records)
    assert start(tmp_path)[1] == 0


def test_commands_that_change_nothing_take_notes_for_it_and_others_read(tmp_path: Path) -> None:
    write(tmp_path, chain(1, 6))
    files = Listing(tmp_path).records
    disk = ReadingDisk()
    noted = list(judge(files, noted=True, disk=disk))
    assert disk.records == 0
    assert sorted(noted, key=lambda j: j.file.path) == list(judge(files, disk=disk))
    assert disk.records == 6
