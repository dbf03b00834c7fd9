"""Llama 3.1 to 3.3: a bare JSON object, `<|python_tag|>` before it or not.

`{"name": ..., "parameters": {...}}`, several separated by semicolons. Without the tag it is a call
only at the beginning of the message or behind another call: JSON inside of text is text. The tag
also begins code for built-in tools, which are none of ours: that is content.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from app.tool_calls.json_call import read_json_call
from app.tool_calls.message import Call
from app.tool_calls.source import Source, Steps

PYTHON_TAG = "<|python_tag|>"


def read_llama3(source: Source, names: Collection[str]) -> Steps[Sequence[Call] | None]:
    """Read one call, with the separator or tag before it."""
    if (yield from source.any_literal((";", PYTHON_TAG))) is not None:
        yield from source.skip_space()
    call = yield from read_json_call(source, names, needs_arguments=True)
    return None if call is None else (call,)
