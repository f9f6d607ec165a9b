"""POST /v1/responses and /v1/responses/input_tokens, and GET of a response that was kept.

Works for one request, on the socket's thread.
"""

from __future__ import annotations

import json
import logging
from typing import Any
from urllib.parse import unquote, urlsplit

from ..scope import retention_of
from .endpoint import Endpoint
from .errors import StatusError, openai_answer
from .responses import ResponsesRequest, parse
from .responses_kept import OwnResponses
from .responses_reply import ResponseRenderer

log = logging.getLogger(__name__)

PATH = "/v1/responses"
COUNT = "input_tokens"


def is_responses(path: str) -> bool:
    """Whether a path, with its query, belongs to the Responses API."""
    path = urlsplit(path).path.rstrip("/")
    return path == PATH or path.startswith(PATH + "/")


class ResponsesEndpoint(Endpoint):
    """Answers one request of `handler`. Only a client that is gone lets it raise: ConnectionError."""

    def __init__(self, handler: Any) -> None:
        super().__init__(handler)
        self._kept: OwnResponses = self._scope.responses.of(self._scope.owner)
        self._renderer: ResponseRenderer | None = None

    def post(self) -> None:
        self._serve(self._post)

    def get(self) -> None:
        """One response that a client has let be stored."""
        self._serve(self._get)

    def _post(self) -> None:
        if self._name == COUNT:
            self._send(200, {"object": "response.input_tokens", "input_tokens": self._count(self._parsed(counts=True))})
        elif self._name:
            raise StatusError(404, f"Unknown path {self._handler.path[:80]} for POST; there are {PATH} and {PATH}/{COUNT}")
        else:
            self._create()

    def _get(self) -> None:
        kept = self._kept.get(self._name)
        if kept is None:
            why = "this server keeps the last ones only, and none over a restart"
            raise StatusError(404, f"Response with id {self._name[:80]!r} not found; {why}.")
        self._send(200, kept.response)

    @property
    def _name(self) -> str:
        return unquote(self._path.removeprefix(PATH).removeprefix("/"))

    def _create(self) -> None:
        parsed = self._parsed()
        context, responses = self._scope.generate(parsed.request, parsed.arguments, progress_callback=self._progress)
        renderer = self._renderer = ResponseRenderer(parsed, context)
        try:
            # A body that is too deep to be written is found out before the headers are sent.
            json.dumps(renderer.response)
            if parsed.stream:
                self._start_stream()
                for event in renderer.events(responses):
                    # Before the client reads the last event, for it may continue at once.
                    self._keep(parsed, renderer)
                    self._write(event)
            else:
                for _ in renderer.events(responses):
                    pass
                self._keep(parsed, renderer)
                self._send(200, renderer.response)
        finally:
            context.stop()
        self._remember(parsed.request, renderer.reader)

    def _parsed(self, counts: bool = False) -> ResponsesRequest:
        """The request's body and headers. Raises what openai_answer() answers."""
        headers, body = self._handler.headers, self._body()
        parsed = parse(body, self._scope.cli_args, self._kept, counts)
        self._scope.parse_headers(headers, body)
        self._scope.options.retention = retention_of(body)
        return parsed

    def _keep(self, parsed: ResponsesRequest, renderer: ResponseRenderer) -> None:
        if renderer.finished and parsed.store:
            self._kept.keep(renderer.response, [*parsed.items, *renderer.response["output"]])

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _progress(self, done: int, total: int) -> None:
        log.info("Prompt processing progress: %d/%d", done, total)
        if self._streams and self._renderer is not None:
            for event in self._renderer.progress():
                self._write(event)

    def _error(self, error: Exception) -> tuple[int, dict[str, Any]]:
        return openai_answer(error)

    def _failed(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self._renderer is not None, "a stream has a renderer"
        return self._renderer.failed(body["error"]["message"])
