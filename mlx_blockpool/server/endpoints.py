"""The endpoints of the server itself: what it is, what its cache holds, and its models."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..errors import BlockpoolError
from ..formatting import client_settings
from ..model_files.device import memory_bytes
from .access import HELLO, own_figures
from .api.errors import openai_status
from .api.ollama import RUNNING
from .models.http import COMMANDS, ModelsEndpoint, cache_report
from .routes import Route
from .watch.page import send_page


def _answer_root(handler: Any) -> None:
    """Send the page to browsers. Other clients get a line that says that the server runs."""
    if "text/html" in handler.headers.get("Accept", ""):
        send_page(handler)
    else:
        handler.send_body(200, "text/plain", RUNNING)


def _answer_cache(handler: Any) -> None:
    scope, generator = handler.scope, handler.scope.generator
    report = own_figures(scope.owner, cache_report(generator.registry, generator.report))
    counts = {
        "prompts": generator.prompts.counts,
        "forms": generator.forms.report,
        "clients": client_settings("$url", "$key"),
        "seconds_saved": generator.registry.speeds.saved(),
        "memory": {
            "total_bytes": memory_bytes(),
            "active_bytes": mx.get_active_memory(),
            "cache_bytes": mx.get_cache_memory(),
            "weights_bytes": sum(
                served.weights_bytes for served in [*generator.registry.loaded.values()]
            ),
        },
    }
    handler.send_json(200, {**report, **counts, "health": generator.health_report()[1]})


def _answer_models(handler: Any) -> None:
    handler.send_json(
        200, ModelsEndpoint(handler.scope.generator).find(handler.route, handler.created)
    )


def _load_or_unload(handler: Any) -> None:
    try:
        answer = ModelsEndpoint(handler.scope.generator).command(
            handler.scope, handler.rfile.read()
        )
    except (BlockpoolError, ValueError, RuntimeError) as error:
        answer = openai_status(error), {"error": str(error)}
    handler.send_json(*answer)


ROUTES = (
    Route("/", _answer_root),
    Route(HELLO, lambda handler: handler.send_json(200, {"message": "hello"})),
    Route("/v1/cache", _answer_cache),
    Route("/v1/models/*", _answer_models),
    Route(
        "/admin/models",
        lambda handler: handler.send_json(200, ModelsEndpoint(handler.scope.generator).figures()),
    ),
    *(Route(path, _load_or_unload, ("POST",)) for path in COMMANDS),
)
