"""The spec and the store of a loaded model, the pools of one with a draft, the figures of pools.

For the generation thread.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from ..config import PoolConfig
from ..engine.caches import PooledCaches
from ..engine.engine import BlockPoolBatchEngine
from ..engine.sequence import Sequence
from ..engine.stock import GuardedPromptCache
from ..errors import PluginError, SpecError
from ..kv import build
from ..kv.arena import KVArena, state_share
from ..kv.pool import BlockPool
from ..kv.prediction_head import head_of
from ..kv.prompt_cache import sequence_of
from ..spec import FullLayer, ModelCacheSpec
from ..tier.cache import TieredPrefixCache
from .access import without_folders
from .bodies import Json
from .provider import BlockpoolModelProvider
from .sequential import DraftedPrefix

log = logging.getLogger(__name__)

# With fewer checkpoints than this, even a handful of agents compute each turn from the start.
FEW_CHECKPOINTS = 8


def describe(model: Any, config: Json, model_id: str) -> tuple[ModelCacheSpec | None, str]:
    """The spec of a model; or None if no plugin describes it, and why, which is logged."""
    try:
        return build.describe(model, config, model_id), ""
    except (PluginError, SpecError) as error:
        log.warning("No pool for %s: %s", model_id, error)
        return None, str(error)


def leave_out_draft(provider: BlockpoolModelProvider, spec: ModelCacheSpec | None) -> None:
    """Have a model of this spec run without its draft if either has windows or states, which is
    logged.

    Wrong tokens of a draft are trimmed, which full windows and states cannot be: the reply would be
    wrong.
    """
    if provider.draft_model is not None and any(
        s is not None and s.needs_checkpoints for s in (spec, _draft_spec(provider))
    ):
        log.warning(
            "%s runs without its draft model: windows and states cannot take wrong tokens back.",
            provider.name,
        )
        provider.draft_model = None


def need_room(
    provider: BlockpoolModelProvider, spec: ModelCacheSpec, pool_bytes: int, config: PoolConfig
) -> None:
    """Raises PoolExhaustedError if `pool_bytes` are too few for a model of this spec. Computes
    nothing and allocates no memory.

    A model needs more if its attention turns out not to read quantised blocks.
    """
    spec = spec.with_bits(config.bits if provider.draft_model is None else None)
    config = replace(config, preallocate=False)
    BlockPool(spec, pool_bytes - state_share(spec, pool_bytes, config), config)


def open_drafted(
    provider: BlockpoolModelProvider, spec: ModelCacheSpec, pool_bytes: int, config: PoolConfig
) -> DraftedPrefix | None:
    """A pool for the model and one for its draft, sized by the bytes of a block of each.

    None if the draft has no spec, if an installed plugin describes one of them, which is not proven
    here, or if a layer of either has several caches.
    """
    draft = _draft_spec(provider)
    if draft is None or spec.source is not None or draft.source is not None:
        return None
    if not all(isinstance(layer, FullLayer) for layer in (*spec.layers, *draft.layers)):
        return None
    sizes = [sum(s.bytes_per_block(g) for g in s.groups) for s in (spec, draft)]
    own = pool_bytes * sizes[0] // sum(sizes)
    key = str(provider.model_key)
    prefix = TieredPrefixCache(KVArena(spec, own, config), key)
    return DraftedPrefix(prefix, TieredPrefixCache(KVArena(draft, pool_bytes - own, config), key))


def _draft_spec(provider: BlockpoolModelProvider) -> ModelCacheSpec | None:
    return describe(provider.draft_model, {}, Path(str(provider.model_key[2])).name)[0]


def warn_of_few_checkpoints(prefix: TieredPrefixCache) -> None:
    """Log a warning if so few checkpoints fit that each turn would compute its prompt again."""
    own, arena = prefix.arena.spec.bytes_per_checkpoint(), prefix.arena
    most = arena.state_bytes if arena.state_leaves else prefix.pool.pool_bytes
    if own and most // own < FEW_CHECKPOINTS:
        needed = FEW_CHECKPOINTS * own * (4 if arena.state_leaves and arena.spec.groups else 1)
        log.warning(
            "%d checkpoints of %d bytes fit; agents will compute their prompts again. Raise "
            "--pool-bytes to %d or more.",
            most // own,
            own,
            needed,
        )


def pool_report(prefix: TieredPrefixCache) -> Json:
    """Figures of a pool and its prefix cache."""
    pool, bits = prefix.pool, prefix.arena.spec.bits
    groups = pool.settle()
    store = prefix.stored.report()
    if store:
        # Clients do not see the folder's path.
        store.pop("folder", None)
        store["problem"] = store["problem"] and without_folders(store["problem"])
    return {
        "backend": "blockpool",
        "ragged": prefix.arena.capabilities.ragged,
        "kv_bits": None if bits is None else asdict(bits),
        "pool_bytes": pool.pool_bytes,
        "array_bytes": prefix.arena.nbytes,
        "used_bytes": sum((group.total - group.free) * group.bytes_per_block for group in groups),
        "known_bytes": prefix.nbytes,
        "sequences": len(prefix),
        "lookups": prefix.num_lookups,
        "prompt_tokens": prefix.num_prompt_tokens,
        "cached_tokens": prefix.num_hit_tokens,
        "known_tokens": prefix.num_matched_tokens,
        "skipped": prefix.num_skipped,
        "alarm": prefix.alarm,
        "groups": [asdict(group) for group in groups],
        "fragmentation": [round(blocks.fragmentation, 3) for blocks in pool.groups],
        "decode_paths": dict(prefix.arena.decode.path_counts),
        "decode_costs": {
            str(group): asdict(costs) for group, costs in prefix.arena.decode.costs.items()
        },
        "no_kernel": {
            str(group): why for group, why in prefix.arena.capabilities.no_kernel.items()
        },
        "store": store,
        **prefix.retention.report(),
    }


def report(
    prefix: TieredPrefixCache | None, stock: GuardedPromptCache, engine: BlockPoolBatchEngine | None
) -> Json:
    """The figures of a model for GET /v1/cache."""
    if prefix is None:
        found: Json = {
            "backend": "mlx-lm",
            "sequences": len(stock),
            "known_bytes": stock.nbytes,
        }
    else:
        found = pool_report(prefix)
    if engine is None:
        return found | {"batch": None, "engine": {}, "drafts": None}
    return found | {
        "batch": batch_report(prefix, engine.live),
        "engine": dict(engine.counts),
        "drafts": draft_report(engine),
    }


def draft_report(engine: BlockPoolBatchEngine) -> Json:
    """How an engine drafts, and how many tokens were accepted, by source."""
    curve, counts = engine.caches.curve, engine.counts
    sources = sorted({name.partition(" ")[2] for name in counts if name.startswith("drafted ")})
    by_source = {
        name: {what: counts[f"{what} {name}"] for what in ("drafted", "accepted")}
        for name in sources
    }
    return {
        "mode": engine.config.drafts,
        "off": engine.steps.off,
        "verifies": engine.caches.capabilities.verifies,
        "curve": None if curve is None else curve.to_json(),
        "verifications": counts["verifications"],
        "head": head_report(engine),
        **{what: sum(own[what] for own in by_source.values()) for what in ("drafted", "accepted")},
        "sources": by_source,
    }


def head_report(engine: BlockPoolBatchEngine) -> Json | None:
    """The bytes of a model's prediction head, what it adds to those of a token, and its guesses."""
    head = head_of(engine.model)
    if head is None or not isinstance(engine.caches, PooledCaches):
        return None
    spec = engine.caches.prefix.arena.spec
    return {
        "bytes": sum(array.nbytes for _, array in tree_flatten(head.parameters())),
        "bytes_per_token": spec.bytes_per_token_per_layer(spec.leaves[-1]),
        "guesses": engine.counts["guesses"],
    }


def batch_report(prefix: TieredPrefixCache | None, batch: list[Sequence]) -> dict[str, int] | None:
    """Bytes of the running batch's blocks, and what they would be if none was shared.

    None if no sequence has blocks.
    """
    caches = [sequence.caches for sequence in batch if sequence.caches and sequence.computed]
    if prefix is None or not caches:
        return None
    held = [blocks for own in caches if (blocks := sequence_of(own)) is not None]
    spec, found = prefix.arena.spec, {"bytes": 0, "unshared_bytes": 0}
    for number, group in enumerate(spec.groups):
        ids = [id for blocks in held for id in blocks.tables[number].ids]
        found["bytes"] += len(set(ids)) * spec.bytes_per_block(group)
        found["unshared_bytes"] += len(ids) * spec.bytes_per_block(group)
    return found
