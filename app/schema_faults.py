"""Request bodies as JSON, and what is wrong with one: the first fault of pydantic's, by its name.

Knows no endpoint. Invariant: a fault of a parameter names it as the client wrote it.
"""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import ValidationError

from app.errors import InvalidJSON, MissingParameter, UnknownParameter
from app.json_types import is_object
from replicas.errors import InvalidRequest


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a request body.

    Raises:
        InvalidJSON: not JSON (NaN and Infinity are not), or not an object.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidJSON(f"the body is not valid JSON: {error}") from error
    if not is_object(value):
        raise InvalidJSON(f"the body must be a JSON object, got {_json_type(value)}")
    return value


def as_invalid_request(error: ValidationError) -> InvalidRequest:
    """Describe the first fault of a body."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ""
    for step in first["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        else:
            param += f".{step}" if param else step
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if not param and kind == "value_error":  # of the request as a whole: it names the parameter
        param, _, message = message.partition(": ")
    if kind == "extra_forbidden":
        return UnknownParameter(f"unknown parameter: '{param}'", param=param)
    if kind == "missing":
        return MissingParameter(f"missing required parameter: '{param}'", param=param)
    got = "" if kind == "value_error" else f", got {_shown(first['input'])}"
    return InvalidRequest(
        f"invalid value for '{param}': {message[:1].lower()}{message[1:]}{got}", param=param
    )


def _shown(value: object) -> str:
    """A value for an error message; long ones are cut."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _json_type(value: object) -> str:
    kinds: dict[type, str] = {list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")
