"""A completion as items for callers that are not HTTP: what is ready when one asks comes as one.

Used by the plain Serve handle and by gRPC. Invariant: the items of a choice, put together, are the
choice as HTTP shows it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from app.choice import Choice, Piece
from app.completion_service import CompletionService
from app.generation import Generation
from app.logprobs import LogprobFormat
from replicas.errors import InvalidRequest


async def stream_items(
    service: CompletionService, generation: Generation
) -> AsyncGenerator[dict[str, Any]]:
    """Run a generation and yield its output.

    Yields:
        Items with `index`, `text`, `token_ids` and `finish_reason` (None until the choice's last
        item), where there are any `reasoning_content` and `tool_calls` (each with `index`, `id`,
        `name` and `arguments`), where they were asked for `logprobs` in HTTP's shape, then one
        with `usage`.

    Raises:
        ServingError: the request fails, or asks for what only HTTP has.
    """
    if generation.echoes or generation.choices[0].sampling.prompt_logprobs is not None:
        raise InvalidRequest("'echo' and 'prompt_logprobs' are for HTTP", param="echo")
    mailbox = _Mailbox(generation)
    run = asyncio.create_task(service.run(generation, mailbox.put))
    run.add_done_callback(mailbox.close)
    try:
        while items := await mailbox.take():
            for item in items:
                yield item
        await run
        yield {"usage": generation.usage().as_json()}
    finally:
        run.cancel()
        await asyncio.wait((run,))


class _Mailbox:
    """Collects output between two reads: one item per choice that has something new."""

    def __init__(self, generation: Generation) -> None:
        self._items: dict[int, dict[str, Any]] = {}
        self._has_news = asyncio.Event()
        self._is_closed = False
        self._formats: list[LogprobFormat] | None = None
        if generation.wants_logprobs:
            self._formats = [generation.logprob_format() for _ in generation.choices]

    async def put(self, choice: Choice, piece: Piece) -> None:
        """Add to the choice's item."""
        empty: dict[str, Any] = {"index": choice.index, "text": "", "token_ids": []}
        item = self._items.setdefault(choice.index, empty)
        item["text"] += piece.text
        item["token_ids"] += piece.token_ids
        if piece.message is not None:
            item["reasoning_content"] = item.get("reasoning_content", "") + piece.message.reasoning
            calls = [dataclasses.asdict(call) for call in piece.message.tool_calls]
            item["tool_calls"] = item.get("tool_calls", []) + calls
        if self._formats is not None and piece.logprobs is not None:
            logprobs = self._formats[choice.index].render(piece.token_ids, piece.logprobs)
            known = item.get("logprobs")
            # Every field of either shape is a list, or null throughout.
            item["logprobs"] = (
                logprobs
                if known is None
                else {k: v if v is None else known[k] + v for k, v in logprobs.items()}
            )
        item["finish_reason"] = choice.finish_reason
        self._has_news.set()

    def close(self, _: object) -> None:
        """Wake the reader, now and whenever it comes: there will be no more."""
        self._is_closed = True
        self._has_news.set()

    async def take(self) -> list[dict[str, Any]]:
        """Wait for output and take it all; empty when there will be no more."""
        await self._has_news.wait()
        if not self._is_closed:
            self._has_news.clear()
        items, self._items = self._items, {}
        return list(items.values())
