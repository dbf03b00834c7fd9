"""Log-probabilities against the naive model: of outputs and prompts, however the work is cut."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from replicas.wire import TokenDelta, TokenLogprob, TokenLogprobs
from tests.fake_runner import output
from tests.naive import NaiveLlama
from tests.small_engine import MODEL, NUM_TOKENS, PROMPTS, generate, small_engine


@cache
def log_softmax(text: tuple[int, ...]) -> np.ndarray:
    logits = NaiveLlama(MODEL).logits(text)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def entries(deltas: list[TokenDelta], *, first: int, of_prompt: bool = False) -> list[TokenLogprob]:
    """All entries of a request, checked to be without gap or repetition."""
    found: list[TokenLogprob] = []
    for delta in deltas:
        part = delta.prompt_logprobs if of_prompt else delta.logprobs
        if part is not None:
            assert part.start == first + len(found)
            found += part
    return found


def check(found: list[TokenLogprob], text: list[int], *, first: int, num_top: int) -> None:
    """Entries of the tokens of `text` from position `first` on are what the naive model says."""
    expected = log_softmax(tuple(text))
    for position, entry in enumerate(found, start=first):
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(row[text[position]], abs=2e-4)
        ids = [token_id for token_id, _ in entry.top]
        np.testing.assert_allclose([value for _, value in entry.top], row[ids], atol=2e-4)
        np.testing.assert_allclose(row[ids], np.sort(row)[::-1][:num_top], atol=2e-4)


@pytest.mark.parametrize("speculation", ["none", "prompt_lookup"])
def test_logprobs_are_those_of_the_model_chunked_preempted_and_drafted(speculation: str) -> None:
    engine = small_engine(num_pages=1 + 18, speculation=speculation)
    before = engine.load()
    asked = {"logprobs": 4, "prompt_logprobs": 2, "temperature": 0.7}
    deltas = generate(engine, **asked)
    assert engine.load().num_preemptions > before.num_preemptions
    assert engine.load().num_cached_tokens == before.num_cached_tokens
    for key, parts in deltas.items():
        prompt, tokens = PROMPTS[key], output(parts)
        text = prompt + tokens
        of_prompt = entries(parts, first=1, of_prompt=True)
        assert len(of_prompt) == len(prompt) - 1
        check(of_prompt, text, first=1, num_top=2)
        of_output = entries(parts, first=0)
        assert len(of_output) == NUM_TOKENS
        check(of_output, text, first=len(prompt), num_top=4)
    plain = generate(engine, temperature=0.7)
    assert {k: output(v) for k, v in plain.items()} == {k: output(v) for k, v in deltas.items()}


def test_the_bits_do_not_depend_on_what_runs_beside() -> None:
    engine = small_engine()
    asked = {"logprobs": 20, "prompt_logprobs": 20}
    together = generate(engine, **asked)
    for key in PROMPTS:
        alone = generate(engine, key, **asked)[key]
        for of_prompt in (False, True):
            first = 1 if of_prompt else 0
            assert entries(alone, first=first, of_prompt=of_prompt) == entries(
                together[key], first=first, of_prompt=of_prompt
            )


def test_what_precedes_the_wanted_prompt_logprobs_may_be_cached() -> None:
    engine = small_engine()
    generate(engine, "3")
    before = engine.load().num_cached_tokens
    [parts] = generate(engine, "3", prompt_logprobs=0, prompt_logprobs_start=36).values()
    assert engine.load().num_cached_tokens == before + 32
    found = entries(parts, first=36, of_prompt=True)
    assert len(found) == 4
    check(found, PROMPTS["3"], first=36, num_top=0)


def test_adjusted_draws_have_the_models_own_logprobs() -> None:
    [parts] = generate(small_engine(), "2", logprobs=1, allowed_token_ids=(7,)).values()
    assert output(parts) == [7] * NUM_TOKENS
    text = PROMPTS["2"] + [7] * NUM_TOKENS
    check(entries(parts, first=0), text, first=len(PROMPTS["2"]), num_top=1)


def test_packed_logprobs_are_cut_and_joined_by_index() -> None:
    rng = random.Random(0)
    data = b"".join(rng.randbytes(12) for _ in range(5))
    whole = TokenLogprobs(start=3, num_top=1, data=data)
    assert (whole.end, len(list(whole))) == (8, 5)
    assert whole.head(2).joined(whole.tail(5)) == whole
    assert whole.tail(0) == whole
    assert whole.tail(9).data == b""
