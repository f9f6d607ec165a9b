"""mlx-blockpool: a block-pool KV cache with shared prefixes for mlx-lm.

Importing this imports no mlx.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "BLOCK_TOKENS": "spec",
    "BlockPool": "kv.pool",
    "BlockPoolBatchEngine": "engine.engine",
    "BlockpoolError": "errors",
    "KVBits": "config",
    "ModelCacheSpec": "spec",
    "PoolConfig": "config",
    "PoolExhaustedError": "errors",
    "PooledKVCache": "kv.layer_caches",
    "PooledRotatingKVCache": "kv.layer_caches",
    "PrefixCache": "prefix.cache",
    "Request": "engine.request",
    "StoreConfig": "config",
    "Token": "engine.request",
    "attach": "kv.build",
    "check_spec": "plugins",
    "detach": "kv.attach",
    "from_stock": "kv.prompt_cache",
    "hookimpl": "hooks",
    "make_prompt_cache": "kv.prompt_cache",
    "open_pool": "kv.build",
    "open_prefix": "tier.opening",
    "spec_from_config": "plugins",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mlx_blockpool' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
