"""The endpoints of models: GET /v1/models and /admin/models, POST /admin/load and /admin/unload.

Runs on the socket's thread, without caches.
"""

from __future__ import annotations

import contextlib
import time
from queue import Queue
from typing import Annotated, Any
from urllib.parse import unquote

from mlx_lm.utils import load_config
from pydantic import Field

from ...errors import ModelNotFoundError
from ...mlx_lm_compat import ModelDescription
from ...model_files.modelfile import local_folder, positions_of
from ..bodies import Json, parse_json
from ..model import LoadedModel
from ..provider import ModelKey
from ..validation import Body, dotted, validated
from .catalog import DEFAULT
from .queue import Claim
from .registry import LoadCommand, ModelRegistry

MODELS = "/v1/models"
COMMANDS = ("/admin/load", "/admin/unload")


# Of a model in a command; longer than any path.
Name = Annotated[str, Field(max_length=10_000)]


class CommandBody(Body):
    model: Name
    draft_model: Name = DEFAULT
    adapters: Name | None = None
    wait: bool = True


class ModelsEndpoint:
    """The models of a server's `generator`, and commands to load and unload them."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._registry: ModelRegistry = generator.registry
        self._catalog = self._registry.catalog

    def models(self, created: int) -> list[Json]:
        """OpenAI's model objects: the loaded and the default model, and the allowed models, or all
        downloaded ones.

        The default has a second entry under the name that stands for it in any request.
        """
        catalog, swap = self._catalog, self._registry.swap
        keys = [*self._registry.loaded, *((swap.unload, swap.load) if swap else ())]
        ids = [*(catalog.id_of(key.model) for key in keys if key is not None), *catalog.listed()]
        known = catalog.ids() | (
            {} if catalog.default is None else {DEFAULT: catalog.default.model}
        )
        ids += [DEFAULT] if catalog.default is not None else []
        return [self._listed(id, known.get(id, id), created) for id in dict.fromkeys(ids)]

    def find(self, path: str, created: int) -> Json:
        """The list for the path /v1/models, or one model for /v1/models/ID.

        Raises ModelNotFoundError.
        """
        found, name = self.models(created), unquote(path.removeprefix(MODELS)).removeprefix("/")
        if not name:
            return {"object": "list", "data": found}
        for model in found:
            if model["id"] == name:
                return model
        raise ModelNotFoundError(
            f"There is no model {name}; the models are {', '.join(model['id'] for model in found)}."
        )

    def figures(self) -> Json:
        """Everything about the models; sizes in bytes, times in seconds."""
        registry, catalog, config = self._registry, self._catalog, self._registry.config
        swap = registry.swap
        named = (
            *registry.loaded,
            *((swap.unload, swap.load) if swap else ()),
            *(entry.key for entry in registry.queue),
            *registry.failures,
            catalog.default,
        )
        keys = [key for key in named if key is not None]
        known = {part for key in keys for part in key}
        keys += [ModelKey(model) for model in catalog.allowed_models() if model not in known]
        return {
            "models": [self._model(key) for key in dict.fromkeys(keys)],
            "change": self._change(),
            "max_models": config.max_models,
            "swap_patience_seconds": config.patience_seconds,
            "idle_unload_seconds": config.idle_seconds,
            "allowed": None if config.allowed is None else catalog.listed(),
            "counts": dict(registry.counts),
        }

    def command(self, scope: Any, data: bytes) -> tuple[int, Json]:
        """Status and body for POST /admin/load or /admin/unload, once it is done, or at once if the
        client does not `wait`.

        `scope`: the RequestScope. Raises ValueError for a bad body, and what change() raises.
        """
        start, body = time.monotonic(), validated(CommandBody, parse_json(data), dotted)
        unload, claim = scope.path == COMMANDS[1], Claim.COMMAND if body.wait else Claim.UNWAITED
        name = self.change(
            scope, ModelDescription(body.model, body.draft_model, body.adapters), unload, claim
        )
        if not body.wait:
            return 202, {"model": name, "accepted": scope.path.removeprefix("/admin/")}
        state = "available" if unload else "loaded"
        return 200, {"model": name, "state": state, "seconds": round(time.monotonic() - start, 3)}

    def change(
        self,
        scope: Any,
        wanted: ModelDescription,
        unload: bool = False,
        claim: Claim = Claim.COMMAND,
    ) -> str:
        """Have a model loaded or unloaded for a RequestScope, and return its id: once that is done,
        if the client waits.

        Raises the reason why it is not.
        """
        key = self._registry.find(wanted, again=True)
        name: str = self._catalog.id_of(key.model)
        command = LoadCommand(Queue(), key, unload, claim, scope.options.keep_seconds, scope.owner)
        self._generator.requests.put(command)
        if claim is not Claim.UNWAITED:
            try:
                error = self._generator.receive(command.queue, scope.connection)
            except ConnectionError:
                command.is_left = True
                raise
            if error is not None:
                raise error
        return name

    def _listed(self, id: str, model: str, created: int) -> Json:
        default, limit = self._catalog.default, self._max_tokens(model)
        about = {
            "state": self._state(model),
            "default": default is not None and model == default.model,
        }
        return {
            "id": id,
            "object": "model",
            "created": created,
            "owned_by": "mlx-blockpool",
            **({} if limit is None else {"max_model_len": limit}),
            "mlx_blockpool": about,
        }

    def _max_tokens(self, model: str) -> int | None:
        """The most tokens of one request: of a loaded model as the pool allows, of others as their
        config.json does.
        """
        for key, loaded in list(self._registry.loaded.items()):
            if key.model == model:
                return loaded.max_tokens
        # The files may hold anything.
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
            return positions_of(load_config(local_folder(model)))
        return None

    def _state(self, name: str) -> str:
        """loaded: it is in memory. loading: it will be soon. available: a request for it loads
        it.
        """
        swap = self._registry.swap
        # The generation thread changes them meanwhile.
        coming, leaving = (None, None) if swap is None else (swap.coming, swap.leaving)
        if coming is not None and coming.key.model == name:
            return "loading"
        loaded = [*self._registry.loaded] + ([] if leaving is None else [leaving.key])
        return "loaded" if any(key.model == name for key in loaded) else "available"

    def _model(self, key: ModelKey) -> Json:
        registry, swap, id_of = self._registry, self._registry.swap, self._catalog.id_of
        loaded = registry.loaded.get(key)
        coming = None if swap is None else swap.coming
        model = loaded or (coming if coming is not None and coming.key == key else None)
        failure, until = registry.failures.get(key, (None, 0.0))
        parts = (("adapter", key.adapter), ("draft_model", key.draft))
        return {
            "id": id_of(key.model),
            **{name: id_of(part) for name, part in parts if part is not None},
            "state": self._state(key.model),
            "weights_bytes": registry.sizes.get(key) if model is None else model.weights_bytes,
            "waiting": sum(entry.key == key for entry in registry.queue),
            "failure": None if failure is None or until < time.monotonic() else str(failure),
            **({} if loaded is None else _usage(loaded)),
        }

    def _change(self) -> Json | None:
        """The swap in progress or planned, and its stage. None if there is neither."""
        swap, plan, id_of = self._registry.swap, self._registry.plan, self._catalog.id_of
        if swap is None:
            if plan.unload is None:
                return None
            return {
                "load": id_of(plan.load.model),
                "unload": id_of(plan.unload.model),
                "stage": "draining",
            }
        now, coming = time.monotonic(), swap.coming
        load, hashing = (swap.load, None) if coming is None else (coming.key, coming.hashing)
        return {
            "load": load and id_of(load.model),
            "unload": swap.unload and id_of(swap.unload.model),
            "stage": swap.stage,
            "stage_seconds": round(now - swap.since, 3),
            "seconds": round(now - swap.began, 3),
            "weights_bytes": 0 if coming is None else coming.weights_bytes,
            "read_bytes": 0 if coming is None else coming.read_bytes,
            "hashed_bytes": 0 if hashing is None else hashing.read_bytes,
        }


def _usage(model: LoadedModel) -> Json:
    return {
        "running": len(model.live) + model.num_embedding,
        "idle_seconds": 0.0 if model.is_busy else round(time.monotonic() - model.used, 3),
        "pool_bytes": model.pool_bytes,
        "array_bytes": model.array_bytes,
        "used_bytes": model.report.get("used_bytes", 0),
    }


def cache_report(registry: ModelRegistry, report: Json) -> Json:
    """`report`, the figures of the pool used last; with several loaded models those of each
    under `models`.
    """
    loaded = registry.loaded
    if len(loaded) < 2:
        return report
    return {
        **report,
        "models": {registry.catalog.id_of(key.model): m.report for key, m in loaded.items()},
    }
