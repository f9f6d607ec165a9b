"""Prompt stores on folders of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from store.disks import QuickDisk

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.store.fs import TEMPORARY, Disk
from mlx_blockpool.store.prompt_store import PromptStore
from mlx_blockpool.store.record import SUFFIX
from mlx_blockpool.store.writer import Job, JobResult

NAMESPACE = "model-of-the-tests"


def open_store(
    folder: Path,
    disk: Disk | None = None,
    namespace: str = NAMESPACE,
    trie_name: str | None = None,
    **config: Any,
) -> PromptStore:
    """A store that keeps nothing free, and looks at what others wrote only if it is told to:
    budgets are small here.
    """
    settings = StoreConfig(folder=folder, **{"min_free_bytes": 0, "look_bytes": 1 << 60, **config})
    return PromptStore(settings, namespace, {"model": "none"}, disk or QuickDisk(), trie_name)


@contextmanager
def held(store: PromptStore) -> Iterator[None]:
    """The writer's thread does nothing meanwhile."""
    gate, do = threading.Event(), store._writer._do

    def do_later(job: Job) -> JobResult:
        assert gate.wait(30)
        return do(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._writer, "_do", do_later)
        try:
            yield
        finally:
            gate.set()


def record_files(folder: Path) -> list[Path]:
    """Every record that is in its place, in the order of the names."""
    return sorted(path for path in folder.glob(f"models/*/blocks/*/*{SUFFIX}"))


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(TEMPORARY)]


def quarantined(folder: Path) -> list[Path]:
    return (
        sorted((folder / "quarantine").glob(f"*{SUFFIX}"))
        if (folder / "quarantine").exists()
        else []
    )
