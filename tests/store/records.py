"""Small records with readable contents."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
from store.disks import StillDisk

from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.hashing import encode as edge_of
from mlx_blockpool.store.reader import read
from mlx_blockpool.store.record import Expected, Part, Record, encode

PARENT = hashlib.blake2b(b"parent", digest_size=32).digest()
PARTS = (
    Part("layers.0.keys", "F32", (1, 2, 3, 4)),
    Part("layers.0.values", "BF16", (1, 2, 3, 5)),
    Part("ring", "U32", (7,)),
)


def prefix_hash(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """As prefix.trie.edge_hash, whose room this test does not need."""
    return hashlib.blake2b(
        parent + struct.pack(f"{len(tokens)}q", *tokens), digest_size=32
    ).digest()


def make_record(
    tokens: tuple[int, ...] = tuple(range(100, 120)),
    *,
    kind: str = "block",
    namespace: str = "model",
    parts: tuple[Part, ...] = PARTS,
    **extra: str,
) -> Record:
    return Record(
        kind, namespace, prefix_hash(PARENT, tokens), PARENT, 512, edge_of(tokens), parts, extra
    )


def make_buffers(record: Record, first: int = 1) -> list[bytes]:
    """Bytes that count up from part to part, none of them 0."""
    sizes = [part.nbytes for part in record.parts]
    return [
        bytes(1 + (first + sum(sizes[:i]) + n) % 255 for n in range(size))
        for i, size in enumerate(sizes)
    ]


def make_file(record: Record, first: int = 1) -> bytes:
    return b"".join(bytes(buffer) for buffer in encode(record, make_buffers(record, first)))


def expected_of(record: Record) -> Expected:
    return Expected(record.namespace, record.kind, record.parts)


# One prefix, computed twice: the same file name.
OLD = make_record(turn="old")
NEW = make_record(turn="new")
OLD_FILE = make_file(OLD, first=1)
NEW_FILE = make_file(NEW, first=7)


def read_turn(disk: Disk, path: Path) -> str:
    """Whether the old record is there, the new one, or none; each of them whole."""
    try:
        record, views, *_ = read(disk, path, expected_of(NEW))
    except FileNotFoundError:
        return "absent"
    data = {"old": OLD_FILE, "new": NEW_FILE}[record.extra["turn"]]
    assert data.endswith(b"".join(views))
    return record.extra["turn"]


# One record in a file of its own, read from memory.
RECORD = make_record(bits="8", ring="3")
FILE = make_file(RECORD)
FOLDER = Path("/models/blocks")
PATH = FOLDER / RECORD.file_name


def disk_with(data: bytes, name: str = PATH.name) -> StillDisk:
    return StillDisk({FOLDER / name: data})


def assert_bad(
    message: str, data: bytes = FILE, expected: Expected | None = None, name: str = PATH.name
) -> None:
    """Neither the whole record nor, as far as it can tell, its header is read."""
    with pytest.raises(BadRecordError, match=message) as raised:
        read(disk_with(data, name), FOLDER / name, expected or expected_of(RECORD))
    assert str(raised.value).startswith(f"{FOLDER / name}: ")
