"""Content blocks of an answer in Anthropic's Messages API, and the events that build them.

Pure; one code path for streams and whole answers. Invariant: the events, put together as
Anthropic's client does it, are the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import orjson

from app.sse import event
from app.tool_calls.message import MessageDelta, ToolCall

_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": "", "citations": None},
    # Nothing is signed here: thinking comes back as its text.
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class BlockWriter:
    """The blocks of one message.

    Attributes:
        blocks: so far; the last one may still grow.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._is_open = False

    def feed(self, text: str, message: MessageDelta | None) -> bytes:
        """Take new output; return its events."""
        return b"".join(self._feed(text, message))

    def close(self) -> bytes:
        """End the block that is open, if one is."""
        if not self._is_open:
            return b""
        self._is_open = False
        return event("content_block_stop", index=len(self.blocks) - 1)

    def _feed(self, text: str, message: MessageDelta | None) -> Iterator[bytes]:
        if message is not None and message.reasoning:
            yield from self._write("thinking", message.reasoning)
        if text:
            yield from self._write("text", text)
        for call in () if message is None else message.tool_calls:
            yield from self._call(call)

    def _write(self, kind: Literal["text", "thinking"], text: str) -> Iterator[bytes]:
        if not self._is_open or self.blocks[-1]["type"] != kind:
            yield from self._open(_EMPTY[kind])
        self.blocks[-1][kind] += text
        delta = {"type": f"{kind}_delta", kind: text}
        yield event("content_block_delta", index=len(self.blocks) - 1, delta=delta)

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        yield from self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield event("content_block_delta", index=len(self.blocks) - 1, delta=delta)
        self.blocks[-1]["input"] = orjson.loads(call.arguments)
        yield self.close()

    def _open(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield self.close()
        self._is_open = True
        self.blocks.append(dict(block))
        yield event("content_block_start", index=len(self.blocks) - 1, content_block=block)
