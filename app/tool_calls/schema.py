"""What clients say of tools: the functions on offer, and calls that are passed back.

Sizes and depth are limited here, before a template renders anything. Invariant: a parsed tool can
be put into a prompt as it is, and the arguments of a parsed call are a JSON object.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.json_types import is_deeper, is_list, is_object

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 512 << 10
MAX_SCHEMA_DEPTH = 32
MAX_CALLS = 128

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class FunctionDefinition(_Schema):
    """A function that the model may call; `parameters` is a JSON schema of an object.

    `strict`: the arguments of a call are what the schema admits, however the call comes about.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _schema_of_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        check_parameters(value)
        return value


class Tool(_Schema):
    """One tool."""

    type: Literal["function"]
    function: FunctionDefinition

    def as_template_data(self, *, needs_description: bool) -> dict[str, Any]:
        """Return what chat templates expect; some fail without a description."""
        function = self.function
        data: dict[str, Any] = {"name": function.name}
        if function.description is not None or needs_description:
            data["description"] = function.description or ""
        data["parameters"] = function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": data}


class NamedFunction(_Schema):
    """A function by its name."""

    name: FunctionName


class NamedTool(_Schema):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool
_CHOICE_WORDS: tuple[Literal["none", "auto", "required"], ...] = ("none", "auto", "required")


class CalledFunction(_Schema):
    """The function of a call, with its arguments as text."""

    name: FunctionName
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _object(cls, value: str) -> str:
        if not value.strip():
            return "{}"
        try:
            arguments = orjson.loads(value)
        except orjson.JSONDecodeError:
            arguments = None
        if not is_object(arguments):
            raise ValueError("must be the text of a JSON object")
        if is_deeper(arguments, MAX_SCHEMA_DEPTH):
            raise ValueError(f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        return value


class PastCall(_Schema):
    """A call that the model made in an earlier turn."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    # Left by clients that put a stream together.
    index: int | None = None

    def as_template_data(self, *, arguments_as_text: bool) -> dict[str, Any]:
        """Return what chat templates expect; most render an object, some join a text."""
        text = self.function.arguments
        arguments = text if arguments_as_text else orjson.loads(text)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


def check_parameters(value: dict[str, Any] | None) -> None:
    """Check the JSON schema of a function's parameters.

    Raises:
        ValueError: it is not one of an object, or nested too deep.
    """
    if value and value.get("type", "object") != "object":
        raise ValueError("must be a JSON schema of type 'object'")
    if is_deeper(value, MAX_SCHEMA_DEPTH):
        raise ValueError(f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")


def check_tools(value: object) -> tuple[object, ...]:
    """Check the number and the size of the `tools` of a request.

    Raises:
        ValueError: there are too many, or they are no list.
    """
    if not is_list(value):
        raise ValueError("must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise ValueError(f"at most {MAX_TOOLS} tools, got {len(value)}")
    size = len(orjson.dumps(value))
    if size > MAX_TOOLS_BYTES:
        raise ValueError(f"at most {MAX_TOOLS_BYTES} bytes of JSON, got {size}")
    return tuple(value)


def check_names(tools: Iterable[Tool]) -> None:
    """Check that no two functions share a name.

    Raises:
        ValueError: two do.
    """
    names: set[str] = set()
    for tool in tools:
        if tool.function.name in names:
            raise ValueError(f"tools: two functions are named '{tool.function.name}'")
        names.add(tool.function.name)


def parse_tool_choice(value: object) -> ToolChoice:
    """Read the `tool_choice` of a request.

    Raises:
        ValueError: it is none.
    """
    for word in _CHOICE_WORDS:
        if value == word:
            return word
    if is_object(value) and value.keys() == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if (
            is_object(function)
            and function.keys() == {"name"}
            and isinstance(function["name"], str)
        ):
            return NamedTool(type="function", function=NamedFunction(name=function["name"]))
    raise ValueError(
        "must be 'none', 'auto', 'required', or an object with type 'function' and a function's "
        "name"
    )


def check_tool_choice(choice: ToolChoice, tools: Iterable[Tool]) -> None:
    """Check that a demanded call is one of the tools on offer.

    Raises:
        ValueError: it is not, or there are none.
    """
    names = {tool.function.name for tool in tools}
    if choice == "required" and not names:
        raise ValueError("tool_choice: 'required' needs 'tools'")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ValueError(f"tool_choice: no function is named '{choice.function.name}'")
