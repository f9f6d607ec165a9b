"""GET /admin/models, POST /admin/load and /admin/unload, and GET /v1/models. Runs on the socket's thread, without caches."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Queue
from typing import Any
from urllib.parse import unquote

from ...errors import ModelNotFoundError
from ...mlx_lm_compat import ModelDescription
from ..bodies import parse_json
from . import listing
from .registry import LoadCommand

MODELS = "/v1/models"
ORDERS = ("/admin/load", "/admin/unload")
LONGEST_BODY = 1_000_000


class Admin:
    """The endpoints of one request to a server's `generator`."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def figures(self) -> dict[str, Any]:
        return listing.figures(self._generator.registry, self._generator.waiting)

    def models(self, path: str, created: int) -> dict[str, Any]:
        """The list of /v1/models, or one of it for /v1/models/ID. Raises ModelNotFoundError for one that is not there."""
        found = listing.listed(self._generator.registry, created)
        name = unquote(path.partition("?")[0].removeprefix(MODELS)).removeprefix("/")
        if not name:
            return {"object": "list", "data": found}
        for model in found:
            if model["id"] == name:
                return model
        raise ModelNotFoundError(f"Found no model {name}; there are {', '.join(model['id'] for model in found)}.")

    def order(self, path: str, length: str | None, read: Callable[[int], bytes]) -> tuple[int, dict[str, Any]]:
        """Status and body for POST /admin/load or /admin/unload, once it is done, or at once where the client does not `wait`.

        Raises ValueError for a body that does not say what is wanted, and what keeps a model from being loaded.
        """
        body = _body(length, read)
        start = time.monotonic()
        wanted = ModelDescription(body["model"], body.get("draft_model", "default_model"), body.get("adapters"))
        order = LoadCommand(Queue(), self._generator.registry.find(wanted, again=True), path == ORDERS[1])
        self._generator.order(order)
        name = self._generator.registry.catalog.id_of(order.key.model)
        if not body.get("wait", True):
            return 202, {"model": name, "accepted": path.removeprefix("/admin/")}
        error = self._generator._await_response(order.queue)
        if error is not None:
            raise error
        state = "available" if order.unload else "loaded"
        return 200, {"model": name, "state": state, "seconds": round(time.monotonic() - start, 3)}


def _body(length: str | None, read: Callable[[int], bytes]) -> dict[str, Any]:
    if length is None or not length.isdecimal() or int(length) > LONGEST_BODY:
        raise ValueError(f"Found Content-Length {length}; needed that of a JSON object, at most {LONGEST_BODY}.")
    try:
        body = parse_json(read(int(length)))
    except ValueError as error:
        raise ValueError(f"The body is not JSON: {error}") from error
    kinds = {"model": str, "draft_model": str, "adapters": str, "wait": bool}
    if not isinstance(body, dict) or "model" not in body:
        raise ValueError('Found no "model"; needed a JSON object such as {"model": "..."}.')
    for name, kind in kinds.items():
        if name in body and not isinstance(body[name], kind):
            raise ValueError(f"{name} must be a {kind.__name__}")
    return body
