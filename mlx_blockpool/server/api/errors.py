"""Errors: the status of an exception, and the body that each protocol's clients read.

Anthropic's clients read {"type": "error", "error": {"type", "message"}, "request_id"}, OpenAI's
{"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...errors import (
    FormError,
    LoadError,
    PoolExhaustedError,
    RequestTooLargeError,
    TooManyRequestsError,
    UnavailableError,
)
from ...formatting import nearest
from ..access import COMPLETIONS
from ..bodies import InvalidRequestError, Json, StatusError
from ..routes import Route

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
    529: "overloaded_error",
}
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
OTHER_TYPE = "invalid_request_error"
# The first that fits an exception has its statuses: Anthropic's, where only the server's own
# failures are 5xx, and OpenAI's.
STATUSES: tuple[tuple[type[Exception], int, int], ...] = (
    (PoolExhaustedError, 529, 503),
    (LoadError, 529, 503),
    (TooManyRequestsError, 429, 429),
    (UnavailableError, 503, 503),
    (OSError, 404, 404),
    (RecursionError, 400, 400),
    (RuntimeError, 500, 503),
    (Exception, 400, 400),
)
INDEX = re.compile(r"\[(\d+)\]")
# Below these Anthropic's and Ollama's clients send requests.
MESSAGES, OLLAMA = "/v1/messages", "/api"
# OpenAI's endpoints whose errors are raised outside of an Endpoint.
OPENAI_PATHS = (*COMPLETIONS, "/v1/models", "/v1/embeddings")


def unknown_path(path: str, routes: Iterable[Route] = ()) -> str:
    """The message for a path, or a method of one of the routes, that this server does not have."""
    methods = ", ".join(
        method for route in routes if route.path == path for method in route.methods
    )
    if methods:
        return f"{path[:80]} is a path for {methods}."
    near = nearest(path[:80], [route.path.removesuffix("/*") for route in routes])
    advice = near or "See the server's README for the endpoints."
    return f"Unknown path {path[:80]}. {advice}"


def anthropic_error(status: int, message: str, request_id: str) -> Json:
    """The body of a response with `status`, or an `error` event."""
    return {
        "type": "error",
        "error": {"type": ANTHROPIC_TYPES.get(status, OTHER_TYPE), "message": message},
        "request_id": request_id,
    }


def statuses(error: Exception) -> tuple[int, int]:
    """The statuses for Anthropic's and for OpenAI's clients."""
    if isinstance(error, StatusError):
        return error.status, error.status
    return next(
        (anthropic, openai) for kind, anthropic, openai in STATUSES if isinstance(error, kind)
    )


def anthropic_status(error: Exception) -> tuple[int, str]:
    """Status and message for any exception of a request."""
    if isinstance(error, RequestTooLargeError):
        # Clients look for these words and then shorten the conversation.
        return 400, f"prompt is too long: {error.needed} tokens > {error.capacity} maximum. {error}"
    status, message = statuses(error)[0], str(error) or type(error).__name__
    if isinstance(error, FormError) and error.place:
        # Their places are written as in OpenAI's protocols: anyOf[0].
        message = INDEX.sub(r".\1", error.place) + f": {error.why}"
    return status, f"model: {message}" if isinstance(error, OSError) else message


def is_below(route: str, root: str) -> bool:
    return route == root or route.startswith(root + "/")


def is_openai(route: str) -> bool:
    """Return whether errors under this path have OpenAI's shape, wherever they are raised."""
    return any(is_below(route, known) for known in OPENAI_PATHS)


def openai_status(error: Exception) -> int:
    """404: no such model.

    503: the server cannot now. 400: the request cannot be served as it is.
    """
    return statuses(error)[1]


def openai_error(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> Json:
    """The body of a response with `status`."""
    kind = "server_error" if status >= 500 else OPENAI_TYPES.get(status, OTHER_TYPE)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def openai_answer(error: Exception) -> tuple[int, Json]:
    """Status and body for any exception of a request."""
    status, message = openai_status(error), str(error) or type(error).__name__
    param = error.place or None if isinstance(error, InvalidRequestError | FormError) else None
    # Clients act on the code: they shorten a conversation that is too long, and do not retry with
    # an unknown model.
    too_long, unknown = isinstance(error, RequestTooLargeError), isinstance(error, OSError)
    code = "context_length_exceeded" if too_long else "model_not_found" if unknown else None
    return status, openai_error(status, message, param, code)


def in_shape(status: int, content: Json) -> Json:
    """{"error": text} in OpenAI's shape. Any other body stays as it is."""
    text = content.get("error")
    return openai_error(status, text) if isinstance(text, str) else content
