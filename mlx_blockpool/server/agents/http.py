"""/v1/agents: lists agents and changes one. Handles one request, on the socket's thread.

GET    /v1/agents, /v1/agents/NAME, /v1/agents/NAME/export
POST   /v1/agents/NAME/pin, unpin, save, restore, import; with {"to": "..."} fork, rename
DELETE /v1/agents/NAME
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ...errors import NoRoomError, PoolExhaustedError, StoreError
from ...formatting import Report
from ..access import as_owner_sees, noted_name, shown, without_folders
from ..api.endpoint import Endpoint
from ..api.errors import StatusError
from ..validation import Body, Text, validated
from ..wire import file_deadline
from . import transfer
from .listing import listing
from .service import AgentService, checked_name

log = logging.getLogger(__name__)

PATH = "/v1/agents"
READ_BYTES = 1 << 20
SEND_BYTES = 1 << 18
# A file has its arrays, and a header that describes them and names its tokens.
HEADER_BYTES = 64 << 20

ACTS: dict[str, Callable[[AgentService, str], Report]] = {
    "pin": AgentService.pin,
    "unpin": AgentService.unpin,
    "save": transfer.save,
    "restore": transfer.restore,
}
MOVES: dict[str, Callable[[AgentService, str, str], Report]] = {"fork": AgentService.fork, "rename": AgentService.rename}


class NewName(Body):
    to: Text


class AgentsEndpoint(Endpoint):
    """Reports about agents. Its errors are {"error": text}."""

    def __init__(self, handler: Any) -> None:
        super().__init__(handler)
        self._service = AgentService(handler.scope)
        # The file that holds the body, whose name no client sees.
        self._spooled: Path | None = None

    def _send_report(self) -> None:
        """Answer any method: _report() knows which ones a path has."""
        report = self._report(_parts_of(self._handler.path))
        if report is not None:
            self._handler.send_json(200, as_owner_sees(self._scope.owner, report))

    _get = _post = _refuse = _send_report

    def _report(self, parts: list[str]) -> Report | None:
        """Carry the request out. None: a file was sent. `parts`: of the path after /v1/agents."""
        service, method = self._service, self._handler.command.replace("HEAD", "GET")
        match method, parts:
            case "GET", []:
                return self._list()
            case "GET", [name]:
                views = service.look()
                return listing(service, views, [service.need_in(views, self._noted(name)).name])[0]
            case "GET", [name, "export"]:
                self._export(self._noted(name))
                return None
            case "POST", [name, "import"]:
                return self._import(self._noted(name))
            case "POST", [name, act] if act in ACTS:
                return ACTS[act](service, self._noted(name))
            case "POST", [name, act] if act in MOVES:
                return MOVES[act](service, self._noted(name), self._new_name())
            case "DELETE", [name]:
                return service.delete(self._noted(name))
        path, acts = "/".join([PATH, "...", *parts[1:]]), ", ".join([*ACTS, *MOVES, "import"])
        raise StatusError(404, f"Unknown request {method} {path}. There are POST {acts} and GET export.")

    def _list(self) -> Report:
        service, warm_up = self._service, self._scope.generator.warm_up
        views = service.look()
        is_all = self._scope.owner is None
        return {
            "agents": listing(service, views, list(service.mine(views))),
            "bad": _bad(service.bad) if is_all else [],
            "warm_up": warm_up.report() if is_all and warm_up is not None else None,
        }

    def _noted(self, name: Any) -> str:
        """The name that an agent is noted under. Raises StatusError for what cannot be one's."""
        return noted_name(self._scope.owner, checked_name(name))

    def _new_name(self) -> str:
        try:
            body = validated(NewName, self._body())
        except ValueError as error:
            raise StatusError(400, f'{error}. Send an object such as {{"to": "a name"}}.') from error
        return self._noted(body.to)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _export(self, name: str) -> None:
        """Send an agent's prompt-cache file."""
        with transfer.export(self._service, name) as path, path.open("rb") as file:
            n_bytes, handler = os.fstat(file.fileno()).st_size, self._handler
            handler.send_response(200)
            handler._set_cors_headers()
            handler.send_header("Content-Type", "application/octet-stream")
            handler.send_header("Content-Length", str(n_bytes))
            handler.end_headers()
            until = file_deadline(handler.access.config.send_seconds, n_bytes)
            while piece := file.read(SEND_BYTES):
                if time.monotonic() > until:
                    raise ConnectionAbortedError("the client takes too long to read its file")
                handler.wfile.write(piece)

    def _import(self, name: str) -> Report:
        """Spool the body to a file of at most the pools' size, then import it."""
        length = unread = self._length()
        pools = [served.pool_bytes for served in self._scope.generator.registry.loaded.values()]
        most = max(pools, default=0) + HEADER_BYTES
        if length > most:
            raise StatusError(413, f"The file has {length} bytes, and the pool has room for {most}. Raise --pool-bytes.")
        with self._scope.generator.spool.file(length) as file:
            self._spooled = file
            with file.open("wb") as out:
                while unread and (data := self._handler.rfile.read(min(unread, READ_BYTES))):
                    out.write(data)
                    unread -= len(data)
            if unread:
                raise StatusError(400, f"The body ended {unread} bytes before its Content-Length.")
            try:
                return transfer.import_file(self._service, name, file)
            except StoreError as error:
                raise StatusError(400, str(error)) from error

    def _fail(self, error: Exception) -> None:
        if isinstance(error, StatusError):
            status = error.status
        elif isinstance(error, OSError | NoRoomError | PoolExhaustedError | RuntimeError):
            status = 503
        elif isinstance(error, StoreError):
            status = 409
        else:
            raise error
        if self._handler.answered:
            # A file has begun: closing the connection is the only way to report an error.
            log.warning("%s: %s", shown(self._handler.path), error)
            self._handler.close_connection = True
            return
        text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        if self._spooled is not None:
            text = text.replace(str(self._spooled), "the body").replace(self._spooled.name, "the body")
        owner = self._scope.owner
        text = text if owner is None else text.replace(f"{owner}/", "")
        self._handler.send_json(status, {"error": without_folders(text)})


def _bad(found: list[tuple[Path, str]]) -> list[Report]:
    """Files of agents that cannot be read, without their folder."""
    return [{"file": path.name, "reason": reason.rpartition(str(path))[2].lstrip(": ")} for path, reason in found]


def _parts_of(path: str) -> list[str]:
    """The percent-decoded parts of the path after /v1/agents. Raises StatusError."""
    rest = path.partition("?")[0].removeprefix(PATH).strip("/")
    try:
        return [unquote(part, errors="strict") for part in rest.split("/")] if rest else []
    except UnicodeDecodeError as error:
        raise StatusError(400, "The agent's name is not UTF-8. Percent-encode it as UTF-8.") from error
