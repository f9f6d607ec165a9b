"""POST /v1/messages and /v1/messages/count_tokens, and the list of models as Anthropic's clients read it.

Works for one request of a BlockpoolHandler, on the socket's thread.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from ..bodies import InvalidRequestError
from ..models.http import MODELS, ModelsEndpoint
from ..request import ParsedRequest
from .anthropic_reply import MessageRenderer
from .anthropic_request import parse
from .endpoint import Endpoint
from .errors import StatusError, anthropic_error, anthropic_status, is_below
from .reply import Json

MESSAGES = "/v1/messages"


def is_models(route: str, headers: Any) -> bool:
    """Return whether a client of this protocol requests models; others do so under the same path."""
    return "anthropic-version" in headers and is_below(route, MODELS)


class MessagesEndpoint(Endpoint):
    """Messages, and the list of models for clients of this protocol."""

    def _post(self) -> None:
        if self._handler.route == MESSAGES:
            self._reply(self._parsed())
        elif self._handler.route == MESSAGES + "/count_tokens":
            self._handler.send_json(200, {"input_tokens": self._count(self._parsed(counts=True))})
        else:
            self._refuse()

    def _refuse(self) -> None:
        """Raises StatusError, for what the protocol has and this server does not, such as batches."""
        path = self._handler.route[:80]
        raise StatusError(404, f"{self._handler.command} {path}: there are only POST {MESSAGES} and /count_tokens below")

    def _get(self) -> None:
        """All models, or the one that the path names."""
        if not is_below(self._handler.route, MODELS):
            self._refuse()
        query = parse_qs(urlsplit(self._handler.path.rstrip("/")).query)
        models = [_model(model["id"]) for model in ModelsEndpoint(self._scope.generator).models(0)]
        name = unquote(self._handler.route.removeprefix(MODELS).removeprefix("/"))
        if not name:
            self._handler.send_json(200, _page(models, query))
            return
        found = next((model for model in models if model["id"] == name), None)
        if found is None:
            raise StatusError(404, f"model: {name}")
        self._handler.send_json(200, found)

    # -- a message -----------------------------------------------------------------------------------------------------

    def _parsed(self, counts: bool = False) -> ParsedRequest:
        """The request's body and headers. Raises what anthropic_status() answers."""
        headers, body = self._handler.headers, self._body()
        parsed = parse(body, self._scope.cli_args, counts)
        # metadata.user_id names no agent: sub-agents share it, and run at the same time.
        self._scope.parse_headers(headers, body, ("session_id", "agent_id"))
        self._scope.take_options(headers, parsed.body)
        return parsed

    def _render(self, parsed: ParsedRequest, context: Any) -> MessageRenderer:
        return MessageRenderer(parsed, context)

    def _error(self, error: Exception) -> tuple[int, Json]:
        status, message = anthropic_status(error)
        if status >= 500:
            message = " ".join(message.split())
        return status, anthropic_error(status, message, self._scope.options.id)


def _model(name: str) -> Json:
    released = "1970-01-01T00:00:00Z"  # the protocol's way to say that it is not known
    return {"type": "model", "id": name, "display_name": name, "created_at": released, "lifecycle": "active"}


def _page(models: list[Json], query: dict[str, list[str]]) -> Json:
    """The part of a list that limit, after_id and before_id choose. Raises InvalidRequestError."""
    limit = query.get("limit", ["20"])[0]
    if not limit.isdecimal() or not 1 <= int(limit) <= 1000:
        raise InvalidRequestError("limit", "Input should be between 1 and 1000")
    names = [model["id"] for model in models]
    begin, end = 0, len(models)
    if (after := query.get("after_id", [""])[0]) in names:
        begin = names.index(after) + 1
    if (before := query.get("before_id", [""])[0]) in names:
        end = names.index(before)
    shown = models[begin:end][-int(limit) :] if before else models[begin:end][: int(limit)]
    ids = [model["id"] for model in shown]
    more = len(shown) < end - begin
    return {"data": shown, "has_more": more, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
