"""What a client of Anthropic's Messages API gets: bodies, events and errors, as bytes.

Pure. Invariant: the events of a stream, put together as Anthropic's client does it, are the body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import orjson

from app.anthropic_errors import event
from app.anthropic_schema import MessagesRequest, parse_messages
from app.completion_service import CompletionService
from app.generation import Generation
from app.openai_response import ChoiceOutput, Usage
from app.tool_calls.message import MessageDelta


class MessagesGeneration(Generation):
    """A chat completion that is answered in Anthropic's shapes."""

    @classmethod
    def of(cls, generation: Generation) -> MessagesGeneration:
        """Answer a planned chat completion so."""
        message_id = generation.header.id.replace("chatcmpl-", "msg_")
        return cls(
            header=dataclasses.replace(generation.header, id=message_id),
            params=generation.params,
            choices=generation.choices,
            arrived_s=generation.arrived_s,
            names=generation.names,
        )

    def stream_format(self) -> MessagesStream:
        """Return how the events of this response look."""
        return MessagesStream(self)

    def body(self, outputs: Sequence[ChoiceOutput]) -> bytes:
        """Render the whole message."""
        [output] = outputs
        return orjson.dumps(
            {
                **self.opening(),
                "content": [{"type": "text", "text": output.text, "citations": None}],
                **self.ending(output.finish_reason),
                "usage": usage_json(self.usage()),
            }
        )

    def opening(self) -> dict[str, Any]:
        """What is known before the first token."""
        return {
            "id": self.header.id,
            "type": "message",
            "role": "assistant",
            "model": self.header.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def ending(self, finish_reason: str) -> dict[str, Any]:
        """Why the message ended."""
        stop = self.choices[0].stop_string
        reason = "max_tokens" if finish_reason == "length" else "end_turn"
        return {
            "stop_reason": reason if stop is None else "stop_sequence",
            "stop_sequence": stop,
        }


class MessagesStream:
    """Events of a streamed message."""

    def __init__(self, generation: MessagesGeneration) -> None:
        self._generation = generation
        self._finish_reason = "stop"

    def first(self, index: int, prompt_token_ids: Sequence[int]) -> bytes:
        """The message's beginning and that of its one block."""
        del prompt_token_ids
        usage = {**usage_json(self._generation.usage()), "output_tokens": 0}
        block = {"type": "text", "text": "", "citations": None}
        return b"".join(
            (
                event("message_start", message={**self._generation.opening(), "usage": usage}),
                event("content_block_start", index=index, content_block=block),
                event("ping"),
            )
        )

    def text(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """New text."""
        del token_ids, logprobs
        delta = {"type": "text_delta", "text": text}
        return event("content_block_delta", index=index, delta=delta)

    def message(
        self,
        index: int,
        delta: MessageDelta,
        token_ids: Sequence[int],
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """New text; thinking is not asked for here, nor are tools."""
        assert not delta.tool_calls
        return self.text(index, delta.content, token_ids, logprobs) if delta.content else b""

    def last(self, index: int, finish_reason: str) -> bytes:
        """The block's end; the message's own comes with the usage."""
        self._finish_reason = finish_reason
        return event("content_block_stop", index=index)

    def usage(self, usage: Usage) -> bytes:
        """The message's end."""
        delta = self._generation.ending(self._finish_reason)
        return event("message_delta", delta=delta, usage=usage_json(usage)) + event("message_stop")


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's usage object, whose input tokens are those that were not cached."""
    cached = usage.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - (cached or 0),
        "cache_creation_input_tokens": None if cached is None else 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


class MessagesPlanner:
    """Plans POST /v1/messages as the chat completion that it is."""

    def __init__(self, service: CompletionService) -> None:
        self._service = service

    async def plan(self, body: dict[str, Any]) -> MessagesGeneration:
        """Plan a message.

        Raises:
            ServingError: the request is refused.
        """
        chat = parse_messages(MessagesRequest, body).as_chat()
        return MessagesGeneration.of(await self._service.plan_chat(chat))
