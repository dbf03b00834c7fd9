"""Text that is still arriving, and a cursor for parsers that wait for more of it.

Parsers are generators that yield whenever what has arrived does not decide how to go on, so that
each one reads like a parser of whole text. Invariant: what a parser does depends on the text alone,
never on how it was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

type Steps[T] = Generator[None, None, T]
"""Yields when more text, or its end, has to be known; returns T."""

_SPACE = re.compile(r"[ \t\r\n]*")
_SPACE_CHARS = " \t\r\n"
_MAX_DROPPED_SPACE = 64


class Source:
    """The text from the first character that is not settled yet.

    Attributes:
        text: what has arrived; `discard_read` drops its beginning.
        position: index of the next character to read. A parser that fails leaves it anywhere:
            whoever tries one remembers where it was.
        is_ended: nothing will follow.
    """

    def __init__(self, text: str = "", *, is_ended: bool = False) -> None:
        self.text = text
        self.position = 0
        self.is_ended = is_ended

    def append(self, piece: str) -> None:
        """Take text that has arrived."""
        self.text += piece

    def discard_read(self) -> None:
        """Forget what lies before the cursor; remembered positions become invalid."""
        self.text = self.text[self.position :]
        self.position = 0

    def peek(self) -> Steps[str]:
        """Return the next character, or an empty string at the end."""
        while self.position >= len(self.text):
            if self.is_ended:
                return ""
            yield
        return self.text[self.position]

    def skip_space(self) -> Steps[None]:
        """Move to the next character that is no whitespace."""
        while True:
            match = _SPACE.match(self.text, self.position)
            assert match is not None
            self.position = match.end()
            if self.position < len(self.text) or self.is_ended:
                return
            yield

    def literal(self, literal: str) -> Steps[bool]:
        """Move past `literal` if it comes next. Decides at the first character that differs."""
        while True:
            found = self.text[self.position : self.position + len(literal)]
            if found == literal:
                self.position += len(literal)
                return True
            if self.is_ended or not literal.startswith(found):
                return False
            yield

    def any_literal(self, literals: Sequence[str]) -> Steps[str | None]:
        """Move past the first of `literals` that comes next, and return it."""
        for literal in literals:
            if (yield from self.literal(literal)):
                return literal
        return None

    def run(self, pattern: re.Pattern[str], *, max_chars: int) -> Steps[str]:
        """Move past the longest match of `pattern`, a repeated class, and return it.

        Empty where nothing matches, or more than `max_chars`.
        """
        while True:
            match = pattern.match(self.text, self.position)
            end = self.position if match is None else match.end()
            if end - self.position > max_chars:
                return ""
            if end < len(self.text) or self.is_ended:
                found = self.text[self.position : end]
                self.position = end
                return found
            yield

    def until(self, literal: str, *, max_chars: int) -> Steps[str | None]:
        """Move past `literal` and return what precedes it; None where it is not that near."""
        while True:
            end = self.text.find(literal, self.position, self.position + max_chars)
            if end >= 0:
                found = self.text[self.position : end]
                self.position = end + len(literal)
                return found
            if self.is_ended or len(self.text) - self.position >= max_chars:
                return None
            yield

    def copy_until(self, markers: Sequence[str], write: Callable[[str], None]) -> Steps[bool]:
        """Hand out text as soon as it is certain that no marker begins in it.

        Args:
            markers: literals that end the copy; none: everything is handed out at once.
            write: takes the text.

        Returns:
            True: the cursor stands in front of a marker and of the whitespace (up to 64 characters)
            before it, which the caller drops or hands out. False: the text has ended.
        """
        longest = max(map(len, markers), default=0)
        while True:
            text = self.text
            found = [at for marker in markers if (at := text.find(marker, self.position)) >= 0]
            if found:
                end = min(found)
            else:
                end = len(text) if self.is_ended else self._first_open(markers, longest)
            # At the end of everything no marker can follow the whitespace.
            if markers and (found or not self.is_ended):
                end = self._before_space(end)
            if end > self.position:
                write(text[self.position : end])
                self.position = end
            self.discard_read()
            if found:
                return True
            if self.is_ended:
                return False
            yield

    def _first_open(self, markers: Sequence[str], longest: int) -> int:
        """Index of the longest suffix that begins a marker, or of the end of the text."""
        text = self.text
        for start in range(max(self.position, len(text) - longest + 1), len(text)):
            suffix = text[start:]
            if any(marker.startswith(suffix) for marker in markers):
                return start
        return len(text)

    def _before_space(self, end: int) -> int:
        first = max(self.position, end - _MAX_DROPPED_SPACE)
        return first + len(self.text[first:end].rstrip(_SPACE_CHARS))
