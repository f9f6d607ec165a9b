"""One checksum over many parts says what those of the parts say."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from mlx_blockpool.store.reader import first_wrong, joined

PARTS = st.lists(st.binary(max_size=300), max_size=8)


def views_of(parts: list[bytes]) -> tuple[list[memoryview], memoryview]:
    whole, views = memoryview(b"".join(parts)), []
    for part in parts:
        start = sum(map(len, views))
        views.append(whole[start : start + len(part)])
    return views, whole


@given(PARTS)
def test_checksums_of_parts_join_to_that_of_the_whole(parts: list[bytes]) -> None:
    assert joined([zlib.crc32(part) for part in parts], [len(part) for part in parts]) == zlib.crc32(b"".join(parts))


def test_large_parts_join_too() -> None:
    parts = [bytes([n]) * size for n, size in enumerate((1 << 20, 3, (1 << 20) + 1, 0, 1 << 20))]
    assert joined([zlib.crc32(part) for part in parts], [len(part) for part in parts]) == zlib.crc32(b"".join(parts))


@given(PARTS, st.data())
def test_the_first_wrong_part_is_found(parts: list[bytes], data: st.DataObject) -> None:
    checksums = [zlib.crc32(part) for part in parts]
    views, whole = views_of(parts)
    assert first_wrong(views, checksums, whole) is None
    places = [i for i, part in enumerate(parts) if part]
    if not places:
        return
    wrong = data.draw(st.sets(st.sampled_from(places), min_size=1))
    for i in wrong:
        at = data.draw(st.integers(0, len(parts[i]) - 1))
        parts[i] = parts[i][:at] + bytes([parts[i][at] ^ data.draw(st.integers(1, 255))]) + parts[i][at + 1 :]
    views, whole = views_of(parts)
    assert first_wrong(views, checksums, whole) == min(wrong)


def test_parts_in_another_order_are_wrong() -> None:
    views, whole = views_of([b"one", b"two"])
    assert first_wrong(views, [zlib.crc32(b"two"), zlib.crc32(b"one")], whole) == 0
