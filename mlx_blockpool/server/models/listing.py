"""What there is of models, for people and clients: in OpenAI's shape, and with all figures. Runs on any thread."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from ..served import ServedModel
from .line import Line
from .provider import ModelKey
from .registry import ModelRegistry

# What mlx-lm's server takes for a model that it can serve.
HUB_FILES = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}


def listed(registry: ModelRegistry, created: int) -> list[dict[str, Any]]:
    """OpenAI's model objects: those loaded, the default, and those allowed, or without a list all downloaded ones."""
    default = registry.default()
    names = [key.model for key in (*registry.loaded, *_coming(registry))]
    names += [] if default is None else [default.model]
    allowed = registry.allowed()
    names += _downloaded() if allowed is None else allowed
    return [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "mlx-blockpool",
            "mlx_blockpool": {"state": state(registry, name), "default": default is not None and name == default.model},
        }
        for name in dict.fromkeys(names)
    ]


def state(registry: ModelRegistry, name: str) -> str:
    """loaded: it is in memory. loading: it soon is. available: it would be loaded for a request."""
    change = registry.change
    coming, leaving = (None, None) if change is None else (change.coming, change.leaving)
    if coming is not None and coming.key.model == name:
        return "loading"
    loaded = [*registry.loaded, *([] if leaving is None else [leaving.key])]
    return "loaded" if any(key.model == name for key in loaded) else "available"


def figures(registry: ModelRegistry, line: Line) -> dict[str, Any]:
    """Everything about the models; sizes in bytes, times in seconds."""
    loaded, default = registry.loaded, registry.default()
    found = [*loaded, *_coming(registry), *(place.key for place in list(line)), *registry.failures]
    keys = list(dict.fromkeys(found if default is None else [*found, default]))
    known = {part for key in keys for part in key}
    keys += [ModelKey(name) for name in registry.allowed() or () if name not in known]
    config = registry.config
    return {
        "models": [_model(registry, line, key, loaded.get(key)) for key in keys],
        "change": _change(registry),
        "max_models": config.max_models,
        "swap_patience_seconds": config.patience_seconds,
        "idle_unload_seconds": config.idle_seconds,
        "allowed": registry.allowed(),
        "counts": dict(registry.counts),
        "memory": {"active_bytes": mx.get_active_memory(), "cache_bytes": mx.get_cache_memory()},
    }


def cache_report(registry: ModelRegistry, report: dict[str, Any]) -> dict[str, Any]:
    """The figures of the pool that was used last, and where several models are loaded those of each under `models`."""
    loaded = registry.loaded
    return report if len(loaded) < 2 else {**report, "models": {key.model: m.prompt_cache.report for key, m in loaded.items()}}


def _model(registry: ModelRegistry, line: Line, key: ModelKey, served: ServedModel | None) -> dict[str, Any]:
    change = registry.change
    coming = None if change is None else change.coming
    served = served or (coming if coming is not None and coming.key == key else None)
    failure, until = registry.failures.get(key, (None, 0.0))
    found = {
        "id": key.model,
        **asdict_of(key),
        "state": state(registry, key.model),
        "weights_bytes": registry.sizes.get(key) if served is None else served.weights_bytes,
        "waiting": sum(place.key == key for place in list(line)),
        "failure": None if failure is None or until < time.monotonic() else str(failure),
    }
    if served is not None and key in registry.loaded:
        found |= {
            "running": len(served.live),
            "idle_seconds": 0.0 if served.live else round(time.monotonic() - served.used, 3),
            "pool_bytes": served.pool_bytes,
            "array_bytes": served.array_bytes,
        }
    return found


def asdict_of(key: ModelKey) -> dict[str, str]:
    """The adapter and the draft of a model, where it has them."""
    return {name: part for name, part in (("adapter", key.adapter), ("draft_model", key.draft)) if part is not None}


def _change(registry: ModelRegistry) -> dict[str, Any] | None:
    """What is being changed and how far it is; None: nothing."""
    change, plan = registry.change, registry.plan
    if change is None:
        if plan.unload is None:
            return None
        return {"load": plan.load.model, "unload": plan.unload.model, "stage": "draining"}
    now, coming = time.monotonic(), change.coming
    return {
        "load": (change.load and change.load.model) if coming is None else coming.key.model,
        "unload": change.unload and change.unload.model,
        "stage": change.stage,
        "stage_seconds": round(now - change.since, 3),
        "seconds": round(now - change.began, 3),
        "weights_bytes": 0 if coming is None else coming.weights_bytes,
        "read_bytes": 0 if coming is None else coming.read_bytes,
    }


def _coming(registry: ModelRegistry) -> list[ModelKey]:
    change = registry.change
    return [] if change is None else [key for key in (change.unload, change.load) if key is not None]


def _downloaded() -> list[str]:
    """Ids of the models in the hub's cache that mlx-lm's server would list."""
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        repo.repo_id
        for repo in repos
        if repo.repo_type == "model"
        and "main" in repo.refs
        and {file.file_path.name for file in repo.refs["main"].files} >= HUB_FILES
    )
