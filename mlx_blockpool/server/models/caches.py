"""The caches of a loaded model: its spec, the pools of a model with a draft, and their figures. For the generation thread."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ... import plugins
from ...config import PoolConfig
from ...engine.sequence import Sequence
from ...errors import PluginError, SpecError
from ...kv.arena import KVArena
from ...kv.parts import sequence_of
from ...memory import batch_memory
from ...spec import FullLayer, ModelCacheSpec
from ...tier.cache import TieredPrefixCache
from ..access import without_folders
from ..sequential import DraftedPrefix
from .provider import BlockpoolModelProvider

log = logging.getLogger(__name__)

# With fewer checkpoints than this, the turns of even a handful of agents are computed from the start.
FEW = 8


def describe(model: Any, config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
    """The spec of a model; None where neither a plugin nor its config describes it, which is logged."""
    try:
        return plugins.spec_of_model(model, config, model_id, plugins.make_plugin_manager())
    except (PluginError, SpecError) as error:
        log.warning("No pool for %s: %s", model_id, error)
        return None


def open_drafted(
    provider: BlockpoolModelProvider, spec: ModelCacheSpec, pool_bytes: int, config: PoolConfig
) -> DraftedPrefix | None:
    """A pool for the model and one for its draft, divided by the bytes of a block of each.

    None where the draft has no spec, or either has layers whose tokens cannot be taken back: what a draft got wrong is trimmed,
    and neither a state nor a window can be.
    """
    draft = describe(provider.draft_model, {}, Path(str(provider.model_key[2])).name)
    if draft is None or not all(isinstance(layer, FullLayer) for layer in (*spec.layers, *draft.layers)):
        return None
    sizes = [sum(s.bytes_per_block(g) for g in s.groups) for s in (spec, draft)]
    own = pool_bytes * sizes[0] // sum(sizes)
    key = str(provider.model_key)
    prefix = TieredPrefixCache(KVArena(spec, own, config), key)
    return DraftedPrefix(prefix, TieredPrefixCache(KVArena(draft, pool_bytes - own, config), key))


def warn_of_few_checkpoints(prefix: TieredPrefixCache) -> None:
    """Log a warning where so few checkpoints fit that every turn would compute its prompt again."""
    own, arena = prefix.arena.spec.bytes_per_checkpoint(), prefix.arena
    room = arena.state_bytes if arena.state_leaves else prefix.pool.pool_bytes
    if own and room // own < FEW:
        needed = FEW * own * (1 if not arena.state_leaves or not arena.spec.groups else 4)
        log.warning(
            "%d checkpoints of %d bytes fit; agents will compute their prompts again. Raise --pool-bytes to %d or more.",
            room // own, own, needed,
        )  # fmt: skip


def pool_report(prefix: TieredPrefixCache) -> dict[str, Any]:
    """Figures of a pool and its prefix cache."""
    pool = prefix.pool
    return {
        "backend": "blockpool",
        "ragged": prefix.arena.ragged,
        "pool_bytes": pool.pool_bytes,
        "array_bytes": prefix.arena.nbytes,
        "known_bytes": prefix.nbytes,
        "sequences": len(prefix),
        "lookups": prefix.num_lookups,
        "prompt_tokens": prefix.num_prompt_tokens,
        "cached_tokens": prefix.num_hit_tokens,
        "known_tokens": prefix.num_known_tokens,
        "skipped": prefix.num_skipped,
        "alarm": prefix.alarm,
        "groups": [asdict(c) for c in pool.settle()],
        "fragmentation": [round(pool.fragmentation(g), 3) for g in range(len(prefix.arena.spec.groups))],
        "decode_paths": dict(prefix.arena.decode.path_counts),
        "store": None if prefix.stored is None else _without_place(prefix.stored.report()),
        **prefix.retention.report(),
    }


def batch_report(prefix: TieredPrefixCache | None, batch: list[Sequence]) -> dict[str, Any] | None:
    """Bytes of the running batch in the pool, and what the batch would take padded; None where it is not in the pool."""
    batch = [running for running in batch if running.caches and running.computed]
    if prefix is None or not prefix.arena.ragged or not batch:
        return None
    sequences = [sequence_of(running.caches or []) for running in batch]
    tables = [sequence.tables for sequence in sequences if sequence is not None]
    held = [len({block for own in tables for block in own[g].ids}) for g in range(len(prefix.arena.spec.groups))]
    return batch_memory(prefix.arena.spec, [running.computed for running in batch], held).bytes.as_dict()


def _without_place(report: dict[str, Any]) -> dict[str, Any]:
    """A store's figures for clients, without the path of its folder."""
    problem = report["problem"] and without_folders(report["problem"])
    return {name: value for name, value in report.items() if name != "folder"} | {"problem": problem}
