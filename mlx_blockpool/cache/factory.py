"""Makes pools and prompt caches: the list of layer caches that mlx-lm's model is called with."""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from ..config import PoolConfig
from ..plugins import spec_of_model
from ..spec import WindowLayer
from .layers import PooledKVCache, PooledRotatingKVCache
from .sequence import Sequence
from .slabs import Slabs


def pooled_caches(slabs: Slabs, sequence: Sequence | None = None) -> list[Any]:
    """Layer caches of one sequence for a model whose layers all live in blocks; empty, without `sequence` a new one."""
    sequence = sequence or Sequence(slabs)
    return [_pooled(sequence, layer) for layer in range(len(slabs.spec.layers))]


def make_prompt_cache(model: Any, slabs: Slabs) -> list[Any]:
    """In place of mlx-lm's make_prompt_cache: one sequence in the pool `slabs`.

    Full and window layers are in blocks; other layers keep mlx-lm's own cache class.
    """
    if slabs.spec.is_poolable:
        return pooled_caches(slabs)
    sequence = Sequence(slabs)
    own = stock_prompt_cache(model)
    return [_pooled(sequence, i) if i in slabs.places else cache for i, cache in enumerate(own)]


def open_pool(model: Any, pool_bytes: int | None = None, config: PoolConfig | None = None) -> Slabs:
    """A pool for a loaded model, `pool_bytes` at most (default: half of the memory that the model leaves free)."""
    spec = spec_of_model(model, config_of(model), type(model).__module__.rpartition(".")[2])
    return Slabs(spec, default_pool_bytes() if pool_bytes is None else pool_bytes, config)


def config_of(model: Any) -> dict[str, Any]:
    """What of config.json the model still knows."""
    args = getattr(model, "args", None)
    return {**vars(args)} if args is not None and hasattr(args, "__dict__") else {}


def default_pool_bytes() -> int:
    """Half of the memory that is left once the model is loaded: the device's where it says how much it has."""
    info = mx.device_info()
    total = info.get("max_recommended_working_set_size") or info.get("total_memory")
    if total is None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, int(total) - mx.get_active_memory()) // 2


def _pooled(sequence: Sequence, layer: int) -> PooledKVCache | PooledRotatingKVCache:
    is_window = isinstance(sequence.slabs.places[layer].layer, WindowLayer)
    return PooledRotatingKVCache(sequence, layer) if is_window else PooledKVCache(sequence, layer)
