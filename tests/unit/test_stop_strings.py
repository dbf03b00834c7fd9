"""The stop-string matcher: one text, one outcome, however it is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.stop_strings import StopStringMatcher

# A tiny alphabet makes overlaps and false starts the rule.
TEXTS = st.text("ab\n", max_size=24)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, character by character: the earliest end, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops)
    out = "".join(matcher.feed(piece) for piece in pieces)
    return out + matcher.flush(), matcher.matched


@given(TEXTS, STOPS, st.data())
def test_every_split_gives_the_text_up_to_the_first_stop_string(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert run(pieces, stops) == expected(text, stops)


@given(TEXTS, STOPS)
def test_holds_back_no_more_than_what_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    out = ""
    for count, char in enumerate(text, start=1):
        out += matcher.feed(char)
        if matcher.matched is not None:
            break
        held = text[len(out) : count]
        assert text[:count] == out + held
        assert not held or any(stop.startswith(held) for stop in stops)


def test_text_held_back_for_nothing_comes_with_the_next_piece() -> None:
    matcher = StopStringMatcher(["</end>"])
    assert [matcher.feed("a</en"), matcher.feed("x"), matcher.flush()] == ["a", "</enx", ""]


def test_nothing_follows_a_match() -> None:
    matcher = StopStringMatcher(["stop"])
    assert matcher.feed("one stop two") == "one "
    assert (matcher.feed("more"), matcher.flush(), matcher.matched) == ("", "", "stop")


def test_an_empty_stop_string_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        StopStringMatcher([""])
