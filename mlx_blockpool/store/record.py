"""Records: one file in the safetensors format that proves what it holds. Knows bytes and tokens; no arrays, no trie, no pool.

    8 bytes   length of the header, little endian
    header    JSON: metadata (seal first), then name, dtype, shape and place of each part; spaces to a multiple of 8
    data      the parts, in order, without gaps

The seal is a hash of the header as it was written; the header holds a CRC-32 of each part. Only what both prove is handed out.
Any thread may call anything here.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import BadRecordError
from ..spec import BLOCK_TOKENS
from .disk import Buffer, Disk

FORMAT = "mlx-blockpool"
VERSION = 1
SUFFIX = ".safetensors"
HASH_BYTES = 32
MAX_HEADER_BYTES = 1 << 20
# Bytes of one value; the names are those of the safetensors format.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

_LENGTH = struct.Struct("<Q")
_UNSEALED = "0" * 64
_EXTRA = "extra."
_MAX_DIMS = 8
_PROPER = f"a name in ASCII, a dtype of {', '.join(ITEM_BYTES)} and at most {_MAX_DIMS} sizes"
# A header scan reads this much at first; few headers are longer.
_FIRST_BYTES = 1 << 14

Naming: TypeAlias = Callable[[bytes, tuple[int, ...]], bytes]


@dataclass(frozen=True)
class Part:
    """One array of a record. `dtype` as in ITEM_BYTES."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Record:
    """What a record says of itself.

    kind, namespace  what its parts are, and what they were computed with.
    hash, parent     names of the prefix with and without `tokens`; 32 bytes each.
    start, tokens    absolute position of the first token, and at most 256 token ids of 64 bits.
    extra            what else the parts need to be understood, ASCII.
    checksums        CRC-32 of each part; `encode` works them out.
    """

    kind: str
    namespace: str
    hash: bytes
    parent: bytes
    start: int
    tokens: tuple[int, ...]
    parts: tuple[Part, ...]
    extra: Mapping[str, str] = field(default_factory=dict)
    checksums: tuple[int, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of data, without the header."""
        return sum(part.nbytes for part in self.parts)

    @property
    def file_name(self) -> str:
        return self.hash.hex() + SUFFIX


@dataclass(frozen=True)
class Expected:
    """What a reader knows of a record beforehand. hash None: the one in the file's name; parts None: those of the header."""

    namespace: str
    kind: str
    hash: bytes | None = None
    parts: tuple[Part, ...] | None = None


def encode(record: Record, buffers: Sequence[Buffer]) -> list[Buffer]:
    """The bytes of a file: its header, then `buffers` themselves, one for each part, contiguous.

    They must not change before they are written. Raises BadRecordError for what could not be read again.
    """
    _need(len(buffers) == len(record.parts), "buffers", len(buffers), len(record.parts))
    checksums = tuple(zlib.crc32(buffer) for buffer in buffers)
    header = _header(_checked(replace(record, checksums=checksums)))
    _need(len(header) <= MAX_HEADER_BYTES, "bytes of header", len(header), f"at most {MAX_HEADER_BYTES}")
    for part, buffer in zip(record.parts, buffers, strict=True):
        _need(memoryview(buffer).nbytes == part.nbytes, f"bytes of {part.name}", memoryview(buffer).nbytes, part.nbytes)
    return [header, *buffers]


def file_size(record: Record) -> int:
    """Bytes of the file that encode() makes of a record."""
    return len(_header(_checked(replace(record, checksums=(0,) * len(record.parts))))) + record.nbytes


def header_size(data: bytes) -> int:
    """Bytes before the first part, from the first 8 bytes of a file. Raises BadRecordError."""
    _need(len(data) >= _LENGTH.size, "bytes of the file", len(data), f"at least {_LENGTH.size}")
    size = _LENGTH.size + int(_LENGTH.unpack_from(data)[0])
    _need(size <= MAX_HEADER_BYTES, "bytes of header", size, f"at most {MAX_HEADER_BYTES}")
    return size


def decode_header(data: bytes) -> Record:
    """The record whose header `data` begins with. Raises BadRecordError unless each byte of it is as it was written."""
    size = header_size(data)
    _need(len(data) >= size, "bytes of the file", len(data), f"at least {size} for the header")
    try:
        record = _checked(_parse(json.loads(data[_LENGTH.size : size].decode("ascii"))))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRecordError(f"Header: found {type(error).__name__} ({error}), needed that of a record.") from None
    _need(_header(record) == data[:size], "header", "one that was changed", "the one that its seal was made for")
    return record


def read_header(disk: Disk, path: Path, expected: Expected, naming: Naming) -> Record:
    """What a file holds, by its header and length alone: its data are not read and may be bad.

    `naming` is the rule that gives the hash of a prefix from its parent's hash and its last tokens.
    Raises BadRecordError, and OSError if the file cannot be read.
    """
    with _told(path):
        data = disk.read(path, 0, _FIRST_BYTES)
        if header_size(data) > len(data):
            data = disk.read(path, 0, header_size(data))
        record = decode_header(data)
        _check_file(record, path, disk.size(path), header_size(data))
        _check_identity(record, expected, naming)
        return record


def read(disk: Disk, path: Path, expected: Expected, naming: Naming) -> tuple[Record, list[memoryview]]:
    """A record and the bytes of each part, read-only views of one buffer, after everything about them was verified.

    Errors and `naming` as in read_header. Reading and checksums release the GIL: to be faster, read several at a time.
    """
    parts = read_header(disk, path, expected, naming).parts if expected.parts is None else expected.parts
    with _told(path):
        data = disk.read(path, 0, MAX_HEADER_BYTES + sum(part.nbytes for part in parts) + 1)
        record = decode_header(data)
        _check_file(record, path, len(data), header_size(data))
        _check_identity(record, expected, naming)
        return record, list(_proven(record, memoryview(data)[header_size(data) :]))


def _proven(record: Record, data: memoryview) -> Iterator[memoryview]:
    start = 0
    for part, needed in zip(record.parts, record.checksums, strict=True):
        view = data[start : start + part.nbytes]
        found = zlib.crc32(view)
        _need(found == needed, f"checksum of {part.name}", f"{found:08x}", f"{needed:08x}")
        yield view
        start += part.nbytes


def _check_file(record: Record, path: Path, size: int, header: int) -> None:
    _need(size == header + record.nbytes, "bytes of the file", size, header + record.nbytes)
    _need(path.name == record.file_name, "a record named", record.file_name, path.name)


def _check_identity(record: Record, expected: Expected, naming: Naming) -> None:
    _need(record.namespace == expected.namespace, "namespace", record.namespace, expected.namespace)
    _need(record.kind == expected.kind, "kind", record.kind, expected.kind)
    if expected.hash is not None:
        _need(record.hash == expected.hash, "hash", record.hash.hex(), expected.hash.hex())
    named = naming(record.parent, record.tokens)
    _need(named == record.hash, "parent and tokens of hash", named.hex(), record.hash.hex())
    if expected.parts is not None:
        _need(len(record.parts) == len(expected.parts), "parts", len(record.parts), len(expected.parts))
        for found, needed in zip(record.parts, expected.parts, strict=True):
            _need(found == needed, "part", found, needed)


def _header(record: Record) -> bytes:
    """The one way to write a header: what is read must be equal to it, byte for byte."""
    entries: dict[str, Any] = {"__metadata__": _metadata(record)}
    start = 0
    for part in record.parts:
        end = start + part.nbytes
        entries[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    seal = hashlib.blake2b(text, digest_size=HASH_BYTES).hexdigest()
    # The seal comes first, so the first run of zeros is its own.
    return _LENGTH.pack(len(text)) + text.replace(_UNSEALED.encode(), seal.encode(), 1)


def _metadata(record: Record) -> dict[str, str]:
    return {
        "seal": _UNSEALED,
        "format": FORMAT,
        "version": str(VERSION),
        "kind": record.kind,
        "namespace": record.namespace,
        "hash": record.hash.hex(),
        "parent": record.parent.hex(),
        "start": str(record.start),
        "tokens": " ".join(map(str, record.tokens)),
        "crc32": " ".join(f"{checksum:08x}" for checksum in record.checksums),
    } | {_EXTRA + key: record.extra[key] for key in sorted(record.extra)}


def _parse(entries: Any) -> Record:
    metadata = entries.pop("__metadata__")
    found = (metadata["format"], metadata["version"])
    _need(found == (FORMAT, str(VERSION)), "format", " ".join(map(str, found)), f"{FORMAT} {VERSION}")
    return Record(
        kind=metadata["kind"],
        namespace=metadata["namespace"],
        hash=bytes.fromhex(metadata["hash"]),
        parent=bytes.fromhex(metadata["parent"]),
        start=int(metadata["start"]),
        tokens=tuple(map(int, metadata["tokens"].split())),
        parts=tuple(Part(name, entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()),
        extra={key.removeprefix(_EXTRA): value for key, value in metadata.items() if key.startswith(_EXTRA)},
        checksums=tuple(int(checksum, 16) for checksum in metadata["crc32"].split()),
    )


def _checked(record: Record) -> Record:
    """The record, if its header can be written and read again. Raises BadRecordError."""
    for text in (record.kind, record.namespace, *record.extra, *record.extra.values()):
        _need(isinstance(text, str) and text.isascii(), "kind, namespace or extra", repr(text), "ASCII text")
    for digest in (record.hash, record.parent):
        _need(len(digest) == HASH_BYTES, "bytes of a hash", len(digest), HASH_BYTES)
    _need(0 <= record.start < 1 << 63, "start", record.start, "a position of at most 64 bits")
    _need(len(record.tokens) <= BLOCK_TOKENS, "tokens", len(record.tokens), f"at most {BLOCK_TOKENS}")
    lowest, highest = min(record.tokens, default=0), max(record.tokens, default=0)
    _need(-(1 << 63) <= lowest <= highest < 1 << 63, "tokens", f"{lowest} to {highest}", "integers of 64 bits")
    names = [part.name for part in record.parts]
    _need(len({*names, "__metadata__"}) == len(names) + 1, "parts", names, "names that differ")
    _need(len(record.checksums) == len(names), "checksums", len(record.checksums), len(names))
    for part in record.parts:
        _need(_is_proper(part), "part", part, _PROPER)
    return record


def _is_proper(part: Part) -> bool:
    # A JSON `true` is an int, and equal to 1.
    sizes = len(part.shape) <= _MAX_DIMS and all(type(n) is int and 0 <= n < 1 << 63 for n in part.shape)
    return sizes and part.dtype in ITEM_BYTES and part.name.isascii()


def _need(holds: bool, what: str, found: object, needed: object) -> None:
    if not holds:
        raise BadRecordError(f"{what[0].upper()}{what[1:]}: found {found}, needed {needed}.")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """The path goes before what is wrong with it."""
    try:
        yield
    except BadRecordError as error:
        raise BadRecordError(f"{path}: {error}") from None
