"""What has been read of an assistant message, handed out bit by bit."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.tool_calls.source import Source, Steps

_ALPHANUMERIC = string.ascii_letters + string.digits


class Call(NamedTuple):
    """A call as the model wrote it: a known function, and a JSON object as raw text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as a client sees it.

    Attributes:
        index: position among the message's calls.
        id: unique; a tool's answer names it.
        name: of the function, one of the request's tools.
        arguments: text of a JSON object.
    """

    index: int
    id: str
    name: str
    arguments: str


class MessageDelta(NamedTuple):
    """What is new of a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()


ReadCalls = Callable[[Source, Collection[str]], Steps[Sequence[Call] | None]]
"""Reads calls of the given functions from where their marker begins; None: these are no calls."""


class Message:
    """Collects a message's parts until they are taken.

    Attributes:
        is_reasoning: the text that arrives now is reasoning.
        num_calls: calls so far.
    """

    def __init__(
        self, new_id: Callable[[], str], *, max_calls: int | None, shows_reasoning: bool
    ) -> None:
        """Begin a message.

        Args:
            new_id: makes the id of a call.
            max_calls: further calls are dropped; None: there is no limit.
            shows_reasoning: False drops the reasoning.
        """
        self.is_reasoning = False
        self.num_calls = 0
        self._new_id = new_id
        self._max_calls = max_calls
        self._shows_reasoning = shows_reasoning
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    @property
    def is_full(self) -> bool:
        """Whether the message has as many calls as it may have."""
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def add_content(self, text: str) -> None:
        """Append to the content."""
        self._content.append(text)

    def add_reasoning(self, text: str) -> None:
        """Append to the reasoning."""
        if self._shows_reasoning:
            self._reasoning.append(text)

    def add_calls(self, calls: Sequence[Call]) -> None:
        """Append calls, as many as are wanted."""
        for call in calls:
            if self.is_full:
                return
            self._calls.append(ToolCall(self.num_calls, self._new_id(), call.name, call.arguments))
            self.num_calls += 1

    def take(self) -> MessageDelta:
        """Return what is new since the last call."""
        delta = MessageDelta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return delta


def openai_id() -> str:
    """An id that looks like OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def mistral_id() -> str:
    """Nine letters and digits: Mistral's chat templates refuse any other id."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
