"""The spec of a loaded model, the pools of a model with a draft, and the figures of pools. For the generation thread."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ... import plugins
from ...config import PoolConfig
from ...engine.sequence import Sequence
from ...errors import PluginError, SpecError
from ...kv.arena import KVArena, state_share
from ...kv.attach import may_read_quantised
from ...kv.parts import sequence_of
from ...kv.pool import BlockPool
from ...memory import batch_memory
from ...spec import FullLayer, ModelCacheSpec
from ...tier.cache import TieredPrefixCache
from ..access import without_folders
from ..sequential import DraftedPrefix
from .provider import BlockpoolModelProvider

log = logging.getLogger(__name__)

# With fewer checkpoints than this, even a handful of agents compute each turn from the start.
FEW_CHECKPOINTS = 8


def describe(model: Any, config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
    """The spec of a model, or None if no plugin describes it, which is logged."""
    try:
        return plugins.spec_of_model(model, config, model_id)
    except (PluginError, SpecError) as error:
        log.warning("No pool for %s: %s", model_id, error)
        return None


def leave_out_draft(provider: BlockpoolModelProvider, spec: ModelCacheSpec | None) -> None:
    """Have a model of this spec run without its draft if either has windows or states, which is logged.

    Wrong tokens of a draft are trimmed, which full windows and states cannot be: the reply would be wrong.
    """
    if provider.draft_model is not None and any(s is not None and s.needs_checkpoints for s in (spec, _draft_spec(provider))):
        log.warning("%s runs without its draft model: windows and states cannot take wrong tokens back.", provider.name)
        provider.draft_model = None


def need_room(provider: BlockpoolModelProvider, spec: ModelCacheSpec, pool_bytes: int, config: PoolConfig) -> None:
    """Raises PoolExhaustedError if `pool_bytes` are too few for a model of this spec. Computes nothing and takes no memory.

    A model whose attention turns out not to read quantised blocks, although its code may, needs more.
    """
    is_quantised = provider.draft_model is None and may_read_quantised(provider.model)
    spec, config = spec.with_bits(config.bits if is_quantised else None), replace(config, preallocate=False)
    BlockPool(spec, pool_bytes - state_share(spec, pool_bytes, config), config)


def open_drafted(
    provider: BlockpoolModelProvider, spec: ModelCacheSpec, pool_bytes: int, config: PoolConfig
) -> DraftedPrefix | None:
    """A pool for the model and one for its draft, sized by the bytes of a block of each.

    None if the draft has no spec, or a layer of either has several caches.
    """
    draft = _draft_spec(provider)
    if draft is None or not all(isinstance(layer, FullLayer) for layer in (*spec.layers, *draft.layers)):
        return None
    sizes = [sum(s.bytes_per_block(g) for g in s.groups) for s in (spec, draft)]
    own = pool_bytes * sizes[0] // sum(sizes)
    key = str(provider.model_key)
    prefix = TieredPrefixCache(KVArena(spec, own, config), key)
    return DraftedPrefix(prefix, TieredPrefixCache(KVArena(draft, pool_bytes - own, config), key))


def _draft_spec(provider: BlockpoolModelProvider) -> ModelCacheSpec | None:
    return describe(provider.draft_model, {}, Path(str(provider.model_key[2])).name)


def warn_of_few_checkpoints(prefix: TieredPrefixCache) -> None:
    """Log a warning if so few checkpoints fit that each turn would compute its prompt again."""
    own, arena = prefix.arena.spec.bytes_per_checkpoint(), prefix.arena
    room = arena.state_bytes if arena.state_leaves else prefix.pool.pool_bytes
    if own and room // own < FEW_CHECKPOINTS:
        needed = FEW_CHECKPOINTS * own * (4 if arena.state_leaves and arena.spec.groups else 1)
        log.warning(
            "%d checkpoints of %d bytes fit; agents will compute their prompts again. Raise --pool-bytes to %d or more.",
            room // own, own, needed,
        )  # fmt: skip


def pool_report(prefix: TieredPrefixCache) -> dict[str, Any]:
    """Figures of a pool and its prefix cache."""
    pool, bits = prefix.pool, prefix.arena.spec.bits
    store = None if prefix.stored is None else prefix.stored.report()
    if store is not None:
        # Clients do not see the folder's path.
        store.pop("folder", None)
        store["problem"] = store["problem"] and without_folders(store["problem"])
    return {
        "backend": "blockpool",
        "ragged": prefix.arena.ragged,
        "kv_bits": None if bits is None else asdict(bits),
        "pool_bytes": pool.pool_bytes,
        "array_bytes": prefix.arena.nbytes,
        "known_bytes": prefix.nbytes,
        "sequences": len(prefix),
        "lookups": prefix.num_lookups,
        "prompt_tokens": prefix.num_prompt_tokens,
        "cached_tokens": prefix.num_hit_tokens,
        "known_tokens": prefix.num_matched_tokens,
        "skipped": prefix.num_skipped,
        "alarm": prefix.alarm,
        "groups": [asdict(c) for c in pool.settle()],
        "fragmentation": [round(blocks.fragmentation, 3) for blocks in pool.groups],
        "decode_paths": dict(prefix.arena.decode.path_counts),
        "store": store,
        **prefix.retention.report(),
    }


def batch_report(prefix: TieredPrefixCache | None, batch: list[Sequence]) -> dict[str, Any] | None:
    """Bytes that the running batch takes in the pool and would take padded; None if it is not in the pool."""
    batch = [sequence for sequence in batch if sequence.caches and sequence.computed]
    if prefix is None or not prefix.arena.ragged or not batch:
        return None
    held = [blocks for sequence in batch if (blocks := sequence_of(sequence.caches or [])) is not None]
    counts = [len({id for blocks in held for id in blocks.tables[g].ids}) for g in range(len(prefix.arena.spec.groups))]
    return batch_memory(prefix.arena.spec, [sequence.computed for sequence in batch], counts).bytes.as_dict()
