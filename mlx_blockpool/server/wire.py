"""Both directions of a connection: requests are read under limits, bodies of responses are framed,
and hang-ups are noticed.

Runs on the socket's thread.
"""

from __future__ import annotations

import io
import select
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from .access import BudgetShare
from .bodies import StatusError

# A body is read in pieces of this size, so that bytes which were announced and never sent take no
# memory.
PIECE_BYTES = 1 << 18
# The time and the bytes for which a rejected request is drained.
DRAIN_SECONDS = 2.0
DRAIN_BYTES = 1 << 16
MOST_DRAIN_BYTES = 64 << 20
# Probes of a silent connection within the time after which it is given up.
PROBES = 3
# macOS's option: unacknowledged data ends a connection after this time. Python has no constant for
# it.
RXT_CONNDROPTIME = 0x80
# Where the system has it, this is reported also while bytes of a next request wait to be read.
READ_HANG_UP: int = getattr(select, "POLLRDHUP", 0)


class TimedReader(io.RawIOBase):
    """The receiving side of a socket.

    Reading raises TimeoutError after `stall` seconds without a byte, and from `until`
    (time.monotonic()) on.
    """

    def __init__(self, connection: socket.socket, stall: float, until: float) -> None:
        self._connection = connection
        self.stall = stall
        self.until = until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(min(self.stall, left))
        return self._connection.recv_into(buffer)


def buffer_body(reader: Any, length: int, share: BudgetShare) -> bytes:
    """Read a body of `length` bytes into memory.

    Raises StatusError if the share cannot grow, or the body ends before.
    """
    body = bytearray()
    while len(body) < length:
        size = min(length - len(body), PIECE_BYTES)
        if not share.grow(size):
            raise StatusError(
                503,
                "The server has too many large requests at once. Try again when one of them has "
                "ended.",
            )
        if not (piece := reader.read(size)):
            raise StatusError(400, f"The body ended after {len(body)} of {length} bytes.")
        body += piece
    return bytes(body)


def drain(
    connection: socket.socket, reader: Any, incoming: TimedReader, length: int, max_body_bytes: int
) -> None:
    """Drain a rejected request before closing: a reset would discard our response.

    `length`: of its body; 0: unknown.
    """
    left = min(length or DRAIN_BYTES, max(MOST_DRAIN_BYTES, 4 * max_body_bytes))
    incoming.stall = DRAIN_SECONDS
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while left > 0 and (data := reader.read1(min(left, 1 << 20))):
            left -= len(data)


def drop_vanished(connection: socket.socket, seconds: float) -> None:
    """Have the system end a connection whose peer has not answered for `seconds`, as after a lost
    network.

    Without it an idle connection would stay for ever, and one with data in flight for a quarter of
    an hour.
    """
    probe = max(1, round(seconds / (PROBES + 1)))
    options = {
        "TCP_KEEPIDLE": probe,
        "TCP_KEEPALIVE": probe,
        "TCP_KEEPINTVL": probe,
        "TCP_KEEPCNT": PROBES,
    }
    options["TCP_USER_TIMEOUT"] = round(seconds * 1000)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        # Each system has some of them.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if sys.platform == "darwin":
        connection.setsockopt(socket.IPPROTO_TCP, RXT_CONNDROPTIME, max(1, round(seconds)))


class Outgoing:
    """A socket's file that frames the body of each response.

    Writing raises ConnectionError for a client that is gone or reads nothing of its response for
    too long.
    `is_whole`: the last response was written as its headers promised, and another one may follow
    it.
    """

    closed = False

    def __init__(self, wfile: Any) -> None:
        self._wfile: Any = wfile
        self.begin()

    def begin(self) -> None:
        """Start a response with its headers, which are not framed."""
        self._chunked = self._drops = self.is_whole = False
        self._promised: int | None = None
        self._written = 0

    def begin_body(self, length: int | None, chunked: bool, drops: bool = False) -> None:
        """The headers are written; they promise `length` bytes, chunks, or everything until the
        connection ends.

        `drops`: the client wants no body, whatever is written.
        """
        self._promised, self._chunked, self._drops, self._written = length, chunked, drops, 0

    def finish(self) -> None:
        """End the body of a response."""
        if self._chunked:
            self._chunked = False
            self.write(b"0\r\n\r\n")
            self.is_whole = True
        elif self._promised is not None:
            self.is_whole = self._written == self._promised

    def write(self, data: bytes) -> int:
        if self._drops:
            return len(data)
        self._written += len(data)
        framed = b"%x\r\n%s\r\n" % (len(data), data) if self._chunked and data else data
        try:
            self._wfile.write(framed)
        except ConnectionError:
            raise
        except OSError as error:
            why = (
                "does not read its response"
                if isinstance(error, TimeoutError)
                else "cannot be reached"
            )
            raise ConnectionAbortedError(f"the client {why}") from error
        return len(data)

    def flush(self) -> None:
        self._wfile.flush()

    def close(self) -> None:
        self.closed = True
        self._wfile.close()


def has_hung_up(connection: socket.socket) -> bool:
    """Return whether the other end has closed or reset a connection.

    Waiting bytes of a next request do not count as that.
    """
    try:
        poll = select.poll()
        poll.register(connection, select.POLLIN | READ_HANG_UP)
        found = [event for _, event in poll.poll(0)]
        if any(event & ~select.POLLIN for event in found):
            return True
        return bool(found) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        # This end is closed too.
        return True


def check_connection(connection: socket.socket | None) -> None:
    """Raises ConnectionAbortedError if the client of a connection has hung up."""
    if connection is not None and has_hung_up(connection):
        raise ConnectionAbortedError("the client hung up")
