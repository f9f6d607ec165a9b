"""Sizes as people write them, and which numbers are settings."""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError, is_dataclass
from dataclasses import fields as fields_of
from pathlib import Path

import pytest
from constants import PACKAGE, constants, possible_settings, trees

from mlx_blockpool import config
from mlx_blockpool.config import KVBits, PoolConfig, kv_bits, parse_bytes
from mlx_blockpool.errors import BlockpoolError

# Arguments that are the default of an option.
OF_OPTIONS = ("default", "prefill_step_size")


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


@pytest.mark.parametrize(
    "text", ["", "GB", "4XB", "four", "4 GB GB", "4G B", "nan", "inf", "1e400", "-1GB"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(
        BlockpoolError, match=r"use a number with a unit, e\.g\. 4GB or 512MiB"
    ) as info:
        parse_bytes(text)
    assert repr(text) in str(info.value)


def test_every_decimal_unit_has_a_binary_one() -> None:
    assert [parse_bytes(f"1{unit}") for unit in ("KiB", "MiB", "GiB", "TiB")] == [
        2**10,
        2**20,
        2**30,
        2**40,
    ]


def test_no_field_is_read_from_its_class() -> None:
    """Setting it would be ignored there.

    Options and parameters may have it as their default: they set it.
    """
    fields = {
        (name, field.name)
        for name, kind in vars(config).items()
        if isinstance(kind, type) and is_dataclass(kind)
        for field in fields_of(kind)
    }
    found = []
    for file, tree in trees(PACKAGE).items():
        nodes = list(ast.walk(tree))
        defaults = {
            id(node.value)
            for node in nodes
            if isinstance(node, ast.keyword) and node.arg in OF_OPTIONS
        }
        defaults |= {
            id(value)
            for node in nodes
            if isinstance(node, ast.arguments)
            for value in node.defaults
        }
        found += [
            f"{file.name}:{node.lineno} {node.value.id}.{node.attr}"
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and id(node) not in defaults
            if (node.value.id, node.attr) in fields
        ]
    assert found == []


def test_defaults_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        PoolConfig().states = 8  # type: ignore[misc]


def test_bits_are_8_or_4_and_groups_32_64_or_128() -> None:
    assert KVBits() == KVBits(8, 8, 64)
    assert KVBits(4, None, 128).values is None
    with pytest.raises(
        BlockpoolError, match=r"^Keys cannot be stored in 6 bits. Choose one of 8, 4.$"
    ):
        KVBits(6)
    with pytest.raises(
        BlockpoolError, match=r"^Values cannot be stored in 16 bits. Choose one of 8, 4.$"
    ):
        KVBits(8, 16)
    with pytest.raises(
        BlockpoolError, match=r"^48 is not a group size. Choose one of 32, 64, 128.$"
    ):
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
def test_options_for_keys_and_values(
    bits: int | None, keys: int | None, values: int | None, expected: KVBits | None
) -> None:
    assert kv_bits(bits, keys, values, 32) == expected


def test_at_most_12_constants_elsewhere_could_be_settings() -> None:
    assert len(constants(PACKAGE)) > 100
    assert len(possible_settings()) <= 12, possible_settings()


def test_a_constant_without_a_reason_counts(tmp_path: Path) -> None:
    text = (
        'A, B = 3, "b"\nC: float = 2 * A\nD = -1\nE = "0" * 64\nF = (1, 2)\nCHECK_SECONDS = 1.0\n'
    )
    (tmp_path / "module.py").write_text(text)
    (tmp_path / "config.py").write_text("G = 1\n")
    assert constants(tmp_path) == [f"module.py:{name}" for name in ("A", "C", "D", "CHECK_SECONDS")]
    assert possible_settings(tmp_path) == ["module.py:A", "module.py:C", "module.py:D"]
