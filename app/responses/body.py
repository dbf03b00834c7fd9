"""The response object and its events, put together while the model writes.

Pure; one code path for streams and whole answers. Invariant: the events of a stream add up to the
response object that its last event carries, and sequence numbers have no gap.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any, Literal

import orjson

from app.openai_response import Usage
from app.responses.schema import ResponsesRequest
from app.sse import event
from app.tool_calls.message import MessageDelta, ToolCall
from replicas.errors import Overloaded, ServingError

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Event = dict[str, Any]


def new_id(prefix: str) -> str:
    """Draw the id of a response or an item."""
    return f"{prefix}_{secrets.token_hex(24)}"


class ResponseWriter:
    """One response, from its creation to its end.

    Attributes:
        id: of the response.
        status: where it stands.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        *,
        response_id: str,
        model: str,
        temperature: float,
        top_p: float,
    ) -> None:
        """Begin a response.

        Args:
            request: what was asked.
            response_id: see the attributes.
            model: that answers.
            temperature: in force.
            top_p: in force.
        """
        self.id = response_id
        self.status: Status = "in_progress"
        self._created_at = int(time.time())
        self._completed_at: int | None = None
        self._error: dict[str, Any] | None = None
        self._incomplete: dict[str, Any] | None = None
        self._usage: Usage | None = None
        self._output: list[dict[str, Any]] = []
        self._is_open = False  # the last item of the output is still written
        self._text: list[str] = []  # of the open item
        self._num_events = 0
        choice = request.tool_choice
        self._fixed: dict[str, Any] = {
            "background": request.background,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": model,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": request.store,
            "temperature": temperature,
            "text": {"format": request.text.format or {"type": "text"}},
            "tool_choice": choice,
            "tools": [tool.as_json() for tool in request.tools],
            "top_logprobs": 0,
            "top_p": top_p,
            "truncation": "disabled",
            "user": request.user,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the response object as it is now."""
        usage = self._usage
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self.status,
            "error": self._error,
            "incomplete_details": self._incomplete,
            **self._fixed,
            "output": self._output,
            "usage": None if usage is None else usage_json(usage),
        }

    def body(self) -> bytes:
        """Render the response object."""
        return orjson.dumps(self.as_json())

    def output_items(self) -> list[dict[str, Any]]:
        """The items that the model has written so far."""
        return list(self._output)

    def begin(self) -> bytes:
        """The first events."""
        return self._encode(
            {"type": "response.created", "response": self.as_json()},
            {"type": "response.in_progress", "response": self.as_json()},
        )

    def feed(self, text: str, message: MessageDelta | None) -> bytes:
        """Take new output; return its events."""
        return self._encode(*self._feed(text, message))

    def end(self, finish_reason: str, usage: Usage) -> bytes:
        """The model has stopped: return the last events."""
        self._usage = usage
        reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
        reason = reasons.get(finish_reason)
        self._completed_at = int(time.time()) if reason is None else None
        self._incomplete = None if reason is None else {"reason": reason}
        return self._end("completed" if reason is None else "incomplete")

    def cancel(self, usage: Usage) -> bytes:
        """Someone ended it: return the last events."""
        self._usage = usage
        return self._end("cancelled")

    def fail(self, error: ServingError) -> bytes:
        """It failed: return the last events."""
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        self._error = {"code": code, "message": error.message}
        return self._end("failed")

    def _end(self, status: Status) -> bytes:
        is_whole = status == "completed"
        events = list(self._close("completed" if is_whole else "incomplete"))
        self.status = status
        # OpenAI has no event for a response that was cancelled: it is not complete.
        kind = "incomplete" if status == "cancelled" else status
        return self._encode(*events, {"type": f"response.{kind}", "response": self.as_json()})

    def _feed(self, text: str, message: MessageDelta | None) -> Iterator[Event]:
        if message is not None and message.reasoning:
            yield from self._write("reasoning", message.reasoning)
        if text:
            yield from self._write("message", text)
        for call in () if message is None else message.tool_calls:
            yield from self._close("completed")
            yield from self._call(call)

    def _write(self, kind: Literal["message", "reasoning"], text: str) -> Iterator[Event]:
        if not self._is_open or self._output[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind)
        self._text.append(text)
        if kind == "message":
            yield self._at("response.output_text.delta", content_index=0, delta=text, logprobs=[])
        else:
            yield self._at("response.reasoning_text.delta", content_index=0, delta=text)

    def _open(self, kind: Literal["message", "reasoning"]) -> Iterator[Event]:
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item |= {"id": new_id("msg"), "role": "assistant"}
        else:
            item |= {"id": new_id("rs"), "summary": [], "encrypted_content": None}
        self._output.append(item)
        self._is_open, self._text = True, []
        yield self._at("response.output_item.added", item={**item, "content": []})
        part = _part(kind, "")
        yield self._at("response.content_part.added", content_index=0, part=part)

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[Event]:
        if not self._is_open:
            return
        item, text = self._output[-1], "".join(self._text)
        part = _part(item["type"], text)
        if item["type"] == "message":
            yield self._at("response.output_text.done", content_index=0, text=text, logprobs=[])
        else:
            yield self._at("response.reasoning_text.done", content_index=0, text=text)
        yield self._at("response.content_part.done", content_index=0, part=part)
        item |= {"content": [part], "status": status}
        self._is_open = False
        yield self._at("response.output_item.done", item=dict(item))

    def _call(self, call: ToolCall) -> Iterator[Event]:
        item: dict[str, Any] = {
            "id": new_id("fc"),
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self._output.append(item)
        yield self._at("response.output_item.added", item=dict(item))
        yield self._at("response.function_call_arguments.delta", delta=call.arguments)
        yield self._at(
            "response.function_call_arguments.done", name=call.name, arguments=call.arguments
        )
        item |= {"arguments": call.arguments, "status": "completed"}
        yield self._at("response.output_item.done", item=dict(item))

    def _at(self, kind: str, **fields: Any) -> Event:
        """An event of the last item."""
        place: Event = {"type": kind, "output_index": len(self._output) - 1}
        if "item" not in fields:
            place["item_id"] = self._output[-1]["id"]
        return place | fields

    def _encode(self, *events: Event) -> bytes:
        encoded: list[bytes] = []
        for fields in events:
            kind: str = fields.pop("type")
            encoded.append(event(kind, **fields, sequence_number=self._num_events))
            self._num_events += 1
        return b"".join(encoded)


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the Responses API's usage object; its details may not be left out."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}
