"""Prompt stores on folders of their own, disks that are watched, and files that are damaged."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.prefix.stored import naming
from mlx_blockpool.store.disk import TEMPORARY, Buffer, Disk
from mlx_blockpool.store.record import SUFFIX, Expected, read
from mlx_blockpool.store.store import BLOCK, PromptStore

NAMESPACE = "model-of-the-tests"


class QuickDisk(Disk):
    """A disk that nobody pulls the plug of."""

    def sync(self, fd: int) -> None:
        pass


class WatchedDisk(QuickDisk):
    """Looks at `root` after every call that can make it larger or smaller; `most`: bytes of records, whole or being written."""

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
        files = [path for path in self.root.rglob("*") if path.name.endswith(SUFFIX) or path.name.startswith(TEMPORARY)]
        self.most = max(self.most, sum(path.stat().st_size for path in files if "blocks" in path.parts))


class BrokenDisk(QuickDisk):
    """Each call named in `broken` raises what is given there; `calls` counts them."""

    def __init__(self, **broken: OSError) -> None:
        self.broken = broken
        self.calls: list[str] = []

    def at(self, call: str) -> None:
        self.calls.append(call)
        if call in self.broken:
            raise self.broken[call]


def _breakable(name: str) -> Callable[..., Any]:
    def call(self: BrokenDisk, *args: Any) -> Any:
        self.at(name)
        return getattr(super(BrokenDisk, self), name)(*args)

    return call


for _name in ("create", "write", "sync", "rename", "unlink", "make_one_directory", "scan", "read", "size", "touch"):
    setattr(BrokenDisk, _name, _breakable(_name))


def open_store(folder: Path, disk: Disk | None = None, namespace: str = NAMESPACE, **config: Any) -> PromptStore:
    settings = StoreConfig(folder=folder, **{"min_free_bytes": 0, **config})
    return PromptStore(settings, namespace, naming, {"model": "none"}, disk or QuickDisk())


def record_files(folder: Path) -> list[Path]:
    """Every record that is in its place, in the order of the names."""
    return sorted(path for path in folder.glob(f"models/*/blocks/*/*{SUFFIX}"))


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(TEMPORARY)]


def quarantined(folder: Path) -> list[Path]:
    return sorted((folder / "quarantine").glob(f"*{SUFFIX}")) if (folder / "quarantine").exists() else []


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
        read(Disk(), path, Expected(path.parents[2].name, BLOCK, bytes.fromhex(path.stem)), naming)
    except BadRecordError:
        return False
    return True
