"""Bodies of Anthropic's Messages API, turned into those of a chat completion.

Invariant: a parsed body asks for nothing that a chat completion could not give; what would have an
effect and is not supported is refused by name.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from app.anthropic_content import (
    Message,
    Schema,
    TextBlock,
    Tool,
    as_messages,
    check_tools,
    text_blocks,
)
from app.chat_message import Hint
from app.errors import UnsupportedParameter
from app.json_types import is_list, is_object
from app.openai_schema import MAX_STOP_STRINGS
from app.parameters import drop_without_effect
from app.schema_faults import as_invalid_request

ANTHROPIC_PARAMETERS: Final[dict[str, tuple[object, ...]]] = {
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    "inference_geo": (),
    "diagnostics": (),
    "speed": ("standard",),
    "user_profile_id": (),
    "cache_control": ({"type": "ephemeral"},),
}
"""Parameters that are not acted on, with the values that change nothing."""


class ToolChoice(Schema):
    """Whether the model may call tools."""

    type: Literal["auto", "none", "any", "tool"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _agrees(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("'name' belongs to type 'tool', which needs it")
        return self

    def as_chat(self) -> object:
        """The same in OpenAI's shape."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Schema):
    """Whether the answer shows what the model thought, if it is a model that thinks."""

    type: Literal["disabled", "adaptive"] = "disabled"


class Metadata(Schema):
    """Hints to a provider."""

    user_id: Hint | None = None


class CountTokensRequest(Schema):
    """Body of POST /v1/messages/count_tokens."""

    model: str
    messages: tuple[Message, ...] = Field(min_length=1)
    system: tuple[TextBlock, ...] = ()
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking = Thinking()

    @field_validator("messages", mode="before")
    @classmethod
    def _messages(cls, value: object) -> tuple[object, ...]:
        if not is_list(value):
            raise ValueError("must be a list of messages")
        return tuple(value)

    @field_validator("system", mode="before", json_schema_input_type=str | list[TextBlock])
    @classmethod
    def _system(cls, value: object) -> tuple[object, ...]:
        return text_blocks(value)

    @field_validator("tools", mode="before", json_schema_input_type=list[Tool])
    @classmethod
    def _tools(cls, value: object) -> tuple[object, ...]:
        return check_tools(value)

    @field_validator("thinking", mode="before", json_schema_input_type=Thinking)
    @classmethod
    def _thinking(cls, value: object) -> object:
        if is_object(value) and value.get("type") == "enabled":
            raise UnsupportedParameter(
                "'thinking' of type 'enabled' is not supported by this server: nothing keeps the "
                "model to a budget; 'adaptive' shows what it thinks",
                param="thinking",
            )
        return value

    @model_validator(mode="after")
    def _agrees(self) -> CountTokensRequest:
        for message in self.messages:
            message.check_role()
        if self.messages[-1].has_calls:
            raise ValueError("messages: the last 'tool_use' has no 'tool_result'")
        return self

    def as_chat(self) -> dict[str, Any]:
        """The body of the chat completion that has the same prompt.

        A final assistant message is continued, not answered, as Anthropic does.
        """
        return {
            "model": self.model,
            "messages": as_messages(self.system, self.messages),
            "continue_final_message": self.messages[-1].role == "assistant",
            "tools": [tool.as_chat() for tool in self.tools] or None,
            "tool_choice": self.tool_choice.as_chat(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "include_reasoning": self.thinking.type == "adaptive",
        }


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
