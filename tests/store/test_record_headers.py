"""Headers of records: all that is wrong with one is told, and nothing is believed that was not
written so.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
from store.disks import StillDisk
from store.records import (
    FILE,
    FOLDER,
    PATH,
    RECORD,
    assert_bad,
    disk_with,
    expected_of,
    make_file,
    make_record,
)

from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.store import record as record_module
from mlx_blockpool.store.reader import read, read_header
from mlx_blockpool.store.record import (
    MAX_HEADER_BYTES,
    Expected,
    Part,
    header_size,
)


def test_a_header_scan_finds_a_wrong_length_but_reads_no_data() -> None:
    class HeaderDisk(StillDisk):
        def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
            assert size is not None
            assert start + size <= 1 << 14
            return super().read(path, start, size)

    record = make_record(parts=(Part("keys", "U8", (100_000,)),))
    path, data, expected = FOLDER / record.file_name, make_file(record), Expected("model", "block")
    assert read_header(HeaderDisk({path: data}), path, expected).nbytes == 100_000
    for wrong in (data[:-1], data + b"x"):
        with pytest.raises(
            BadRecordError, match=f"Bytes of the file: got {len(wrong)}, expected {len(data)}"
        ):
            read_header(HeaderDisk({path: wrong}), path, expected)


def test_a_record_of_an_older_format_is_told_from_a_bad_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(record_module, "VERSION", 1)
        older = make_file(RECORD)
    with pytest.raises(BadRecordError, match=r"got mlx-blockpool 1, expected mlx-blockpool 2"):
        read_header(disk_with(older), PATH, expected_of(RECORD))
    with pytest.raises(BadRecordError, match="no valid seal"):
        read_header(
            disk_with(older.replace(b'"start":"512"', b'"start":"513"')), PATH, expected_of(RECORD)
        )


def test_a_header_longer_than_the_first_read() -> None:
    parts = tuple(Part(f"layers.{n}.keys", "U8", (1,)) for n in range(1000))
    record = make_record(parts=parts)
    path = FOLDER / record.file_name
    assert header_size(make_file(record)) > 1 << 15
    assert (
        read_header(disk_with(make_file(record), path.name), path, expected_of(record)).parts
        == parts
    )


def test_the_longest_header_hides_no_longer_file() -> None:
    record = make_record(extra="")
    record = make_record(extra="x" * (MAX_HEADER_BYTES - header_size(make_file(record))))
    data = make_file(record)
    assert header_size(data) == MAX_HEADER_BYTES
    read(disk_with(data), PATH, expected_of(record))
    assert_bad("Bytes of the file: got", data + b"x")


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_a_giant_header_length_allocates_nothing(length: int) -> None:
    class BoundedDisk(StillDisk):
        def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
            assert size is not None
            assert size <= 2 * MAX_HEADER_BYTES
            return super().read(path, start, size)

    disk = BoundedDisk({PATH: struct.pack("<Q", length) + FILE[8:]})
    for reader in (read, read_header):
        with pytest.raises(
            BadRecordError,
            match=f"Bytes of header: got {length + 8}, expected at most {MAX_HEADER_BYTES}",
        ):
            reader(disk, PATH, expected_of(RECORD))


HEAD = b'{"__metadata__":{"seal":"'


def sealed(text: bytes) -> bytes:
    """A header with a right seal in the place of its first 64 digits."""
    rest = text[len(HEAD) + 64 :]
    return (
        HEAD + hashlib.blake2b(HEAD + b"0" * 64 + rest, digest_size=32).hexdigest().encode() + rest
    )


def rewritten(change: dict[str, object] | None = None, seal: bool = True, **metadata: str) -> bytes:
    """The file with another header, whose seal is right or the one before."""
    size = header_size(FILE)
    entries = json.loads(FILE[8:size])
    entries["__metadata__"].update(metadata)
    text = json.dumps(entries | (change or {}), separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + (sealed(text) if seal else text) + FILE[size:]


def with_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def test_headers_of_others_are_told() -> None:
    assert_bad("Bytes of the file: got 0, expected at least 8", b"")
    assert_bad("Bytes of the file: got 20, expected at least", FILE[:20])
    assert_bad("Format: got mlx-blockpool 3, expected mlx-blockpool 2", rewritten(version="3"))
    for text in (
        b'{"weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"__metadata__":{}}',
        b"[" * 100_000,
        b"3",
        b"",
    ):
        assert_bad("Header: got no valid seal", with_header(text))
    start = HEAD + b"0" * 64 + b'"'
    assert_bad(
        "The header is not that of a record: KeyError .'format'", with_header(sealed(start + b"}}"))
    )
    assert_bad(
        "The header is not that of a record: JSONDecodeError", with_header(sealed(start + b"}"))
    )
    assert_bad(
        "The header is not that of a record: RecursionError",
        with_header(sealed(start + b'},"a":' + b"[" * 100_000)),
    )
    assert_bad(
        "The header is not that of a record: UnicodeDecodeError",
        with_header(sealed(start + b'},"\xff":1}')),
    )
    assert_bad("The header is not that of a record: TypeError", rewritten({"layers.0.keys": 3}))
    assert_bad("The header is not that of a record: ValueError", rewritten(start="9" * 5000))


def test_headers_that_are_not_as_written_are_told() -> None:
    changed, moved = (
        "Header: got no valid seal",
        "Parts: got others, expected those of the header, without gaps",
    )
    keys = {"dtype": "F32", "shape": [1, 2, 3, 4], "data_offsets": [0, 96]}
    assert_bad(changed, rewritten(seal=False))
    assert_bad(changed, rewritten(seal=False, start="0512"))
    assert_bad("Parent and tokens of hash", rewritten(tokens="1_0 2"))
    assert_bad("The header is not that of a record: error", rewritten(tokens=str(1 << 63)))
    for change in ({"data_offsets": [8, 104]}, {"more": 1}):
        assert_bad(changed, rewritten({"layers.0.keys": keys | change}, seal=False))
        assert_bad(moved, rewritten({"layers.0.keys": keys | change}))
    assert_bad(
        "Part: got Part.name=.layers.0.keys., .*, expected a name in ASCII, a dtype of BOOL",
        rewritten({"layers.0.keys": keys | {"shape": [True, 2, 3, 4]}}),
    )
    assert_bad(
        "Part: got Part.name=.layers.0.keys., .*, expected a name in ASCII, a dtype of BOOL",
        rewritten({"layers.0.keys": keys | {"shape": [1.0, 2, 3, 4]}}),
    )
    assert_bad(
        "Part: got Part.name=.layers.0.keys., .*, expected a name in ASCII, a dtype of BOOL",
        rewritten({"layers.0.keys": keys | {"shape": [-1, 2, 3, -4]}}),
    )
    assert_bad(
        "Part: got Part.name=.layers.0.keys., .*, expected a name in ASCII, a dtype of BOOL",
        rewritten({"layers.0.keys": keys | {"dtype": "F33"}}),
    )
    text = FILE[8 : header_size(FILE)]
    twice = text.replace(
        b'{"__metadata__"',
        b'{"ring":{"dtype":"U32","shape":[7],"data_offsets":[156,184]},"__metadata__"',
        1,
    )
    assert_bad(changed, with_header(twice) + FILE[header_size(FILE) :])
