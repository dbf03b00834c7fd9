"""Hermes, and Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The format: https://github.com/NousResearch/Hermes-Function-Calling. The last closing marker may be
missing where the model stopped instead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from app.tool_calls.json_call import read_json_call
from app.tool_calls.message import Call
from app.tool_calls.source import Source, Steps

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def read_hermes(source: Source, names: Collection[str]) -> Steps[Sequence[Call] | None]:
    """Read one call with its markers."""
    if not (yield from source.literal(OPEN)):
        return None
    yield from source.skip_space()
    call = yield from read_json_call(source, names)
    if call is None:
        return None
    yield from source.skip_space()
    is_closed = yield from source.literal(CLOSE)
    if not is_closed and (yield from source.peek()):
        return None
    return (call,)
