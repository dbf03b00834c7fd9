"""DeepSeek V3, R1 and V3.1: calls between markers of their own vocabulary.

V3 and R1 write `BEGIN function SEP name`, a line break, the arguments in a fenced `json` block, and
`END`; V3.1 writes `BEGIN name SEP {...} END`. A pair of outer markers encloses all calls; it goes
with the first and the last of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from app.tool_calls import json_text
from app.tool_calls.message import Call
from app.tool_calls.source import Source, Steps

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

_NAME = re.compile(r"[a-zA-Z0-9_-]*")
_FENCE = "```"


def read_deepseek(source: Source, names: Collection[str]) -> Steps[Sequence[Call] | None]:
    """Read one call, and the outer marker before it."""
    if (yield from source.literal(CALLS_BEGIN)):
        yield from source.skip_space()
    if not (yield from source.literal(CALL_BEGIN)):
        return None
    name = yield from source.run(_NAME, max_chars=64)
    if not (yield from source.literal(SEPARATOR)):
        return None
    is_fenced = name == "function" and (yield from source.peek()) != "{"
    if is_fenced:
        name = yield from source.run(_NAME, max_chars=64)
        yield from source.skip_space()
        if not (yield from source.literal(f"{_FENCE}json")):
            return None
    if name not in names:
        return None
    arguments = yield from json_text.read_arguments(source)
    if arguments is None:
        return None
    if is_fenced and not (yield from source.literal(_FENCE)):
        return None
    yield from source.skip_space()
    is_closed = yield from source.literal(CALL_END)
    if not is_closed and (yield from source.peek()):
        return None
    return (Call(name, arguments),)
