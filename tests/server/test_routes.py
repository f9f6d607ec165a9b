"""One table of routes: a module adds an endpoint by itself, and the best route answers a
request.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_blockpool.server import api
from mlx_blockpool.server.http import find_routes
from mlx_blockpool.server.routes import Route
from server.serving import Client

pytestmark = pytest.mark.server("--pool-bytes 20MB --prefill-step-size 128", model="agent")

MODULE = '''
"""GET /v1/greeting, and POST to it: the number of tokens that the pool has for one request."""

from typing import Any

from mlx_blockpool.server.api.endpoint import Endpoint
from mlx_blockpool.server.bodies import StatusError
from mlx_blockpool.server.routes import Route


class GreetingEndpoint(Endpoint):
    def where(self) -> None:
        self._handler.send_json(200, {"path": self._handler.route})

    def capacity(self) -> None:
        if self._body() != {"fails": False}:
            raise StatusError(418, "it fails")
        self._handler.send_json(200, {"capacity": self._scope.generator.model.capacity()})


def fail(handler: Any) -> None:
    raise RuntimeError("a failure of the endpoint")


ROUTES = (
    GreetingEndpoint.route("/v1/greeting/*", GreetingEndpoint.where, "GET"),
    GreetingEndpoint.route("/v1/greeting/*", GreetingEndpoint.capacity, "POST"),
    GreetingEndpoint.route("/v1/greeting", GreetingEndpoint.capacity, "POST", is_explained=True),
    Route("/v1/greeting/broken", fail),
)
'''


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module with endpoints, which no other module names."""
    (tmp_path / "greeting.py").write_text(MODULE)
    monkeypatch.setattr(api, "__path__", [*api.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    find_routes.cache_clear()
    yield
    find_routes.cache_clear()
    sys.modules.pop("mlx_blockpool.server.api.greeting", None)


def num_explained(server: Client) -> int:
    """How many failed requests are explained."""
    return sum(
        each["state"] == "failed" for each in server.send("/v1/cache/explain")[1]["requests"]
    )


@pytest.mark.usefixtures("added")
def test_a_module_adds_endpoints_that_no_other_module_names(server: Client) -> None:
    assert server.send("/v1/greeting") == (200, {"path": "/v1/greeting"})
    assert server.send("/v1/greeting/below") == (200, {"path": "/v1/greeting/below"})
    capacity = server.capacity()
    assert server.send("/v1/greeting", {"fails": False}) == (200, {"capacity": capacity})
    before = num_explained(server)
    status, answer = server.send("/v1/greeting", {"fails": True})
    assert (status, answer["error"]["message"]) == (418, "it fails")
    assert num_explained(server) == before + 1
    assert server.send("/v1/greeting/below", {"fails": True})[0] == 418
    assert num_explained(server) == before + 1
    assert server.send("/v1/greeting/broken") == (
        500,
        {"error": "RuntimeError: a failure of the endpoint"},
    )
    assert server.send("/health")[0] == 200


def test_without_the_module_the_path_is_unknown(server: Client) -> None:
    assert server.send("/v1/greeting")[0] == 404


def test_the_longest_path_answers_and_before_it_the_route_for_a_header() -> None:
    def respond(handler: object) -> None: ...

    near, far = Route("/v1/models/*", respond), Route("/v1/models/mine", respond)
    special = Route("/v1/models/*", respond, header="anthropic-version")
    below, exact = Route("/api/*", respond), Route("/api", respond)
    table = (near, far, special, below, exact)

    def best(method: str, path: str, headers: dict[str, str]) -> Route | None:
        found = max(table, key=lambda route: route.rank(method, path, headers))
        return found if any(found.rank(method, path, headers)) else None

    assert best("GET", "/v1/models", {}) is near
    assert best("HEAD", "/v1/models/other", {}) is near
    assert best("GET", "/v1/models/mine", {}) is far
    assert best("GET", "/v1/models", {"anthropic-version": "1"}) is special
    assert best("GET", "/api", {}) is exact
    assert best("GET", "/api/tags", {}) is below
    assert best("GET", "/v1/modelsX", {}) is None
    assert best("POST", "/v1/models", {}) is None


def test_each_path_has_one_route_for_each_method() -> None:
    found = [
        (method, route.path, route.header) for route in find_routes() for method in route.methods
    ]
    assert len(found) == len(set(found)) > 30
