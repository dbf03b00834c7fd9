"""Strict JSON (RFC 8259), recognised as it arrives.

Fails at the first character that no JSON text could have there, so that text which only looks like
a tool call is held back no longer than needed. Nothing is built: the raw text is what counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from app.tool_calls.source import Source, Steps

MAX_DEPTH = 64

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_STARTS = "-0123456789tfn"
_HEX = "0123456789abcdefABCDEF"
_MAX_SCALAR_CHARS = 1_000

ReadMember = Callable[[str], Steps[bool]]
"""Reads the value of a member whose key (raw, with its quotes) is given."""


def read_value(source: Source, depth: int = MAX_DEPTH) -> Steps[bool]:
    """Read one value; whether there is one. `depth` containers may be nested."""
    char = yield from source.peek()
    if char == "{":
        return (yield from read_object(source, depth))
    if char == "[":
        return (yield from read_array(source, depth))
    if char == '"':
        return (yield from read_string(source))
    if char == "" or char not in _SCALAR_STARTS:
        return False
    word = yield from source.run(_WORD, max_chars=_MAX_SCALAR_CHARS)
    return _SCALAR.fullmatch(word) is not None


def read_object(
    source: Source, depth: int = MAX_DEPTH, *, read_member: ReadMember | None = None
) -> Steps[bool]:
    """Read one object; `read_member` reads the values of its members in place of `read_value`."""
    if depth == 0 or not (yield from source.literal("{")):
        return False
    yield from source.skip_space()
    if (yield from source.literal("}")):
        return True
    while True:
        start = source.position
        if not (yield from read_string(source)):
            return False
        key = source.text[start : source.position]
        yield from source.skip_space()
        if not (yield from source.literal(":")):
            return False
        yield from source.skip_space()
        member = read_value(source, depth - 1) if read_member is None else read_member(key)
        if not (yield from member):
            return False
        yield from source.skip_space()
        if (yield from source.literal("}")):
            return True
        if not (yield from source.literal(",")):
            return False
        yield from source.skip_space()


def read_arguments(source: Source) -> Steps[str | None]:
    """Read one object, with space around it, and return its text; None where there is none."""
    yield from source.skip_space()
    start = source.position
    if not (yield from read_object(source)):
        return None
    arguments = source.text[start : source.position]
    yield from source.skip_space()
    return arguments


def read_array(source: Source, depth: int = MAX_DEPTH) -> Steps[bool]:
    """Read one array."""
    if depth == 0 or not (yield from source.literal("[")):
        return False
    yield from source.skip_space()
    if (yield from source.literal("]")):
        return True
    while True:
        if not (yield from read_value(source, depth - 1)):
            return False
        yield from source.skip_space()
        if (yield from source.literal("]")):
            return True
        if not (yield from source.literal(",")):
            return False
        yield from source.skip_space()


def read_string(source: Source, *, max_chars: int | None = None) -> Steps[bool]:
    """Read one string; one of more than `max_chars` raw characters fails without its end."""
    if not (yield from source.literal('"')):
        return False
    start = source.position
    while True:
        match = _PLAIN.match(source.text, source.position)
        assert match is not None
        source.position = match.end()
        if max_chars is not None and source.position - start > max_chars:
            return False
        char = yield from source.peek()
        if char == '"':
            source.position += 1
            return True
        if char == "\\":
            if not (yield from _read_escape(source)):
                return False
        elif char == "" or char < " ":
            return False


def _read_escape(source: Source) -> Steps[bool]:
    source.position += 1
    char = yield from source.peek()
    source.position += 1
    if char != "u":
        return char != "" and char in '"\\/bfnrt'
    for _ in range(4):
        char = yield from source.peek()
        if char == "" or char not in _HEX:
            return False
        source.position += 1
    return True


def is_object(text: str) -> bool:
    """Whether a whole text is one JSON object, whitespace around it allowed."""
    source = Source(text.strip(" \t\r\n"), is_ended=True)
    steps = read_object(source)
    try:
        next(steps)
    except StopIteration as end:
        return end.value is True and source.position == len(source.text)
    raise AssertionError("a parser of a whole text waits for nothing")


def decoded(raw: str) -> str:
    """The text of a raw JSON string."""
    text = json.loads(raw)
    assert isinstance(text, str)
    return text
