"""Sizes as people write them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from mlx_blockpool.config import KVBits, PoolConfig, kv_bits, parse_bytes
from mlx_blockpool.errors import BlockpoolError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000),
        ("1000B", 1000),
        ("2K", 2000),
        ("2kb", 2000),
        ("2KiB", 2048),
        ("512 MiB", 512 * 2**20),
        ("512MB", 512 * 10**6),
        ("4GB", 4 * 10**9),
        ("4g", 4 * 10**9),
        (" 4 GiB ", 4 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("2TB", 2 * 10**12),
        ("0", 0),
    ],
)
def test_parse_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "4XB", "four", "4 GB GB", "4G B", "nan", "inf", "1e400", "-1GB"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BlockpoolError, match="Write a number with a unit, such as 4GB or 512MiB") as info:
        parse_bytes(text)
    assert repr(text) in str(info.value)


def test_every_decimal_unit_has_a_binary_one() -> None:
    assert [parse_bytes(f"1{unit}") for unit in ("KiB", "MiB", "GiB", "TiB")] == [2**10, 2**20, 2**30, 2**40]


def test_defaults_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        PoolConfig().slabs = 8  # type: ignore[misc]


def test_bits_are_8_or_4_and_groups_32_64_or_128() -> None:
    assert KVBits() == KVBits(8, 8, 64)
    assert KVBits(4, None, 128).values is None
    with pytest.raises(BlockpoolError, match=r"^Keys cannot be held in 6 bits. Choose one of 8, 4.$"):
        KVBits(6)
    with pytest.raises(BlockpoolError, match=r"^Values cannot be held in 16 bits. Choose one of 8, 4.$"):
        KVBits(8, 16)
    with pytest.raises(BlockpoolError, match=r"^Groups cannot have 48 values. Choose one of 32, 64, 128.$"):
        KVBits(8, 8, 48)


@pytest.mark.parametrize(
    ("bits", "keys", "values", "expected"),
    [
        (None, None, None, None),
        (16, None, None, None),
        (None, 16, 16, None),
        (8, 16, 16, None),
        (8, None, None, KVBits(8, 8, 32)),
        (4, 8, None, KVBits(8, 4, 32)),
        (8, None, 4, KVBits(8, 4, 32)),
        (4, None, 16, KVBits(4, None, 32)),
        (None, 8, None, KVBits(8, None, 32)),
    ],
)
def test_options_for_keys_and_values(bits: int | None, keys: int | None, values: int | None, expected: KVBits | None) -> None:
    assert kv_bits(bits, keys, values, 32) == expected
