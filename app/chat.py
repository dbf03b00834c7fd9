"""Chats become prompts: message checks and the model's own jinja template.

Templates come with the model and run in jinja2's immutable sandbox, with the names that Hugging
Face templates expect (`raise_exception`, `strftime_now`, `tojson`, loop controls, the
`generation` tag). Knows nothing of tokens. Invariant: a chat either becomes exactly the string
that the model was trained with, or is refused as the caller's fault.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.chat_message import ChatMessage
from app.template_probe import TEMPLATE_ERRORS, probe_tools
from app.tool_calls.schema import Tool
from replicas.errors import InvalidRequest


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: its text; with that of the template for tools, where the model has two.
        tool_support: what it makes of tools.

    Raises ValueError (from the constructor) where the template's source is malformed.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, tool_source: str | None = None
    ) -> None:
        """Compile a template, and the one that the model has for chats with tools, or None."""
        self.source = source + (tool_source or "")
        self._special_tokens = dict(special_tokens)
        # OpenAI's newer name for the system role is passed on only to templates that know it.
        self._knows_developer = "developer" in source
        # gpt-oss's template has a name of its own for the reasoning.
        self._reasoning_key = "thinking" if "message.thinking" in source else "reasoning_content"
        try:
            self._template = _environment().from_string(source)
            self._tool_template = _environment().from_string(tool_source or source)
        except jinja2.TemplateError as error:
            raise ValueError(str(error)) from error
        self.tool_support = probe_tools(self._fill_in)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """Render the prompt of a chat, ending where the assistant's answer begins.

        Args:
            messages: at least one.
            add_generation_prompt: whether the answer's own beginning is part of the prompt.
            continue_final_message: end inside the last message instead, behind its text.
            variables: further names that the template sees.
            tools: functions that the model may call.

        Raises:
            InvalidRequest: the template refuses the chat, e.g. two user messages in a row, takes
                no tools, or changes the text that is to be continued.
        """
        prompt = self._render(
            messages,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            variables=variables or {},
            tools=tools,
        )
        if not continue_final_message:
            return prompt
        final = messages[-1].text.strip()
        end = prompt.rfind(final) + len(final)
        if not final or end < len(final):
            raise InvalidRequest(
                "the last message has no text that the model's chat template would keep: there is "
                "nothing to continue",
                param="continue_final_message",
            )
        return prompt[:end]

    def _render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Tool],
    ) -> str:
        if tools and not self.tool_support.takes_tools:
            raise InvalidRequest("the model's chat template takes no tools", param="tools")
        has_calls = any(message.tool_calls or message.role == "tool" for message in messages)
        if has_calls and not self.tool_support.takes_calls:
            raise InvalidRequest(
                "the model's chat template takes no tool calls and no messages of tools",
                param="messages",
            )
        functions = {call.id: call.function.name for m in messages for call in m.tool_calls}
        chat = [self._as_template_data(message, functions) for message in messages]
        try:
            return self._fill_in(
                chat,
                [
                    tool.as_template_data(needs_description=self.tool_support.needs_description)
                    for tool in tools
                ],
                add_generation_prompt=add_generation_prompt,
                variables=variables,
            )
        except TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def _fill_in(
        self,
        chat: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        template = self._tool_template if tools else self._template
        return template.render(
            {
                **(variables or {}),
                **self._special_tokens,
                "messages": chat,
                "tools": tools or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def _as_template_data(
        self, message: ChatMessage, functions: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return a message as templates expect it; `functions` names those of calls by id."""
        role = message.role
        if role == "developer" and not self._knows_developer:
            role = "system"
        data: dict[str, Any] = {"role": role, "content": message.text}
        name = message.name
        if message.role == "tool":
            data["tool_call_id"] = message.tool_call_id
            name = name or functions.get(message.tool_call_id or "")
        if name is not None:
            data["name"] = name
        if message.tool_calls:
            support = self.tool_support
            data["content"] = message.text or support.empty_content
            data["tool_calls"] = [
                call.as_template_data(arguments_as_text=support.arguments_as_text)
                for call in message.tool_calls
            ]
        if message.reasoning_text is not None:
            data[self._reasoning_key] = message.reasoning_text
        return data


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is
    transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body in place of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    # jinja2 leaves the types of these dictionaries open.
    cast(dict[str, Any], environment.filters)["tojson"] = _to_json
    cast(dict[str, Any], environment.globals).update(
        raise_exception=_raise, strftime_now=_strftime_now
    )
    return environment


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _to_json(value: object, **options: object) -> str:
    """`json.dumps` without jinja's HTML escapes, text kept as it is."""
    return json.dumps(value, **cast(dict[str, Any], {"ensure_ascii": False, **options}))
