"""What there is of models, for people and clients: in OpenAI's shape, and with all figures. Runs on any thread."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

from ..model import LoadedModel
from .catalog import DEFAULT
from .provider import ModelKey
from .queue import ModelQueue
from .registry import ModelRegistry


def listed(registry: ModelRegistry, created: int) -> list[dict[str, Any]]:
    """OpenAI's model objects: those loaded, the default, and those allowed, or without a list all downloaded ones.

    The default has a second entry under the name that stands for it in any request.
    """
    catalog, default = registry.catalog, registry.default()
    here = [catalog.id_of(key.model) for key in (*registry.loaded, *_coming(registry))]
    models = {**dict.fromkeys([*here, *catalog.listed()]), **({} if default is None else {DEFAULT: None})}
    known = catalog.ids()
    return [_listed(registry, id, known.get(id, id), created) for id in models]


def _listed(registry: ModelRegistry, id: str, model: str, created: int) -> dict[str, Any]:
    default = registry.default()
    if id == DEFAULT and default is not None:
        model = default.model
    about = {"state": state(registry, model), "default": default is not None and model == default.model}
    return {"id": id, "object": "model", "created": created, "owned_by": "mlx-blockpool", "mlx_blockpool": about}


def state(registry: ModelRegistry, name: str) -> str:
    """loaded: it is in memory. loading: it soon is. available: it would be loaded for a request."""
    change = registry.change
    coming, leaving = (None, None) if change is None else (change.coming, change.leaving)
    if coming is not None and coming.key.model == name:
        return "loading"
    loaded = [*registry.loaded, *([] if leaving is None else [leaving.key])]
    return "loaded" if any(key.model == name for key in loaded) else "available"


def figures(registry: ModelRegistry, line: ModelQueue) -> dict[str, Any]:
    """Everything about the models; sizes in bytes, times in seconds."""
    loaded, default = registry.loaded, registry.default()
    found = [*loaded, *_coming(registry), *(place.key for place in list(line)), *registry.failures]
    keys = list(dict.fromkeys(found if default is None else [*found, default]))
    known = {part for key in keys for part in key}
    catalog = registry.catalog
    keys += [ModelKey(model) for model in catalog.allowed_models() if model not in known]
    config = registry.config
    return {
        "models": [_model(registry, line, key, loaded.get(key)) for key in keys],
        "change": _change(registry),
        "max_models": config.max_models,
        "swap_patience_seconds": config.patience_seconds,
        "idle_unload_seconds": config.idle_seconds,
        "allowed": None if config.allowed is None else catalog.listed(),
        "counts": dict(registry.counts),
        "memory": {"active_bytes": mx.get_active_memory(), "cache_bytes": mx.get_cache_memory()},
    }


def cache_report(registry: ModelRegistry, report: dict[str, Any]) -> dict[str, Any]:
    """The figures of the pool that was used last, and where several models are loaded those of each under `models`."""
    loaded = registry.loaded
    if len(loaded) < 2:
        return report
    return {**report, "models": {registry.catalog.id_of(key.model): m.report for key, m in loaded.items()}}


def _model(registry: ModelRegistry, line: ModelQueue, key: ModelKey, served: LoadedModel | None) -> dict[str, Any]:
    change = registry.change
    coming = None if change is None else change.coming
    served = served or (coming if coming is not None and coming.key == key else None)
    failure, until = registry.failures.get(key, (None, 0.0))
    found = {
        "id": registry.catalog.id_of(key.model),
        **_parts_of(registry, key),
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


def _parts_of(registry: ModelRegistry, key: ModelKey) -> dict[str, str]:
    """The adapter and the draft of a model, where it has them."""
    parts = (("adapter", key.adapter), ("draft_model", key.draft))
    return {name: registry.catalog.id_of(part) for name, part in parts if part is not None}


def _change(registry: ModelRegistry) -> dict[str, Any] | None:
    """What is being changed and how far it is; None: nothing."""
    change, plan, id_of = registry.change, registry.plan, registry.catalog.id_of
    if change is None:
        if plan.unload is None:
            return None
        return {"load": id_of(plan.load.model), "unload": id_of(plan.unload.model), "stage": "draining"}
    now, coming = time.monotonic(), change.coming
    load = change.load if coming is None else coming.key
    return {
        "load": load and id_of(load.model),
        "unload": change.unload and id_of(change.unload.model),
        "stage": change.stage,
        "stage_seconds": round(now - change.since, 3),
        "seconds": round(now - change.began, 3),
        "weights_bytes": 0 if coming is None else coming.weights_bytes,
        "read_bytes": 0 if coming is None else coming.read_bytes,
        "hashed_bytes": 0 if coming is None else coming.hashed_bytes,
    }


def _coming(registry: ModelRegistry) -> list[ModelKey]:
    change = registry.change
    return [] if change is None else [key for key in (change.unload, change.load) if key is not None]
