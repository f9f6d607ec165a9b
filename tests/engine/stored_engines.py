"""Engines over a store, and folders as a kill would leave them."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.engines import ROOMY, attached
from store.stores import open_store

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.capabilities import RAGGED, Capabilities
from mlx_blockpool.store.fs import TEMPORARY, Disk
from mlx_blockpool.store.prompt_store import PromptStore
from mlx_blockpool.store.reader import RecordData
from mlx_blockpool.tier.cache import TieredPrefixCache
from mlx_blockpool.tier.write_behind import StoredPrefixes

ENGINE = EngineConfig(prefill_tokens=128)


@dataclass
class Machine:
    """One server's life, without the server."""

    engine: BlockPoolBatchEngine
    prefix: TieredPrefixCache
    store: PromptStore

    @property
    def stored(self) -> StoredPrefixes:
        assert isinstance(self.prefix.stored, StoredPrefixes)
        return self.prefix.stored


def start(
    folder: Path,
    n_bytes: int = ROOMY,
    disk: Disk | None = None,
    model: Any = None,
    name: str = "llama",
    capabilities: Capabilities = RAGGED,
    engine: EngineConfig = ENGINE,
    **config: Any,
) -> Machine:
    own, spec = attached(name) if model is None else model
    slabs = KVArena(spec, n_bytes)
    slabs.capabilities = capabilities
    store = open_store(folder, disk, **config)
    prefix = TieredPrefixCache(slabs, store=store)
    return Machine(
        BlockPoolBatchEngine(own, PooledCaches(prefix), engine),
        prefix,
        store,
    )


def write_all(machine: Machine) -> None:
    """As if there had been time."""
    machine.stored.write_behind(1 << 40)
    assert machine.store.flush()


def killed(machine: Machine, folder: Path) -> Path:
    """What a kill leaves on disk now, in a folder of its own."""
    return shutil.copytree(machine.store.root, folder, copy_function=_copy)


def _copy(source: str, target: str) -> None:
    try:
        shutil.copy2(source, target)
    except FileNotFoundError:
        # The writer has renamed or removed it meanwhile.
        if not Path(source).name.startswith(TEMPORARY):
            raise


def read_at_once(store: PromptStore) -> None:
    """Every read has ended before anybody asks."""
    read = store.read

    def done(*wanted: Any) -> Future[RecordData]:
        found = read(*wanted)
        found.exception()
        return found

    store.read = done  # type: ignore[method-assign]
