"""What child processes do to a folder, without mlx: children.py commit|note|fill folder, and what
the function takes.

PROGRAM is the same as the program of a fork that has run IMPORTS.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from store.disks import CountedDisk
from store.records import NEW, NEW_FILE

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.store.agents import Agents
from mlx_blockpool.store.fs import Disk, write_whole

IMPORTS = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r}); import store.disks, "
    "store.records, runpy"
)
PROGRAM = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"


class DyingDisk(CountedDisk):
    """The process dies at the k-th call."""

    def __init__(self, k: int, how: str) -> None:
        super().__init__()
        self.k = k
        self.how = how

    def at(self, call: str) -> None:
        if len(self.calls) == self.k:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(77)
        super().at(call)


def commit(folder: Path, k: str, how: str) -> str:
    """Commit the new record on a disk that dies. Returns its calls."""
    disk = DyingDisk(int(k), how)
    write_whole(disk, folder / NEW.file_name, [NEW_FILE])
    return " ".join(disk.calls)


def note(folder: Path, first: str, count: str) -> str:
    """Note one agent `count` times."""
    # A process that makes no pause may keep others waiting.
    StoreConfig.lock_seconds = 60
    agents = Agents(folder)
    for turn in range(int(count)):
        agents.note(
            "shared",
            "model",
            "tiny",
            [bytes([int(first)]) * 32] * (1 + turn % 3),
            256 * (1 + turn % 3),
        )
    return ""


def fill(folder: Path) -> str:
    """Commit on a small file system until it is full. Returns what is there then, as JSON."""
    whole = 0
    first = _failure(folder / "old", b"old" * 1000)
    while (full := _failure(folder / f"{whole}", bytes([whole]) * 10_000)) is None:
        whole += 1
    again = _failure(folder / "old", b"new" * 10_000)
    files = {path.name: path.read_bytes().decode("latin-1") for path in folder.iterdir()}
    return json.dumps([first, full, again, whole, files, Disk().free_bytes(folder)])


def _failure(path: Path, data: bytes) -> tuple[int | None, str] | None:
    """errno and file name of a commit that failed, or None."""
    try:
        write_whole(Disk(), path, [data])
    except OSError as error:
        return error.errno, Path(error.filename).name
    return None


if __name__ == "__main__":
    said = {"commit": commit, "note": note, "fill": fill}[sys.argv[1]](
        Path(sys.argv[2]), *sys.argv[3:]
    )
    assert "mlx" not in sys.modules
    print(said)
