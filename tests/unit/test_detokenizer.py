"""Incremental detokenisation equals decoding everything at once."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from app.detokenizer import byte_level_table
from app.tokenizer import Tokenizer
from tests.tiny_tokenizer import byte_level, sentence_piece

BYTE_LEVEL = byte_level()
SENTENCE_PIECE = sentence_piece()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def pieces_of(
    tokenizer: tokenizers.Tokenizer, deltas: list[list[int]], *, skip_special_tokens: bool
) -> list[str]:
    wrapped = Tokenizer(tokenizer, chat_template=None)
    detokenizer = wrapped.detokenizer(skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.feed(delta) for delta in deltas), detokenizer.flush()]


def cut(ids: list[int], data: st.DataObject) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    bounds = [0, *cuts, len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


@given(
    st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=30),
    st.booleans(),
    st.data(),
)
def test_byte_level_equals_decode_for_any_ids_and_cuts(
    ids: list[int], skip_special_tokens: bool, data: st.DataObject
) -> None:
    pieces = pieces_of(BYTE_LEVEL, cut(ids, data), skip_special_tokens=skip_special_tokens)
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip_special_tokens)
    assert "".join(pieces) == whole


@given(TEXTS, st.booleans(), st.data())
def test_sentence_piece_equals_decode_for_any_text_and_cuts(
    text: str, with_special: bool, data: st.DataObject
) -> None:
    ids = SENTENCE_PIECE.encode(f"▁Hello{text}").ids
    if with_special:
        ids = [1, *ids[: len(ids) // 2], *([2] * 20), *ids[len(ids) // 2 :], 2]
    unsplit = SENTENCE_PIECE.decode(ids, skip_special_tokens=True)
    pieces = pieces_of(SENTENCE_PIECE, cut(ids, data), skip_special_tokens=True)
    assert "".join(pieces) == unsplit


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte", "sentencepiece"])
def test_no_piece_cuts_a_character(tokenizer: tokenizers.Tokenizer) -> None:
    text = "火星🚀"
    ids = tokenizer.encode(text).ids
    pieces = pieces_of(tokenizer, [[i] for i in ids], skip_special_tokens=True)
    assert "".join(pieces).strip() == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(ids) > len(text)  # or the test shows nothing


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte", "sentencepiece"])
def test_an_unfinished_character_is_flushed_as_a_replacement(
    tokenizer: tokenizers.Tokenizer,
) -> None:
    ids = tokenizer.encode("🚀").ids[:-1]
    *pieces, last = pieces_of(tokenizer, [[i] for i in ids], skip_special_tokens=True)
    assert "".join(pieces) == ""
    assert set(last) == {"\ufffd"}


def test_sentence_piece_does_not_wait_for_ever_for_bytes_that_make_no_character() -> None:
    broken = SENTENCE_PIECE.token_to_id("<0xFF>")
    hello = SENTENCE_PIECE.token_to_id("▁Hello")
    deltas = [[i] for i in [broken] * 40 + [hello]]
    pieces = pieces_of(SENTENCE_PIECE, deltas, skip_special_tokens=True)
    assert "\ufffd" in "".join(pieces[:20])
    assert "".join(pieces).endswith("Hello")


def test_ids_without_a_token_have_no_text() -> None:
    assert pieces_of(BYTE_LEVEL, [[100_000]], skip_special_tokens=True) == ["", ""]


def test_only_byte_level_vocabularies_have_a_table() -> None:
    table = byte_level_table(BYTE_LEVEL)
    assert table is not None
    assert set(table) == set(range(BYTE_LEVEL.get_vocab_size()))
    assert byte_level_table(SENTENCE_PIECE) is None
