"""Reads an assistant message while it is being written.

One code path for streams and whole answers. Guarantees, whatever the model writes and however its
text is cut into pieces: the deltas, joined, are the same; no piece raises; every call names one of
the request's functions and its arguments are a JSON object; whatever is no such call is content or
reasoning, and nothing of it is lost but whitespace next to a marker.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from app.tool_calls.content import read_content, read_thought
from app.tool_calls.harmony import read_harmony
from app.tool_calls.message import Message, MessageDelta
from app.tool_calls.source import Source, Steps
from app.tool_calls.styles import (
    CALL_MARKERS,
    THOUGHT_MARKERS,
    CallStyle,
    ReasoningStyle,
    detect_call_style,
    detect_reasoning_style,
    id_maker,
    visible_markers,
)


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How one model writes its messages. gpt-oss's two styles are one format: either reads both."""

    calls: CallStyle = "none"
    reasoning: ReasoningStyle = "none"

    @classmethod
    def resolve(
        cls, template: str, *, calls: CallStyle | None, reasoning: ReasoningStyle | None
    ) -> MessageFormat:
        """Fill in what is None from a chat template."""
        calls = detect_call_style(template) if calls is None else calls
        reasoning = detect_reasoning_style(template) if reasoning is None else reasoning
        return cls(calls, reasoning)

    @property
    def markers(self) -> frozenset[str]:
        """Literals that have to be part of the text, though they may be special tokens."""
        return visible_markers(self.calls, self.reasoning)

    def is_inside_thought(self, prompt: str, continued: str = "") -> bool:
        """Whether the answer to a prompt begins inside of its reasoning.

        Args:
            prompt: the rendered chat.
            continued: the assistant's text that the answer continues.
        """
        markers = THOUGHT_MARKERS.get(self.reasoning)
        if markers is None:
            return False
        if continued:
            return continued.rfind(markers.begin) > continued.rfind(markers.end)
        return prompt.rstrip().endswith(markers.begin)

    def reader(
        self,
        *,
        functions: Collection[str],
        is_inside_thought: bool,
        max_calls: int | None,
        shows_reasoning: bool,
    ) -> MessageReader | None:
        """Return what reads one answer; None: all of it is content.

        Args:
            functions: names that may be called.
            is_inside_thought: see the method.
            max_calls: the message ends with that many; None: there is no limit.
            shows_reasoning: False drops it.
        """
        is_harmony = "gpt-oss" in (self.calls, self.reasoning)
        has_calls = bool(functions) and self.calls != "none"
        if not (is_harmony or has_calls or self.reasoning != "none"):
            return None
        source, names = Source(), frozenset(functions if has_calls else ())
        message = Message(
            id_maker(self.calls), max_calls=max_calls, shows_reasoning=shows_reasoning
        )
        if is_harmony:
            steps = read_harmony(source, message, names)
        else:
            steps = _read_marked(self, source, message, names, is_inside_thought=is_inside_thought)
        return MessageReader(source, message, steps)


class MessageReader:
    """The state of one message that is being read."""

    def __init__(self, source: Source, message: Message, steps: Steps[None]) -> None:
        self._source = source
        self._message = message
        self._steps = steps
        self._advance()

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known."""
        return self._message.is_reasoning

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._message.num_calls

    @property
    def is_full(self) -> bool:
        """Whether all calls that are wanted are there: text that follows is not looked at."""
        return self._message.is_full

    def feed(self, text: str) -> None:
        """Read further text."""
        if text:
            self._source.append(text)
            self._advance()

    def finish(self) -> None:
        """Read the end: what is still open is settled."""
        self._source.is_ended = True
        self._advance()

    def take(self) -> MessageDelta:
        """Return what has become certain since the last call."""
        return self._message.take()

    def _advance(self) -> None:
        next(self._steps, None)


def _read_marked(
    form: MessageFormat,
    source: Source,
    message: Message,
    names: Collection[str],
    *,
    is_inside_thought: bool,
) -> Steps[None]:
    if (thought := THOUGHT_MARKERS.get(form.reasoning)) is not None:
        yield from read_thought(source, message, thought, is_open=is_inside_thought)
    yield from read_content(source, message, CALL_MARKERS.get(form.calls), names)
