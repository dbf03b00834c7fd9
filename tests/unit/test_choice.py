"""One choice: its text, count and end do not depend on how its tokens are cut into deltas."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.choice import Choice
from app.tokenizer import Tokenizer
from replicas.errors import EngineError
from replicas.wire import FinishReason, GenerateResult, SamplingParams, TokenDelta
from tests.tiny_tokenizer import byte_level

TOKENIZER = Tokenizer(byte_level(), chat_template=None)
IDS = TOKENIZER.encode("Hello world, 火星🚀 Hello again and again.", add_special_tokens=False)


def make_choice(stop: tuple[str, ...] = ()) -> Choice:
    return Choice(
        0,
        "r",
        prompt_token_ids=[5],
        sampling=SamplingParams(),
        detokenizer=TOKENIZER.detokenizer(skip_special_tokens=True),
        stop_strings=stop,
        counts_prompt=True,
    )


def result(reason: FinishReason, num_tokens: int) -> GenerateResult:
    return GenerateResult(
        request_id="r",
        finish_reason=reason,
        num_output_tokens=num_tokens,
        num_prompt_tokens=1,
        num_cached_tokens=1,
    )


def run(
    choice: Choice, ids: list[int], cuts: list[int], reason: FinishReason
) -> tuple[str, list[int]]:
    text, kept = "", []
    bounds = [0, *sorted(cuts), len(ids)]
    for start, end in itertools.pairwise(bounds):
        is_last = end == len(ids) and start == bounds[-2]
        delta = TokenDelta(
            request_id="r",
            start_index=start,
            token_ids=tuple(ids[start:end]),
            result=result(reason, len(ids)) if is_last else None,
        )
        new_text, new_ids, *_ = choice.feed(delta)
        text += new_text
        kept += new_ids
        if choice.finish_reason is not None:
            break
    return text, kept


CUTS = st.lists(st.integers(0, len(IDS)), max_size=8)


@given(CUTS)
def test_without_stop_strings_all_text_and_tokens_come_through(cuts: list[int]) -> None:
    choice = make_choice()
    text, kept = run(choice, IDS, cuts, FinishReason.LENGTH)
    assert text == TOKENIZER.decode(IDS, skip_special_tokens=True)
    assert kept == IDS
    assert (choice.num_tokens, choice.finish_reason) == (len(IDS), "length")


@given(CUTS, st.sampled_from([("again",), ("lo w", "🚀"), ("星",), ("never",), (".",)]))
def test_a_stop_string_ends_text_and_count_alike_for_all_cuts(
    cuts: list[int], stop: tuple[str, ...]
) -> None:
    whole = TOKENIZER.decode(IDS, skip_special_tokens=True)
    end = min((whole.find(s) for s in stop if s in whole), default=len(whole))
    # The fewest tokens whose text contains a stop string.
    counts = range(1, len(IDS) + 1)
    decoded = {n: TOKENIZER.decode(IDS[:n], skip_special_tokens=True) for n in counts}
    expected = next((n for n in counts if any(s in decoded[n] for s in stop)), None)
    choice = make_choice(stop)
    text, kept = run(choice, IDS, cuts, FinishReason.LENGTH)
    assert text == whole[:end]
    assert choice.num_tokens == len(kept) == (expected or len(IDS))
    assert choice.finish_reason == ("length" if expected is None else "stop")


@given(CUTS)
def test_a_stop_token_counts_but_is_not_text(cuts: list[int]) -> None:
    word = TOKENIZER.encode("again", add_special_tokens=False)[-1]
    ids = [*IDS, word]
    choice = make_choice(("unused",))
    text, kept = run(choice, ids, [min(cut, len(IDS)) for cut in cuts], FinishReason.STOP)
    assert text == TOKENIZER.decode(IDS, skip_special_tokens=True)
    assert kept == ids
    assert (choice.num_tokens, choice.num_cached_tokens) == (len(ids), 1)
    assert choice.finish_reason == "stop"


def test_an_end_without_tokens_flushes_what_was_held() -> None:
    choice = make_choice(("Hello there",))
    text, *_ = choice.feed(TokenDelta(request_id="r", start_index=0, token_ids=tuple(IDS[:1])))
    last = TokenDelta(
        request_id="r", start_index=1, token_ids=(), result=result(FinishReason.LENGTH, 1)
    )
    more, *_ = choice.feed(last)
    assert text == ""
    assert more == TOKENIZER.decode(IDS[:1], skip_special_tokens=True)
    assert (choice.num_tokens, choice.finish_reason) == (1, "length")


def test_an_abort_by_the_engine_is_an_error() -> None:
    delta = TokenDelta(
        request_id="r", start_index=0, token_ids=(), result=result(FinishReason.ABORT, 0)
    )
    with pytest.raises(EngineError):
        make_choice().feed(delta)


@pytest.mark.parametrize("stop", [(), ("no such text",)])
def test_the_last_token_of_a_complete_text_is_part_of_it(stop: tuple[str, ...]) -> None:
    """A grammar that lets nothing follow ends the output without a token that says so."""
    choice = make_choice(stop)
    text, kept = run(choice, IDS, [3], FinishReason.COMPLETE)
    assert (text, kept) == (TOKENIZER.decode(IDS, skip_special_tokens=True), IDS)
    assert (choice.finish_reason, choice.num_tokens) == ("stop", len(IDS))
    assert choice.stop_token_id is None
