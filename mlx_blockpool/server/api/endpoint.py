"""What the endpoints of every protocol do alike: read a JSON body, reply whole or as a stream, fail in the protocol's shape.

For one request, on the socket's thread.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from ..bodies import InvalidRequestError, parse_json
from ..prompts.preparation import Counted
from ..request import ParsedRequest
from ..scope import RequestScope
from .errors import StatusError, openai_answer, unknown_path
from .reply import Packet, Renderer, ReplyParser

log = logging.getLogger(__name__)


class Endpoint:
    """Answers one request of `handler`. Only a client that is gone lets answer() raise: ConnectionError.

    stream_type: the content type of its streams.
    """

    stream_type = "text/event-stream"

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._scope: RequestScope = handler.scope
        self._streams = False
        self._renderer: Renderer | None = None

    def answer(self) -> None:
        """Answer the request by its method. Whatever is raised on the way is the request's failure."""
        acts = {"POST": self._post, "GET": self._get, "HEAD": self._get}
        try:
            acts.get(self._handler.command, self._refuse)()
        except ConnectionError:
            raise
        except Exception as error:
            self._fail(error)

    def _post(self) -> None:
        self._refuse()

    def _get(self) -> None:
        self._refuse()

    def _refuse(self) -> None:
        """Raises StatusError, for a path or method that the protocol has and this server does not."""
        raise StatusError(404, unknown_path(self._handler.route))

    # -- the request ---------------------------------------------------------------------------------------------------

    def _body(self) -> dict[str, Any]:
        body = parse_json(self._handler.rfile.read(self._length()))
        if not isinstance(body, dict):
            raise InvalidRequestError("body", "Input should be a valid dictionary")
        log.debug("request body: %s", body)
        return body

    def _length(self) -> int:
        length = self._handler.headers.get("Content-Length")
        if length is None:
            raise StatusError(411, "Content-Length header is required")
        return int(length)

    def _count(self, parsed: ParsedRequest) -> int:
        """The tokens of the prompt of a request that was parsed to be counted."""
        try:
            self._scope.generate(parsed.request, parsed.arguments)
        except Counted as counted:
            return counted.tokens
        raise AssertionError("a request that only counts was served")

    # -- the reply -----------------------------------------------------------------------------------------------------

    def _reply(self, parsed: ParsedRequest) -> None:
        """Generate the reply, and send it as a stream or whole."""
        context, responses = self._scope.generate(parsed.request, parsed.arguments, progress_callback=self._progress)
        try:
            self._renderer = renderer = self._render(parsed, context)
            if parsed.body.stream:
                self._handler.start_stream(self.stream_type)
                self._streams = True
            self._write_all(renderer.packets(responses))
            last = list(renderer.finish())
            # A client that has read its reply may send it back at once.
            self._remember(parsed, renderer.parser)
            self._write_all(last)
            if not self._streams:
                self._handler.send_json(200, renderer.whole)
        finally:
            context.stop()

    def _remember(self, parsed: ParsedRequest, reply: ReplyParser) -> None:
        # A forced call and a given beginning are text that was not sampled.
        if parsed.request.calls != "must" and not parsed.request.begin and reply.is_whole:
            self._scope.remember(reply.blocks.text, reply.blocks.calls, reply.tokens)

    def _render(self, parsed: Any, context: Any) -> Renderer:
        """Return the renderer of the reply."""
        raise NotImplementedError

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _progress(self, done: int, total: int) -> None:
        log.info("Prompt processing progress: %d/%d", done, total)
        if self._streams:
            for packet in self._keepalive(f" {done}/{total}"):
                self._write(packet)

    def _keepalive(self, progress: str) -> Iterable[Packet]:
        return self._renderer.keepalive(progress) if self._renderer is not None else ()

    def _write_all(self, packets: Iterable[Packet]) -> None:
        """Write the packets if the reply is streamed; read them in any case."""
        for packet in packets:
            if self._streams:
                self._write(packet)

    def _write(self, packet: Packet) -> None:
        self._handler.wfile.write(self._packed(packet))
        self._handler.wfile.flush()

    def _packed(self, packet: Packet) -> bytes:
        """A packet as it is written: a server-sent event."""
        if isinstance(packet, bytes):
            return packet
        name = f"event: {packet['type']}\n" if "type" in packet else ""
        return f"{name}data: {json.dumps(packet)}\n\n".encode()

    def _fail(self, error: Exception) -> None:
        self._scope.fail(error)
        status, body = self._error(error)
        if status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED:
            log.error("%s failed", self._handler.path, exc_info=error)
        if self._streams and self._renderer is not None:
            self._write(self._renderer.failed(body))
        else:
            self._handler.send_json(status, body)

    def _error(self, error: Exception) -> tuple[int, dict[str, Any]]:
        """Status and body for an exception, in the protocol's shape: OpenAI's by default."""
        return openai_answer(error)
