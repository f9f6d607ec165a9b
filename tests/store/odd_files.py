"""What may lie in a folder under the name of a file and is none, or is one without an end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


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
