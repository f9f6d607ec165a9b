"""The sending side of a connection: a file that frames the bodies of responses. Runs on the socket's thread."""

from __future__ import annotations

import socket
import sys
from typing import Any

# Probes of a silent connection within the time after which it is given up.
PROBES = 3
# macOS's name for the time after which data that nobody acknowledges ends a connection; Python has no constant for it.
RXT_CONNDROPTIME = 0x80


def drop_vanished(connection: socket.socket, seconds: float) -> None:
    """Have the system end a connection whose other machine has answered nothing for so long, as after a lost network.

    Without it an idle one would stay for ever, and one with data under way for a quarter of an hour.
    """
    probe = max(1, round(seconds / (PROBES + 1)))
    options = {"TCP_KEEPIDLE": probe, "TCP_KEEPALIVE": probe, "TCP_KEEPINTVL": probe, "TCP_KEEPCNT": PROBES}
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

    Writing raises ConnectionError for a client that is gone or reads nothing of its response for too long.
    `is_whole`: the last response was written as its headers promised, and another one may follow it.
    """

    closed = False

    def __init__(self, wfile: Any) -> None:
        self._wfile: Any = wfile
        self._chunked = False
        self._promised: int | None = None
        self._written = 0
        self.is_whole = False

    def begin(self) -> None:
        """Start a response with its headers, which are not framed."""
        self._chunked, self._promised, self._written, self.is_whole = False, None, 0, False

    def begin_body(self, length: int | None, chunked: bool) -> None:
        """The headers are written; they promise `length` bytes, chunks, or everything until the connection ends."""
        self._chunked, self._promised = chunked, length

    def finish(self) -> None:
        """End the body of a response."""
        if self._chunked:
            self._chunked = False
            self.write(b"0\r\n\r\n")
            self.is_whole = True
        elif self._promised is not None:
            self.is_whole = self._written == self._promised

    def write(self, data: bytes) -> int:
        if self._promised is not None:
            self._written += len(data)
        framed = b"%x\r\n%s\r\n" % (len(data), data) if self._chunked and data else data
        try:
            self._wfile.write(framed)
        except ConnectionError:
            raise
        except OSError as error:
            why = "does not read its response" if isinstance(error, TimeoutError) else "cannot be reached"
            raise ConnectionAbortedError(f"the client {why}") from error
        return len(data)

    def flush(self) -> None:
        self._wfile.flush()

    def close(self) -> None:
        self.closed = True
        self._wfile.close()


class OnlyHeaders:
    """The response to HEAD: a socket's file that writes the headers, which are one write, and drops the body."""

    closed = False

    def __init__(self, wfile: Any) -> None:
        self._wfile: Any = wfile

    def write(self, data: bytes) -> int:
        if self._wfile is not None:
            self._wfile.write(data)
            self._wfile = None
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
