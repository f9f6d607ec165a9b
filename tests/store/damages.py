"""Ways in which a record file is not what was written, what is left of a folder of them, and
what is no file at all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from store.stores import record_files

from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.reader import read
from mlx_blockpool.store.record import BLOCK, Expected


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes() or b"-")
    data[rng.randrange(len(data) // 2, len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _flip_header(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes() or b"-")
    data[rng.randrange(min(len(data), 200))] ^= 1 << rng.randrange(7)
    path.write_bytes(data)


def _truncate(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(max(1, path.stat().st_size))])


def _delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def _swap(path: Path, rng: random.Random) -> None:
    """With any other record there is; a twin of itself is no damage."""
    others = [other for other in record_files(path.parents[4]) if other != path]
    if not others:
        return _truncate(path, rng)
    other = rng.choice(others)
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)
    return None


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "flip": _flip,
    "flip header": _flip_header,
    "truncate": _truncate,
    "delete": _delete,
    "swap": _swap,
}


def remove_bad(folder: Path) -> int:
    """Every record that cannot be read goes. Returns how many that were."""
    bad = [path for path in record_files(folder) if not _is_good(path)]
    for path in bad:
        path.unlink()
    return len(bad)


def _is_good(path: Path) -> bool:
    try:
        read(Disk(), path, Expected(path.parents[2].name, BLOCK))
    except BadRecordError:
        return False
    return True


def _link_to_a_file(path: Path) -> None:
    target = path.parent / f"target of {path.name}"
    target.write_bytes(b"somebody else's")
    path.symlink_to(target)


def _link_to_a_pipe(path: Path) -> None:
    target = path.parent / f"target of {path.name}"
    os.mkfifo(target)
    path.symlink_to(target)


# Each makes one where nothing is.
ODD_FILES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "directory": os.mkdir,
    "link to a file": _link_to_a_file,
    "link to a pipe": _link_to_a_pipe,
    "link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "dangling link": lambda path: path.symlink_to(path.parent / "nowhere"),
    "link to itself": lambda path: path.symlink_to(path),
}


def make_sparse(path: Path) -> None:
    """64 GB that take no room on the disk."""
    path.touch()
    os.truncate(path, 64 << 30)
