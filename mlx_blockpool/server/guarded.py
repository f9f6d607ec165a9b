"""HTTP below the endpoints: a request is read whole, within its limits and times, before anybody looks at it.

Runs on the socket's thread. What is refused is told in the shape of the protocol that was asked.
"""

from __future__ import annotations

import io
import json
import math
import socket
import time
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from mlx_lm.server import APIHandler

from .anthropic import errors as anthropic_errors
from .anthropic.http import is_messages
from .guard import FILES, Guard, Refusal, Timed
from .openai import errors as openai_errors

# Where there are too many connections already, a request has so long to be read and refused.
CROWDED_SECONDS = 1.0
# So long, and for so many bytes, a refused client that still sends is listened to: closing at once would take the answer away.
LINGER_SECONDS = 2.0
LINGER_BYTES = 1 << 16
LINGER_MOST = 64 << 20


class Outgoing:
    """A socket's file. A client that takes nothing of its answer for too long counts as one that is gone: ConnectionError."""

    closed = False

    def __init__(self, wfile: Any) -> None:
        self._wfile: Any = wfile

    def write(self, data: bytes) -> int:
        try:
            self._wfile.write(data)
        except TimeoutError as error:
            raise ConnectionAbortedError("the client does not read its answer") from error
        return len(data)

    def flush(self) -> None:
        self._wfile.flush()

    def close(self) -> None:
        self.closed = True
        self._wfile.close()


class GuardedHandler(APIHandler):  # type: ignore[misc]
    """mlx-lm's handler behind a Guard. `route`: the path without query and last slash."""

    wfile: Any
    rfile: Any
    headers: Any
    request_version: str

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.guard: Guard = self.response_generator.guard
        config = self.guard.config
        self._incoming = Timed(self.connection, config.stall_seconds, time.monotonic() + config.request_seconds)
        self.rfile, self.wfile = io.BufferedReader(self._incoming), Outgoing(self.wfile)
        self.headers, self.path, self.route = Message(), "", ""
        self._crowded = False

    def handle(self) -> None:
        self._crowded = not self.guard.room.acquire(blocking=False)
        if self._crowded:
            self._incoming.until = time.monotonic() + CROWDED_SECONDS
        try:
            super().handle()
        except ConnectionError:
            self.log_message("the client hung up")
        finally:
            if not self._crowded:
                self.guard.room.release()

    def parse_request(self) -> bool:
        """http.server's, and whether the request is let in; its body is in `rfile` then."""
        try:
            if not super().parse_request():
                return False
            refusal = self._refusal() or self._read_body()
        except TimeoutError:
            config = self.guard.config
            waited = f"nothing came for {config.stall_seconds:g} seconds or all of it took more than {config.request_seconds:g}"
            refusal = Refusal(408, f"The request did not come in time: {waited}")
        if refusal is not None:
            self.refuse(refusal)
        self.connection.settimeout(self.guard.config.send_seconds)
        return refusal is None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server does not like about a request, as JSON."""
        self.refuse(Refusal(int(code), ". ".join(part for part in (message or HTTPStatus(code).phrase, explain) if part)))

    def refuse(self, refusal: Refusal) -> None:
        """Answer a request that is not let in."""
        self.close_connection = True
        if self.request_version == "HTTP/0.9":
            # Where the version could not be read: an answer without a status is understood by nobody.
            self.request_version = "HTTP/1.0"
        self.connection.settimeout(self.guard.config.send_seconds)
        if is_messages(self.route) or "anthropic-version" in self.headers:
            content = anthropic_errors.error_body(refusal.status, refusal.message, self.response_generator.wishes.id)
        else:
            content = openai_errors.error_body(refusal.status, refusal.message)
        body = json.dumps(content).encode()
        self._headers_buffer: list[bytes] = []
        self._set_completion_headers(refusal.status)
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if refusal.status != HTTPStatus.REQUEST_TIMEOUT:
            self._linger()

    def _refusal(self) -> Refusal | None:
        try:
            self.route = self.response_generator.path = urlsplit(self.path).path.rstrip("/") or "/"
        except ValueError as error:
            return Refusal(400, f"Bad path: {error}")
        if self._crowded:
            most = self.guard.config.max_connections
            return Refusal(503, f"The server has {most} connections already; ask again when one of them has ended")
        refusal = self.guard.check(self.command, self.route, self.headers)
        return refusal or self.guard.check_body(self.route, self.headers)

    def _read_body(self) -> Refusal | None:
        """Take the body in, so that whoever reads it does not wait. A file stays on the wire."""
        length = int(self.headers.get("Content-Length", 0))
        if FILES.fullmatch(self.route):
            self._incoming.until = math.inf
        elif length:
            body = self.rfile.read(length)
            if len(body) < length:
                return Refusal(400, f"The body ended after {len(body)} of {length} bytes")
            self.rfile = io.BytesIO(body)
        return None

    def _linger(self) -> None:
        declared = self.headers.get("Content-Length")
        length = int(declared) if declared and declared.isdecimal() and len(declared) < 19 else 0
        if self.command in ("GET", "HEAD", "OPTIONS") and not length:
            return
        left = min(length or LINGER_BYTES, max(LINGER_MOST, 4 * self.guard.config.max_body_bytes))
        self._incoming.stall = LINGER_SECONDS
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while left > 0 and (data := self.rfile.read1(min(left, 1 << 20))):
                left -= len(data)
