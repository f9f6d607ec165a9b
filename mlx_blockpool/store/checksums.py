"""CRC-32 of bytes, part by part and as a whole. Knows bytes alone.

zlib's crc32_combine, which Python does not have: a checksum of many parts is taken in one go, in which the interpreter's lock is
given away once, and compared with those of the parts.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice

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
