"""How calls must be written, per style: what makes a model's calls follow the functions' schemas.

The counterpart of the readers: whatever is written so, they read. Knows no tokens. Invariant: the
arguments of a call that is demanded, or of a `strict` function, are what its schema admits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from app.output_grammar import Calls, Frame, Tag
from app.tool_calls import deepseek, harmony, hermes, mistral
from app.tool_calls.schema import NamedTool, Tool, ToolChoice
from app.tool_calls.styles import THOUGHT_MARKERS, CallStyle, ReasoningStyle
from replicas.errors import InvalidRequest


def guided_calls(
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    style: CallStyle,
    template: str,
    is_single: bool,
) -> Calls | None:
    """Return how the calls of a message must be written; None: as the model likes.

    Args:
        tools: that the model is told of.
        choice: of the request.
        style: of the model; not "none" where there are tools.
        template: its chat template, which tells generations of a style apart.
        is_single: one call at most.

    Raises:
        InvalidRequest: `strict` cannot be kept in this style without a demand.
    """
    is_required = choice == "required" or isinstance(choice, NamedTool)
    if not is_required and not any(tool.function.strict for tool in tools):
        return None
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        is_single = True
    calls = _form(style, template, is_required=is_required, is_single=is_single)
    if not is_required and not calls.trigger and not calls.not_first:
        raise InvalidRequest(
            "'strict' functions need tool_choice 'required' or a named function with this model",
            param="tools",
        )
    tags = [
        Tag("", tag.begin.replace(_NAME, tool.function.name), _schema(tool, is_required), tag.end)
        for tool in tools
        for tag in calls.tags
    ]
    return dataclasses.replace(calls, tags=tuple(tags))


def message_frame(style: ReasoningStyle, *, is_inside_thought: bool, is_call: bool) -> Frame:
    """Return what stands before the constrained part of a message.

    Args:
        style: how the model writes its reasoning.
        is_inside_thought: the prompt has begun it.
        is_call: a call follows, not content.
    """
    if style == "gpt-oss":
        return Frame(
            thought_begin=f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",
            thought_end="<|end|>",
            after_thought=f"{harmony.START}assistant",
            before="" if is_call else f"{harmony.CHANNEL}final{harmony.MESSAGE}",
        )
    markers = THOUGHT_MARKERS.get(style)
    if markers is None:
        return Frame()
    return Frame(
        thought_begin=markers.begin,
        thought_end=markers.end,
        is_inside_thought=is_inside_thought,
    )


# Stands for the function's name in the tags of `_form`; no name has such a character.
_NAME = "\0"


def _form(style: CallStyle, template: str, *, is_required: bool, is_single: bool) -> Calls:
    """The style's way of writing a call of `_NAME`."""

    def calls(begin: str, end: str, **form: str) -> Calls:
        tag = Tag("", begin, {}, end)
        return Calls(tags=(tag,), is_required=is_required, is_single=is_single, **form)

    as_object = f'{{"name": "{_NAME}", "arguments": '
    match style:
        case "llama3":
            begin = f'{{"name": "{_NAME}", "parameters": '
            return calls(begin, "}", separator="; ", not_first="{<;")
        case "mistral" if mistral.ARGS in template:
            begin = f"{mistral.TOOL_CALLS}{_NAME}{mistral.ARGS}"
            return calls(begin, "", trigger=mistral.TOOL_CALLS)
        case "mistral":
            before = f"{mistral.TOOL_CALLS}["
            return calls(
                as_object, "}", before=before, separator=", ", after="]", trigger=mistral.TOOL_CALLS
            )
        case "deepseek":
            is_fenced = "```json" in template
            begin, end = f"{deepseek.CALL_BEGIN}{_NAME}{deepseek.SEPARATOR}", deepseek.CALL_END
            if is_fenced:
                begin = f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}{_NAME}\n```json\n"
                end = f"\n```{deepseek.CALL_END}"
            return calls(
                begin,
                end,
                before=deepseek.CALLS_BEGIN,
                separator="\n" if is_fenced else "",
                after=deepseek.CALLS_END,
                trigger=deepseek.CALLS_BEGIN,
            )
        case "gpt-oss":
            to = f" to=functions.{_NAME}{harmony.CHANNEL}commentary <|constrain|>json"
            return dataclasses.replace(calls(f"{to}{harmony.MESSAGE}", ""), is_single=True)
        case _:
            begin = f"{hermes.OPEN}\n{as_object}"
            return calls(begin, f"}}\n{hermes.CLOSE}", separator="\n", trigger=hermes.OPEN)


def _schema(tool: Tool, is_required: bool) -> Mapping[str, Any]:
    """What the arguments must be: of functions that are not strict, as far as it is understood."""
    function = tool.function
    schema = {"type": "object", **(function.parameters or {})}
    if function.strict:
        return schema
    if not is_required:
        return {"type": "object"}
    return {**schema, "x-guidance": {"lenient": True}}
