"""Disks that fail, die or lose what was not synced."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mlx_blockpool.store.fs import Buffer, Disk, Entry

CHANGES = ("create", "sync", "rename", "sync_directory", "unlink", "make_one_directory")
COMMIT = ["create", "write", "half", "sync", "close", "rename", "sync_directory", "sync"]


class CountedDisk(Disk):
    """`at` hears of each call that changes something before it does, of "half" in the middle of a write, of "close" after it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def at(self, call: str) -> None:
        self.calls.append(call)

    def write(self, fd: int, buffers: Iterable[Buffer]) -> None:
        self.at("write")
        data = b"".join(bytes(buffer) for buffer in buffers)
        super().write(fd, [data[: len(data) // 2]])
        self.at("half")
        super().write(fd, [data[len(data) // 2 :]])

    def close(self, fd: int) -> None:
        super().close(fd)
        self.at("close")


def _counted(name: str) -> Callable[..., Any]:
    def call(self: CountedDisk, *args: Any) -> Any:
        self.at(name)
        return getattr(super(CountedDisk, self), name)(*args)

    return call


for _name in CHANGES:
    setattr(CountedDisk, _name, _counted(_name))


class FailingDisk(CountedDisk):
    """The k-th call (from 0) fails with an errno; `for_good`: all calls after it, too."""

    def __init__(self, k: int, error: int, for_good: bool = False) -> None:
        super().__init__()
        self.k = k
        self.error = error
        self.for_good = for_good

    def at(self, call: str) -> None:
        super().at(call)
        count = len(self.calls) - 1
        if count == self.k or (self.for_good and count > self.k):
            raise OSError(self.error, os.strerror(self.error))


class StillDisk(Disk):
    """Files in a dictionary, to be read."""

    def __init__(self, files: dict[Path, bytes]) -> None:
        self.files = files

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path][start : None if size is None else start + size]

    def size(self, path: Path) -> int:
        return len(self.files[path])

    def scan(self, path: Path) -> list[Entry]:
        return [Entry(p.name, len(data), 0.0, False) for p, data in self.files.items() if p.parent == path]


class PowerCut(BaseException):
    pass


class VolatileDisk(Disk):
    """Files and directories in memory, of which a power cut leaves what was synced, and of the rest whatever it likes.

    A file is an index into `contents`, a directory is None. `pending` are changes of names, by directory, not yet synced.
    """

    def __init__(self) -> None:
        self.contents: list[bytes] = []
        self.synced: list[bytes] = []
        self.names: dict[Path, int | None] = {Path("/"): None}
        self.synced_names = dict(self.names)
        self.pending: list[tuple[Path, Path, int | None, bool]] = []

    def create(self, path: Path) -> int:
        self._name(path, len(self.contents))
        self.contents.append(b"")
        self.synced.append(b"")
        return len(self.contents) - 1

    def write(self, fd: int, buffers: Iterable[Buffer]) -> None:
        self.contents[fd] += b"".join(bytes(buffer) for buffer in buffers)

    def sync(self, fd: int) -> None:
        self.synced[fd] = self.contents[fd]

    def close(self, fd: int) -> None:
        pass

    def rename(self, old: Path, new: Path) -> None:
        self.names[new] = self.names.pop(old)
        # One change of one directory: both names or neither.
        assert old.parent == new.parent
        self.pending.append((old, new, self.names[new], True))

    def unlink(self, path: Path) -> None:
        raise AssertionError("nothing is removed here")

    def make_one_directory(self, path: Path) -> None:
        if path in self.names:
            raise FileExistsError(path)
        self._name(path, None)

    def sync_directory(self, path: Path) -> None:
        done = [change for change in self.pending if change[1].parent == path]
        self.pending = [change for change in self.pending if change[1].parent != path]
        self.synced_names = _changed(self.synced_names, done)

    def after_power_cut(self) -> Iterator[StillDisk]:
        """Every disk that may be found: any of the unsynced names, and any of the unsynced bytes, without regard to order."""
        every = [range(2)] * len(self.pending)
        for chosen in itertools.product(*every):
            names = _changed(self.synced_names, list(itertools.compress(self.pending, chosen)))
            reachable = {p: n for p, n in names.items() if n is not None and set(p.parents) <= set(names)}
            for contents in itertools.product(*(self._remains(n) for n in reachable.values())):
                yield StillDisk(dict(zip(reachable, contents, strict=True)))

    def _remains(self, file: int) -> set[bytes]:
        data, synced = self.contents[file], self.synced[file]
        half = len(data) // 2
        torn = {data, data[:half], bytes(len(data)), data[:half] + bytes(len(data) - half)}
        return {synced} | (torn if data != synced else set())

    def _name(self, path: Path, file: int | None) -> None:
        if path.parent not in self.names:
            raise FileNotFoundError(path)
        assert path not in self.names
        self.names[path] = file
        self.pending.append((path, path, file, False))


def _changed(names: dict[Path, int | None], changes: list[tuple[Path, Path, int | None, bool]]) -> dict[Path, int | None]:
    names = dict(names)
    for old, new, file, is_rename in changes:
        if is_rename:
            names.pop(old, None)
        names[new] = file
    return names


class CutDisk(CountedDisk, VolatileDisk):
    """The power goes at the k-th call; nothing happens after that."""

    def __init__(self) -> None:
        super().__init__()
        self.k: int | None = None

    def at(self, call: str) -> None:
        super().at(call)
        if self.k is not None and len(self.calls) > self.k:
            raise PowerCut
