"""A call written as one JSON object: `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

from collections.abc import Collection

from app.tool_calls import json_text
from app.tool_calls.message import Call
from app.tool_calls.source import Source, Steps

_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
# Six characters stand for one that is escaped.
_MAX_NAME_CHARS = 6 * 64


def read_json_call(
    source: Source, names: Collection[str], *, needs_arguments: bool = False
) -> Steps[Call | None]:
    """Read a call of one of the functions `names`.

    The arguments are an object, or a string that holds one, as some models write it. A call without
    any has `{}`, unless `needs_arguments`.
    """
    members: dict[str, str] = {}

    def read_member(raw_key: str) -> Steps[bool]:
        key = json_text.decoded(raw_key)
        if key not in _KEYS or key in members:
            return False
        start = source.position
        if key == "name":
            is_string = yield from json_text.read_string(source, max_chars=_MAX_NAME_CHARS)
            if (
                not is_string
                or json_text.decoded(source.text[start : source.position]) not in names
            ):
                return False
        elif not (yield from json_text.read_value(source)):
            return False
        members[key] = source.text[start : source.position]
        return True

    is_object = yield from json_text.read_object(source, read_member=read_member)
    if not is_object or "name" not in members:
        return None
    given = [members[key] for key in _ARGUMENTS if key in members]
    if len(given) > 1 or (needs_arguments and not given):
        return None
    arguments = _object_text(given[0] if given else "null")
    return None if arguments is None else Call(json_text.decoded(members["name"]), arguments)


def _object_text(raw: str) -> str | None:
    """The text of the object that a raw value is or holds."""
    if raw.startswith("{"):
        return raw
    if raw == "null":
        return "{}"
    if not raw.startswith('"'):
        return None
    text = json_text.decoded(raw)
    # Half of a surrogate pair can be escaped in JSON, but not be sent.
    is_sendable = not any("\ud800" <= char <= "\udfff" for char in text)
    return text if is_sendable and json_text.is_object(text) else None
