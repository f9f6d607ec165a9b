"""HTTP/1.1 below the endpoints: a request is read whole, within its limits and times, before anybody looks at it.

Connections are kept for further requests. Runs on the socket's thread. A refusal has the shape of the protocol that was asked.
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

from ..errors import PromptError
from .access import FILES, AccessPolicy, Rejected, Timed
from .api import anthropic_errors, openai_errors
from .api.anthropic import is_messages

# Where there are too many connections already, a request has so long to be read and refused.
CROWDED_SECONDS = 1.0
# So long, and for so many bytes, a refused client that still sends is listened to: closing at once would take the answer away.
LINGER_SECONDS = 2.0
LINGER_BYTES = 1 << 16
LINGER_MOST = 64 << 20
# A body is read in pieces of this size; what was announced and not sent takes no memory.
PIECE_BYTES = 1 << 18
# Who sends or takes a file more slowly than this is left.
FILE_BYTES_PER_SECOND = 1 << 18


class Outgoing:
    """A socket's file that frames the body of each response.

    A client that takes nothing of its answer for too long counts as one that is gone: ConnectionError.
    `is_whole`: the response that was begun last has been written as its headers promised, and another one may follow it.
    """

    closed = False

    def __init__(self, wfile: Any) -> None:
        self._wfile: Any = wfile
        self._chunked = False
        self._promised: int | None = None
        self._written = 0
        self.is_whole = False

    def begin(self) -> None:
        """Headers come next, of a response that is not whole yet."""
        self._chunked, self._promised, self._written, self.is_whole = False, None, 0, False

    def begin_body(self, length: int | None, chunked: bool) -> None:
        """The headers are written; they promise `length` bytes, chunks, or everything until the connection ends."""
        self._chunked, self._promised = chunked, length

    def finish(self) -> None:
        """End the body of a response."""
        if self._chunked:
            self._chunked, self._promised = False, 0
            self._send(b"0\r\n\r\n")
        elif self._promised is None or self._written != self._promised:
            return
        self.is_whole = True

    def write(self, data: bytes) -> int:
        if self._promised is not None:
            self._written += len(data)
        if not self._chunked:
            self._send(data)
        elif data:
            self._send(b"%x\r\n%s\r\n" % (len(data), data))
        return len(data)

    def _send(self, data: bytes) -> None:
        try:
            self._wfile.write(data)
        except TimeoutError as error:
            raise ConnectionAbortedError("the client does not read its answer") from error

    def flush(self) -> None:
        self._wfile.flush()

    def close(self) -> None:
        self.closed = True
        self._wfile.close()


def file_deadline(seconds: float, n_bytes: int) -> float:
    """When a file of so many bytes has to be through, in seconds of time.monotonic()."""
    return time.monotonic() + seconds + n_bytes / FILE_BYTES_PER_SECOND


class Body(io.RawIOBase):
    """The body of a request that stays on the wire: `left` bytes of the connection's reader."""

    def __init__(self, reader: Any, left: int) -> None:
        self._reader = reader
        self.left = left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._reader.read1(min(len(buffer), self.left)) if self.left else b""
        buffer[: len(data)] = data
        self.left -= len(data)
        return len(data)


class GuardedHandler(APIHandler):  # type: ignore[misc]
    """mlx-lm's handler behind a Guard. `route`: the path without query and last slash.

    One handler serves the requests of one connection, one after the other. A connection takes one of the guard's places while a
    request of it is read and served, and none while it waits for the next one.
    """

    protocol_version = "HTTP/1.1"
    # Headers and body are separate writes: without this the second waits for the client's delayed acknowledgement.
    disable_nagle_algorithm = True

    wfile: Any
    rfile: Any
    headers: Any
    request_version: str

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = Timed(self.connection, 0.0, 0.0)
        self._reader = io.BufferedReader(self._incoming)
        self._outgoing = Outgoing(self.wfile)
        self._crowded, self._is_new = False, True
        self.begin_request()

    def begin_request(self) -> None:
        """Forget the request before, and wait for another as long as its guard allows."""
        self.guard: AccessPolicy = self.response_generator.guard
        config = self.guard.config
        self._incoming.stall, self._incoming.until = config.stall_seconds, time.monotonic() + config.request_seconds
        self.rfile, self.wfile = self._reader, self._outgoing
        self._body: Body | None = None
        self._taken = 0
        self._outgoing.begin()
        self.headers, self.path, self.route = Message(), "", ""
        self.command, self.request_version, self._expects_continue = "", "HTTP/1.0", False
        self._headers_buffer: list[bytes] = []

    def handle(self) -> None:
        self.close_connection = False
        try:
            while not self.close_connection and self._has_next():
                self.begin_request()
                self._serve_one()
                self._is_new = False
        except ConnectionError:
            self.log_message("the client hung up")

    def _serve_one(self) -> None:
        """Serve one request with a place of the guard's, or refuse it."""
        guard = self.guard
        self._crowded = not guard.room.acquire(blocking=False)
        if self._crowded:
            self._incoming.until = time.monotonic() + CROWDED_SECONDS
        try:
            self.handle_one_request()
            self._end_request()
        finally:
            guard.bodies.give(self._taken)
            if not self._crowded:
                guard.room.release()

    def _end_request(self) -> None:
        """End the response; the connection is closed where another could not be told from the rest of this one."""
        self._outgoing.finish()
        if not self._outgoing.is_whole:
            self.close_connection = True
        elif self._body is not None and self._body.left:
            self._linger()

    def _has_next(self) -> bool:
        """Whether another request comes before the connection has been idle for too long."""
        guard, is_new = self.guard, self._is_new
        is_idle = guard.idle.acquire(blocking=False)
        if not (is_idle or is_new):
            return False
        seconds = guard.config.stall_seconds if is_new else guard.config.keep_alive_seconds
        self._incoming.stall = seconds if is_idle else CROWDED_SECONDS
        self._incoming.until = math.inf
        try:
            return bool(self._reader.peek(1))
        except (TimeoutError, OSError):
            return False
        finally:
            if is_idle:
                guard.idle.release()

    def handle_expect_100(self) -> bool:
        """The client waits for leave to send its body, which it gets once its headers were checked."""
        self._expects_continue = True
        return True

    def end_headers(self) -> None:
        """Say how the body ends, which mlx-lm leaves to the end of the connection."""
        status, told = self._status_and_headers()
        length = told.get(b"content-length")
        has_body = self.command != "HEAD" and status not in (204, 304)
        chunked = has_body and length is None and self.request_version >= "HTTP/1.1"
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif has_body and length is None:
            self.close_connection = True
        if self._body is not None and self._body.left:
            self.close_connection = True
        if self.close_connection:
            self.send_header("Connection", "close")
        else:
            self.send_header("Connection", "keep-alive")
            self.send_header("Keep-Alive", f"timeout={int(self.guard.config.keep_alive_seconds)}")
        super().end_headers()
        self._outgoing.begin_body(0 if not has_body else None if length is None else int(length), chunked)

    def _status_and_headers(self) -> tuple[int, dict[bytes, bytes]]:
        """Of the response whose headers are being collected. Names in lower case."""
        status, *lines = b"".join(self._headers_buffer).split(b"\r\n")
        told = (line.partition(b":") for line in lines)
        return int((status.split() or [b"", b"0"])[1]), {name.lower(): value.strip() for name, _, value in told}

    def parse_request(self) -> bool:
        """http.server's, and whether the request is let in; its body is in `rfile` then."""
        try:
            if not super().parse_request():
                return False
            refusal = self._refusal() or self._read_body()
        except TimeoutError:
            config = self.guard.config
            waited = f"nothing came for {config.stall_seconds:g} seconds or all of it took more than {config.request_seconds:g}"
            refusal = Rejected(408, f"The request did not come in time: {waited}")
        if refusal is not None:
            self.refuse(refusal)
        self.connection.settimeout(self.guard.config.send_seconds)
        return refusal is None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server does not like about a request, as JSON."""
        self.refuse(Rejected(int(code), ". ".join(part for part in (message or HTTPStatus(code).phrase, explain) if part)))

    def refuse(self, refusal: Rejected) -> None:
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
        self._headers_buffer = []
        self._set_completion_headers(refusal.status)
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self._outgoing.finish()
        if refusal.status != HTTPStatus.REQUEST_TIMEOUT:
            self._linger()

    def _refusal(self) -> Rejected | None:
        try:
            self.route = self.response_generator.path = urlsplit(self.path).path.rstrip("/") or "/"
        except ValueError as error:
            return Rejected(400, f"Bad path: {error}")
        if self._crowded:
            most = self.guard.config.max_connections
            return Rejected(503, f"The server has {most} connections already; ask again when one of them has ended")
        refusal = self.guard.check(self.command, self.route, self.headers)
        self.response_generator.owner = self.guard.owner(self.headers)
        return refusal or self.guard.check_body(self.route, self.headers)

    def _read_body(self) -> Rejected | None:
        """Take the body in, so that whoever reads it does not wait. A file stays on the wire."""
        length = int(self.headers.get("Content-Length", 0))
        if self._expects_continue and length:
            self._outgoing.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if FILES.fullmatch(self.route):
            self._incoming.until = file_deadline(self.guard.config.request_seconds, length)
            self._body = Body(self._reader, length)
            self.rfile = io.BufferedReader(self._body)
        else:
            return self._take_in(length)
        return None

    def _take_in(self, length: int) -> Rejected | None:
        """Read a body to its end, as long as the bodies of all have room in memory."""
        body = bytearray()
        while len(body) < length:
            size = min(length - len(body), PIECE_BYTES)
            if not self.guard.bodies.take(size):
                return Rejected(503, "The server has too many large requests at once; ask again when one of them has ended")
            self._taken += size
            if not (piece := self._reader.read(size)):
                return Rejected(400, f"The body ended after {len(body)} of {length} bytes")
            body += piece
        whole = bytes(body)
        self.rfile = io.BytesIO(whole)
        try:
            self.response_generator.prompts.check_body(whole)
        except PromptError as error:
            return Rejected(400, str(error))
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
            while left > 0 and (data := self._reader.read1(min(left, 1 << 20))):
                left -= len(data)
