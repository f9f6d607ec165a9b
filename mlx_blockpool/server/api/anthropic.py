"""POST /v1/messages and /v1/messages/count_tokens, and the list of models as Anthropic's clients read it.

Works for one request of a BlockpoolHandler, on the socket's thread.
"""

from __future__ import annotations

import json
import logging
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from ..asking import Wishes, agent_of
from ..bodies import parse_json
from ..fields import InvalidRequestError, checked
from ..models.admin import MODELS, Admin
from ..rendering import Counted
from .anthropic_errors import answer_to, error_body
from .anthropic_request import Asked, understand
from .anthropic_stream import PING, Answer, Event, message_of

log = logging.getLogger(__name__)

PATH = "/v1/messages"


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def is_messages(path: str) -> bool:
    """Whether a path, with its query, belongs to the Messages API."""
    path = urlsplit(path).path.rstrip("/")
    return path == PATH or path.startswith(PATH + "/")


def is_models(path: str, headers: Any) -> bool:
    """Whether a client of this protocol asks for models; others ask under the same path."""
    path = urlsplit(path).path.rstrip("/")
    return "anthropic-version" in headers and (path == MODELS or path.startswith(MODELS + "/"))


class Endpoint:
    """Answers one request of `handler`. Only a client that is gone lets it raise: ConnectionError."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._generator = handler.response_generator
        self._id: str = self._generator.wishes.id
        self._streams = False

    def post(self) -> None:
        try:
            path = urlsplit(self._handler.path).path.rstrip("/")
            if path == PATH:
                self._create()
            elif path == PATH + "/count_tokens":
                self._send(200, {"input_tokens": self._count()})
            else:
                self.refuse_path()
        except ConnectionError:
            raise
        except Exception as error:
            # The top of the request's thread.
            self._fail(error)

    def refuse_path(self) -> None:
        """Answer a request for what the protocol has and this server has not, such as batches."""
        path = urlsplit(self._handler.path).path.rstrip("/")
        self._fail(_RefusedError(404, f"{self._handler.command} {path[:80]}: there are only POST {PATH} and {PATH}/count_tokens"))

    def get_models(self) -> None:
        """All models, or the one that the path names."""
        path, query = urlsplit(self._handler.path.rstrip("/")), parse_qs(urlsplit(self._handler.path).query)
        listed = Admin(self._generator).models(MODELS, 0)["data"]
        models = [_model(model["id"]) for model in listed]
        name = unquote(path.path.removeprefix(MODELS).removeprefix("/"))
        if not name:
            try:
                self._send(200, _page(models, query))
            except ValueError as error:
                self._fail(error)
            return
        found = next((model for model in models if model["id"] == name), None)
        if found is None:
            self._fail(_RefusedError(404, f"model: {name}"))
        else:
            self._send(200, found)

    # -- a message -----------------------------------------------------------------------------------------------------

    def _create(self) -> None:
        asked = self._asked()
        context, responses = self._generator.generate(asked.request, asked.arguments, progress_callback=self._progress)
        answer = Answer(asked, context)
        try:
            if asked.stream:
                self._start_stream()
                for event in answer.events(responses):
                    self._write(event)
            else:
                self._send(200, message_of(answer.events(responses)))
        finally:
            context.stop()
        if answer.finished and not (asked.request.begin or asked.request.calls == "must"):
            # What is sampled behind a given beginning is not the whole message.
            self._generator.told(answer.blocks.text, answer.blocks.calls, True)

    def _count(self) -> int:
        asked = self._asked(counts=True)
        try:
            self._generator.generate(asked.request, asked.arguments)
        except Counted as counted:
            return counted.tokens
        raise AssertionError("a request that only counts was served")

    def _asked(self, counts: bool = False) -> Asked:
        """The request's body and headers, understood. Raises what answer_to() answers."""
        headers = self._handler.headers
        body = self._body()
        asked = understand(body, self._generator.cli_args, counts)
        # metadata.user_id names no agent: sub-agents share it, and run at the same time.
        self._generator.wishes = Wishes(self._id, agent_of(headers.get("X-Agent-Id"), body, ("session_id", "agent_id")))
        self._generator.normalisers = self._generator.known_normalisers.asked(headers.get("X-Normalise"))
        return asked

    def _body(self) -> dict[str, Any]:
        length = self._handler.headers.get("Content-Length")
        if length is None:
            raise _RefusedError(411, "Content-Length header is required")
        body = parse_json(self._handler.rfile.read(int(length)))
        return checked(body, dict, "body")  # type: ignore[no-any-return]

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _start_stream(self) -> None:
        self._handler._set_stream_headers(200)
        self._handler.end_headers()
        self._streams = True

    def _progress(self, done: int, total: int) -> None:
        log.info("Prompt processing progress: %d/%d", done, total)
        if self._streams:
            self._write(PING)

    def _write(self, event: Event) -> None:
        self._handler.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        self._handler.wfile.flush()

    def _fail(self, error: Exception) -> None:
        self._generator.refused(error)
        status, message = (error.status, str(error)) if isinstance(error, _RefusedError) else answer_to(error)
        if status >= 500:
            log.error("%s failed", self._handler.path, exc_info=error)
            message = " ".join(message.split())
        body = error_body(status, message, self._id)
        if self._streams:
            self._write(body)
        else:
            self._send(status, body)

    def _send(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self._handler.send_response(status)
        self._handler.send_header("Content-type", "application/json")
        self._handler._set_cors_headers()
        self._handler.send_header("Content-Length", str(len(body)))
        self._handler.end_headers()
        self._handler.wfile.write(body)


def _model(name: str) -> dict[str, Any]:
    released = "1970-01-01T00:00:00Z"  # the protocol's way to say that it is not known
    return {"type": "model", "id": name, "display_name": name, "created_at": released, "lifecycle": "active"}


def _page(models: list[dict[str, Any]], query: dict[str, list[str]]) -> dict[str, Any]:
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
