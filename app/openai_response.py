"""What a client gets: bodies and stream chunks of completions and chat completions, as bytes.

A stream's chunks differ in a few fields only, so everything else is serialised once per request
and a chunk is a join of prepared bytes with the text. Pure. Invariant: a body and the
concatenation of a stream's chunks carry the same text, ids, finish reasons and usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from app.tool_calls.message import MessageDelta, ToolCall

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request, over all its prompts and choices.

    Attributes:
        prompt_tokens: each prompt counts once, however many choices it has.
        completion_tokens: tokens generated, a final stop token included.
        cached_tokens: prompt tokens found in the prefix cache; None: not known.
        reasoning_tokens: how many of the completion's are reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    reasoning_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        # Left out rather than guessed where it is not known.
        cached = self.cached_tokens
        details = None if cached is None else {"cached_tokens": cached, "audio_tokens": 0}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": details,
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "audio_tokens": 0,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOutput:
    """One finished choice.

    Attributes:
        text: the whole output text; of a chat, its content.
        token_ids: all output token ids.
        prompt_token_ids: ids of the choice's prompt.
        finish_reason: "stop", "length" or "tool_calls".
        stop_string: what of `stop` ended it, or None.
        logprobs: rendered, or None.
        prompt_logprobs: rendered, or None.
        reasoning: what of a chat's output precedes its content.
        tool_calls: of a chat.
    """

    text: str
    token_ids: Sequence[int]
    prompt_token_ids: Sequence[int]
    finish_reason: str
    stop_string: str | None = None
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHeader:
    """What every body and chunk of one response repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def as_json(self, kind: str) -> dict[str, Any]:
        """Return the fields in the order that OpenAI's examples show them."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class StreamFormat(Protocol):
    """How the chunks of a stream look."""

    def first(self, index: int, prompt_token_ids: Sequence[int]) -> bytes:
        """What precedes a choice's first text; may be empty."""
        ...

    def text(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with new text of one choice, and the log-probabilities of its tokens."""
        ...

    def message(
        self,
        index: int,
        delta: MessageDelta,
        token_ids: Sequence[int],
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with more than text: reasoning or tool calls, which only chats have."""
        ...

    def last(self, index: int, finish_reason: str) -> bytes:
        """The last chunk of a choice."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The chunk after all choices; empty unless the client asked for usage."""
        ...


class _Frame:
    """The bytes of a chunk around what one choice adds."""

    def __init__(self, header: ResponseHeader, kind: str, *, include_usage: bool) -> None:
        self._start = b"data: " + orjson.dumps(header.as_json(kind))[:-1]
        self._head = self._start + b',"choices":[{"index":'
        self._tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._include_usage = include_usage

    def choice(
        self,
        index: int,
        *fields: bytes,
        finish_reason: bytes = b"null",
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk of one choice; `fields` begin with a comma."""
        reason = (b',"logprobs":null,"finish_reason":', finish_reason)
        if logprobs is not None:
            reason = (b',"logprobs":', orjson.dumps(logprobs), b',"finish_reason":', finish_reason)
        return b"".join((self._head, b"%d" % index, *fields, *reason, self._tail))

    def usage(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b""
        return b"".join(
            (self._start, b',"choices":[],"usage":', orjson.dumps(usage.as_json()), b"}\n\n")
        )


class CompletionStream:
    """Chunks of a streamed completion."""

    def __init__(
        self, header: ResponseHeader, *, include_usage: bool, return_token_ids: bool
    ) -> None:
        self._frame = _Frame(header, "text_completion", include_usage=include_usage)
        self._return_token_ids = return_token_ids

    def first(self, index: int, prompt_token_ids: Sequence[int]) -> bytes:
        """The prompt's ids, for those who asked for ids."""
        if not self._return_token_ids:
            return b""
        ids = orjson.dumps(prompt_token_ids)
        fields = (b',"text":"","token_ids":[],"prompt_token_ids":', ids)
        return self._frame.choice(index, *fields)

    def text(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with new text."""
        if not self._return_token_ids:
            return self._frame.choice(index, b',"text":', orjson.dumps(text), logprobs=logprobs)
        fields = (b',"text":', orjson.dumps(text), b',"token_ids":', orjson.dumps(token_ids))
        return self._frame.choice(index, *fields, logprobs=logprobs)

    def message(
        self,
        index: int,
        delta: MessageDelta,
        token_ids: Sequence[int],
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """A completion has text only."""
        raise AssertionError("completions have no messages")

    def last(self, index: int, finish_reason: str) -> bytes:
        """The chunk with the finish reason."""
        reason = orjson.dumps(finish_reason)
        return self._frame.choice(index, b',"text":""', finish_reason=reason)

    def usage(self, usage: Usage) -> bytes:
        """The usage chunk."""
        return self._frame.usage(usage)


class ChatStream:
    """Chunks of a streamed chat completion."""

    def __init__(
        self, header: ResponseHeader, *, include_usage: bool, return_token_ids: bool
    ) -> None:
        self._frame = _Frame(header, "chat.completion.chunk", include_usage=include_usage)
        self._return_token_ids = return_token_ids

    def first(self, index: int, prompt_token_ids: Sequence[int]) -> bytes:
        """The chunk with the role; the prompt's ids stand beside the choices, as in vLLM."""
        delta = b',"delta":{"role":"assistant","content":"","refusal":null}'
        chunk = self._frame.choice(index, delta)
        if not self._return_token_ids:
            return chunk
        ids, end = orjson.dumps(prompt_token_ids), b"}\n\n"
        return b"".join((chunk.removesuffix(end), b',"prompt_token_ids":', ids, end))

    def text(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with new text."""
        content = orjson.dumps(text)
        if not self._return_token_ids:
            fields = (b',"delta":{"content":', content, b"}")
            return self._frame.choice(index, *fields, logprobs=logprobs)
        ids = orjson.dumps(token_ids)
        fields = (b',"delta":{"content":', content, b'},"token_ids":', ids)
        return self._frame.choice(index, *fields, logprobs=logprobs)

    def message(
        self,
        index: int,
        delta: MessageDelta,
        token_ids: Sequence[int],
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with new reasoning, content and tool calls."""
        content: dict[str, Any] = {"content": delta.content} if delta.content else {}
        content |= _beside_content(delta.reasoning, delta.tool_calls, is_delta=True)
        fields = [b',"delta":', orjson.dumps(content)]
        if self._return_token_ids:
            fields += [b',"token_ids":', orjson.dumps(token_ids)]
        return self._frame.choice(index, *fields, logprobs=logprobs)

    def last(self, index: int, finish_reason: str) -> bytes:
        """The chunk with the finish reason and an empty delta."""
        return self._frame.choice(index, b',"delta":{}', finish_reason=orjson.dumps(finish_reason))

    def usage(self, usage: Usage) -> bytes:
        """The usage chunk."""
        return self._frame.usage(usage)


def completion_body(
    header: ResponseHeader, choices: Sequence[ChoiceOutput], usage: Usage, *, return_token_ids: bool
) -> bytes:
    """Render a whole completion."""
    rendered: list[dict[str, Any]] = []
    for index, choice in enumerate(choices):
        entry: dict[str, Any] = {
            "index": index,
            "text": choice.text,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }
        if return_token_ids:
            entry["token_ids"] = choice.token_ids
            entry["prompt_token_ids"] = choice.prompt_token_ids
        if choice.prompt_logprobs is not None:
            entry["prompt_logprobs"] = choice.prompt_logprobs
        rendered.append(entry)
    body = header.as_json("text_completion")
    return orjson.dumps({**body, "choices": rendered, "usage": usage.as_json()})


def chat_body(
    header: ResponseHeader, choices: Sequence[ChoiceOutput], usage: Usage, *, return_token_ids: bool
) -> bytes:
    """Render a whole chat completion."""
    rendered: list[dict[str, Any]] = []
    for index, choice in enumerate(choices):
        entry: dict[str, Any] = {
            "index": index,
            "message": {
                "role": "assistant",
                "content": None if choice.tool_calls and not choice.text else choice.text,
                "refusal": None,
                **_beside_content(choice.reasoning, choice.tool_calls, is_delta=False),
            },
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }
        if return_token_ids:
            entry["token_ids"] = choice.token_ids
        rendered.append(entry)
    body = header.as_json("chat.completion")
    extra: dict[str, Any] = {}
    if return_token_ids:
        extra["prompt_token_ids"] = choices[0].prompt_token_ids
    if choices[0].prompt_logprobs is not None:
        extra["prompt_logprobs"] = choices[0].prompt_logprobs
    return orjson.dumps({**body, "choices": rendered, "usage": usage.as_json(), **extra})


def _beside_content(
    reasoning: str, tool_calls: Sequence[ToolCall], *, is_delta: bool
) -> dict[str, Any]:
    """Return the fields of a message, or of a delta, that are there only where needed."""
    fields: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
    if tool_calls:
        fields["tool_calls"] = [
            {
                **({"index": call.index} if is_delta else {}),
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in tool_calls
        ]
    return fields
