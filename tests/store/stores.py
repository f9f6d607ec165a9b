"""Prompt stores on folders of their own, and disks that are watched or broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.prefix.trie import naming
from mlx_blockpool.store.fs import TEMPORARY, Buffer, Disk
from mlx_blockpool.store.prompt_store import PromptStore
from mlx_blockpool.store.record import SUFFIX

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


for _name in ("create", "write", "sync", "rename", "unlink", "make_one_directory", "scan", "read", "touch", "append"):
    setattr(BrokenDisk, _name, _breakable(_name, _name))
BrokenDisk.stat = _breakable("stat", "size")  # type: ignore[method-assign]
BrokenDisk.read_into = _breakable("read_into", "read")  # type: ignore[method-assign]


def open_store(folder: Path, disk: Disk | None = None, namespace: str = NAMESPACE, **config: Any) -> PromptStore:
    """A store that keeps nothing free, and looks at what others wrote only if it is told to: budgets are small here."""
    settings = StoreConfig(folder=folder, **{"min_free_bytes": 0, "look_bytes": 1 << 60, **config})
    return PromptStore(settings, namespace, naming, {"model": "none"}, disk or QuickDisk())


def record_files(folder: Path) -> list[Path]:
    """Every record that is in its place, in the order of the names."""
    return sorted(path for path in folder.glob(f"models/*/blocks/*/*{SUFFIX}"))


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(TEMPORARY)]


def quarantined(folder: Path) -> list[Path]:
    return sorted((folder / "quarantine").glob(f"*{SUFFIX}")) if (folder / "quarantine").exists() else []
