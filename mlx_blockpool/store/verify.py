"""Proof of what a file says and holds: nothing of a record is handed out before. Knows bytes and tokens; no arrays.

Any thread may call anything here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from pathlib import Path

from ..errors import BadRecordError
from .fs import Disk, Into
from .record import MAX_HEADER_BYTES, Expected, Naming, Record, decode_header, header_size, need

# A header scan reads this much at first; few headers are longer.
_FIRST_BYTES = 1 << 14
PIECE_BYTES = 1 << 24


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


def read(disk: Disk, path: Path, expected: Expected, naming: Naming, into: Into | None = None) -> tuple[Record, list[memoryview]]:
    """A record and the bytes of each part, views of what `into` gave, after everything about them was verified.

    Errors and `naming` as in read_header. Reading and checksums release the GIL: to be faster, read several at a time.
    """
    parts = read_header(disk, path, expected, naming).parts if expected.parts is None else expected.parts
    with _told(path):
        most = MAX_HEADER_BYTES + sum(part.nbytes for part in parts) + 1
        data = memoryview(disk.read(path, 0, most)) if into is None else disk.read_into(path, into, most)
        record = decode_header(data, parts)
        _check_file(record, path, len(data), header_size(data))
        _check_identity(record, expected, naming)
        return record, _proven(record, data[header_size(data) :])


def check(disk: Disk, path: Path, expected: Expected, naming: Naming) -> Record:
    """read() of a record of any size whose bytes nobody wants: no more than PIECE_BYTES of them are in memory."""
    record = read_header(disk, path, expected, naming)
    with _told(path):
        start = disk.size(path) - record.nbytes
        for part, checksum in zip(record.parts, record.checksums, strict=True):
            end, found = start + part.nbytes, 0
            for at in range(start, end, PIECE_BYTES):
                data = disk.read(path, at, min(PIECE_BYTES, end - at))
                need(len(data) == min(PIECE_BYTES, end - at), "bytes of the file", at + len(data), "those of its header")
                found = zlib.crc32(data, found)
            need(found == checksum, f"checksum of {part.name}", f"{found:08x}", f"{checksum:08x}")
            start = end
    return record


def _proven(record: Record, data: memoryview) -> list[memoryview]:
    starts = list(accumulate((part.nbytes for part in record.parts), initial=0))
    views = [data[start:end] for start, end in pairwise(starts)]
    wrong = first_wrong(views, record.checksums, data)
    if wrong is not None:
        found, needed = f"{zlib.crc32(views[wrong]):08x}", f"{record.checksums[wrong]:08x}"
        need(False, f"checksum of {record.parts[wrong].name}", found, needed)
    return views


def _check_file(record: Record, path: Path, size: int, header: int) -> None:
    need(size == header + record.nbytes, "bytes of the file", size, header + record.nbytes)
    need(path.name == record.file_name, "a record named", record.file_name, path.name)


def _check_identity(record: Record, expected: Expected, naming: Naming) -> None:
    need(record.namespace == expected.namespace, "namespace", record.namespace, expected.namespace)
    need(record.kind == expected.kind, "kind", record.kind, expected.kind)
    if expected.hash is not None:
        need(record.hash == expected.hash, "hash", record.hash.hex(), expected.hash.hex())
    need(record.nbytes <= expected.max_bytes, "bytes of data", record.nbytes, f"at most {expected.max_bytes}")
    named = naming(record.parent, record.tokens)
    need(named == record.hash, "parent and tokens of hash", named.hex(), record.hash.hex())
    if expected.parts is not None:
        need(len(record.parts) == len(expected.parts), "parts", len(record.parts), len(expected.parts))
        for found, needed in zip(record.parts, expected.parts, strict=True):
            need(found == needed, "part", found, needed)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """The path goes before what is wrong with it."""
    try:
        yield
    except BadRecordError as error:
        raise BadRecordError(f"{path}: {error}") from None


# Polynomials over two elements, as in zlib: the highest bit is 1, the lowest is x^31; x^32 is left out of this one.
_POLYNOMIAL = 0xEDB88320
_ONE, _X8 = 1 << 31, 1 << 23


def first_wrong(views: Sequence[memoryview], checksums: Sequence[int], whole: memoryview) -> int | None:
    """Which of `views`, which one after the other are `whole`, has not the checksum that it should have."""
    if zlib.crc32(whole) == joined(checksums, [len(view) for view in views]):
        return None
    return next(i for i, view in enumerate(views) if zlib.crc32(view) != checksums[i])


def joined(checksums: Sequence[int], sizes: Sequence[int]) -> int:
    """The checksum of parts one after the other, from that of each and its bytes."""
    whole = 0
    for checksum, size in zip(checksums, sizes, strict=True):
        a, b, c, d = _tables(size)
        whole = a[whole >> 24] ^ b[whole >> 16 & 255] ^ c[whole >> 8 & 255] ^ d[whole & 255] ^ checksum
    return whole


@lru_cache(maxsize=64)
def _tables(size: int) -> list[list[int]]:
    """What each byte of a checksum, the highest first, becomes where `size` bytes follow."""
    multiples = list(islice(_multiples(_behind(size)), 32))
    tables = []
    for first in range(0, 32, 8):
        table = [0]
        for multiple in reversed(multiples[first : first + 8]):
            table += [known ^ multiple for known in table]
        tables.append(table)
    return tables


def _behind(size: int) -> int:
    """x^(8 * size): so many bytes that follow multiply a checksum by it."""
    found, power = _ONE, _X8
    while size:
        if size & 1:
            found = _product(found, power)
        power = _product(power, power)
        size >>= 1
    return found


def _product(a: int, b: int) -> int:
    found = 0
    for bit, multiple in zip(range(31, -1, -1), _multiples(b), strict=False):
        if a >> bit & 1:
            found ^= multiple
    return found


def _multiples(a: int) -> Iterator[int]:
    """a, a x, a x^2.. modulo the polynomial."""
    while True:
        yield a
        a = a >> 1 ^ _POLYNOMIAL if a & 1 else a >> 1
