"""Disks that fail, die, wait, are watched, or lose what was not synced."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx_blockpool.store.fs import TEMPORARY, Buffer, Disk, Entry, Into
from mlx_blockpool.store.record import SUFFIX

CHANGES = ("create", "sync", "rename", "sync_directory", "unlink", "make_one_directory")
COMMIT = ["create", "write", "half", "sync", "close", "rename", "sync_directory", "sync"]


class CountedDisk(Disk):
    """`at` hears of each call that changes something before it does, of "half" in the middle of
    a write, of "close" after it.
    """

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
        return [
            Entry(p.name, len(data), 0.0, False)
            for p, data in self.files.items()
            if p.parent == path
        ]


class PowerCut(BaseException):
    pass


class VolatileDisk(Disk):
    """Files and directories in memory, of which a power cut leaves what was synced, and of the rest
    whatever it likes.

    A file is an index into `contents`, a directory is None. `pending` are changes of names, by
    directory, not yet synced.
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
        """Every disk that may be found: any of the unsynced names, and any of the unsynced
        bytes, without regard to order.
        """
        every = [range(2)] * len(self.pending)
        for chosen in itertools.product(*every):
            names = _changed(self.synced_names, list(itertools.compress(self.pending, chosen)))
            reachable = {
                p: n for p, n in names.items() if n is not None and set(p.parents) <= set(names)
            }
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


def _changed(
    names: dict[Path, int | None], changes: list[tuple[Path, Path, int | None, bool]]
) -> dict[Path, int | None]:
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


class QuickDisk(Disk):
    """A disk that nobody pulls the plug of."""

    def sync(self, fd: int) -> None:
        pass


class WatchedDisk(QuickDisk):
    """Looks at `root` after every call that can make it larger or smaller; `most`: bytes of
    records, whole or being written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.most = 0
        self.written = 0
        self.unlinked: list[str] = []

    def write(self, fd: int, buffers: Iterable[Buffer]) -> None:
        data = list(buffers)
        super().write(fd, data)
        self.written += sum(memoryview(buffer).nbytes for buffer in data)
        self.look()

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.look()

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if not path.name.startswith(TEMPORARY):
            self.unlinked.append(path.stem)
        self.look()

    def look(self) -> None:
        files = [
            path
            for path in self.root.rglob("*")
            if path.name.endswith(SUFFIX) or path.name.startswith(TEMPORARY)
        ]
        self.most = max(self.most, sum(_size(path) for path in files if "blocks" in path.parts))


def _size(path: Path) -> int:
    """0 for one that another store has just renamed or removed."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


class BrokenDisk(QuickDisk):
    """Each call named in `broken` raises what is given there; `calls` counts them."""

    def __init__(self, **broken: OSError) -> None:
        self.broken = broken
        self.calls: list[str] = []

    def at(self, call: str) -> None:
        self.calls.append(call)
        if call in self.broken:
            raise self.broken[call]


def _breakable(name: str, called: str) -> Callable[..., Any]:
    def call(self: BrokenDisk, *args: Any) -> Any:
        self.at(called)
        return getattr(super(BrokenDisk, self), name)(*args)

    return call


for _name in (
    "create",
    "write",
    "sync",
    "rename",
    "unlink",
    "make_one_directory",
    "scan",
    "read",
    "touch",
):
    setattr(BrokenDisk, _name, _breakable(_name, _name))
BrokenDisk.stat = _breakable("stat", "size")  # type: ignore[method-assign]
BrokenDisk.read_into = _breakable("read_into", "read")  # type: ignore[method-assign]


class GatedDisk(QuickDisk):
    """Files are begun, and read, when the gates are open."""

    def __init__(self) -> None:
        self.writes, self.reads = threading.Event(), threading.Event()
        self.writes.set()
        self.reads.set()

    def create(self, path: Path) -> int:
        assert self.writes.wait(20)
        return super().create(path)

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        assert self.reads.wait(20)
        return super().read(path, start, size)

    def read_into(self, path: Path, into: Into, most: int) -> memoryview:
        assert self.reads.wait(20)
        return super().read_into(path, into, most)


def sweep(disk: Disk, directory: Path, older_than: float) -> list[Path]:
    """Remove the leftovers of writes that never ended from a directory. Returns their paths; raises
    OSError.

    `older_than` is a moment, in seconds since the epoch: a younger file may be a live write of
    another process.
    """
    removed = []
    for entry in disk.scan(directory):
        if (
            entry.name.startswith(TEMPORARY)
            and not entry.is_directory
            and entry.modified < older_than
        ):
            with suppress(FileNotFoundError):
                disk.unlink(directory / entry.name)
                removed.append(directory / entry.name)
    return removed
