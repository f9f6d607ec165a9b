"""Folder: what others wrote, used and removed since the last look, and nothing of what was done
here.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from store.disks import BrokenDisk, QuickDisk

from mlx_blockpool.store.fs import TEMPORARY, Disk, Entry
from mlx_blockpool.store.scan import ChangedFile, Folder, Listing

A, B, C = (f"models/m/blocks/{n}/{n}.safetensors" for n in ("aa", "bb", "cc"))
OTHERS = "models/other/windows/aa/aa.safetensors"


def make(root: Path, name: str, size: int, used: float) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"x" * size)
    os.utime(root / name, (used, used))


def look(folder: Folder) -> tuple[list[str], list[str]]:
    changes = folder.look()
    return [one.name for one in changes.found], changes.gone


def test_the_first_look_finds_everything_in_the_order_of_use(tmp_path: Path) -> None:
    for name, size, used in ((A, 3, 30), (B, 2, 10), (OTHERS, 1, 20)):
        make(tmp_path, name, size, used)
    (tmp_path / A).with_name("notes.txt").write_text("not a record")
    (tmp_path / "models/m/model.json").write_text("{}")
    (tmp_path / "models/m/unknown/aa").mkdir(parents=True)
    folder = Folder(QuickDisk(), tmp_path)
    assert folder.look().found == [
        ChangedFile(B, 2, True),
        ChangedFile(OTHERS, 1, True),
        ChangedFile(A, 3, True),
    ]
    assert look(folder) == ([], [])


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert look(Folder(QuickDisk(), tmp_path / "none")) == ([], [])


def test_what_others_wrote_used_replaced_and_removed(tmp_path: Path) -> None:
    for name in (A, B, C, OTHERS):
        make(tmp_path, name, 5, 10)
    folder = Folder(QuickDisk(), tmp_path)
    folder.look()
    os.utime(tmp_path / A, (30, 30))
    make(tmp_path, B, 7, 20)
    (tmp_path / C).unlink()
    make(tmp_path, new := "models/m/states/dd/dd.safetensors", 1, 5)
    changes = folder.look()
    assert changes.found == [
        ChangedFile(new, 1, True),
        ChangedFile(B, 7, True),
        ChangedFile(A, 5, False),
    ]
    assert changes.gone == [C]
    assert look(folder) == ([], [])


def test_what_was_done_here_is_no_news(tmp_path: Path) -> None:
    folder = Folder(Disk(), tmp_path)
    for name in (A, B, C):
        folder.write(name, [b"12345"], 5)
    folder.remove(B)
    folder.touch([C, A, "models/m/blocks/dd/unknown.safetensors"])
    assert look(folder) == ([], [])
    assert [folder.size_of(name) for name in (A, B, C)] == [5, None, 5]
    times = [(tmp_path / name).stat().st_mtime for name in (C, A)]
    assert times[0] < times[1]
    folder.remove(A)
    folder.remove(A)
    assert look(folder) == ([], [])


def test_what_others_do_to_our_files_is_news(tmp_path: Path) -> None:
    folder = Folder(QuickDisk(), tmp_path)
    for name in (A, B, C):
        folder.write(name, [b"12345"], 5)
    (tmp_path / A).unlink()
    (tmp_path / B).write_bytes(b"1234567")
    changes = folder.look()
    assert changes.found == [ChangedFile(B, 7, True)]
    assert changes.gone == [A]
    # From the second look on, their times are known.
    os.utime(tmp_path / C, (5, 5))
    assert look(folder) == ([C], [])


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    disk = BrokenDisk()
    folder = Folder(disk, tmp_path)
    folder.write(A, [b"12345"], 5)
    disk.broken["rename"] = OSError(errno.EIO, "broken")
    for name in (A, B):
        with pytest.raises(OSError, match="broken"):
            folder.write(name, [b"123"], 3)
    assert [folder.size_of(name) for name in (A, B)] == [5, None]
    disk.broken["size"] = OSError(errno.EIO, "blind")
    with pytest.raises(OSError, match="broken"):
        folder.write(A, [b"123"], 3)
    assert folder.size_of(A) is None
    disk.broken.clear()
    assert folder.look().found == [ChangedFile(A, 5, True)], (
        "what could not be asked for is found by looking"
    )


def test_a_look_that_fails_changes_nothing(tmp_path: Path) -> None:
    disk = BrokenDisk()
    make(tmp_path, A, 5, 10)
    folder = Folder(disk, tmp_path)
    folder.look()
    make(tmp_path, B, 5, 10)
    disk.broken["scan"] = OSError(errno.EIO, "blind")
    with pytest.raises(OSError, match="blind"):
        folder.look()
    disk.broken.clear()
    assert look(folder) == ([B], [])


@pytest.mark.parametrize("place", [Path(A).parent, Path(A).parent.parent])
def test_a_part_that_cannot_be_read_is_as_it_was_and_is_logged_once(
    tmp_path: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Partly(QuickDisk):
        is_broken = False

        def scan(self, path: Path) -> list[object]:  # type: ignore[override]
            if self.is_broken and path == tmp_path / place:
                raise PermissionError(errno.EACCES, "not allowed")
            return super().scan(path)  # type: ignore[return-value]

    for name in (A, OTHERS):
        make(tmp_path, name, 5, 10)
    folder = Folder(disk := Partly(), tmp_path)
    folder.look()
    disk.is_broken = True
    (tmp_path / A).unlink()
    (tmp_path / OTHERS).unlink()
    assert look(folder) == ([], [OTHERS])
    assert look(folder) == ([], [])
    assert caplog.messages == ["prompt store: [Errno 13] not allowed"]
    disk.is_broken = False
    assert look(folder) == ([], [A])


def test_a_link_in_place_of_the_folder_of_models_is_followed_and_none_below_it(
    tmp_path: Path,
) -> None:
    make(tmp_path / "disk", A, 5, 10)
    make(tmp_path / "disk", OTHERS, 5, 10)
    root, models = tmp_path / "store", tmp_path / "disk/models"
    root.mkdir()
    (root / "models").symlink_to(models)
    (models / "linked").symlink_to(models / "other")
    (models / "m/windows").symlink_to(models / "other/windows")
    folder = Folder(QuickDisk(), root)
    assert look(folder) == ([A, OTHERS], [])
    folder.write(B, [b"12345"], 5)
    assert look(folder) == ([], [])
    (root / A).unlink()
    assert look(folder) == ([], [A])
    assert Listing(root).records == []
    assert Listing(root).foreign == [root / "models"]


def test_a_look_scans_only_the_folders_of_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Others(QuickDisk):
        def scan(self, path: Path) -> list[Entry]:
            if path in (tmp_path, tmp_path / "agents", tmp_path / "quarantine"):
                raise PermissionError(errno.EACCES, "not allowed")
            return super().scan(path)

    make(tmp_path, A, 5, 10)
    for name in ("agents", "quarantine"):
        (tmp_path / name).mkdir()
    assert look(Folder(Others(), tmp_path)) == ([A], [])
    assert caplog.records == []


def test_a_look_removes_old_leftovers_of_records_and_no_file_on_its_way_in_or_out(
    tmp_path: Path,
) -> None:
    make(tmp_path, A, 5, 10)
    for place in (Path(A).parent, Path()):
        make(tmp_path, str(place / f"{TEMPORARY}1-old"), 1, 10)
        (tmp_path / place / f"{TEMPORARY}1-young").write_bytes(b"x")
    assert look(Folder(QuickDisk(), tmp_path)) == ([A], [])
    left = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob(f"{TEMPORARY}*"))
    assert left == sorted(
        [
            Path(A).parent / f"{TEMPORARY}1-young",
            Path(f"{TEMPORARY}1-old"),
            Path(f"{TEMPORARY}1-young"),
        ]
    )
