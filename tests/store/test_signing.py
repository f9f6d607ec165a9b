"""Signatures: a file is known again to its last byte, by the key of one store."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store.stores import temporaries

from mlx_blockpool.errors import StoreError
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.scan import Listing
from mlx_blockpool.store.signing import FIELD, UNSIGNED, export_key, is_signed, sign


def unsigned(path: Path, **texts: str) -> Path:
    text = json.dumps({"__metadata__": {"0.name": UNSIGNED[:9], **texts, FIELD: UNSIGNED}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(200)))
    return path


def test_a_signed_file_is_known_until_any_byte_changes(tmp_path: Path) -> None:
    file, key = unsigned(tmp_path / "file"), export_key(tmp_path)
    assert not is_signed(file, key)
    sign(file, key)
    assert is_signed(file, key)
    assert not is_signed(file, export_key(tmp_path / "another"))
    data = file.read_bytes()
    for at in range(len(data)):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert not is_signed(file, key), at
    for other in (data + b"\0", data[:-1], b"", data[:20], b"\xff" * 50):
        file.write_bytes(other)
        assert not is_signed(file, key)


def test_zeros_before_the_signature_are_not_taken_for_it(tmp_path: Path) -> None:
    file, key = unsigned(tmp_path / "file", **{"0.model": UNSIGNED}), export_key(tmp_path)
    sign(file, key)
    assert is_signed(file, key)


def test_the_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with ThreadPoolExecutor(8) as threads:
        keys = set(threads.map(lambda _: export_key(root), range(32)))
    assert len(keys) == 1
    assert ((root / "export.key").stat().st_mode & 0o777, temporaries(root)) == (0o600, [])
    assert Listing(root).foreign == []


def test_where_there_are_no_second_names_the_key_is_made_all_the_same(tmp_path: Path) -> None:
    class Plain(Disk):
        def link(self, old: Path, new: Path) -> None:
            raise PermissionError(1, "no links here")

    key = export_key(tmp_path, Plain())
    assert (key, temporaries(tmp_path)) == (export_key(tmp_path), [])


@pytest.mark.parametrize("what", ["short", "long", "fifo", "link", "folder"])
def test_what_is_no_key_is_not_read(tmp_path: Path, what: str) -> None:
    path = tmp_path / "export.key"
    if what in ("short", "long"):
        path.write_bytes(bytes(31 if what == "short" else 33))
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    with pytest.raises(StoreError, match=r"export\.key"):
        export_key(tmp_path)
