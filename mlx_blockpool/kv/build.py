"""Opens pools for loaded models: the model is described, the pool is allocated, and what the model
can do with it is probed.

Server, command line and scripts all come here. Owned by the generation thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..config import KVBits, PoolConfig
from ..errors import PoolExhaustedError, SpecError
from ..model_files.device import memory_bytes
from ..plugins import spec_of_model, traced_spec
from ..ranks.group import ALONE, Ranks, ranks_of
from ..spec import ModelCacheSpec, StateLayer
from .arena import KVArena
from .attach import attached_modules, classes_of, detach, restore
from .capabilities import Capabilities
from .prediction_head import drop_head
from .probe import probe
from .shards import agreed, need_whole, without_collectives

log = logging.getLogger(__name__)

# Finds out what a model can do with a pool, as probe() does.
Probe = Callable[[Any, KVArena, Ranks], Capabilities]

# The first tokens that windows of max_kv_size tokens retain, as in mlx-lm.
KEPT_TOKENS = 4


def describe(
    model: Any,
    config: dict[str, Any] | None = None,
    name: str = "",
    max_kv_size: int | None = None,
    ranks: Ranks = ALONE,
) -> ModelCacheSpec:
    """The spec of a loaded model, for a `max_kv_size` as in with_windows(). All ranks call this, or
    none.

    config: the fields of its config.json; by default those that the model still has. name: "" for
    its architecture. One rank's part of a model is described by its caches. Raises SpecError,
    PluginError, and GroupError for a part without its `ranks`, or if the ranks' parts are not
    alike.
    """
    name = name or type(model).__module__.rpartition(".")[2]
    if max_kv_size is not None:
        # mlx-lm gives windows to models that make no caches, as those with a head do.
        drop_head(model)
    if ranks.decides:
        need_whole(model)
        return with_windows(
            spec_of_model(model, config_of(model) if config is None else config, name),
            model,
            max_kv_size,
        )

    def own_part() -> ModelCacheSpec:
        with without_collectives(model):
            spec = traced_spec(model, name)
        if any(isinstance(leaf, StateLayer) and leaf.own for leaf in spec.leaves):
            raise SpecError(f"{name}: ranks do not share states of its cache class.")
        return with_windows(spec, model, max_kv_size)

    return agreed(own_part, ranks)


def open_pool(
    model: Any,
    pool_bytes: int | None = None,
    config: PoolConfig | None = None,
    *,
    attach: bool = True,
    max_kv_size: int | None = None,
    group: Any = None,
    spec: ModelCacheSpec | None = None,
) -> KVArena:
    """A pool for a loaded model, of `pool_bytes` at most (default: half of the memory that the
    model leaves free).

    attach: let the model's attention read blocks where they lie, if a few random tokens give the
    same logits that way. arena.capabilities says whether they did. If not, or with attach=False,
    each acquire() copies the cached prefix into one piece, and merge() copies sequences into
    mlx-lm's padded batch. max_kv_size: what mlx-lm's make_prompt_cache means by it. config.bits:
    blocks hold keys and values in this many bits. Raises ValueError if the model's attention cannot
    read such blocks. group: of mx.distributed, as sharded_load() took it. All its ranks open a
    pool, and the least `pool_bytes` counts; raises GroupError if their pools cannot be alike. spec:
    what describe() has returned; by default it is called here.
    """
    config, ranks = config or PoolConfig(), ALONE if group is None else ranks_of(group, "tensor")
    spec = quantised(spec or describe(model, max_kv_size=max_kv_size, ranks=ranks), config.bits)
    if spec.bits is not None and not attach:
        raise ValueError(
            "Only attached attention reads quantised blocks: leave out attach=False, or the bits."
        )
    arena = allocate(spec, pool_bytes, config, ranks)
    try:
        arena.capabilities = probe(model, arena, ranks, attaches=attach)
    except (PoolExhaustedError, RuntimeError) as error:
        if spec.bits is not None or not ranks.decides:
            raise
        # The pool is too small to try it, or the device cannot run the model: its use will say so.
        log.info("%s is not attached: %s", type(model).__module__, error)
    if spec.bits is not None and not arena.capabilities.is_attached:
        raise ValueError(
            f"The attention of {spec.model_id} does not read quantised blocks: leave out the bits."
        )
    return arena


def open_served(
    model: Any,
    spec: ModelCacheSpec,
    pool_bytes: int,
    config: PoolConfig,
    ranks: Ranks = ALONE,
    probe: Probe = probe,
) -> KVArena:
    """A pool for a model that an engine serves, `pool_bytes` at most. Attaches the model if its
    batches can be ragged.

    Blocks hold keys and values in config.bits. A model whose attention does not read such blocks,
    or that would lose its batches by it, has keys and values as it computes them, with a warning.
    Raises GroupError on all ranks if their pools cannot be alike, and PoolExhaustedError if the
    pool is too small to probe the model.
    """
    try:
        wanted = quantised(spec, config.bits)
    except ValueError as error:
        log.warning("%s Keys and values stay in %s, and --kv-bits is not used.", error, spec.dtype)
        wanted = spec
    was_attached = bool(attached_modules(model))
    arena = allocate(wanted, pool_bytes, config, ranks)
    found = arena.capabilities = probe(model, arena, ranks)
    if found.ragged or wanted == spec:
        return arena
    classes = classes_of(model)
    if not was_attached:
        detach(model)
    # The pool frees its slabs before the next one allocates some.
    del arena
    arena = allocate(spec, pool_bytes, config, ranks)
    arena.capabilities = probe(model, arena, ranks)
    if arena.capabilities.ragged or not found.is_attached:
        log.warning(
            "%s: its attention does not read quantised blocks. Keys and values stay in %s, and "
            "--kv-bits is not used.",
            spec.model_id,
            spec.dtype,
        )
        return arena
    del arena
    restore(classes)
    return allocate(wanted, pool_bytes, config, ranks, found)


def allocate(
    spec: ModelCacheSpec,
    pool_bytes: int | None = None,
    config: PoolConfig | None = None,
    ranks: Ranks = ALONE,
    capabilities: Capabilities | None = None,
) -> KVArena:
    """A pool of `pool_bytes` at most, the least of all ranks, which call this together (default:
    default_pool_bytes()).
    """
    (least,) = ranks.least([default_pool_bytes() if pool_bytes is None else pool_bytes])
    arena = KVArena(spec, least, config)
    arena.capabilities = capabilities or Capabilities()
    return arena


def attach(model: Any, arena: KVArena, ranks: Ranks = ALONE) -> bool:
    """Attach a model to a pool that was opened for it, as probe() does.

    Returns whether its batches are ragged now.
    """
    arena.capabilities = probe(model, arena, ranks)
    return arena.capabilities.ragged


def with_windows(spec: ModelCacheSpec, model: Any, max_kv_size: int | None) -> ModelCacheSpec:
    """The spec of the caches that mlx-lm makes for a model and a `max_kv_size`: windows, unless the
    model makes its own caches.

    Raises ValueError for one that cannot hold the tokens that are always kept and the next one.
    """
    if max_kv_size is None or hasattr(model, "make_cache"):
        return spec
    if max_kv_size <= KEPT_TOKENS:
        raise ValueError(
            f"max_kv_size is {max_kv_size}, and a window keeps the first {KEPT_TOKENS} tokens. "
            "Give more than that."
        )
    return spec.with_windows(max_kv_size, KEPT_TOKENS)


def quantised(spec: ModelCacheSpec, bits: KVBits | None) -> ModelCacheSpec:
    """The spec of pools whose blocks hold keys and values in `bits`.

    Raises ValueError if they would hold all as it is.
    """
    found = spec.with_bits(bits)
    if found.bits is None and bits is not None and (bits.keys or bits.values):
        rows = (
            "has no keys and values"
            if not spec.groups
            else "has no keys or values whose size is a multiple of 32"
        )
        raise ValueError(f"{spec.model_id} {rows}: blocks cannot hold them in fewer bits.")
    return found


def config_of(model: Any) -> dict[str, Any]:
    """The fields of config.json that the model still has."""
    args = getattr(model, "args", None)
    return {**vars(args)} if args is not None and hasattr(args, "__dict__") else {}


def default_pool_bytes() -> int:
    """Half of the memory that is left once the model is loaded."""
    return max(0, memory_bytes() - mx.get_active_memory()) // 2
