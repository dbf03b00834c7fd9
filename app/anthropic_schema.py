"""Bodies of Anthropic's Messages API, turned into those of a chat completion.

Invariant: a parsed body asks for nothing that a chat completion could not give; what would have an
effect and is not supported is refused by name.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from app.json_types import is_list, is_object
from app.openai_schema import MAX_STOP_STRINGS, Hint, as_invalid_request
from app.parameters import drop_without_effect

ANTHROPIC_PARAMETERS: Final[dict[str, tuple[object, ...]]] = {
    "tools": ([],),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "disabled"},),
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    "inference_geo": (),
    "cache_control": ({"type": "ephemeral"},),
}
"""Parameters that are not acted on, with the values that change nothing."""


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class TextBlock(_Schema):
    """A block of text; `cache_control` is a hint: every prefix is cached here."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: None = None


class Message(_Schema):
    """One turn."""

    role: Literal["user", "assistant"]
    content: tuple[TextBlock, ...]

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextBlock])
    @classmethod
    def _blocks(cls, value: object) -> tuple[object, ...]:
        return _text_blocks(value)

    def as_chat(self) -> dict[str, Any]:
        """The same turn in OpenAI's shape."""
        parts = [{"type": "text", "text": block.text} for block in self.content]
        return {"role": self.role, "content": parts}


class Metadata(_Schema):
    """Hints to a provider."""

    user_id: Hint | None = None


class CountTokensRequest(_Schema):
    """Body of POST /v1/messages/count_tokens."""

    model: str
    messages: tuple[Message, ...] = Field(min_length=1)
    system: tuple[TextBlock, ...] = ()

    @field_validator("messages", mode="before")
    @classmethod
    def _messages(cls, value: object) -> tuple[object, ...]:
        if not is_list(value):
            raise ValueError("must be a list of messages")
        return tuple(value)

    @field_validator("system", mode="before", json_schema_input_type=str | list[TextBlock])
    @classmethod
    def _system(cls, value: object) -> tuple[object, ...]:
        return _text_blocks(value)

    def as_chat(self) -> dict[str, Any]:
        """The body of the chat completion that has the same prompt.

        A final assistant message is continued, not answered, as Anthropic does.
        """
        messages: list[dict[str, Any]] = []
        if self.system:
            text = "\n".join(block.text for block in self.system)
            messages.append({"role": "system", "content": text})
        messages += [message.as_chat() for message in self.messages]
        continues = self.messages[-1].role == "assistant"
        return {"model": self.model, "messages": messages, "continue_final_message": continues}


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    metadata: Metadata | None = None
    stop_sequences: tuple[str, ...] = Field(default=(), max_length=MAX_STOP_STRINGS)
    stream: bool = False
    temperature: float | None = Field(default=None, ge=0.0, le=1.0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=0, le=1 << 30)

    @field_validator("stop_sequences", mode="before")
    @classmethod
    def _stop_sequences(cls, value: object) -> object:
        return tuple(value) if is_list(value) else value

    def as_chat(self) -> dict[str, Any]:
        """The body of the chat completion that gives the same answer."""
        return {
            **super().as_chat(),
            "max_tokens": self.max_tokens,
            "stop": list(self.stop_sequences) or None,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


def parse_messages[R: (CountTokensRequest, MessagesRequest)](
    schema: type[R], body: dict[str, Any]
) -> R:
    """Turn a JSON object into a request.

    Raises:
        InvalidRequest: the first parameter at fault is named.
    """
    try:
        return schema.model_validate(drop_without_effect(body, ANTHROPIC_PARAMETERS))
    except ValidationError as error:
        raise as_invalid_request(error) from None


def _text_blocks(value: object) -> tuple[object, ...]:
    if isinstance(value, str):
        return ({"type": "text", "text": value},)
    if not is_list(value):
        raise ValueError("must be a string or a list of text blocks")
    for block in value:
        kind = block.get("type") if is_object(block) else None
        if kind != "text":
            raise ValueError(f"blocks must be of type 'text', got {kind!r}: the model reads text")
    return tuple(value)
