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
from ..access import without_folders
from ..bodies import parse_json
from ..incoming import file_deadline
from ..owners import as_told, noted_name
from . import transfer
from .listing import listing
from .service import AgentService, RefusedError, checked_name

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


def is_agents(path: str) -> bool:
    """Whether a path, with its query, is one of these."""
    path = path.partition("?")[0]
    return path == PATH or path.startswith(PATH + "/")


class AgentsEndpoint:
    """Answers one request of `handler`."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._generator = handler.response_generator
        self._parts: list[str] = []
        # Bytes of the request's file that were not received yet.
        self._unread = 0

    def get(self) -> None:
        """The list, one agent, or its file."""
        self._answer(self._get)

    def post(self) -> None:
        """One of ACTS or MOVES, or an import."""
        self._answer(self._post)

    def delete(self) -> None:
        self._answer(self._delete)

    # -- what is asked -------------------------------------------------------------------------------------------------

    def _get(self) -> Report | None:
        service = AgentService(self._generator)
        if len(self._parts) == 2 and self._parts[1] == "export":
            self._export(service, self._parts[0])
            return None
        if len(self._parts) > 1:
            raise self._unknown()
        views = service.look()
        if self._parts:
            view = service.need_in(views, self._noted(self._parts[0]))
            return listing(service, views, [view.name])[0]
        warm_up = getattr(self._generator, "warm_up", None)
        return {
            "agents": listing(service, views, list(service.mine(views))),
            "bad": [] if service.owner is not None else _bad(service.bad),
            "warm_up": None if warm_up is None or service.owner is not None else warm_up.report(),
        }

    def _post(self) -> Report:
        if len(self._parts) != 2:
            raise self._unknown()
        name, act = self._noted(self._parts[0]), self._parts[1]
        service = AgentService(self._generator)
        if act in ACTS:
            return ACTS[act](service, name)
        if act in MOVES:
            return MOVES[act](service, name, self._new_name())
        if act == "import":
            return self._import(service, name)
        raise self._unknown()

    def _delete(self) -> Report:
        if len(self._parts) != 1:
            raise self._unknown()
        return AgentService(self._generator).delete(self._noted(self._parts[0]))

    def _noted(self, name: Any) -> str:
        """The name that an agent is noted under. Raises RefusedError for what cannot be one's."""
        return noted_name(getattr(self._generator, "owner", None), checked_name(name))

    def _new_name(self) -> str:
        length = self._length()
        try:
            body = parse_json(self._handler.rfile.read(length))
        except ValueError as error:
            raise RefusedError(400, f'The body is not JSON: {error}. Needed an object such as {{"to": "a name"}}.') from error
        if not isinstance(body, dict) or "to" not in body:
            raise RefusedError(400, 'Found no "to" in the body; needed an object such as {"to": "a name"}.')
        return self._noted(body["to"])

    def _length(self) -> int:
        length = self._handler.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            raise RefusedError(411, "Found no Content-Length; needed that of a body.")
        return int(length)

    def _unknown(self) -> RefusedError:
        acts = ", ".join([*ACTS, *MOVES, "import"])
        return RefusedError(
            404, f"Found no {self._handler.command} {PATH}/.../{'/'.join(self._parts[1:])}; there are POST {acts} and GET export."
        )

    # -- files ---------------------------------------------------------------------------------------------------------

    def _export(self, service: AgentService, name: str) -> None:
        with transfer.export(service, self._noted(name)) as path, path.open("rb") as file:
            n_bytes, handler = os.fstat(file.fileno()).st_size, self._handler
            handler._set_completion_headers(200)
            # mlx-lm's headers say JSON, and are not sent yet.
            handler._headers_buffer = [line for line in handler._headers_buffer if not line.lower().startswith(b"content-type")]
            handler.send_header("Content-Type", "application/octet-stream")
            handler.send_header("Content-Length", str(n_bytes))
            handler.end_headers()
            until = file_deadline(handler.guard.config.send_seconds, n_bytes)
            while piece := file.read(SEND_BYTES):
                if time.monotonic() > until:
                    raise ConnectionAbortedError("the client takes too long to read its file")
                handler.wfile.write(piece)

    def _import(self, service: AgentService, name: str) -> Report:
        """Spool the body to a file of at most the pools' size, then import it."""
        length, most = self._length(), _pool_bytes(self._generator)
        self._unread = length
        if length > most:
            raise RefusedError(
                413, f"Found a file of {length} bytes; needed at most {most}, as the pool has. Raise --pool-bytes."
            )
        with service.spool.file(length) as file:
            self._receive(file)
            try:
                return transfer.import_file(service, name, file)
            except StoreError as error:
                raise RefusedError(400, str(error).replace(str(file), "the body")) from error

    def _receive(self, file: Path) -> None:
        with file.open("wb") as out:
            while self._unread and (data := self._handler.rfile.read(min(self._unread, READ_BYTES))):
                out.write(data)
                self._unread -= len(data)
        if self._unread:
            raise RefusedError(400, f"The body ended {self._unread} bytes before its Content-Length; needed all of it.")

    # -- answers -------------------------------------------------------------------------------------------------------

    def _answer(self, act: Callable[[], Report | None]) -> None:
        """Send the report of `act`, or its error as JSON."""
        try:
            self._parts = _parts_of(self._handler.path)
            report = act()
            if report is not None:
                self._handler.send_json(200, as_told(self._generator.owner, report))
        except ConnectionError:
            raise
        except RefusedError as error:
            self._fail(error.status, error)
        except (OSError, NoRoomError, PoolExhaustedError, RuntimeError) as error:
            self._fail(503, error)
        except StoreError as error:
            self._fail(409, error)

    def _fail(self, status: int, error: Exception) -> None:
        if self._handler.answered:
            # A file has begun: closing the connection is the only way to report an error.
            log.warning("%s: %s", self._handler.path, error)
            self._handler.close_connection = True
            return
        text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        owner = self._generator.owner
        told = text if owner is None else text.replace(f"{owner}/", "")
        self._handler.send_json(status, {"error": without_folders(told)})


def _bad(found: list[tuple[Path, str]]) -> list[Report]:
    """Files of agents that cannot be read, without their folder."""
    return [{"file": path.name, "reason": reason.rpartition(str(path))[2].lstrip(": ")} for path, reason in found]


def _parts_of(path: str) -> list[str]:
    """The percent-decoded parts of the path behind /v1/agents. Raises RefusedError."""
    rest = path.partition("?")[0].removeprefix(PATH).strip("/")
    try:
        return [unquote(part, errors="strict") for part in rest.split("/")] if rest else []
    except UnicodeDecodeError as error:
        raise RefusedError(400, "Found a name that is not UTF-8; needed one percent-encoded as UTF-8.") from error


def _pool_bytes(generator: Any) -> int:
    """The most that one file can bring into a pool, with its header."""
    return max([served.pool_bytes for served in generator.registry.loaded.values()], default=0) + HEADER_BYTES
