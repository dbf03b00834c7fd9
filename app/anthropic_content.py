"""Content blocks that a client of Anthropic's Messages API sends, and the chat that they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.errors import UnsupportedParameter
from app.json_types import is_list, is_object
from app.tool_calls.schema import FunctionName, check_parameters

CacheControl = dict[str, Any] | None
"""A hint: every prefix is cached here."""

ERROR_PREFIX = "Error: "
"""Begins the result of a tool that failed: chat templates know no other way to say so."""


class Schema(BaseModel):
    """What all parts of a body have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class TextBlock(Schema):
    """A block of text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: None = None

    def as_chat(self) -> dict[str, Any]:
        """The same in OpenAI's shape."""
        return {"type": "text", "text": self.text}


class ThinkingBlock(Schema):
    """What the model thought before it answered; nothing is signed here."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Schema):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(max_length=256)]
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None

    def as_chat(self) -> dict[str, Any]:
        """The same in OpenAI's shape."""
        function = {"name": self.name, "arguments": orjson.dumps(self.input).decode()}
        return {"id": self.id, "type": "function", "function": function}


class ToolResultBlock(Schema):
    """What a call came to."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(max_length=256)]
    # A string counts as one block.
    content: tuple[TextBlock, ...] = ()
    is_error: bool = False
    cache_control: CacheControl = None

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextBlock])
    @classmethod
    def _content(cls, value: object) -> tuple[object, ...]:
        return text_blocks(value)

    def as_chat(self) -> dict[str, Any]:
        """The same as a message in OpenAI's shape."""
        text = "\n".join(block.text for block in self.content)
        return {
            "role": "tool",
            "tool_call_id": self.tool_use_id,
            "content": ERROR_PREFIX + text if self.is_error else text,
        }


class Tool(Schema):
    """A function that the model may call."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl = None

    @field_validator("input_schema")
    @classmethod
    def _schema_of_object(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_parameters(value)
        return value

    def as_chat(self) -> dict[str, Any]:
        """The same in OpenAI's shape."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        given = {k: v for k, v in function.items() if v is not None}
        return {"type": "function", "function": given}


_BLOCKS: Final[dict[str, tuple[str, ...]]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
}
_KINDS: Final = frozenset(kind for kinds in _BLOCKS.values() for kind in kinds)


class Message(Schema):
    """One turn."""

    role: Literal["user", "assistant"]
    content: tuple[
        Annotated[
            TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
        ],
        ...,
    ]

    @field_validator(
        "content",
        mode="before",
        json_schema_input_type=str
        | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock],
    )
    @classmethod
    def _blocks(cls, value: object) -> tuple[object, ...]:
        return _blocks_of(value, _KINDS)

    @property
    def has_calls(self) -> bool:
        """Whether tools are called in it."""
        return any(isinstance(block, ToolUseBlock) for block in self.content)

    def check_role(self) -> None:
        """Check that each block is of a kind that its side writes.

        Raises:
            ValueError: one is not.
        """
        for block in self.content:
            if block.type not in _BLOCKS[self.role]:
                raise ValueError(
                    f"messages: a block of type '{block.type}' does not belong to a message of "
                    f"role '{self.role}'"
                )

    def as_chat(self) -> list[dict[str, Any]]:
        """The same turn as messages in OpenAI's shape: results of tools are messages there."""
        texts = [block.as_chat() for block in self.content if isinstance(block, TextBlock)]
        if self.role == "user":
            results = [b.as_chat() for b in self.content if isinstance(b, ToolResultBlock)]
            return results + ([{"role": "user", "content": texts}] if texts or not results else [])
        message: dict[str, Any] = {"role": "assistant", "content": texts}
        thoughts = [b.thinking for b in self.content if isinstance(b, ThinkingBlock)]
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if self.has_calls:
            calls = [b.as_chat() for b in self.content if isinstance(b, ToolUseBlock)]
            message["tool_calls"] = calls
        return [message]


def text_blocks(value: object) -> tuple[object, ...]:
    """Look at the kinds of blocks where only text can be.

    Raises:
        ValueError: it is neither text nor blocks of text.
    """
    return _blocks_of(value, frozenset({"text"}))


def check_tools(value: object) -> tuple[object, ...]:
    """Look at the kinds of `tools`.

    Raises:
        UnsupportedParameter: one is run by Anthropic's own servers.
        ValueError: it is no list of tools.
    """
    if not is_list(value):
        raise ValueError("must be a list of tools")
    for index, tool in enumerate(value):
        kind = tool.get("type") if is_object(tool) else None
        if kind not in (None, "custom"):
            raise UnsupportedParameter(
                f"tools of type {str(kind)[:64]!r} are not supported by this server; only "
                "functions of your own are",
                param=f"tools[{index}].type",
            )
    return tuple(
        {k: v for k, v in tool.items() if v is not None} if is_object(tool) else tool
        for tool in value
    )


def _blocks_of(value: object, kinds: frozenset[str]) -> tuple[object, ...]:
    if isinstance(value, str):
        return ({"type": "text", "text": value},)
    if not is_list(value):
        raise ValueError("must be a string or a list of blocks")
    for block in value:
        kind = block.get("type") if is_object(block) else None
        if not isinstance(kind, str) or kind not in kinds:  # what is no string may not be hashable
            known = ", ".join(f"'{name}'" for name in sorted(kinds))
            given = repr(kind)[:64]
            raise ValueError(f"blocks must be of type {known}, got {given}: the model reads text")
    return tuple(value)


def as_messages(system: Sequence[TextBlock], turns: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the chat in OpenAI's shape."""
    messages: list[dict[str, Any]] = []
    if system:
        text = "\n".join(block.text for block in system)
        messages.append({"role": "system", "content": text})
    for turn in turns:
        messages += turn.as_chat()
    return messages
