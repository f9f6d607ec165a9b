"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from typing import Any

from ...errors import PoolExhaustedError, RequestTooLargeError
from ..fields import InvalidRequestError

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# The endpoints of mlx-lm that are OpenAI's.
PATHS = ("/v1/chat/completions", "/chat/completions", "/v1/completions", "/v1/models")


def is_openai(path: str) -> bool:
    """Whether an error under this path has this shape, whoever finds it."""
    path = path.partition("?")[0]
    return any(path == known or path.startswith(known + "/") for known in PATHS)


def status_of(error: Exception) -> int:
    """404: no such model. 503: the server cannot now. 400: the request cannot be served as it is."""
    if isinstance(error, OSError):
        return 404
    overloaded = isinstance(error, PoolExhaustedError | RuntimeError) and not isinstance(error, RecursionError)
    return 503 if overloaded else 400


def code_of(error: Exception) -> str | None:
    """What programs look for: clients shorten a conversation that is too long, and do not ask again for what is not there."""
    if isinstance(error, RequestTooLargeError):
        return "context_length_exceeded"
    return "model_not_found" if isinstance(error, OSError) else None


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """What the body of an answer with `status` says."""
    kind = "server_error" if status >= 500 else TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def answer_to(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for whatever a request has raised."""
    status, message = status_of(error), str(error) or type(error).__name__
    param = error.place or None if isinstance(error, InvalidRequestError) else None
    return status, error_body(status, message, param, code_of(error))


def in_shape(status: int, body: bytes, code: str | None = None) -> bytes:
    """mlx-lm's body of an error in this shape: {"error": text}, or the text alone. Any other stays as it is."""
    try:
        content = json.loads(body)
    except ValueError:
        content = {"error": body.decode(errors="replace")}
    if isinstance(content, dict) and isinstance(content.get("error"), str):
        return json.dumps(error_body(status, content["error"], code=code)).encode()
    return body


class ErrorFile:
    """A socket's file behind the headers of an answer with `status`: the body, which is written at once, gets this shape."""

    def __init__(self, wfile: Any, status: int, code: str | None) -> None:
        self._wfile = wfile
        self._shape = status, code

    def write(self, data: bytes) -> int:
        """As a file's; the count is that of `data`, whatever is sent for it."""
        status, code = self._shape
        self._wfile.write(in_shape(status, data, code))
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wfile, name)
