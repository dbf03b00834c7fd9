"""What a client of Anthropic's Messages API gets: bodies, events and errors, as bytes.

Pure. Invariant: the events of a stream, put together as Anthropic's client does it, are the body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import orjson

from app.anthropic_blocks import BlockWriter
from app.anthropic_schema import MessagesRequest, parse_messages
from app.choice import Choice, Piece
from app.completion_service import CompletionService
from app.generation import Generation
from app.openai_response import ChoiceOutput, Usage
from app.sse import event
from app.tool_calls.message import MessageDelta

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


class MessagesGeneration(Generation):
    """A chat completion that is answered in Anthropic's shapes."""

    @classmethod
    def of(cls, generation: Generation) -> MessagesGeneration:
        """Answer a planned chat completion so."""
        message_id = generation.header.id.replace("chatcmpl-", "msg_")
        given: dict[str, Any] = _fields_of(generation)
        given["header"] = dataclasses.replace(generation.header, id=message_id)
        return cls(**given)

    def stream_format(self) -> MessagesStream:
        """Return how the events of this response look."""
        return MessagesStream(self)

    def output(self, choice: Choice, pieces: Sequence[Piece]) -> MessageOutput:
        """Put the finished message together."""
        writer = BlockWriter()
        for piece in pieces:
            writer.feed(piece.text, piece.message)
        given = _fields_of(super().output(choice, pieces))
        return MessageOutput(**given, blocks=writer.blocks)

    def body(self, outputs: Sequence[ChoiceOutput]) -> bytes:
        """Render the whole message."""
        [output] = outputs
        assert isinstance(output, MessageOutput)
        return orjson.dumps(
            {
                **self.opening(),
                "content": output.blocks,
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
        reason = "stop_sequence" if stop is not None else _STOP_REASONS[finish_reason]
        if finish_reason in ("tool_calls", "content_filter"):
            reason, stop = _STOP_REASONS[finish_reason], None
        return {"stop_reason": reason, "stop_sequence": stop}


def _fields_of(instance: Generation | ChoiceOutput) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MessageOutput(ChoiceOutput):
    """One finished message.

    Attributes:
        blocks: its content, in the order in which it was written.
    """

    blocks: Sequence[dict[str, Any]]


class MessagesStream:
    """Events of a streamed message."""

    def __init__(self, generation: MessagesGeneration) -> None:
        self._generation = generation
        self._blocks = BlockWriter()
        self._finish_reason = "stop"

    def first(self, index: int, prompt_token_ids: Sequence[int]) -> bytes:
        """The message's beginning."""
        del index, prompt_token_ids
        usage = {**usage_json(self._generation.usage()), "output_tokens": 0}
        message = {**self._generation.opening(), "usage": usage}
        return event("message_start", message=message) + event("ping")

    def text(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """New text."""
        del index, token_ids, logprobs
        return self._blocks.feed(text, None)

    def message(
        self,
        index: int,
        delta: MessageDelta,
        token_ids: Sequence[int],
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """New thinking, text and calls."""
        del index, token_ids, logprobs
        return self._blocks.feed(delta.content, delta)

    def last(self, index: int, finish_reason: str) -> bytes:
        """The last block's end; the message's own comes with the usage."""
        del index
        self._finish_reason = finish_reason
        return self._blocks.close()

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
