"""A commit that dies at each of its calls, and a power cut at each of them: what was there
before or the new record, whole.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import Forks
from store import children
from store.disks import COMMIT, CutDisk, PowerCut, sweep
from store.records import NEW, NEW_FILE, OLD_FILE, read_turn

from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.store.fs import Disk, write_whole

FOLDER = Path("/models/blocks")
PATH = FOLDER / NEW.file_name

Commit = Callable[[Disk], None]


def run_child(processes: Forks, folder: Path, k: int, how: str) -> subprocess.CompletedProcess[str]:
    return processes.run(children.PROGRAM, "commit", str(folder), str(k), how)


def test_a_commit_is_these_calls(tmp_path: Path, processes: Forks) -> None:
    child = run_child(processes, tmp_path, 100, "exit")
    assert child.stdout.split() == COMMIT, child.stderr
    assert read_turn(Disk(), tmp_path / NEW.file_name) == "new"


@pytest.mark.sampled
@pytest.mark.parametrize("before", ["old", "absent"])
@pytest.mark.parametrize(("how", "code"), [("exit", 77), ("kill", -9)])
@pytest.mark.parametrize("k", range(len(COMMIT)))
def test_a_process_that_dies_leaves_the_old_record_or_the_new(
    tmp_path: Path, processes: Forks, k: int, how: str, code: int, before: str
) -> None:
    path = tmp_path / NEW.file_name
    if before == "old":
        path.write_bytes(OLD_FILE)
    child = run_child(processes, tmp_path, k, how)
    assert child.returncode == code, child.stderr

    found = "new" if k > COMMIT.index("rename") else before
    assert read_turn(Disk(), path) == found
    leftovers = sweep(Disk(), tmp_path, older_than=float("inf"))
    assert len(leftovers) == (COMMIT.index("create") < k <= COMMIT.index("rename"))
    assert list(tmp_path.iterdir()) == ([] if found == "absent" else [path])


def write_in_order(*order: str) -> Commit:
    """A commit that makes these calls in this order."""

    def commit(disk: Disk) -> None:
        temporary = FOLDER / ".writing"
        fd = disk.create(temporary)
        calls: dict[str, Callable[[], None]] = {
            "write": lambda: disk.write(fd, [NEW_FILE]),
            "sync": lambda: disk.sync(fd),
            "rename": lambda: disk.rename(temporary, PATH),
            "sync_directory": lambda: disk.sync_directory(FOLDER),
        }
        for call in order:
            calls[call]()
        disk.close(fd)

    return commit


def commit_whole(disk: Disk) -> None:
    disk.make_directory(FOLDER)
    write_whole(disk, PATH, [NEW_FILE])


def opened(before: str) -> CutDisk:
    disk = CutDisk()
    if before != "no folder":
        disk.make_directory(FOLDER)
    if before == "old":
        write_whole(disk, PATH, [OLD_FILE])
    disk.calls.clear()
    return disk


def outcome(disk: Disk) -> str:
    try:
        return read_turn(disk, PATH)
    except BadRecordError:
        return "torn"


def outcomes(commit: Commit, before: str) -> tuple[set[str], set[str]]:
    """What may be found after a power cut during the commit, at any of its calls, and after one
    that follows it.
    """
    whole = opened(before)
    commit(whole)
    during: set[str] = set()
    for k in range(len(whole.calls)):
        disk = opened(before)
        disk.k = k
        with pytest.raises(PowerCut):
            commit(disk)
        during.update(map(outcome, disk.after_power_cut()))
    return during, set(map(outcome, whole.after_power_cut()))


@pytest.mark.parametrize(
    ("before", "found"), [("old", "old"), ("absent", "absent"), ("no folder", "absent")]
)
def test_a_power_cut_leaves_the_old_record_or_the_new(before: str, found: str) -> None:
    assert outcomes(commit_whole, before) == ({found, "new"}, {"new"})


@pytest.mark.parametrize(
    ("order", "during", "after"),
    [
        (("write", "sync", "rename", "sync_directory"), {"old", "new"}, {"new"}),
        (("write", "rename", "sync", "sync_directory"), {"old", "new", "torn"}, {"new"}),
        (("rename", "write", "sync", "sync_directory"), {"old", "new", "torn"}, {"new"}),
        (("write", "rename", "sync_directory"), {"old", "new", "torn"}, {"new", "torn"}),
        (("write", "sync", "rename"), {"old", "new"}, {"old", "new"}),
    ],
)
def test_the_simulated_power_cut_finds_a_wrong_order(
    order: tuple[str, ...], during: set[str], after: set[str]
) -> None:
    assert outcomes(write_in_order(*order), "old") == (during, after)
