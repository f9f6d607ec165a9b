"""The base of all endpoints: reads a JSON body, replies whole or as a stream, and fails in the
protocol's shape.

For one request, on the socket's thread.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from contextlib import closing
from http import HTTPStatus
from typing import Any

from ...errors import UnavailableError
from ..bodies import InvalidRequestError, Json, StatusError, parse_json
from ..preparation import PromptCounted
from ..request import ChatRequest, ParsedRequest
from ..routes import Route
from ..scope import AGENT_FIELDS, RequestScope
from .errors import openai_answer, unknown_path
from .reply import Packet, Renderer

log = logging.getLogger(__name__)


class Endpoint:
    """Answers one request of `handler`. Only a client that is gone lets a route raise:
    ConnectionError.

    stream_type:   the content type of its streams.
    agent_fields:  the fields of a body that may name the agent.
    """

    stream_type = "text/event-stream"
    agent_fields: tuple[str, ...] = AGENT_FIELDS

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._scope: RequestScope = handler.scope
        self._streams = False
        self._choices: dict[int, Renderer] = {}
        self._errors: dict[int, Exception] = {}

    @classmethod
    def route(cls, path: str, act: Callable[[Any], None], *methods: str, **more: Any) -> Route:
        """The route whose requests are answered by `act`, a method.

        Whatever is raised on the way is the request's failure.
        """

        def respond(handler: Any) -> None:
            endpoint = cls(handler)
            try:
                act(endpoint)
            except ConnectionError:
                raise
            except Exception as error:
                endpoint._fail(error)

        return Route(path, respond, methods, **more)

    def refuse(self) -> None:
        """Raises StatusError, for a path or method that the protocol has and this server does
        not.
        """
        raise StatusError(404, unknown_path(self._handler.route))

    # -- the request -------------------------------------------------------------------------------

    def _body(self) -> Json:
        if "Content-Length" not in self._handler.headers:
            raise StatusError(411, "Content-Length header is required")
        body = parse_json(self._handler.rfile.read())
        if not isinstance(body, dict):
            raise InvalidRequestError("body", "Input should be a valid dictionary")
        log.debug("request body: %s", body)
        return body

    def _parsed(self, counts: bool = False) -> ParsedRequest:
        """The request's body and headers. Raises what _error() answers."""
        headers, body = self._handler.headers, self._body()
        parsed = self._parse(body, counts)
        self._scope.parse_headers(headers, body, self.agent_fields)
        self._scope.take_options(headers, parsed.body)
        return parsed

    def _parse(self, body: Json, counts: bool) -> ParsedRequest:
        """Parse the body of a request for a reply. `counts`: only the prompt is of interest."""
        raise NotImplementedError

    def _count(self) -> int:
        """The tokens of the prompt of a request that generates nothing."""
        parsed = self._parsed(counts=True)
        try:
            next(self._scope.generate_choices(parsed.request, parsed.arguments))
        except PromptCounted as counted:
            return counted.tokens
        raise AssertionError("a request that only counts was served")

    # -- the reply ---------------------------------------------------------------------------------

    def reply(self) -> None:
        self._reply(self._parsed())

    def _reply(self, parsed: ParsedRequest) -> None:
        """Generate the choices of the reply, and send them as a stream or whole."""
        with closing(
            self._scope.generate_choices(parsed.request, parsed.arguments, self._progress)
        ) as parts:
            for index, part in parts:
                self._render_part(parsed, index, part)
        if len(self._errors) == parsed.request.choices:
            raise self._errors[min(self._errors)]
        if self._streams:
            self._write_all(self._closing_packets(parsed))
        else:
            self._handler.send_json(200, self._response(parsed))

    def _render_part(self, parsed: ParsedRequest, index: int, part: Any) -> None:
        """Render one part of a choice: see BlockpoolGenerator.generate_choices().

        A choice that fails leaves the others alone.
        """
        if isinstance(part, Exception):
            self._errors[index] = part
            self._write_all(self._failure_packets(parsed, index))
            return
        if index not in self._choices:
            self._choices[index] = self._render(parsed, part, index)
            if parsed.body.stream and not self._streams:
                self._handler.start_stream(self.stream_type)
                self._streams = True
            self._write_all(self._choices[index].begin())
            return
        choice = self._choices[index]
        if part is not None:
            self._write_all(choice.add(part))
        if part is None or choice.parser.reason is not None:
            choice.stop()
            last = list(choice.finish())
            # A client that has read its reply may send it back at once.
            self._remember(parsed, choice)
            self._write_all(last)

    def _remember(self, parsed: ParsedRequest, choice: Renderer) -> None:
        request, reply = parsed.request, choice.parser
        # A forced call and a given beginning are text that was not sampled.
        if (
            isinstance(request, ChatRequest)
            and request.calls != "must"
            and not request.begin
            and reply.is_whole
        ):
            calls = [call.openai(call.id) for call in reply.blocks.calls]
            self._scope.remember(reply.blocks.text, calls, reply.tokens)

    def _render(self, parsed: Any, context: Any, index: int) -> Renderer:
        """Return the renderer of a choice of the reply."""
        raise NotImplementedError

    def _failure_packets(self, parsed: ParsedRequest, index: int) -> Iterable[Packet]:
        """The packets of a choice that has failed, of several."""
        return ()

    def _closing_packets(self, parsed: ParsedRequest) -> Iterable[Packet]:
        """The packets of a stream after those of all choices."""
        return ()

    def _response(self, parsed: ParsedRequest) -> Json:
        """The body of the response."""
        (choice,) = self._choices.values()
        return choice.whole

    # -- the wire ----------------------------------------------------------------------------------

    def _progress(self, done: int, total: int) -> None:
        log.info("Prompt processing progress: %d/%d", done, total)
        if self._streams:
            self._write_all(self._first_choice.keepalive(f" {done}/{total}"))

    @property
    def _first_choice(self) -> Renderer:
        """The renderer of the choice that has begun first."""
        return next(iter(self._choices.values()))

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
        if isinstance(error, UnavailableError):
            # It was raised for all requests at once, so a traceback would say nothing about this
            # one.
            self._scope.log_unavailable(error)
        elif status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED:
            log.error("%s failed", self._handler.path, exc_info=error)
        if self._streams:
            self._write(self._first_choice.failed(body))
        else:
            self._handler.send_json(status, body)

    def _error(self, error: Exception) -> tuple[int, Json]:
        """Status and body for an exception, in the protocol's shape: OpenAI's by default."""
        return openai_answer(error)
