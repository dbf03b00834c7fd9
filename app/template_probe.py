"""Finds out by trying what a chat template makes of tools and of earlier calls.

Templates differ in whether they take tools at all, whether a call's arguments are an object or
text, and whether a message that only calls has null content or none. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError)
"""What rendering raises where a template does not suit its input."""

Render = Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]]], str]
"""Renders messages and tools; raises TEMPLATE_ERRORS."""

_FUNCTION = "probe_function"
_ARGUMENT = "probe_argument"
_ANSWER = "probe_answer"
_FUNCTION_DEFINITION: dict[str, Any] = {
    "name": _FUNCTION,
    "parameters": {"type": "object", "properties": {_ARGUMENT: {"type": "string"}}},
}
_USER = {"role": "user", "content": "Probe."}
# Nine characters: Mistral's templates refuse other ids.
_ID = "probe0000"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSupport:
    """What a chat template makes of tools.

    Attributes:
        takes_tools: their definitions come into the prompt.
        needs_description: of each function, if only an empty one.
        takes_calls: earlier calls and their results do.
        arguments_as_text: it wants a call's arguments as text, not as an object.
        empty_content: what it wants as the content of a message that only calls.
    """

    takes_tools: bool = False
    needs_description: bool = False
    takes_calls: bool = False
    arguments_as_text: bool = False
    empty_content: str | None = None


def probe_tools(render: Render) -> ToolSupport:
    """Return what a template makes of tools, by rendering small chats."""
    takes_bare = _takes_tool(render, _FUNCTION_DEFINITION)
    takes_tools = takes_bare or _takes_tool(render, {**_FUNCTION_DEFINITION, "description": ""})
    needs_description = takes_tools and not takes_bare
    for arguments_as_text in (False, True):
        for empty_content in (None, ""):
            if _takes_call(render, arguments_as_text, empty_content):
                return ToolSupport(
                    takes_tools=takes_tools,
                    needs_description=needs_description,
                    takes_calls=True,
                    arguments_as_text=arguments_as_text,
                    empty_content=empty_content,
                )
    return ToolSupport(takes_tools=takes_tools, needs_description=needs_description)


def _takes_tool(render: Render, function: dict[str, Any]) -> bool:
    try:
        return _FUNCTION in render([_USER], [{"type": "function", "function": function}])
    except TEMPLATE_ERRORS:
        return False


def _takes_call(render: Render, arguments_as_text: bool, empty_content: str | None) -> bool:
    arguments: object = {_ARGUMENT: 1}
    if arguments_as_text:
        arguments = f'{{"{_ARGUMENT}": 1}}'
    call = {
        "id": _ID,
        "type": "function",
        "function": {"name": _FUNCTION, "arguments": arguments},
    }
    chat: list[dict[str, Any]] = [
        _USER,
        {"role": "assistant", "content": empty_content, "tool_calls": [call]},
        {"role": "tool", "name": _FUNCTION, "tool_call_id": _ID, "content": _ANSWER},
    ]
    try:
        prompt = render(chat, [])
    except TEMPLATE_ERRORS:
        return False
    # In double quotes: not as Python would show a dictionary, nor as text encoded once more.
    return _FUNCTION in prompt and f'"{_ARGUMENT}"' in prompt and _ANSWER in prompt
