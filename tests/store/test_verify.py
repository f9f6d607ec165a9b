"""Records read into memory that was given for it: as proven as in memory of their own."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from store.records import expected_of, make_buffers, make_file, make_record, naming

from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.store import record as record_module
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.reader import read
from mlx_blockpool.store.record import MAX_HEADER_BYTES, Part, decode_header, header_size

RECORD = make_record(bits="8", ring="3")
FILE = make_file(RECORD)


class Memory:
    """The same bytes for every file, as long as they are enough."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(b"\xee" * size)
        self.asked: list[int] = []

    def take(self, size: int) -> memoryview:
        self.asked.append(size)
        return memoryview(self.data)[:size]


def is_read(path: Path, memory: Memory) -> bool:
    """Whether it is proven, and as it was written then."""
    try:
        record, views, *_ = read(Disk(), path, expected_of(RECORD), naming, memory.take)
    except BadRecordError:
        return False
    assert record.parts == RECORD.parts
    assert record.extra == RECORD.extra
    assert [bytes(view) for view in views] == make_buffers(RECORD)
    return True


def test_a_record_is_read_into_what_is_given(tmp_path: Path) -> None:
    path, memory = tmp_path / RECORD.file_name, Memory(10_000)
    path.write_bytes(FILE)
    assert is_read(path, memory)
    assert memory.asked == [len(FILE)]
    assert bytes(memory.data[: len(FILE)]) == FILE
    assert bytes(memory.data[len(FILE) :]) == b"\xee" * (10_000 - len(FILE))


def test_no_changed_byte_is_handed_out(tmp_path: Path) -> None:
    """What was read before is still in the memory."""
    path, memory = tmp_path / RECORD.file_name, Memory(10_000)
    for at in range(len(FILE)):
        path.write_bytes(FILE)
        assert is_read(path, memory)
        path.write_bytes(FILE[:at] + bytes([FILE[at] ^ 1]) + FILE[at + 1 :])
        assert not is_read(path, memory)


@pytest.mark.parametrize("parts", [None, RECORD.parts, RECORD.parts[:2]], ids=["unknown", "known", "others"])
def test_no_changed_header_is_believed(parts: tuple[Part, ...] | None) -> None:
    assert decode_header(FILE, parts).extra == RECORD.extra
    for at in range(header_size(FILE)):
        with pytest.raises(BadRecordError):
            decode_header(FILE[:at] + bytes([FILE[at] ^ 1]) + FILE[at + 1 :], parts)


@pytest.mark.parametrize("change", [b"", b"x", b"x" * (MAX_HEADER_BYTES + 10)])
def test_a_file_of_another_length_is_no_record(tmp_path: Path, change: bytes) -> None:
    path, memory = tmp_path / RECORD.file_name, Memory(2 * MAX_HEADER_BYTES)
    path.write_bytes(FILE)
    assert is_read(path, memory)
    path.write_bytes(FILE + change if change else FILE[:-1])
    assert not is_read(path, memory)
    assert max(memory.asked) <= MAX_HEADER_BYTES + RECORD.nbytes + 1


def test_a_file_that_shrinks_while_it_is_read_is_found(tmp_path: Path) -> None:
    path, memory = tmp_path / RECORD.file_name, Memory(10_000)
    path.write_bytes(FILE)
    assert is_read(path, memory)

    def take(size: int) -> memoryview:
        os.truncate(path, size - 5)
        return memory.take(size)

    with pytest.raises(BadRecordError, match="Bytes of the file"):
        read(Disk(), path, expected_of(RECORD), naming, take)


def test_no_header_is_written_again_to_compare_it(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decode_header(FILE)
    monkeypatch.setattr(record_module, "_header", None)
    assert decode_header(FILE, RECORD.parts) == expected == decode_header(FILE)
    assert decode_header(FILE, (*RECORD.parts[:2], Part("ring", "U32", (1, 7)))) == expected


def test_a_sealed_header_says_where_each_part_lies_and_nothing_lies_between() -> None:
    head = FILE[8 : header_size(FILE)]
    moved = head.replace(b"[96,156]", b"[97,157]")
    assert moved != head
    at = len(b'{"__metadata__":{"seal":"')
    unsealed = moved[:at] + b"0" * 64 + moved[at + 64 :]
    seal = hashlib.blake2b(unsealed, digest_size=32).hexdigest().encode()
    for parts in (None, RECORD.parts):
        with pytest.raises(BadRecordError, match="without gaps"):
            decode_header(FILE[:8] + moved[:at] + seal + moved[at + 64 :] + FILE[header_size(FILE) :], parts)
