"""Content with tool calls in it, and reasoning before it: the shape of every style but gpt-oss's.

Invariant: each character is content, reasoning or part of a call that is handed out, but for
whitespace next to a marker, which goes with the marker.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from app.tool_calls.message import Message, ReadCalls
from app.tool_calls.source import Source, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarkers:
    """How calls are found in content.

    Attributes:
        openers: literals that begin calls.
        read: reads them.
        closers: literals that may follow calls and mean nothing.
        is_bare: calls need no opener at the beginning of the content and behind another call.
    """

    openers: tuple[str, ...]
    read: ReadCalls
    closers: tuple[str, ...] = ()
    is_bare: bool = False


@dataclass(frozen=True, slots=True)
class ThoughtMarkers:
    """Literals around the reasoning, which precedes the content."""

    begin: str
    end: str


def read_thought(
    source: Source, message: Message, markers: ThoughtMarkers, *, is_open: bool
) -> Steps[None]:
    """Read the reasoning, if the message begins with any.

    Args:
        source: the text.
        message: takes the reasoning.
        markers: what is around it.
        is_open: the prompt holds its begin already. Some models repeat it.
    """
    message.is_reasoning = is_open
    yield from source.skip_space()
    has_begin = yield from source.literal(markers.begin)
    if not has_begin and not is_open:
        source.position = 0
        return
    message.is_reasoning = True
    yield from source.skip_space()
    source.discard_read()
    if (yield from source.copy_until((markers.end,), message.add_reasoning)):
        yield from source.skip_space()
        yield from source.literal(markers.end)
        message.is_reasoning = False
        yield from source.skip_space()
        source.discard_read()


def read_content(
    source: Source, message: Message, markers: CallMarkers | None, names: Collection[str]
) -> Steps[None]:
    """Read content and calls to the end of the text, or until the message is full.

    A call is handed out when it is complete and known to be well-formed. What turns out not to be
    one is content, and is searched for calls behind its first character.
    """
    if markers is None or not names:
        yield from source.copy_until((), message.add_content)
        return
    may_be_bare = markers.is_bare
    while True:
        is_call = may_be_bare and (yield from _read_calls(source, message, markers, names))
        may_be_bare = False
        if not is_call:
            if not (yield from source.copy_until(markers.openers, message.add_content)):
                return
            is_call = yield from _read_calls(source, message, markers, names)
        if is_call:
            if message.is_full:
                return
            yield from _skip_closers(source, markers.closers)
            source.discard_read()
            may_be_bare = markers.is_bare
        else:
            yield from source.skip_space()
            source.position += 1
            message.add_content(source.text[: source.position])
            source.discard_read()


def _read_calls(
    source: Source, message: Message, markers: CallMarkers, names: Collection[str]
) -> Steps[bool]:
    """Read calls from the cursor on, or leave it where it is: at the start of the text."""
    assert source.position == 0
    yield from source.skip_space()
    calls = yield from markers.read(source, names)
    if calls is None:
        source.position = 0
        return False
    message.add_calls(calls)
    return True


def _skip_closers(source: Source, closers: tuple[str, ...]) -> Steps[None]:
    while True:
        yield from source.skip_space()
        if (yield from source.any_literal(closers)) is None:
            return
