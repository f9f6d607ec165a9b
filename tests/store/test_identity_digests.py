"""Digests of whole files: of every byte, read once, and again where anything speaks against what
is remembered.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from models import save_model

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.errors import StoreError
from mlx_blockpool.store import identity as identity_module
from mlx_blockpool.store.db import DATABASE_FILE
from mlx_blockpool.store.identity import Digests, check_unchanged, identity, stamp_of, stamps_of


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a test has just written count as old."""
    monkeypatch.setattr(identity_module, "SETTLED_SECONDS", -60.0)


@pytest.fixture
def model(tmp_path: Path, settled: None) -> Path:
    return save_model(tmp_path / "model", "llama")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files of weights that are opened, by whatever means, from now on."""
    found: list[str] = []
    os_open, path_open = os.open, Path.open

    def note(path: object) -> None:
        if str(path).endswith("safetensors"):
            found.append(Path(str(path)).name)

    monkeypatch.setattr(
        os, "open", lambda path, *rest, **kw: (note(path), os_open(path, *rest, **kw))[1]
    )
    monkeypatch.setattr(
        Path, "open", lambda path, *rest, **kw: (note(path), path_open(path, *rest, **kw))[1]
    )
    return found


def files_in(folder: Path, sizes: list[int]) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"file {number}" for number in range(len(sizes))]
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        path.write_bytes(bytes([number]) * size)
    return paths


def no_check(path: Path) -> None:
    return None


def test_digests_are_those_of_whole_files_in_the_order_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_module, "PIECE_BYTES", 1000)
    paths = files_in(tmp_path / "files", [0, 1, 999, 1000, 1001, 5000])
    found = Digests(None)
    assert found.of(paths, no_check) == [
        hashlib.sha256(path.read_bytes()).digest() for path in paths
    ]
    assert found.read_bytes == 8001


def test_the_second_time_nothing_is_read(model: Path, tmp_path: Path, opened: list[str]) -> None:
    root = tmp_path / "store"
    first, second = Digests(root), Digests(root)
    name = identity(model, None, first)
    assert first.read_bytes == (model / "model.safetensors").stat().st_size
    assert opened
    opened.clear()
    assert identity(model, None, second) == name
    assert (opened, second.read_bytes) == ([], 0)


def test_a_renamed_folder_keeps_its_name_and_is_not_read_again(
    model: Path, tmp_path: Path, opened: list[str]
) -> None:
    name = identity(model, None, Digests(tmp_path / "store"))
    opened.clear()
    assert identity(model.rename(tmp_path / "renamed"), None, Digests(tmp_path / "store")) == name
    assert opened == []


def test_a_copy_has_the_same_name_and_is_read(model: Path, tmp_path: Path) -> None:
    name, again = identity(model, None, Digests(tmp_path / "store")), Digests(tmp_path / "store")
    assert identity(shutil.copytree(model, tmp_path / "copy"), None, again) == name
    assert again.read_bytes > 0


def test_a_touched_file_is_read_again_and_has_the_same_name(model: Path, tmp_path: Path) -> None:
    name, again = identity(model, None, Digests(tmp_path / "store")), Digests(tmp_path / "store")
    os.utime(model / "model.safetensors", (1, 1))
    assert identity(model, None, again) == name
    assert again.read_bytes == (model / "model.safetensors").stat().st_size


def test_a_byte_that_changes_in_its_place_is_seen_though_size_and_time_are_as_before(
    model: Path, tmp_path: Path
) -> None:
    path = model / "model.safetensors"
    name, before = identity(model, None, Digests(tmp_path / "store")), path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size - 4321)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert identity(model, None, Digests(tmp_path / "store")) != name


def test_a_file_that_has_just_changed_is_not_remembered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_module, "SETTLED_SECONDS", 3600.0)
    identity(model, None, Digests(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def change(statement: str) -> Callable[[Path], object]:
    def act(path: Path) -> None:
        with sqlite3.connect(path) as connection:
            connection.execute(statement)
        connection.close()

    return act


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, 5000),
    "text": lambda path: path.write_text("not a database"),
    "gone": lambda path: path.unlink(),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "no table": change("DROP TABLE weights"),
    "no digest": change("UPDATE weights SET digest = NULL"),
    "a long digest": change("UPDATE weights SET digest = zeroblob(33)"),
    "another stamp": change("UPDATE weights SET stamp = stamp || '0'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_remembered_badly_is_read_again(damage: str, model: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    name = identity(model, None, Digests(root))
    DAMAGES[damage](root / DATABASE_FILE)
    again = Digests(root)
    assert identity(model, None, again) == name
    assert again.read_bytes > 0
    last = Digests(root)
    assert identity(model, None, last) == name
    assert last.read_bytes == 0


def test_a_folder_that_cannot_be_made_costs_the_memory_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert identity(model, None, Digests(tmp_path / "file")) == identity(model)


def test_the_files_hashed_last_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: None
) -> None:
    monkeypatch.setattr(identity_module, "MOST_FILES", 3)
    paths = files_in(tmp_path / "files", [10] * 4)
    for path in paths:
        Digests(tmp_path / "store").of([path], no_check)
    again = Digests(tmp_path / "store")
    again.of(paths[1:], no_check)
    assert again.read_bytes == 0
    again.of(paths[:1], no_check)
    assert again.read_bytes == 10


def test_a_file_that_changes_while_it_is_read_has_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_module, "PIECE_BYTES", 100)
    (path,) = files_in(tmp_path / "files", [1000])

    class Slow(Digests):
        @property
        def read_bytes(self) -> int:
            return 0

        @read_bytes.setter
        def read_bytes(self, value: int) -> None:
            # After each piece.
            os.utime(path, (value, value))

    with pytest.raises(StoreError, match="changed while it was read"):
        Slow(None).of([path], no_check)


def test_stopped_digests_end_before_the_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_module, "PIECE_BYTES", 100)
    found = Digests(None)
    found.stop()
    with pytest.raises(StoreError, match="stopped"):
        found.of(files_in(tmp_path / "files", [1000, 1000, 1000]), no_check)
    assert found.read_bytes <= 2 * 100
    names = {thread.name for thread in threading.enumerate()}
    assert "hash" not in names


def test_a_disk_that_hangs_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    (path,) = files_in(tmp_path / "files", [1000])
    script = f"""
import threading
from pathlib import Path
from mlx_blockpool.store import identity

begun = threading.Event()
def hangs(path):
    begun.set()
    threading.Event().wait()
identity.open_regular = hangs
wanted = [[Path({str(path)!r})], lambda path: None]
reader = threading.Thread(target=identity.Digests(None).of, args=wanted, daemon=True)
reader.start()
begun.wait()
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_an_error_in_a_thread_is_raised_and_the_other_files_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreConfig, "hash_threads", 1)
    asked = list[str]()

    def refuses(path: Path) -> None:
        asked.append(path.name)
        raise OSError("bad sector")

    monkeypatch.setattr(identity_module, "open_regular", refuses)
    with pytest.raises(OSError, match="bad sector"):
        Digests(None).of(files_in(tmp_path / "files", [10, 30, 20]), no_check)
    assert asked == ["file 1"]


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is not a regular file"):
        Digests(None).of([tmp_path / "pipe"], no_check)


def test_a_link_is_the_file_that_it_leads_to(model: Path, tmp_path: Path) -> None:
    """As the hub's folders have them."""
    linked = shutil.copytree(model, tmp_path / "linked")
    (linked / "model.safetensors").unlink()
    (linked / "model.safetensors").symlink_to(model / "model.safetensors")
    assert identity(linked) == identity(model)


def test_weights_that_were_replaced_after_they_were_loaded_are_found_out(
    model: Path, tmp_path: Path
) -> None:
    stamps = stamps_of(model)
    check_unchanged(model, None, stamps)
    copy = tmp_path / "copy"
    shutil.copy2(model / "model.safetensors", copy)
    os.replace(copy, model / "model.safetensors")
    with pytest.raises(StoreError, match="changed after they were loaded"):
        check_unchanged(model, None, stamps)
    (model / "model.safetensors").unlink()
    with pytest.raises(StoreError, match="changed after they were loaded"):
        check_unchanged(model, None, stamps)


def test_a_stamp_has_all_by_which_a_file_is_known(tmp_path: Path) -> None:
    (path,) = files_in(tmp_path / "files", [3])
    found = path.stat()
    expected = (found.st_dev, found.st_ino, 3, found.st_mtime_ns, found.st_ctime_ns)
    assert stamp_of(found) == expected
