"""How a ServingError looks over HTTP: OpenAI's nested body, always with a string code.

Owns the refusals that only an HTTP edge can make (unknown path, wrong method, unknown or
unsupported parameter). Knows neither Starlette nor Ray. Invariant: every failure that a client
sees, before or after the headers were sent, has the one shape that `error_body` renders.
"""

from __future__ import annotations

import math
from http import HTTPStatus

import orjson

from replicas.errors import InvalidRequest, RequestError, ServingError


class UnsupportedParameter(InvalidRequest):
    """A known parameter at a value that would have an effect, which this server does not have."""

    code = "unsupported_parameter"


class UnknownParameter(InvalidRequest):
    """A key that neither OpenAI's nor our interface knows."""

    code = "unknown_parameter"


class MissingParameter(InvalidRequest):
    """A required key is absent."""

    code = "missing_required_parameter"


class InvalidJSON(RequestError):
    """The body is not a JSON object."""

    code = "invalid_json"


class RequestTimeout(RequestError):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"


class PathNotFound(RequestError):
    """No endpoint has that path."""

    status = 404
    code = "path_not_found"


class MethodNotAllowed(RequestError):
    """The endpoint exists and answers to another method."""

    status = 405
    code = "method_not_allowed"


class ConfigError(ValueError):
    """The configuration is wrong; nothing has been started."""


def internal_error() -> ServingError:
    """What a client is told of a failure that is ours: nothing but where to look."""
    return ServingError("internal error; the server's log has the details")


def error_body(error: ServingError) -> bytes:
    """Render the JSON body of an error.

    `code` is never null: an error class without one is named after its HTTP status, e.g.
    "internal_server_error".
    """
    code = error.code or HTTPStatus(error.status).phrase.lower().replace(" ", "_")
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": code,
            }
        }
    )


def error_headers(error: ServingError) -> dict[str, str]:
    """Headers that go with the error.

    Retry-After in whole seconds, WWW-Authenticate on 401, and the connection's end on 408, which
    still has the rest of a body to come.
    """
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif error.status in (429, 503):
        headers["Retry-After"] = "1"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 408:
        headers["Connection"] = "close"
    return headers
