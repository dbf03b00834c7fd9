"""Items of a conversation in OpenAI's Responses API, and the chat that they are.

Pure. Invariant: an item that was parsed has a place in the chat; whatever would be left out of it
is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.errors import UnsupportedParameter
from app.json_types import is_list, is_object
from app.tool_calls.schema import FunctionName

MAX_ITEMS = 10_000
_TEXT_PARTS: Final = ("input_text", "output_text", "text")

Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(max_length=256)]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class ContentPart(_Schema):
    """A part of a message. What an answer carries beside its text may come back, and is dropped."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _parts(value: object) -> object:
    if isinstance(value, str):
        return ({"type": "input_text", "text": value},)
    if not is_list(value):
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        kind = part.get("type") if is_object(part) else None
        if kind not in _TEXT_PARTS:
            raise ValueError(
                f"content parts must be of type 'input_text' or 'output_text', got {kind!r}: the "
                "model reads text"
            )
    return tuple(value)


class MessageItem(_Schema):
    """A message of either side."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    # A string counts as one part.
    content: tuple[ContentPart, ...]
    id: ItemId | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    @field_validator("content", mode="before", json_schema_input_type=str | list[ContentPart])
    @classmethod
    def _content(cls, value: object) -> object:
        return _parts(value)


class FunctionCallItem(_Schema):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: ItemId
    name: FunctionName
    arguments: str
    id: ItemId | None = None
    status: Status | None = None


class FunctionCallOutputItem(_Schema):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: ItemId
    # A string counts as one part.
    output: tuple[ContentPart, ...]
    id: ItemId | None = None
    status: Status | None = None

    @field_validator("output", mode="before", json_schema_input_type=str | list[ContentPart])
    @classmethod
    def _output(cls, value: object) -> object:
        return _parts(value)


class ReasoningText(_Schema):
    """A part of the reasoning, or of a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Schema):
    """What the model thought before it answered, as this server gave it."""

    type: Literal["reasoning"]
    summary: tuple[ReasoningText, ...] = ()
    content: tuple[ReasoningText, ...] | None = None
    # Reasoning is not encrypted here: its text is in `content`.
    encrypted_content: None = None
    id: ItemId | None = None
    status: Status | None = None

    @field_validator("summary", "content", mode="before")
    @classmethod
    def _texts(cls, value: object) -> object:
        return tuple(value) if is_list(value) else value

    @property
    def text(self) -> str:
        """The reasoning itself, or its summary where that is all there is."""
        return "\n".join(part.text for part in self.content or self.summary)


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem

_ITEMS: Final[dict[str, type[Item]]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}


def check_items(value: object) -> tuple[object, ...]:
    """Look at the kinds of the items of an `input` and drop their nulls.

    Raises:
        ValueError: there are none or too many.
        UnsupportedParameter: one is of a kind that has no place in a chat.
    """
    if isinstance(value, str):
        return ({"type": "message", "role": "user", "content": value},)
    if not is_list(value) or not 1 <= len(value) <= MAX_ITEMS:
        raise ValueError(f"must be a string, or a list of 1 to {MAX_ITEMS} items")
    found: list[object] = []
    for index, item in enumerate(value):
        if not is_object(item):
            raise ValueError(f"item {index} must be an object")
        kind = item.get("type")
        if kind is None:
            kind = "message"
        if not isinstance(kind, str) or kind not in _ITEMS:  # a list could not be looked up
            raise UnsupportedParameter(
                f"items of type {str(kind)[:64]!r} are not supported by this server; there are "
                + ", ".join(sorted(_ITEMS)),
                param=f"input[{index}].type",
            )
        found.append({"type": kind} | {k: v for k, v in item.items() if v is not None})
    return tuple(found)


def item_schema(item: object) -> type[Item]:
    """The model of a checked item."""
    return _ITEMS[item["type"]] if is_object(item) else MessageItem


def as_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages of the chat that the items are.

    Reasoning, text and calls that follow each other are one message of the assistant.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message that is being put together

    def assistant() -> dict[str, Any]:
        nonlocal turn
        if turn is None:
            turn = {"role": "assistant", "content": []}
            messages.append(turn)
        return turn

    for item in items:
        match item:
            case ReasoningItem():
                message = assistant()
                if message["content"] or "tool_calls" in message:
                    turn = None
                    message = assistant()
                message["reasoning_content"] = message.get("reasoning_content", "") + item.text
            case MessageItem(role="assistant"):
                message = assistant()
                if message["content"] or "tool_calls" in message:
                    turn = None
                    message = assistant()
                message["content"] = _chat_parts(item.content)
            case MessageItem():
                turn = None
                messages.append({"role": item.role, "content": _chat_parts(item.content)})
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                assistant().setdefault("tool_calls", []).append(call)
            case FunctionCallOutputItem():
                turn = None
                content = _chat_parts(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    return messages


def _chat_parts(parts: Sequence[ContentPart]) -> list[dict[str, str]]:
    return [{"type": "text", "text": part.text} for part in parts]


def with_ids(items: Sequence[Item], new_id: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return items as they are listed: each has an id."""
    listed: list[dict[str, Any]] = []
    for item in items:
        data: dict[str, Any] = orjson.loads(item.model_dump_json(exclude_none=True))
        if isinstance(item, ReasoningItem):
            data.setdefault("summary", [])
        listed.append({"id": new_id(_PREFIXES[item.type]), **data})
    return listed


_PREFIXES: Final[dict[str, str]] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
