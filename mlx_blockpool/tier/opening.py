"""Opens the prompt store of a model: the one place that says under which name its records are kept.

Server, command line and scripts all come here, so that one finds what the others wrote.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_config

from .. import __version__
from ..config import KVBits, StoreConfig, check_store_bits
from ..kv.arena import KVArena
from ..kv.factory import default_pool_bytes, quantised, try_out, with_windows
from ..kv.shards import need_whole
from ..mlx_lm_compat import download
from ..plugins import spec_of_model
from ..ranks.group import ALONE, Ranks
from ..spec import ModelCacheSpec
from ..store.identity import Digests, identity, namespace
from ..store.measurements import Measurements
from ..store.paths import default_folder
from ..store.prompt_store import PromptStore
from ..store.record import VERSION
from .agreement import name_for_all
from .cache import TieredPrefixCache


def open_prefix(
    model: Any,
    path: str | Path,
    pool_bytes: int | None = None,
    store: StoreConfig | None = None,
    adapter_path: str | Path | None = None,
    *,
    attach: bool = True,
    max_kv_size: int | None = None,
    bits: KVBits | None = None,
) -> TieredPrefixCache:
    """A prefix cache over the prompt store for a model that mlx-lm's load() has read from `path`, a folder or an id.

    `pool_bytes`, `attach` and `max_kv_size` as in open_pool, `bits` as its config.bits; `store`: None for the same folder and
    budget as the server's. What is kept is on disk at the latest when close() returns. Raises SpecError for a model that cannot
    be in blocks, StoreError if its weights cannot be distinguished from others,
    GroupError for one rank's part of a model, whose prefixes only a server keeps on disk.
    """
    need_whole(model)
    folder = Path(download(str(path)))
    spec = with_windows(spec_of_model(model, load_config(folder), folder.name), model, max_kv_size)
    arena = KVArena(quantised(spec, bits), default_pool_bytes() if pool_bytes is None else pool_bytes)
    try_out(model, arena, attach)
    adapter = None if adapter_path is None else Path(adapter_path)
    return TieredPrefixCache(arena, store=open_store(store or StoreConfig(), folder, adapter, arena.spec, folder.name))


def open_store(
    config: StoreConfig,
    model_folder: Path,
    adapter_folder: Path | None,
    spec: ModelCacheSpec,
    model_id: str,
    weights: str | None = None,
    ranks: Ranks = ALONE,
) -> PromptStore:
    """The store of the weights in a model folder, with an adapter or without. `model_id` is for people to read.

    `weights`: their identity(); None: it is computed here. Raises StoreError if the weights cannot be distinguished from others,
    BlockpoolError for a store of no fewer bits than the spec's. In a group every rank calls it, with `weights`: the records of a
    rank are its own, and their prefixes have the same names on all.
    """
    check_store_bits(config.bits, spec.bits)
    if weights is None:
        weights = identity(model_folder, adapter_folder, digests_of(config))
    bits = config.bits or 0
    about = {
        "model_id": model_id,
        "adapter": None if adapter_folder is None else adapter_folder.name,
        "weights": weights,
        "spec": spec.fingerprint(),
        "dtype": spec.dtype,
        "bits": bits,
        **({} if spec.bits is None else {"kv_bits": asdict(spec.bits)}),
        "format": VERSION,
        "created_by": f"mlx-blockpool {__version__}",
    }
    parts = spec.fingerprint(), spec.dtype, f"bits {bits}", f"format {VERSION}"
    if ranks.size == 1:
        return PromptStore(config, namespace(weights, *parts), about)
    part = f"{ranks.kind} {ranks.rank} of {ranks.size}"
    name = name_for_all(ranks, namespace(weights, *parts, f"{ranks.kind} of {ranks.size}"))
    return PromptStore(config, namespace(weights, *parts, part), about | {"ranks": part}, trie_name=name)


def digests_of(config: StoreConfig) -> Digests:
    """The digests of weights that the store's folder remembers."""
    return Digests(config.folder or default_folder())


def measurements_of(config: StoreConfig | None) -> Measurements:
    """The measurements that the store's folder remembers; without a store they stay in memory."""
    return Measurements(None if config is None else config.folder or default_folder())
