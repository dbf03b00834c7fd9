"""Mistral, two generations behind one marker.

Up to the v7 tokenizer: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, all calls in one
array. From v11 on, for each call: `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, where the id and the
`[ARGS]` may be missing. The format: https://github.com/mistralai/mistral-common.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from app.tool_calls import json_text
from app.tool_calls.json_call import read_json_call
from app.tool_calls.message import Call
from app.tool_calls.source import Source, Steps

TOOL_CALLS = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"

_NAME = re.compile(r"[a-zA-Z0-9_-]*")
_ID = re.compile(r"[a-zA-Z0-9_-]*")


def read_mistral(source: Source, names: Collection[str]) -> Steps[Sequence[Call] | None]:
    """Read the array, or one call of the newer form."""
    if not (yield from source.literal(TOOL_CALLS)):
        return None
    yield from source.skip_space()
    if (yield from source.literal("[")):
        return (yield from _read_array(source, names))
    name = yield from source.run(_NAME, max_chars=64)
    if name not in names:
        return None
    if (yield from source.literal(CALL_ID)):
        yield from source.run(_ID, max_chars=64)
    yield from source.literal(ARGS)
    yield from source.skip_space()
    start = source.position
    if not (yield from json_text.read_object(source)):
        return None
    return (Call(name, source.text[start : source.position]),)


def _read_array(source: Source, names: Collection[str]) -> Steps[Sequence[Call] | None]:
    calls: list[Call] = []
    while True:
        yield from source.skip_space()
        call = yield from read_json_call(source, names)
        if call is None:
            return None
        calls.append(call)
        yield from source.skip_space()
        if (yield from source.literal("]")):
            return calls
        if not (yield from source.literal(",")):
            return None
