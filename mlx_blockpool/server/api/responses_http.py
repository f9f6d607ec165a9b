"""POST /v1/responses and /v1/responses/input_tokens, and GET of a response that was kept.

Works for one request, on the socket's thread.
"""

from __future__ import annotations

import json
import logging
from typing import Any
from urllib.parse import unquote, urlsplit

from ..asking import Wishes, agent_of, retention_of
from ..rendering import Counted
from .anthropic import Endpoint, _RefusedError
from .openai_errors import answer_to, error_body
from .responses import Asked, understand
from .responses_kept import OwnResponses
from .responses_stream import Answer

log = logging.getLogger(__name__)

PATH = "/v1/responses"
COUNT = "input_tokens"


def is_responses(path: str) -> bool:
    """Whether a path, with its query, belongs to the Responses API."""
    path = urlsplit(path).path.rstrip("/")
    return path == PATH or path.startswith(PATH + "/")


class ResponsesEndpoint(Endpoint):
    """Answers one request of `handler`, over the wire as the other endpoint does. Only a client that is gone lets it raise."""

    def __init__(self, handler: Any) -> None:
        super().__init__(handler)
        self._kept: OwnResponses = self._generator.responses.of(self._generator.owner)
        self._answer: Answer | None = None

    def post(self) -> None:
        try:
            if self._name() == COUNT:
                self._send(200, {"object": "response.input_tokens", "input_tokens": self._count()})
            elif self._name():
                raise _RefusedError(404, f"Found no {self._handler.path[:80]} to POST to; there are {PATH} and {PATH}/{COUNT}")
            else:
                self._create()
        except ConnectionError:
            raise
        except Exception as error:
            # The top of the request's thread.
            self._fail(error)

    def get(self) -> None:
        """One response that a client has let be stored."""
        kept = self._kept.get(self._name())
        if kept is None:
            why = "this server keeps the last ones only, and none over a restart"
            self._fail(_RefusedError(404, f"Response with id {self._name()[:80]!r} not found; {why}."))
        else:
            self._send(200, kept.response)

    def _name(self) -> str:
        return unquote(urlsplit(self._handler.path).path.rstrip("/").removeprefix(PATH).removeprefix("/"))

    def _create(self) -> None:
        asked = self._understood()
        context, responses = self._generator.generate(asked.request, asked.arguments, progress_callback=self._progress)
        answer = self._answer = Answer(asked, context)
        try:
            # What is too deep to be written is found out before the headers are gone.
            json.dumps(answer.response)
            if asked.stream:
                self._start_stream()
                for event in answer.events(responses):
                    # Before the client hears of the end, for it may go on at once.
                    self._keep(asked, answer)
                    self._write(event)
            else:
                for _ in answer.events(responses):
                    pass
                self._keep(asked, answer)
                self._send(200, answer.response)
        finally:
            context.stop()
        if asked.request.calls != "must":
            # What is sampled behind a given beginning is not the whole message.
            self._generator.told(answer.blocks.text, answer.blocks.calls, True)

    def _count(self) -> int:
        asked = self._understood(counts=True)
        try:
            self._generator.generate(asked.request, asked.arguments)
        except Counted as counted:
            return counted.tokens
        raise AssertionError("a request that only counts was served")

    def _understood(self, counts: bool = False) -> Asked:
        """The request's body and headers. Raises what answer_to() answers."""
        headers, body = self._handler.headers, self._body()
        asked = understand(body, self._generator.cli_args, self._kept, counts)
        agent = agent_of(headers.get("X-Agent-Id"), body)
        self._generator.wishes = Wishes(self._id, agent, retention=retention_of(body))
        self._generator.normalisers = self._generator.known_normalisers.asked(headers.get("X-Normalise"))
        return asked

    def _keep(self, asked: Asked, answer: Answer) -> None:
        if answer.finished and asked.store:
            self._kept.keep(answer.response, [*asked.items, *answer.response["output"]])

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _progress(self, done: int, total: int) -> None:
        log.info("Prompt processing progress: %d/%d", done, total)
        if self._streams and self._answer is not None:
            for event in self._answer.goes_on():
                self._write(event)

    def _fail(self, error: Exception) -> None:
        self._generator.refused(error)
        if isinstance(error, _RefusedError):
            status, body = error.status, error_body(error.status, str(error))
        else:
            status, body = answer_to(error)
        if status >= 500:
            log.error("%s failed", self._handler.path, exc_info=error)
        if self._streams and self._answer is not None:
            self._write(self._answer.failed(body["error"]["message"]))
        else:
            self._send(status, body)
