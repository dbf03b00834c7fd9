"""Errors of Anthropic's Messages API; knows neither Starlette nor completions."""

from __future__ import annotations

import orjson

from replicas.errors import ServingError

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_json(error: ServingError, request_id: str | None) -> bytes:
    """Render an error's body."""
    kind = _ERROR_TYPES.get(error.status, "api_error")
    details = {"type": kind, "message": error.message}
    return orjson.dumps({"type": "error", "error": details, "request_id": request_id})


def messages_error_event(error: ServingError, request_id: str) -> bytes:
    """Render an error that ends a stream."""
    return b"event: error\ndata: " + error_json(error, request_id) + b"\n\n"
