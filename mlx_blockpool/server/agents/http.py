"""/v1/agents: lists agents and changes one. Handles one request, on the socket's thread.

GET    /v1/agents, /v1/agents/NAME
POST   /v1/agents/NAME/pin, unpin, save, restore; with {"to": "..."} fork
DELETE /v1/agents/NAME
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from ...errors import PoolExhaustedError, StoreError
from ...formatting import Report
from ..access import noted_name, without_folders
from ..api.endpoint import Endpoint
from ..bodies import StatusError
from ..validation import Body, Text, validated
from .service import AgentService, checked_name

PATH = "/v1/agents"

ACTS: dict[str, Callable[[AgentService, str], Report]] = {
    "pin": AgentService.pin,
    "unpin": AgentService.unpin,
    "save": AgentService.save,
    "restore": AgentService.restore,
}


class NewName(Body):
    to: Text


class AgentsEndpoint(Endpoint):
    """Reports about agents. Its errors are {"error": text}."""

    def __init__(self, handler: Any) -> None:
        super().__init__(handler)
        self._service = AgentService(handler.scope)

    def send_report(self) -> None:
        """Answer any method: _report() rejects those that a path does not have."""
        self._handler.send_json(200, self._report(_parts_of(self._handler.path)))

    def _report(self, parts: list[str]) -> Report:
        """Serve the request. `parts`: of the path after /v1/agents."""
        service, method = self._service, self._handler.command.replace("HEAD", "GET")
        match method, parts:
            case "GET", []:
                return self._list()
            case "GET", [name]:
                views = service.views()
                return service.listing(views, [service.find(self._noted(name), views).name])[0]
            case "POST", [name, act] if act in ACTS:
                return ACTS[act](service, self._noted(name))
            case "POST", [name, "fork"]:
                return service.fork(self._noted(name), self._new_name())
            case "DELETE", [name]:
                return service.delete(self._noted(name))
        path, acts = "/".join([PATH, "...", *parts[1:]]), ", ".join([*ACTS, "fork"])
        raise StatusError(
            404, f"Unknown request {method} {path}. Use POST with one of {acts}, GET or DELETE."
        )

    def _list(self) -> Report:
        service, warm_up = self._service, self._scope.generator.warm_up
        views = service.views()
        is_all = self._scope.owner is None
        return {
            "agents": service.listing(views, list(service.visible(views))),
            # Clients of earlier versions read this list.
            "bad": [],
            "warm_up": warm_up.report() if is_all and warm_up is not None else None,
        }

    def _noted(self, name: Any) -> str:
        """The name that an agent is noted under. Raises StatusError for what cannot be one's."""
        return noted_name(self._scope.owner, checked_name(name))

    def _new_name(self) -> str:
        try:
            body = validated(NewName, self._body())
        except ValueError as error:
            raise StatusError(
                400, f'{error}. Send an object such as {{"to": "a name"}}.'
            ) from error
        return self._noted(body.to)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, StatusError):
            status = error.status
        elif isinstance(error, OSError | PoolExhaustedError | RuntimeError):
            status = 503
        elif isinstance(error, StoreError):
            status = 409
        else:
            raise error
        text = (
            os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        )
        owner = self._scope.owner
        text = text if owner is None else text.replace(f"{owner}/", "")
        self._handler.send_json(status, {"error": without_folders(text)})


def _parts_of(path: str) -> list[str]:
    """The percent-decoded parts of the path after /v1/agents. Raises StatusError."""
    rest = path.partition("?")[0].removeprefix(PATH).strip("/")
    try:
        return [unquote(part, errors="strict") for part in rest.split("/")] if rest else []
    except UnicodeDecodeError as error:
        raise StatusError(
            400, "The agent's name is not UTF-8. Percent-encode it as UTF-8."
        ) from error


ROUTES = (AgentsEndpoint.route(f"{PATH}/*", AgentsEndpoint.send_report, "GET", "POST", "DELETE"),)
