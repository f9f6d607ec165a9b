"""Reading a request from a socket under limits of time and memory. Runs on the socket's thread."""

from __future__ import annotations

import io
import socket
import time
from contextlib import suppress
from typing import Any

from .access import BudgetShare, Rejected

# A body is read in pieces of this size, so that bytes which were announced and never sent take no memory.
PIECE_BYTES = 1 << 18
# A client that sends or takes a file more slowly than this is disconnected.
FILE_BYTES_PER_SECOND = 1 << 18
# How long, and how much of, a rejected request is drained.
DRAIN_SECONDS = 2.0
DRAIN_BYTES = 1 << 16
MOST_DRAIN_BYTES = 64 << 20


class TimedReader(io.RawIOBase):
    """The receiving side of a socket.

    Reading raises TimeoutError after `stall` seconds without a byte, and from `until` (time.monotonic()) on.
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


class WireBody(io.RawIOBase):
    """A request's body that stays on the wire: the next `left` bytes of the connection's reader."""

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


def buffer_body(reader: Any, length: int, share: BudgetShare) -> bytes | Rejected:
    """Read a body of `length` bytes into memory, as far as the share can grow."""
    body = bytearray()
    while len(body) < length:
        size = min(length - len(body), PIECE_BYTES)
        if not share.grow(size):
            return Rejected(503, "The server has too many large requests at once. Try again when one of them has ended.")
        if not (piece := reader.read(size)):
            return Rejected(400, f"The body ended after {len(body)} of {length} bytes.")
        body += piece
    return bytes(body)


def drain(connection: socket.socket, reader: Any, incoming: TimedReader, length: int, max_body_bytes: int) -> None:
    """Drain a rejected request before closing: a reset would discard our response. `length`: of its body; 0: unknown."""
    left = min(length or DRAIN_BYTES, max(MOST_DRAIN_BYTES, 4 * max_body_bytes))
    incoming.stall = DRAIN_SECONDS
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while left > 0 and (data := reader.read1(min(left, 1 << 20))):
            left -= len(data)


def file_deadline(seconds: float, n_bytes: int) -> float:
    """When the transfer of a file has to end, in seconds of time.monotonic()."""
    return time.monotonic() + seconds + n_bytes / FILE_BYTES_PER_SECOND
