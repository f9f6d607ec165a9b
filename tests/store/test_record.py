"""Records: what is written is read again, by us and by others, and each way of being another
record is told.
"""

from __future__ import annotations

import dataclasses
import errno
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from store.disks import StillDisk
from store.records import (
    FILE,
    FOLDER,
    PARENT,
    PATH,
    RECORD,
    assert_bad,
    disk_with,
    expected_of,
    make_buffers,
    make_file,
    make_record,
    prefix_hash,
)
from thorough import tried

from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.spec import ITEM_BYTES
from mlx_blockpool.store.fs import Disk, write_whole
from mlx_blockpool.store.hashing import edge_hash
from mlx_blockpool.store.hashing import encode as edge_of
from mlx_blockpool.store.reader import read, read_header
from mlx_blockpool.store.record import (
    MAX_HEADER_BYTES,
    Expected,
    Part,
    Record,
    decode_header,
    encode,
    header_size,
)

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / RECORD.file_name
    buffers = make_buffers(RECORD)
    write_whole(Disk(), path, encode(RECORD, buffers))
    record, views, *_ = read(Disk(), path, expected_of(RECORD))
    assert dataclasses.replace(record, checksums=()) == RECORD
    assert [bytes(view) for view in views] == buffers
    assert all(view.readonly for view in views)
    assert read_header(Disk(), path, expected_of(RECORD)) == record == decode_header(FILE)


def test_what_is_not_known_beforehand_is_read_from_the_header() -> None:
    record, views, *_ = read(disk_with(FILE), PATH, Expected("model", "block"))
    assert record.parts == RECORD.parts
    assert [bytes(view) for view in views] == make_buffers(RECORD)


def test_the_buffers_are_not_copied() -> None:
    buffers = [memoryview(buffer) for buffer in make_buffers(RECORD)]
    assert all(
        mine is yours for mine, yours in zip(encode(RECORD, buffers)[1:], buffers, strict=True)
    )


@given(
    tokens=st.lists(INT64, max_size=256).map(tuple),
    shapes=st.dictionaries(
        st.text(st.characters(max_codepoint=127), max_size=9).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(
            st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 3), max_size=4).map(tuple)
        ),
        max_size=5,
    ),
    extra=st.dictionaries(
        st.text(st.characters(max_codepoint=127), max_size=9),
        st.text(st.characters(max_codepoint=127)),
    ),
    start=st.integers(0, (1 << 63) - 1),
)
@tried(30, 500)
def test_any_record_is_read_as_it_was_written(
    tokens: tuple[int, ...],
    shapes: dict[str, tuple[str, tuple[int, ...]]],
    extra: dict[str, str],
    start: int,
) -> None:
    parts = tuple(Part(name, dtype, shape) for name, (dtype, shape) in shapes.items())
    record = Record(
        "state", "model", prefix_hash(PARENT, tokens), PARENT, start, edge_of(tokens), parts, extra
    )
    found, views, *_ = read(
        disk_with(make_file(record), record.file_name),
        FOLDER / record.file_name,
        expected_of(record),
    )
    assert dataclasses.replace(found, checksums=()) == record
    assert [bytes(view) for view in views] == make_buffers(record)
    assert safetensors.deserialize(make_file(record)) is not None


def test_hashes_are_those_of_the_trie() -> None:
    tokens = tuple(range(256))
    assert prefix_hash(PARENT, tokens) == edge_hash(PARENT, edge_of(tokens))


def test_safetensors_reads_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / RECORD.file_name
    write_whole(Disk(), path, [FILE])
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert [
        (name, tuple(t["shape"]), t["dtype"], bytes(t["data"])) for name, t in sorted(found.items())
    ] == [
        (part.name, part.shape, part.dtype, data)
        for part, data in zip(RECORD.parts, make_buffers(RECORD), strict=True)
    ]
    with safetensors.safe_open(path, "numpy") as opened:
        metadata = opened.metadata()
        assert opened.get_tensor("ring").tobytes() == make_buffers(RECORD)[2]
    assert metadata["tokens"] == " ".join(map(str, range(100, 120)))
    assert metadata["extra.bits"] == "8"
    assert len(metadata["seal"]) == 64
    assert metadata["seal"] != "0" * 64


def test_mlx_reads_the_same_arrays(tmp_path: Path) -> None:
    arrays = {
        "keys": mx.arange(48, dtype=mx.float32).reshape(1, 2, 6, 4),
        "values": (mx.arange(60) + 1000).astype(mx.bfloat16).reshape(1, 2, 6, 5),
        "empty": mx.zeros((1, 2, 6, 0), mx.float16),
    }
    dtypes = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}
    parts = tuple(Part(name, dtypes[array.dtype], array.shape) for name, array in arrays.items())
    record = make_record(parts=parts)
    stored = [
        array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for array in arrays.values()
    ]
    mx.eval(stored)
    path = tmp_path / record.file_name
    write_whole(Disk(), path, encode(record, [memoryview(array) for array in stored]))
    found = mx.load(str(path))
    assert {name: (array.dtype, array.shape) for name, array in found.items()} == {
        name: (array.dtype, array.shape) for name, array in arrays.items()
    }
    assert all(mx.array_equal(found[name], arrays[name]) for name in arrays)


def test_other_records_are_not_the_one_that_was_wanted() -> None:
    expected = expected_of(RECORD)
    assert_bad(
        "Namespace: got model, expected other",
        expected=dataclasses.replace(expected, namespace="other"),
    )
    assert_bad(
        "Kind: got block, expected window", expected=dataclasses.replace(expected, kind="window")
    )
    assert_bad(
        "Parts: got 3, expected 2", expected=dataclasses.replace(expected, parts=RECORD.parts[:2])
    )
    assert_bad("A record named: got .*, expected other", name="other.safetensors")
    for change in ({"name": "x"}, {"dtype": "I32"}, {"shape": (1, 2, 4, 3)}):
        parts = (dataclasses.replace(RECORD.parts[0], **change), *RECORD.parts[1:])
        assert_bad(
            "Part: got Part.*, expected Part", expected=dataclasses.replace(expected, parts=parts)
        )


def test_tokens_and_parent_belong_to_the_hash() -> None:
    for change in (
        {"tokens": RECORD.tokens[:-8] + edge_of([7])},
        {"tokens": RECORD.tokens[:-8]},
        {"parent": b"p" * 32},
    ):
        record = dataclasses.replace(RECORD, **change)
        assert_bad("Parent and tokens of hash: got", make_file(record))
        with pytest.raises(BadRecordError, match="Parent and tokens of hash"):
            read_header(disk_with(make_file(record)), PATH, expected_of(RECORD))


def test_each_part_has_its_checksum() -> None:
    for part, (start, end) in zip(RECORD.parts, ((0, 96), (96, 156), (156, 184)), strict=True):
        for at in (start, end - 1):
            data = bytearray(FILE)
            data[header_size(FILE) + at] ^= 1
            assert_bad(
                f"Checksum of {part.name}: got [0-9a-f]{{8}}, expected [0-9a-f]{{8}}", bytes(data)
            )


def test_equal_records_are_equal_files() -> None:
    assert (
        make_file(make_record(ring="3", bits="8"))
        == make_file(make_record(bits="8", ring="3"))
        == FILE
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": edge_of(range(257))}, "Tokens: got 257, expected at most 256"),
        ({"hash": b"short"}, "Bytes of a hash: got 5, expected 32"),
        ({"start": -1}, "Start: got -1"),
        ({"namespace": "ü"}, "got 'ü', expected ASCII text"),
        ({"extra": {"ring": 3}}, "got 3, expected ASCII text"),
        (
            {"parts": (*RECORD.parts[:2], RECORD.parts[0])},
            "Parts: got .*, expected names that differ",
        ),
        (
            {"parts": (*RECORD.parts[:2], Part("__metadata__", "U32", (7,)))},
            "expected names that differ",
        ),
        (
            {"parts": (*RECORD.parts[:2], Part("ring", "F7", (7,)))},
            "Part: got Part.*F7.*, expected a name in ASCII, a dtype of BOOL, ",
        ),
        (
            {"parts": (*RECORD.parts[:2], Part("ring", "U32", (8,)))},
            "Bytes of ring: got 28, expected 32",
        ),
        ({"parts": RECORD.parts[:2]}, "Buffers: got 3, expected 2"),
        ({"extra": {"ring": "3" * MAX_HEADER_BYTES}}, "Bytes of header: got"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(BadRecordError, match=message):
        encode(dataclasses.replace(RECORD, **change), make_buffers(RECORD))


def test_a_file_that_cannot_be_read_is_no_bad_record() -> None:
    class BrokenDisk(StillDisk):
        def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
            raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        read(BrokenDisk({}), PATH, expected_of(RECORD))
    with pytest.raises(FileNotFoundError):
        read(StillDisk({}), PATH, expected_of(RECORD))


def test_records_need_no_arrays() -> None:
    code = (
        "import sys, mlx_blockpool.store.record; print([m for m in sys.modules if m in ('mlx', "
        "'mlx_lm', 'numpy')])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
