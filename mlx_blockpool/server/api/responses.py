"""POST /v1/responses and /v1/responses/input_tokens, and GET of a response that was kept.

Works for one request, on the socket's thread.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from ..scope import retention_of
from .endpoint import Endpoint
from .errors import StatusError
from .responses_kept import KeptResponses
from .responses_reply import ResponseRenderer
from .responses_request import ResponsesRequest, parse

RESPONSES = "/v1/responses"
COUNT = "input_tokens"


class ResponsesEndpoint(Endpoint):
    """Responses, the tokens of their input, and those that were kept."""

    def __init__(self, handler: Any) -> None:
        super().__init__(handler)
        self._kept: KeptResponses = self._scope.generator.responses

    def _post(self) -> None:
        if self._name == COUNT:
            self._handler.send_json(
                200, {"object": "response.input_tokens", "input_tokens": self._count(self._parsed(counts=True))}
            )
        elif self._name:
            raise StatusError(404, f"Unknown path {self._handler.path[:80]} for POST; there are {RESPONSES} and /{COUNT} below")
        else:
            self._reply(self._parsed())

    def _get(self) -> None:
        """A response that its client let the server keep."""
        kept = self._kept.get(self._name, self._scope.owner)
        if kept is None:
            why = "this server keeps the last ones only, and none over a restart"
            raise StatusError(404, f"Response with id {self._name[:80]!r} not found; {why}.")
        self._handler.send_json(200, kept.response)

    @property
    def _name(self) -> str:
        return unquote(self._handler.route.removeprefix(RESPONSES).removeprefix("/"))

    def _parsed(self, counts: bool = False) -> ResponsesRequest:
        """The request's body and headers. Raises what openai_answer() answers."""
        headers, body = self._handler.headers, self._body()
        parsed = parse(body, self._scope.cli_args, self._kept, self._scope.owner, counts)
        self._scope.parse_headers(headers, body)
        self._scope.options.retention = retention_of(body)
        self._scope.take_options(headers, parsed.body)
        return parsed

    def _render(self, parsed: Any, context: Any) -> ResponseRenderer:
        return ResponseRenderer(parsed, context, self._kept, self._scope.owner)
