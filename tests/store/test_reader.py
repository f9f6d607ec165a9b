"""Records are read by threads of the reader, several at a time; errors are raised by the result."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
from store.disks import StillDisk
from store.records import expected_of, make_buffers, make_file, make_record, naming

from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.store.fs import Disk, Into
from mlx_blockpool.store.quarantine import Quarantine
from mlx_blockpool.store.reader import READERS, Reader

RECORDS = [make_record(tokens=(n, n + 1)) for n in range(READERS + 2)]


class GatedDisk(Disk):
    """Reading waits for the gate, and says who reads."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun: list[str] = []
        self.changed = threading.Condition()

    def read_into(self, path: Path, into: Into, most: int) -> memoryview:
        with self.changed:
            self.begun.append(threading.current_thread().name)
            self.changed.notify_all()
        assert self.gate.wait(20)
        return super().read_into(path, into, most)

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, 20)


def test_several_records_are_read_at_a_time_and_none_by_the_thread_that_waits(tmp_path: Path) -> None:
    disk, counts = GatedDisk(), Counter[str]()
    for record in RECORDS:
        (tmp_path / record.file_name).write_bytes(make_file(record))
    reader = Reader(disk, tmp_path, naming, counts, Quarantine(disk, tmp_path, 10**9))
    readings = [reader.read(record.file_name, expected_of(record), bytearray) for record in RECORDS]
    disk.wait_for(READERS)
    assert len(set(disk.begun)) == READERS
    assert [reading.done() for reading in readings] == [False] * len(RECORDS)
    disk.gate.set()
    for reading, record in zip(readings, RECORDS, strict=True):
        found = reading.result(20)
        assert [bytes(view) for view in found.views] == make_buffers(record)
        assert 0 < found.begun <= found.ended
    reader.close()
    assert len(disk.begun) == len(RECORDS)
    assert threading.current_thread().name not in disk.begun
    assert counts == {"read": len(RECORDS), "read_bytes": sum(record.nbytes for record in RECORDS)}


def test_what_went_wrong_is_for_whoever_asks(tmp_path: Path) -> None:
    record = RECORDS[0]
    reader = Reader(StillDisk({}), tmp_path, naming, Counter(), Quarantine(StillDisk({}), tmp_path, 10**9))
    with pytest.raises(FileNotFoundError):
        reader.read(record.file_name, expected_of(record)).result(20)
    (tmp_path / record.file_name).write_bytes(make_file(record)[:-1])
    reader = Reader(Disk(), tmp_path, naming, counts := Counter(), Quarantine(Disk(), tmp_path, 10**9))
    with pytest.raises(BadRecordError):
        reader.read(record.file_name, expected_of(record), bytearray).result(20)
    assert counts == {"quarantined": 1}
