"""HTTP: mlx-lm's handler after the checks of the access policy, with the endpoints that mlx-lm does
not have.

A request is read whole, within its limits and times, before any endpoint reads it. Connections are
kept for further requests. Every error is JSON in the shape of the protocol that the request speaks.
Runs on the socket's thread, without caches.
"""

from __future__ import annotations

import io
import json
import logging
import math
import time
from collections.abc import Mapping
from email.message import Message
from functools import cache
from http import HTTPStatus
from importlib import import_module
from pkgutil import iter_modules
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit

from ..errors import (
    BlockpoolError,
    FormError,
    ModelNotFoundError,
    PromptError,
    TooManyRequestsError,
    UnavailableError,
)
from ..mlx_lm_compat import APIHandler
from . import agents, api, watch
from .access import (
    TOKENIZES,
    AccessPolicy,
    BudgetShare,
    cause_of,
    shown,
)
from .api.errors import (
    MESSAGES,
    OLLAMA,
    anthropic_error,
    in_shape,
    is_below,
    is_openai,
    openai_error,
    openai_status,
    unknown_path,
)
from .bodies import Json, StatusError
from .generator import BlockpoolGenerator
from .routes import Route
from .scope import RequestScope
from .watch.page import FIGURES
from .wire import Outgoing, TimedReader, buffer_body, drain, drop_vanished

log = logging.getLogger(__name__)

# Errors whose text is for the client.
EXPECTED = (
    StatusError,
    UnavailableError,
    FormError,
    ModelNotFoundError,
    PromptError,
    TooManyRequestsError,
)
# How long a request may take to arrive if it will be rejected, because there are too many
# connections.
CROWDED_SECONDS = 1.0
# The first byte of a TLS record of a handshake; no request begins with it.
TLS_HANDSHAKE = b"\x16"


class BlockpoolHandler(APIHandler):  # type: ignore[misc]
    """Serves the requests of one connection, one after the other.

    A connection holds a slot of the policy while a request is read and served, and none while it
    waits for the next one. `route`: the request's path without query and last slash. `answered`:
    the response's headers are written.
    """

    protocol_version = "HTTP/1.1"
    # Headers and body are separate writes: without this the second waits for the client's delayed
    # acknowledgement.
    disable_nagle_algorithm = True

    response_generator: Any
    wfile: Any
    rfile: Any
    headers: Any
    request_version: str

    def setup(self) -> None:
        super().setup()
        self._generator: BlockpoolGenerator = self.response_generator
        self.rfile.close()
        self._incoming = TimedReader(self.connection, 0.0, 0.0)
        self._reader = io.BufferedReader(self._incoming)
        self._outgoing = Outgoing(self.wfile)
        self._crowded, self._is_new = False, True
        drop_vanished(self.connection, 2 * self._generator.access.config.send_seconds)
        self._begin_request()

    def _begin_request(self) -> None:
        """Reset the state of the previous request."""
        self.response_generator = self.scope = RequestScope(self._generator, self.connection)
        self.access: AccessPolicy = self._generator.access
        config = self.access.config
        self._incoming.stall = config.stall_seconds
        self._incoming.until = time.monotonic() + config.request_seconds
        self.rfile, self.wfile = self._reader, self._outgoing
        self._share = BudgetShare(self.access.bodies)
        self._outgoing.begin()
        self.headers, self.path, self.route = Message(), "", ""
        self.command, self.request_version, self._expects_continue = "", "HTTP/1.0", False
        self.created = int(time.time())
        self.answered = False

    def handle_one_request(self) -> None:
        """Serve the next request if a connection slot is free; otherwise answer 503."""
        if not self._has_next():
            self.close_connection = True
            return
        self._begin_request()
        connections = self.access.connections
        self._crowded = not connections.acquire(blocking=False)
        if self._crowded:
            self._incoming.until = time.monotonic() + CROWDED_SECONDS
        try:
            super().handle_one_request()
            self._outgoing.finish()
            if not self._outgoing.is_whole:
                self.close_connection = True
        except ConnectionError:
            self.close_connection = True
            self.log_message("the client hung up")
        finally:
            self._share.release()
            self.scope.pixels.release()
            if not self._crowded:
                connections.release()
        self._is_new = False

    def _has_next(self) -> bool:
        """Return whether another request comes before the connection has been idle for too long."""
        access, is_new = self.access, self._is_new
        is_idle = access.idle.acquire(blocking=False)
        if not (is_idle or is_new):
            return False
        seconds = access.config.stall_seconds if is_new else access.config.keep_alive_seconds
        self._incoming.stall = seconds if is_idle else CROWDED_SECONDS
        self._incoming.until = math.inf
        try:
            first = self._reader.peek(1)[:1]
            if first == TLS_HANDSHAKE:
                log.warning(
                    "%s speaks TLS, and this port serves plain HTTP: use http:// in its URL",
                    self.client_address[0],
                )
            return first not in (b"", TLS_HANDSHAKE)
        except (TimeoutError, OSError):
            return False
        finally:
            if is_idle:
                access.idle.release()

    # -- the request -------------------------------------------------------------------------------

    def handle_expect_100(self) -> bool:
        """The client waits to be told to send its body, which happens once its headers are
        checked.
        """
        self._expects_continue = True
        return True

    def parse_request(self) -> bool:
        """Parse as http.server does, check by the access policy, and read the body into `rfile`."""
        config = self.access.config
        try:
            if not super().parse_request():
                return False
            if not isinstance(self.server, ThreadingMixIn):
                # Without a thread for each connection, all others wait until this one is closed.
                self.close_connection = True
            self._check()
            self._read_body()
        except TimeoutError:
            limits = (
                f"at most {config.stall_seconds:g} seconds without a byte, and "
                f"{config.request_seconds:g} in all"
            )
            self._reject(408, f"The request did not arrive in time: {limits}.")
            return False
        except StatusError as error:
            self._reject(error.status, str(error))
            return False
        self.connection.settimeout(config.send_seconds)
        return True

    def _check(self) -> None:
        """Raises StatusError for a request that is not served."""
        try:
            self.route = self.scope.path = urlsplit(self.path).path.rstrip("/") or "/"
        except ValueError as error:
            raise StatusError(400, f"Bad path: {error}") from error
        if self._crowded:
            most = self.access.config.max_connections
            raise StatusError(
                503,
                f"The server already has {most} connections. Try again when one of them has ended.",
            )
        self.scope.owner = self.access.owner(self.headers)
        self.scope.page = self.access.foreign_page(self.headers)
        self.access.check(self.command, self.route, self.headers)
        self.access.check_body(self.route, self.headers)

    def _read_body(self) -> None:
        """Read the body, so that endpoints do not wait for it. Raises StatusError."""
        length = int(self.headers.get("Content-Length", 0))
        if self._expects_continue and length:
            self._outgoing.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = buffer_body(self._reader, length, self._share)
        self.rfile = io.BytesIO(body)
        try:
            self._generator.prompts.check_body(
                body, only_tokenizes=bool(TOKENIZES.fullmatch(self.route))
            )
        except EXPECTED as error:
            raise StatusError(self._status_of(error), str(error)) from error

    def _status_of(self, error: BlockpoolError) -> int:
        """The status of one of EXPECTED. Logs that the server cannot answer now."""
        if isinstance(error, UnavailableError):
            self.scope.log_unavailable(error)
        return openai_status(error)

    def _reject(self, status: int, message: str) -> None:
        """Answer a request that is not served, and close the connection."""
        self.close_connection = True
        if self.request_version == "HTTP/0.9":
            # http.server could not read the version, and would send a response without a status.
            self.request_version = "HTTP/1.0"
        self.connection.settimeout(self.access.config.send_seconds)
        challenge = {"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else {}
        self.send_json(status, self._error(status, message), challenge)
        self._outgoing.finish()
        if status != HTTPStatus.REQUEST_TIMEOUT:
            self._drain()

    def _error(self, status: int, message: str) -> Json:
        """The body of an error in the shape of the protocol that the request's path or headers
        name, or else in OpenAI's.
        """
        if is_below(self.route, MESSAGES) or "anthropic-version" in self.headers:
            return anthropic_error(status, message, self.scope.options.id)
        return {"error": message} if is_below(self.route, OLLAMA) else openai_error(status, message)

    def _drain(self) -> None:
        declared = self.headers.get("Content-Length")
        length = int(declared) if declared and declared.isdecimal() and len(declared) < 19 else 0
        if length or self.command not in ("GET", "HEAD", "OPTIONS"):
            drain(
                self.connection,
                self._reader,
                self._incoming,
                length,
                self.access.config.max_body_bytes,
            )

    # -- endpoints ---------------------------------------------------------------------------------

    def _answer(self) -> None:
        """Answer the request by its route.

        The top of the request's thread: an endpoint that fails fails this request alone.
        """
        try:
            routes = (HEALTH,) if self.route == HEALTH.path else find_routes()
            route = max(routes, key=lambda each: each.rank(self.command, self.route, self.headers))
            if any(route.rank(self.command, self.route, self.headers)):
                self.scope.is_explained = route.is_explained
                route.respond(self)
            else:
                self.send_json(404, self._error(404, unknown_path(self.route, routes)))
        except ConnectionError as error:
            log.info("%s: the client hung up: %s", shown(self.path), error)
        except Exception as error:
            status, content = self._failure_of(error)
            if not self.answered:
                self.send_json(status, content)

    # Of the response to HEAD only the headers are sent. Clients send HEAD / to see whether the
    # server runs.
    do_GET = do_HEAD = do_POST = do_DELETE = _answer  # noqa: N815

    def do_OPTIONS(self) -> None:  # noqa: N802
        self.start_response(204, {"Content-type": "application/json"})

    def _failure_of(self, error: Exception) -> tuple[int, dict[str, str]]:
        if isinstance(error, EXPECTED):
            return self._status_of(error), {"error": str(error)}
        log.exception("%s failed", shown(self.path))
        return 500, {"error": cause_of(error)}

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log as http.server does, without the requests that the page repeats."""
        if not (code == HTTPStatus.OK and self.command == "GET" and self.route in FIGURES):
            super().log_request(code, size)

    # -- the response ------------------------------------------------------------------------------

    def send_json(
        self, status: int, content: Any, headers: Mapping[str, str] | None = None
    ) -> None:
        """Write JSON. Errors of OpenAI's endpoints get OpenAI's shape."""
        body = json.dumps(
            in_shape(status, content) if status >= 400 and is_openai(self.route) else content
        ).encode()
        self.send_body(status, "application/json", body, headers)

    def send_body(
        self, status: int, content_type: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Write a whole response."""
        self.start_response(status, {"Content-type": content_type, **(headers or {})}, len(body))
        self.wfile.write(body)

    def start_stream(self, content_type: str) -> None:
        """Write the headers of a stream."""
        self.start_response(200, {"Content-type": content_type, "Cache-Control": "no-cache"})

    def start_response(
        self, status: int, headers: Mapping[str, str], length: int | None = None, cors: bool = True
    ) -> None:
        """Write the status and the headers, also those that explain the request and frame its body.

        `length`: of the body; None: it is a stream, or there is none. `cors`: whether pages of
        other origins may read it.
        """
        self.answered = True
        self._headers_buffer: list[bytes] = []
        self.send_response(status)
        if cors:
            self._set_cors_headers()
        explaining = self.scope.headers(self.headers.get("X-Explain"))
        framing = {} if length is None else {"Content-Length": str(length)}
        has_body = self.command != "HEAD" and status != HTTPStatus.NO_CONTENT
        chunked = has_body and length is None and self.request_version >= "HTTP/1.1"
        if chunked:
            framing["Transfer-Encoding"] = "chunked"
        elif has_body and length is None:
            self.close_connection = True
        framing["Connection"] = "close" if self.close_connection else "keep-alive"
        if not self.close_connection:
            framing["Keep-Alive"] = f"timeout={int(self.access.config.keep_alive_seconds)}"
        for name, value in {**headers, **explaining, **framing}.items():
            self.send_header(name, value)
        self.end_headers()
        self._outgoing.begin_body(length if has_body else 0, chunked, drops=not has_body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what http.server rejects, as JSON."""
        self._reject(
            int(code),
            ". ".join(part for part in (message or HTTPStatus(code).phrase, explain) if part),
        )


HEALTH = Route(
    "/health", lambda handler: handler.send_json(*handler.scope.generator.health_report())
)


@cache
def find_routes() -> tuple[Route, ...]:
    """The ROUTES of all modules of endpoints, which are imported by the first request for one."""
    names = [
        info.name
        for package in (agents, api, watch)
        for info in iter_modules(package.__path__, f"{package.__name__}.")
    ]
    return (
        HEALTH,
        *(
            route
            for name in (f"{__package__}.endpoints", *names)
            for route in getattr(import_module(name), "ROUTES", ())
        ),
    )
