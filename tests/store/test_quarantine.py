"""Quarantine: a bound in bytes and in files, the oldest go with their reasons, and the budget
counts it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from store.chains import SIZE, chain, data_of, file_of, put, put_all
from store.damages import ODD_FILES
from store.disks import QuickDisk
from store.stores import open_store, quarantined, record_files

from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.store.db import DATABASE_FILES
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.paths import MODEL_FILE
from mlx_blockpool.store.quarantine import Quarantine


class Clocked(QuickDisk):
    """Every touch is a second after the one before."""

    now = 1_000_000.0

    def touch(self, path: Path, moment: float) -> None:
        self.now += 1
        super().touch(path, self.now)


def set_aside(folder: Path, held: Quarantine, name: str, size: int) -> None:
    path = folder / name
    path.write_bytes(b"x" * size)
    held.set_aside(path, "because")
    for reason in held.folder.glob(f"*-{name}.txt"):
        os.utime(reason, (0, 0))


def names(held: Quarantine) -> list[str]:
    return sorted(path.name[17:] for path in held.folder.iterdir())


def test_the_oldest_go_with_their_reasons(tmp_path: Path) -> None:
    held = Quarantine(Clocked(), tmp_path, 4000)
    for number in range(9):
        set_aside(tmp_path, held, f"file-{number}", 1000)
        assert held.nbytes == sum(path.stat().st_size for path in held.folder.iterdir()) <= 4000
    assert names(held) == ["file-6", "file-6.txt", "file-7", "file-7.txt", "file-8", "file-8.txt"]


def test_what_is_too_large_by_itself_takes_no_place_of_others(tmp_path: Path) -> None:
    held = Quarantine(Clocked(), tmp_path, 4000)
    set_aside(tmp_path, held, "small", 1000)
    set_aside(tmp_path, held, "large", 4000)
    assert names(held) == ["small", "small.txt"]


def test_very_many_small_ones_go_too(tmp_path: Path) -> None:
    held = Quarantine(Clocked(), tmp_path, 10**9, 3)
    for number in range(5):
        set_aside(tmp_path, held, f"file-{number}", 0)
    assert names(held) == [f"file-{number}{end}" for number in (2, 3, 4) for end in ("", ".txt")]


def test_what_nobody_put_there_stays(tmp_path: Path) -> None:
    held = Quarantine(Clocked(), tmp_path, 0)
    held.folder.mkdir()
    (held.folder / "notes").write_text("somebody's")
    (held.folder / f"{'0' * 16}-folder").mkdir()
    set_aside(tmp_path, held, "file", 10)
    assert (held.nbytes, {path.name for path in held.folder.iterdir()}) == (
        0,
        {"notes", f"{'0' * 16}-folder"},
    )


@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_a_link_leads_to_is_not_touched(tmp_path: Path, kind: str) -> None:
    held = Quarantine(Disk(), tmp_path, 0)
    ODD_FILES[kind](tmp_path / "odd")
    targets = {path: path.lstat().st_mtime_ns for path in tmp_path.glob("target*")}
    held.set_aside(tmp_path / "odd", "because")
    assert not (tmp_path / "odd").is_symlink()
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.glob("target*")} == targets


def test_a_folder_that_cannot_be_looked_at_is_no_failure(tmp_path: Path) -> None:
    held = Quarantine(Disk(), tmp_path, 0)
    held.folder.write_text("no folder")
    held.bound()
    assert held.nbytes == 0


def test_records_and_quarantine_are_in_the_budget_together(tmp_path: Path) -> None:
    budget = 10 * SIZE + 200
    store = open_store(tmp_path, store_bytes=budget, quarantine=0.4)
    store.open()
    for number in range(12):
        put_all(store, chain(number, 2))
        if number % 2:
            bad = record_files(tmp_path)[0]
            bad.write_bytes(bad.read_bytes()[:-1] + b"\xff")
            (record,) = (
                r for n in range(number + 1) for r in chain(n, 2) if file_of(tmp_path, r) == bad
            )
            with pytest.raises(BadRecordError):
                data_of(store, record)
            store.gone(record.key)
            assert put(store, record) is None, (
                "what is in quarantine takes the place of older records"
            )
            assert store.flush()
            assert store.poll() == []
        files = [
            path
            for path in tmp_path.rglob("*")
            if path.is_file() and path.name not in (MODEL_FILE, *DATABASE_FILES)
        ]
        assert sum(path.stat().st_size for path in files) <= budget
    assert 0 < store.report()["quarantine_bytes"] <= 0.4 * budget
    assert 0 < len(quarantined(tmp_path)) <= 4
    assert store.close()
    again = open_store(tmp_path, store_bytes=budget, quarantine=0.0)
    assert len(again.open()) + len(again.settle([])) <= 10
    assert quarantined(tmp_path) == []
    assert again.close()
