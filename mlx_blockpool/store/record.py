"""Records: files in the safetensors format that prove their content. Knows bytes and tokens; no
arrays, no trie, no pool.

    8 bytes   length of the header, little endian
    header    JSON: metadata (seal first), then name, dtype, shape and place of each part; spaces to
              a multiple of 8
    data      the parts, in order, without gaps

The seal is a hash of the header as it was written; the header holds a CRC-32 of each part. Readers
return only what both prove. Any thread may call anything here.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from ..errors import BadRecordError
from ..spec import BLOCK_TOKENS, ITEM_BYTES
from .fs import Buffer
from .hashing import TOKEN_BYTES, decode
from .hashing import encode as encode_tokens

FORMAT = "mlx-blockpool"
VERSION = 2
SUFFIX = ".safetensors"
HASH_BYTES = 32
# The kinds of records: the full layers of one block, the keys and values of window layers for its
# tokens, and the states of state layers after its last token.
BLOCK, WINDOW, STATE = "block", "window", "state"
# In `extra` of a record that begins under a salt: the salt, in hexadecimal.
SALT = "salt"
MAX_HEADER_BYTES = 1 << 20
# Far more than any model has for 256 tokens: a file that claims more is not ours, and is not read.
MAX_DATA_BYTES = 1 << 34
_LENGTH = struct.Struct("<Q")
_HEAD = b'{"__metadata__":{"seal":"'
_UNSEALED = "0" * 64
_EXTRA = "extra."
_MAX_DIMS = 8
_PROPER = f"a name in ASCII, a dtype of {', '.join(ITEM_BYTES)} and at most {_MAX_DIMS} sizes"


class Key(NamedTuple):
    """The name of a record within its namespace."""

    kind: str
    hash: bytes


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
    """The header of a record.

    kind, namespace  of its parts, and of the weights and settings that computed them.
    hash, parent     names of the prefix with and without `tokens`; 32 bytes each.
    start, tokens    absolute position of the first token, and at most 256 token ids as bytes.
    extra            further facts about the parts, ASCII.
    checksums        CRC-32 of each part; `encode` works them out.
    """

    kind: str
    namespace: str
    hash: bytes
    parent: bytes
    start: int
    tokens: bytes
    parts: tuple[Part, ...]
    extra: Mapping[str, str] = field(default_factory=dict)
    checksums: tuple[int, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of data, without the header."""
        return sum(part.nbytes for part in self.parts)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens) // TOKEN_BYTES

    @property
    def key(self) -> Key:
        return Key(self.kind, self.hash)

    @property
    def file_name(self) -> str:
        return self.hash.hex() + SUFFIX


@dataclass(frozen=True)
class Expected:
    """The properties that a reader expects of a record, next to the hash in its file's name.

    parts      None for those of its header, which then have `max_bytes` together at most.
    """

    namespace: str
    kind: str
    parts: tuple[Part, ...] | None = None
    max_bytes: int = MAX_DATA_BYTES


def encode(record: Record, buffers: Sequence[Buffer]) -> list[Buffer]:
    """The bytes of a file: its header, then `buffers` themselves, one for each part, contiguous.

    They must not change before they are written. Raises BadRecordError for a record that could not
    be read again.
    """
    need(len(buffers) == len(record.parts), "buffers", len(buffers), len(record.parts))
    checksums = tuple(zlib.crc32(buffer) for buffer in buffers)
    header = _header(_checked(_checked_parts(replace(record, checksums=checksums))))
    need(
        len(header) <= MAX_HEADER_BYTES,
        "bytes of header",
        len(header),
        f"at most {MAX_HEADER_BYTES}",
    )
    for part, buffer in zip(record.parts, buffers, strict=True):
        need(
            memoryview(buffer).nbytes == part.nbytes,
            f"bytes of {part.name}",
            memoryview(buffer).nbytes,
            part.nbytes,
        )
    return [header, *buffers]


def file_size(record: Record) -> int:
    """Bytes of the file that encode() makes of a record."""
    return (
        len(_header(_checked(_checked_parts(replace(record, checksums=(0,) * len(record.parts))))))
        + record.nbytes
    )


def header_size(data: Buffer) -> int:
    """Bytes before the first part, from the first 8 bytes of a file. Raises BadRecordError."""
    need(len(data) >= _LENGTH.size, "bytes of the file", len(data), f"at least {_LENGTH.size}")
    size = _LENGTH.size + int(_LENGTH.unpack_from(data)[0])
    need(size <= MAX_HEADER_BYTES, "bytes of header", size, f"at most {MAX_HEADER_BYTES}")
    return size


def decode_header(data: Buffer, parts: tuple[Part, ...] | None = None) -> Record:
    """The record whose header `data` begins with. Raises BadRecordError unless each byte of it is
    as it was written.

    Faster if its parts are these.
    """
    size = header_size(data)
    need(len(data) >= size, "bytes of the file", len(data), f"at least {size} for the header")
    text = bytes(data[_LENGTH.size : size])
    start, end = len(_HEAD), len(_HEAD) + len(_UNSEALED)
    is_sealed = _seal(text[:start] + _UNSEALED.encode() + text[end:]) == text[start:end]
    need(is_sealed, "header", "no valid seal", "that of a record as it was written")
    body = text.rstrip(b" ")
    try:
        known = None if parts is None else _entries(parts)
        if parts is not None and known is not None and body.endswith(known):
            record = _checked(_parse(json.loads(body.removesuffix(known) + b"}"), parts))
        else:
            record = _checked(_parse(json.loads(body.decode("ascii"))))
            need(
                body.endswith(_entries(_checked_parts(record).parts)),
                "parts",
                "others",
                "those of the header, without gaps",
            )
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        struct.error,
    ) as error:
        raise BadRecordError(
            f"The header is not that of a record: {type(error).__name__} ({error})."
        ) from None
    return record


def _header(record: Record) -> bytes:
    text = _json({"__metadata__": _metadata(record)})[:-1] + _entries(record.parts)
    text += b" " * (-len(text) % 8)
    # The seal comes first, so the first run of zeros is its own.
    return _LENGTH.pack(len(text)) + text.replace(_UNSEALED.encode(), _seal(text), 1)


@lru_cache(maxsize=64)
def _entries(parts: tuple[Part, ...]) -> bytes:
    """The end of a header, after its metadata."""
    entries: dict[str, Any] = {}
    start = 0
    for part in parts:
        end = start + part.nbytes
        entries[part.name] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "data_offsets": [start, end],
        }
        start = end
    return (b"," if parts else b"") + _json(entries)[1:]


def _json(entries: dict[str, Any]) -> bytes:
    return json.dumps(entries, separators=(",", ":")).encode("ascii")


def _seal(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=HASH_BYTES).hexdigest().encode("ascii")


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
        "tokens": " ".join(map(str, decode(record.tokens))),
        "crc32": " ".join(f"{checksum:08x}" for checksum in record.checksums),
    } | {_EXTRA + key: record.extra[key] for key in sorted(record.extra)}


def _parse(entries: Any, parts: tuple[Part, ...] | None = None) -> Record:
    """`parts`: those of `entries`, if they are known."""
    metadata = entries.pop("__metadata__")
    if parts is None:
        parts = tuple(
            Part(name, entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()
        )
    found = (metadata["format"], metadata["version"])
    need(
        found == (FORMAT, str(VERSION)), "format", " ".join(map(str, found)), f"{FORMAT} {VERSION}"
    )
    return Record(
        kind=metadata["kind"],
        namespace=metadata["namespace"],
        hash=bytes.fromhex(metadata["hash"]),
        parent=bytes.fromhex(metadata["parent"]),
        start=int(metadata["start"]),
        tokens=encode_tokens([int(token) for token in metadata["tokens"].split()]),
        parts=parts,
        extra={
            key.removeprefix(_EXTRA): value
            for key, value in metadata.items()
            if key.startswith(_EXTRA)
        },
        checksums=tuple(int(checksum, 16) for checksum in metadata["crc32"].split()),
    )


def _checked(record: Record) -> Record:
    """The record, if what its header says apart from its parts can be written and read again.

    Raises BadRecordError.
    """
    for text in (record.kind, record.namespace, *record.extra, *record.extra.values()):
        need(
            isinstance(text, str) and text.isascii(),
            "kind, namespace or extra",
            repr(text),
            "ASCII text",
        )
    for digest in (record.hash, record.parent):
        need(len(digest) == HASH_BYTES, "bytes of a hash", len(digest), HASH_BYTES)
    need(0 <= record.start < 1 << 63, "start", record.start, "a position of at most 64 bits")
    count = record.end - record.start
    need(count <= BLOCK_TOKENS, "tokens", count, f"at most {BLOCK_TOKENS}")
    need(
        len(record.checksums) == len(record.parts),
        "checksums",
        len(record.checksums),
        len(record.parts),
    )
    return record


def _checked_parts(record: Record) -> Record:
    """The record, if its parts can be written and read again. Raises BadRecordError."""
    names = [part.name for part in record.parts]
    need(len({*names, "__metadata__"}) == len(names) + 1, "parts", names, "names that differ")
    for part in record.parts:
        need(_is_proper(part), "part", part, _PROPER)
    need(
        record.nbytes <= MAX_DATA_BYTES, "bytes of data", record.nbytes, f"at most {MAX_DATA_BYTES}"
    )
    return record


def _is_proper(part: Part) -> bool:
    # A JSON `true` is an int, and equal to 1.
    sizes = len(part.shape) <= _MAX_DIMS and all(
        type(n) is int and 0 <= n < 1 << 63 for n in part.shape
    )
    return sizes and part.dtype in ITEM_BYTES and part.name.isascii()


def need(holds: bool, what: str, found: object, needed: object) -> None:
    if not holds:
        raise BadRecordError(f"{what[0].upper()}{what[1:]}: got {found}, expected {needed}.")
