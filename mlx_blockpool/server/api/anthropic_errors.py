"""Errors as Anthropic's Messages API words and shapes them."""

from __future__ import annotations

from typing import Any

from ...errors import LoadError, PoolExhaustedError, RequestTooLargeError, UnavailableError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    411: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
    529: "overloaded_error",
}
# Of the rest: what a client has done to a request before anybody could understand it.
OTHER = "invalid_request_error"


def error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """What the body of an answer with `status`, or an `error` event, says."""
    return {"type": "error", "error": {"type": TYPES.get(status, OTHER), "message": message}, "request_id": request_id}


def answer_to(error: Exception) -> tuple[int, str]:
    """Status and message for whatever a request has raised; the server's own failures alone are 5xx."""
    if isinstance(error, RequestTooLargeError):
        # Clients look for these words and then shorten the conversation.
        return 400, f"prompt is too long: {error.needed} tokens > {error.capacity} maximum. {error}"
    if isinstance(error, PoolExhaustedError | LoadError):
        return 529, str(error)
    if isinstance(error, UnavailableError):
        return 503, str(error)
    if isinstance(error, OSError):
        return 404, f"model: {error}"
    if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):
        return 500, str(error)
    return 400, str(error) or type(error).__name__
