"""Finds stop strings in text that arrives piece by piece.

Pure and synchronous. Invariant: what is let through, and where the text ends, depend on the text
alone, never on how it was cut into pieces. The earliest *end* of a stop string ends the text, as
if characters arrived one at a time; of several that end there the longest counts.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Holds back text while it may be the beginning of a stop string.

    Attributes:
        matched: the stop string that ended the text, or None.
    """

    def __init__(self, stop_strings: Sequence[str], *, is_included: bool = False) -> None:
        """Look for `stop_strings`; with `is_included` the one that is found is let through."""
        assert stop_strings
        assert all(stop_strings), "an empty stop string would match before the first token"
        # Longest first: of two that end at the same place the longer one wins.
        self._stop_strings = sorted(set(stop_strings), key=len, reverse=True)
        self._max_held = max(map(len, self._stop_strings)) - 1
        self._held = ""
        self._is_included = is_included
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Take new text and return what can no longer be part of a stop string.

        After a match the text before the stop string has been returned (with it, where it is
        included), and nothing follows.
        """
        if self.matched is not None or not piece:
            return ""
        text = self._held + piece
        end, match = len(text) + 1, ""
        for stop in self._stop_strings:
            start = text.find(stop, 0, end - 1)  # only what ends earlier than the best so far
            if start >= 0:
                end, match = start + len(stop), stop
        if match:
            self.matched, self._held = match, ""
            return text[:end] if self._is_included else text[: end - len(match)]
        keep = self._longest_open_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text held back: the output has ended and no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _longest_open_suffix(self, text: str) -> int:
        """Length of the longest suffix that begins a stop string without completing it."""
        for length in range(min(self._max_held, len(text)), 0, -1):
            suffix = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stop_strings):
                return length
        return 0
