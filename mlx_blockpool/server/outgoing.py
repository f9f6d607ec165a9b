"""The sending side of a connection: a file that frames the bodies of responses. Runs on the socket's thread."""

from __future__ import annotations

from typing import Any


class Outgoing:
    """A socket's file that frames the body of each response.

    Writing raises ConnectionError for a client that reads nothing of its response for too long.
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
        except TimeoutError as error:
            raise ConnectionAbortedError("the client does not read its response") from error
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
