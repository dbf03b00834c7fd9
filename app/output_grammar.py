"""What a client wants its output to look like, written down as one grammar.

Pure text: knows the syntax of llguidance's grammars (Lark with additions, and JSON schemas by
name), not the library. A grammar here is what its `LLMatcher` takes. Invariant: whatever a client
sends ends up inside a quoted literal, a JSON value or a grammar of its own, never in the text of
another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from app.json_types import is_object

_ANY_TEXT: Final = r"/(.|\n)*/"
# Without a bound, a model that is at a loss goes on with blanks until its tokens are spent.
_JSON_OPTIONS: Final = {"whitespace_pattern": r"[ \t\r\n]{0,32}"}


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A JSON text that a schema admits."""

    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that a regular expression matches as a whole."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choices:
    """One of some texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lark:
    """A text of the client's own grammar."""

    grammar: str


@dataclass(frozen=True, slots=True)
class Tag:
    """A piece of a text with a JSON value in it.

    Attributes:
        trigger: what makes the rest of the piece inevitable; `begin` starts with it.
        begin: literal before the value.
        schema: of the value.
        end: literal behind it.
    """

    trigger: str
    begin: str
    schema: Mapping[str, Any]
    end: str


@dataclass(frozen=True, slots=True)
class Tags:
    """Free text with tags in it, at least one of them possible."""

    tags: tuple[Tag, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of functions, as one style of models writes them.

    Attributes:
        tags: one for each function; their triggers do not count.
        before: literal before the first call.
        separator: literal between two.
        after: literal behind the last.
        is_required: there is nothing but calls. Else there may be text, and calls behind it.
        is_single: there is one call at most.
        trigger: no text contains it: it begins calls. Empty: calls stand at the beginning.
        not_first: where they do, characters that no text begins with.
    """

    tags: tuple[Tag, ...]
    before: str = ""
    separator: str = ""
    after: str = ""
    is_required: bool
    is_single: bool
    trigger: str = ""
    not_first: str = ""


Constraint = JsonSchema | Regex | Choices | Lark | Tags | Calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What stands around the constrained part of a message.

    Attributes:
        thought_begin: literal that may begin reasoning.
        thought_end: literal that ends it; empty: there is no reasoning.
        is_inside_thought: the prompt holds its begin.
        after_thought: literal behind reasoning.
        before: literal before the constrained part.
    """

    thought_begin: str = ""
    thought_end: str = ""
    is_inside_thought: bool = False
    after_thought: str = ""
    before: str = ""


NO_FRAME = Frame()


@dataclass(slots=True)
class _Writer:
    """A grammar that is being written.

    Attributes:
        special: ids of the tokens that no text contains, by name.
        rules: lines of the main grammar.
        parts: grammars that it refers to.
    """

    special: Mapping[str, int]
    rules: list[str] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)

    def literal(self, text: str) -> str:
        """A text as an expression: as bytes, but for its special tokens."""
        pieces = _split(text, self.special)
        return " ".join(f"<[{p}]>" if isinstance(p, int) else json.dumps(p) for p in pieces)

    def until(self, name: str, literal: str) -> str:
        """Any text up to the first occurrence of a literal, as an expression."""
        if literal in self.special:
            self.rules.append(f"{name}_text: {_ANY_TEXT}")
            return f"{name}_text {self.literal(literal)}"
        self.rules.append(f"{name}[lazy]: {_ANY_TEXT} {json.dumps(literal)}")
        return name

    def rest(self) -> str:
        """Any text, as an expression."""
        self.rules.append(f"rest: {_ANY_TEXT}")
        return "rest"

    def part(self, **grammar: Any) -> str:
        """A grammar of its own, as an expression."""
        name = f"part_{len(self.parts)}"
        self.parts.append({"name": name, **grammar})
        return f"@{name}"

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value, as an expression."""
        given = schema.get("x-guidance", {})
        options = {**given, **_JSON_OPTIONS} if is_object(given) else given
        return self.part(json_schema={**schema, "x-guidance": options})

    def finish(self, start: str) -> str:
        """The whole grammar, which begins with an expression."""
        lark = "\n".join([f"start: {start}", *self.rules, ""])
        return json.dumps({"grammars": [{"name": "output", "lark_grammar": lark}, *self.parts]})


def write_grammar(
    constraint: Constraint, *, frame: Frame = NO_FRAME, special: Mapping[str, int]
) -> str:
    """Write the grammar of a message.

    Args:
        constraint: what it must look like.
        frame: what may stand around that.
        special: ids of the tokens that stand for no text, by name.
    """
    writer = _Writer(special)
    pieces = [_thought(frame, writer), writer.literal(frame.before)]
    pieces.append(_expression(constraint, writer))
    return writer.finish(" ".join(filter(None, pieces)))


def _thought(frame: Frame, writer: _Writer) -> str:
    if not frame.thought_end:
        return ""
    text = writer.until("thought", frame.thought_end)
    writer.rules.append(r"space: /[ \t\r\n]{0,8}/")
    behind = f"{text} space {writer.literal(frame.after_thought)}"
    if frame.is_inside_thought:
        return behind
    return f"({writer.literal(frame.thought_begin)} {behind})?"


def _expression(constraint: Constraint, writer: _Writer) -> str:
    match constraint:
        case JsonSchema(schema):
            return writer.json(schema)
        case Regex(pattern):
            return writer.part(lark_grammar=f"start: /{_slashed(pattern)}/")
        case Choices(texts):
            return f"({' | '.join(json.dumps(text) for text in texts)})"
        case Lark(grammar):
            return writer.part(lark_grammar=grammar)
        case Tags(tags):
            return _tags(tags, writer)
        case Calls():
            return _calls(constraint, writer)


def _tags(tags: Sequence[Tag], writer: _Writer) -> str:
    by_trigger: dict[str, list[str]] = {}
    for tag in tags:
        by_trigger.setdefault(tag.trigger, []).append(_tag(tag, tag.trigger, writer))
    choices = [
        f"{writer.until(f'trigger_{i}', trigger)} ({' | '.join(bodies)})"
        for i, (trigger, bodies) in enumerate(by_trigger.items())
    ]
    writer.rules.append(f"tag: {' | '.join(choices)}")
    return f"tag* {writer.rest()}"


def _calls(calls: Calls, writer: _Writer) -> str:
    trigger = "" if calls.is_required else calls.trigger
    # Each call has the trigger in front of it, or all of them together have.
    has_own_trigger = bool(trigger) and not calls.before
    tags = [_tag(tag, trigger if has_own_trigger else "", writer) for tag in calls.tags]
    writer.rules.append(f"call: {' | '.join(tags)}")
    if has_own_trigger:
        call = f"{writer.until('trigger', trigger)} call"
        return f"({call} | {writer.rest()})" if calls.is_single else f"({call})* {writer.rest()}"
    more = "" if calls.is_single else f"({writer.literal(calls.separator)} call)*"
    before = writer.literal(calls.before.removeprefix(trigger))
    group = f"{before} call {more} {writer.literal(calls.after)}"
    if calls.is_required:
        return group
    if trigger:
        return f"({writer.until('trigger', trigger)} {group} | {writer.rest()})"
    writer.rules.append(rf"plain: /[ \t\r\n]*([^ \t\r\n{calls.not_first}](.|\n)*)?/")
    return f"({group} | plain)"


def _tag(tag: Tag, prefix: str, writer: _Writer) -> str:
    """A tag without a prefix of it, as an expression."""
    begin = writer.literal(tag.begin.removeprefix(prefix))
    return f"{begin} {writer.json(tag.schema)} {writer.literal(tag.end)}"


def _split(text: str, special: Mapping[str, int]) -> Sequence[str | int]:
    """Cut a text at its special tokens, the longest first."""
    for name in sorted(special, key=len, reverse=True):
        before, found, behind = text.partition(name)
        if found:
            return [*_split(before, special), special[name], *_split(behind, special)]
    return [text] if text else []


def _slashed(pattern: str) -> str:
    """A pattern as it stands between slashes: those of its own are escaped, and line ends."""
    escaped: list[str] = []
    is_escape = False
    for char in pattern:
        if char == "/" and not is_escape:
            escaped.append("\\/")
        elif char == "\n":
            escaped.append("n" if is_escape else "\\n")
        else:
            escaped.append(char)
        is_escape = char == "\\" and not is_escape
    return "".join(escaped)
