"""OpenAI's harmony format of gpt-oss: an answer is a series of messages in channels.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`: analysis
is reasoning, final and commentary are content, and a message to `functions.name` is a call. The
prompt ends with `<|start|>assistant`. The format:
https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from app.tool_calls import json_text
from app.tool_calls.message import Call, Message
from app.tool_calls.source import Source, Steps

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
MARKERS = (START, CHANNEL, MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

_OPENERS = (START, CHANNEL)
_CLOSERS = ("<|end|>", "<|call|>", "<|return|>")
_MAX_HEADER_CHARS = 400
_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?\s*(?:to=(?P<role_to>[^\s<]+))?\s*"
    r"<\|channel\|>(?P<channel>analysis|commentary|final)\s*(?:to=(?P<to>[^\s<]+))?"
    r"\s*(?:<\|constrain\|>)?\w*"
)
_FUNCTIONS = "functions."


def read_harmony(source: Source, message: Message, names: Collection[str]) -> Steps[None]:
    """Read all messages; what has no header of a known kind is content, as is a malformed call."""
    parts: set[str] = set()
    while (yield from source.peek()):
        if (yield from _read_message(source, message, names, parts)):
            if message.is_full:
                return
        else:
            source.position = 1
            message.add_content(source.text[:1])
            yield from source.copy_until(_OPENERS, message.add_content)


def _read_message(
    source: Source, message: Message, names: Collection[str], parts: set[str]
) -> Steps[bool]:
    """Read one message from the start of the text; False: nothing has been handed out.

    `parts` names what the answer has so far: a second message of a kind begins on a new line.
    """
    assert source.position == 0
    yield from source.skip_space()
    if (yield from source.any_literal((*_OPENERS, "to="))) is None:
        return False
    if (yield from source.until(MESSAGE, max_chars=_MAX_HEADER_CHARS)) is None:
        return False
    header = source.text[: source.position].removesuffix(MESSAGE).strip()
    match = _HEADER.fullmatch(header)
    if match is None:
        return False
    if recipient := match["to"] or match["role_to"]:
        call = yield from _read_call(source, recipient.removeprefix(_FUNCTIONS), names)
        if call is None:
            return False
        message.add_calls((call,))
        source.discard_read()
        return True
    message.is_reasoning = match["channel"] == "analysis"
    part = "reasoning" if message.is_reasoning else "content"
    write = message.add_reasoning if message.is_reasoning else message.add_content
    if part in parts:
        write("\n")
    parts.add(part)
    source.discard_read()
    if (yield from source.copy_until((*_CLOSERS, *_OPENERS), write)):
        yield from source.skip_space()
        is_closed = (yield from source.any_literal(_CLOSERS)) is not None
        source.position = source.position if is_closed else 0
        source.discard_read()
    message.is_reasoning = False
    return True


def _read_call(source: Source, name: str, names: Collection[str]) -> Steps[Call | None]:
    if name not in names:
        return None
    arguments = yield from json_text.read_arguments(source)
    if arguments is None:
        return None
    after = source.position
    if (yield from source.any_literal(_CLOSERS)) is not None:
        return Call(name, arguments)
    is_over = (yield from source.any_literal(_OPENERS)) is not None
    source.position = after
    is_over = is_over or not (yield from source.peek())
    return Call(name, arguments) if is_over else None
