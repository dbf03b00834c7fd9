"""Server-sent events with a type, as Anthropic's Messages and OpenAI's Responses have them."""

from __future__ import annotations

import orjson


def event(kind: str, **fields: object) -> bytes:
    """Encode one event; its data repeats its type."""
    data = orjson.dumps({"type": kind, **fields})
    return b"".join((b"event: ", kind.encode(), b"\ndata: ", data, b"\n\n"))
