"""Sizes as people write them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from mlx_blockpool.config import PoolConfig, parse_bytes
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
