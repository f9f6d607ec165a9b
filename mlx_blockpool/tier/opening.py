"""Opens the prompt store of a model: the only place that says under which name its records are
stored.

Server, command line and scripts all come here, so that one finds what the others wrote.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_config

from .. import __version__
from ..config import KVBits, PoolConfig, StoreConfig
from ..kv.build import describe, open_pool
from ..kv.shards import need_whole
from ..mlx_lm_compat import download
from ..ranks.group import ALONE, Ranks
from ..spec import ModelCacheSpec
from ..store.identity import Digests, identity, namespace
from ..store.measurements import Measurements
from ..store.paths import default_folder
from ..store.prompt_store import PromptStore
from ..store.record import VERSION
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
    """A prefix cache over the prompt store for a model that mlx-lm's load() has read from `path`, a
    folder or an id.

    `pool_bytes`, `attach` and `max_kv_size` as in open_pool, `bits` as its config.bits; `store`:
    None for the same folder and budget as the server's. What was cached is on disk once close() has
    returned. Raises SpecError for a model that cannot be in blocks, StoreError if its weights
    cannot be distinguished from others, GroupError for one rank's part of a model, whose prefixes
    only a server writes to disk.
    """
    need_whole(model)
    folder = Path(download(str(path)))
    spec = describe(model, load_config(folder), folder.name, max_kv_size)
    arena = open_pool(model, pool_bytes, PoolConfig(bits=bits), attach=attach, spec=spec)
    adapter = None if adapter_path is None else Path(adapter_path)
    return TieredPrefixCache(
        arena, store=open_store(store or StoreConfig(), folder, adapter, arena.spec, folder.name)
    )


def open_store(
    config: StoreConfig,
    model_folder: Path,
    adapter_folder: Path | None,
    spec: ModelCacheSpec,
    model_id: str,
    weights: str | None = None,
    ranks: Ranks = ALONE,
) -> PromptStore:
    """The store of the weights in a model folder, with an adapter or without. `model_id` is for
    people to read.

    `weights`: their identity(), or None to compute it here. Raises StoreError if the weights cannot
    be distinguished from others. In a group every rank calls it, with `weights`: the records of a
    rank are its own, and their prefixes have the same names on all.
    """
    if weights is None:
        weights = identity(model_folder, adapter_folder, digests_of(config))
    about = {
        "model_id": model_id,
        "adapter": None if adapter_folder is None else adapter_folder.name,
        "weights": weights,
        "spec": spec.fingerprint(),
        "dtype": spec.dtype,
        **({} if spec.bits is None else {"kv_bits": asdict(spec.bits)}),
        "format": VERSION,
        "created_by": f"mlx-blockpool {__version__}",
    }
    if ranks.own_share:
        about["ranks"] = ranks.own_share
    parts = spec.fingerprint(), spec.dtype, f"format {VERSION}"
    own, shared = (
        namespace(weights, *parts, *filter(None, [share]))
        for share in (ranks.own_share, ranks.shares)
    )
    return PromptStore(config, own, about, trie_name=ranks.from_first(shared.encode()).decode())


def digests_of(config: StoreConfig) -> Digests:
    """The digests of weights that the store's folder remembers."""
    return Digests(config.folder or default_folder())


def measurements_of(config: StoreConfig | None) -> Measurements:
    """The measurements that the store's folder remembers; without a store they stay in memory."""
    return Measurements(None if config is None else config.folder or default_folder())
