"""One message of a chat, as OpenAI's clients send it.

Invariant: a parsed message holds text, and calls of tools that can be put into a prompt.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from app.errors import UnsupportedParameter
from app.json_types import is_list, is_object
from app.tool_calls.schema import MAX_CALLS, PastCall

Hint = Annotated[str, Field(max_length=1_000)]
"""A text that changes no answer."""


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class TextPart(_Schema):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Schema):
    """One message of a chat; assistant messages may be passed back as they were received."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    # A string counts as one part.
    content: tuple[TextPart, ...] = ()
    name: Hint | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[PastCall, ...] = Field(default=(), max_length=MAX_CALLS)
    tool_call_id: str | None = Field(default=None, max_length=256)

    @property
    def text(self) -> str:
        """The content as one string; parts are joined by line breaks."""
        return "\n".join(part.text for part in self.content)

    @property
    def reasoning_text(self) -> str | None:
        """The reasoning under either of its two names."""
        return self.reasoning if self.reasoning is not None else self.reasoning_content

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _tool_calls(cls, value: object) -> object:
        return tuple(value) if is_list(value) else value

    @model_validator(mode="after")
    def _suits_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("'tool_calls' belong to assistant messages")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("'tool_call_id' belongs to tool messages, and they need it")
        return self

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextPart])
    @classmethod
    def _parts(cls, value: object) -> tuple[object, ...]:
        if isinstance(value, str):
            return ({"type": "text", "text": value},)
        if not is_list(value):
            raise ValueError("must be a string or a list of text parts")
        for part in value:
            kind = part.get("type") if is_object(part) else None
            if kind != "text":
                raise ValueError(
                    f"content parts must be of type 'text', got {kind!r}: the model reads text"
                )
        return tuple(value)


def clean_message(message: object) -> object:
    """Drop what a received assistant message carries empty: nulls, notes."""
    if not is_object(message):
        return message
    for name in ("function_call", "audio"):
        if message.get(name):
            raise UnsupportedParameter(
                f"messages with '{name}' are not supported by this server", param="messages"
            )
    return {k: v for k, v in message.items() if v is not None and k != "annotations"}
