"""The body of POST /v1/responses, turned into that of a chat completion.

Invariant: a parsed body asks for nothing that a chat completion could not give; what would have an
effect and is not supported is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.chat_message import Hint
from app.errors import UnsupportedParameter
from app.json_types import is_list, is_object
from app.parameters import drop_without_effect
from app.responses.items import Item, as_messages, check_items, item_schema
from app.schema_faults import as_invalid_request
from app.tool_calls.schema import FunctionDefinition, check_tools
from replicas.errors import RequestError

RESPONSES_PARAMETERS: Final[Mapping[str, tuple[object, ...]]] = {
    "access_programs": (),
    "background_options": ({},),
    "context_management": ([],),
    "conversation": (),
    # Reasoning comes with its text, never encrypted, so there is nothing more to include.
    "include": (["reasoning.encrypted_content"], []),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Parameters that are not acted on, with the values that change nothing."""

_PASSED_ON: Final = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "cache_salt",
    "chat_template_kwargs",
    "parallel_tool_calls",
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
)
"""What a chat completion has under the same name and checks itself."""
_CHAT_NAMES: Final[Mapping[str, str]] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
"""What a chat completion calls differently."""


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class FunctionTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]

    def as_chat(self) -> dict[str, Any]:
        """The same tool in a chat completion's shape."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}

    def as_json(self) -> dict[str, Any]:
        """The tool as it was asked for."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }


class TextConfig(_Schema):
    """How the text of the answer is to look: a chat completion's `response_format`, flattened."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None

    def as_chat(self) -> dict[str, Any]:
        """The same in a chat completion's parameters."""
        chat: dict[str, Any] = {} if self.verbosity is None else {"verbosity": self.verbosity}
        if self.format is None or self.format == {"type": "text"}:
            return chat
        if self.format.get("type") != "json_schema":
            return {**chat, "response_format": self.format}
        schema = {k: v for k, v in self.format.items() if k != "type"}
        return {**chat, "response_format": {"type": "json_schema", "json_schema": schema}}


class ResponsesRequest(_Schema):
    """Body of POST /v1/responses."""

    model: str | None = None
    # A string counts as one message of the user.
    input: tuple[Item, ...]
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=256)
    store: bool = True
    background: bool = False
    stream: bool = False
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    tools: tuple[FunctionTool, ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    user: Hint | None = None
    safety_identifier: Hint | None = None
    prompt_cache_key: Hint | None = None
    # This server's and vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("input", mode="plain", json_schema_input_type=str | list[Item])
    @classmethod
    def _input(cls, value: object) -> tuple[Item, ...]:
        return parse_items(value)

    @field_validator("tools", mode="before", json_schema_input_type=list[FunctionTool])
    @classmethod
    def _tools(cls, value: object) -> tuple[object, ...]:
        for index, tool in enumerate(value if is_list(value) else ()):
            kind = tool.get("type") if is_object(tool) else None
            if kind != "function":
                raise UnsupportedParameter(
                    f"tools of type {str(kind)[:64]!r} are not supported by this server; only "
                    "functions are",
                    param=f"tools[{index}].type",
                )
        return check_tools(value)

    @model_validator(mode="after")
    def _agrees(self) -> ResponsesRequest:
        if self.background and not self.store:
            raise ValueError("background: needs 'store': true, or nobody could read the answer")
        return self

    def as_chat(self, history: Sequence[Item]) -> dict[str, Any]:
        """The body of the chat completion that gives the same answer.

        Args:
            history: what precedes the input: the conversation up to the previous response.
        """
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        messages += as_messages([*history, *self.input])
        choice: object = self.tool_choice
        if is_object(choice) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        passed = {name: getattr(self, name) for name in _PASSED_ON}
        return {
            **{name: value for name, value in passed.items() if value is not None},
            **self.text.as_chat(),
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": [tool.as_chat() for tool in self.tools] or None,
            "tool_choice": choice,
        }


def parse_items(value: object) -> tuple[Item, ...]:
    """Parse an `input`.

    Raises:
        InvalidRequest: an item is malformed, or of a kind that has no place in a chat.
        ValueError: it is no list of items.
    """
    items: list[Item] = []
    for index, item in enumerate(check_items(value)):
        try:
            items.append(item_schema(item).model_validate(item))
        except ValidationError as error:
            fault = as_invalid_request(error)
            param = f"input[{index}]" + (f".{fault.param}" if fault.param else "")
            message = fault.message.replace(f"'{fault.param}'", f"'{param}'", 1)
            raise type(fault)(message, param=param) from None
    return tuple(items)


def parse_responses(body: dict[str, Any]) -> ResponsesRequest:
    """Turn a JSON object into a request.

    Raises:
        InvalidRequest: the first parameter at fault is named.
    """
    body = dict(body)
    if is_object(reasoning := body.get("reasoning")):
        body["reasoning"] = {k: v for k, v in reasoning.items() if v is not None}
        for name in ("effort", "summary", "generate_summary"):
            if name in body["reasoning"]:
                raise UnsupportedParameter(
                    f"'reasoning.{name}' is not supported by this server; leave it out",
                    param=f"reasoning.{name}",
                )
    if is_object(text := body.get("text")):
        body["text"] = {k: v for k, v in text.items() if v is not None}
    try:
        return ResponsesRequest.model_validate(drop_without_effect(body, RESPONSES_PARAMETERS))
    except ValidationError as error:
        raise as_invalid_request(error) from None


def rename_fault(error: RequestError) -> RequestError:
    """Return the error of a chat completion with the parameter's name of this API."""
    if error.param is None:
        return error
    name = error.param.split(".")[0].split("[")[0]
    renamed = _CHAT_NAMES.get(name)
    if renamed is None:
        return error
    pattern, new = (rf"\b{name}\b", renamed) if "_" in name else (f"'{name}'", f"'{renamed}'")
    message = re.sub(pattern, new, error.message)
    return type(error)(message, param=renamed)
