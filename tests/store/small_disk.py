"""A child process on a small file system: commits until it is full, then tells in JSON what is there. small_disk.py folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mlx_blockpool.store.fs import Disk, write_whole


def failure(path: Path, data: bytes) -> tuple[int | None, str] | None:
    """errno and file name of a commit that failed; None: it did not."""
    try:
        write_whole(Disk(), path, [data])
    except OSError as error:
        return error.errno, Path(error.filename).name
    return None


if __name__ == "__main__":
    folder, whole = Path(sys.argv[1]), 0
    first = failure(folder / "old", b"old" * 1000)
    while (full := failure(folder / f"{whole}", bytes([whole]) * 10_000)) is None:
        whole += 1
    again = failure(folder / "old", b"new" * 10_000)
    files = {path.name: path.read_bytes().decode("latin-1") for path in folder.iterdir()}
    print(json.dumps([first, full, again, whole, files, Disk().free_bytes(folder)]))
