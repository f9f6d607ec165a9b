"""What the endpoints of every protocol do alike: read a JSON body, answer it whole or as a stream, fail in the protocol's shape.

For one request, on the socket's thread.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from ..bodies import parse_json
from ..fields import checked
from ..prompts.preparation import Counted
from ..request import ChatRequest
from ..scope import RequestScope
from .errors import StatusError
from .reply import ReplyReader

log = logging.getLogger(__name__)


class Endpoint:
    """Answers one request of `handler`. Only a client that is gone lets it raise: ConnectionError."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._scope: RequestScope = handler.scope
        self._streams = False

    @property
    def _path(self) -> str:
        return str(urlsplit(self._handler.path).path).rstrip("/")

    def _serve(self, serve: Callable[[], None]) -> None:
        """The top of the request's thread: whatever `serve` raises is the request's failure."""
        try:
            serve()
        except ConnectionError:
            raise
        except Exception as error:
            self._fail(error)

    def _body(self) -> dict[str, Any]:
        length = self._handler.headers.get("Content-Length")
        if length is None:
            raise StatusError(411, "Content-Length header is required")
        return checked(parse_json(self._handler.rfile.read(int(length))), dict, "body")  # type: ignore[no-any-return]

    def _count(self, parsed: Any) -> int:
        """The tokens of the prompt of a request that was parsed to be counted."""
        try:
            self._scope.generate(parsed.request, parsed.arguments)
        except Counted as counted:
            return counted.tokens
        raise AssertionError("a request that only counts was served")

    def _send(self, status: int, content: Any) -> None:
        self._handler.send_json(status, content)

    def _start_stream(self) -> None:
        self._handler.start_stream()
        self._streams = True

    def _write(self, event: dict[str, Any]) -> None:
        self._handler.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        self._handler.wfile.flush()

    def _remember(self, request: ChatRequest, reader: ReplyReader) -> None:
        """Note a whole reply, so that it can be put back as it was sampled."""
        if request.calls != "must" and reader.is_whole:
            # A forced call begins with text that was not sampled.
            self._scope.remember(*reader.message)

    def _fail(self, error: Exception) -> None:
        self._scope.fail(error)
        status, body = self._error(error)
        if status >= 500:
            log.error("%s failed", self._handler.path, exc_info=error)
        if self._streams:
            self._write(self._failed(body))
        else:
            self._send(status, body)

    def _error(self, error: Exception) -> tuple[int, dict[str, Any]]:
        """Status and body for an exception, in the protocol's shape."""
        raise NotImplementedError

    def _failed(self, body: dict[str, Any]) -> dict[str, Any]:
        """The event that ends a stream with an error's body."""
        return body
