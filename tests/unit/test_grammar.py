"""Outputs of one grammar share its lexer, and notice nothing of it."""

from __future__ import annotations

import random

import llguidance
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas import grammar as grammars
from replicas.grammar import BadGrammar, Matcher, Vocabulary, grammar_of_json_schema
from tests.tiny_tokenizer import byte_level

# Which states its lexer has depends on the text: there are 2 ** 13.
MANY_STATES = r'start: /(a|b)*a(a|b){12}/ "c"'
PERSON = grammar_of_json_schema(
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}}
)


def new_vocabulary() -> Vocabulary:
    return Vocabulary(byte_level().to_str(), vocab_size=700, eos_token_ids=[1])


def mask_of(matcher: Matcher) -> npt.NDArray[np.int32]:
    words = np.zeros(22, np.int32)
    matcher.fill_mask(words)
    return words


def allowed_tokens(words: npt.NDArray[np.int32]) -> list[int]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


SHARED = new_vocabulary()


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([MANY_STATES, PERSON]))
def test_what_is_allowed_depends_on_no_other_output(rng: random.Random, grammar: str) -> None:
    shared = [SHARED.matcher(grammar) for _ in range(3)]
    alone = [new_vocabulary().matcher(grammar) for _ in shared]
    for _ in range(40):
        index = rng.randrange(3)
        if shared[index].is_complete:
            continue
        mask = mask_of(shared[index])
        np.testing.assert_array_equal(mask, mask_of(alone[index]))
        token_id = rng.choice(allowed_tokens(mask))
        assert shared[index].consume(token_id)
        assert alone[index].consume(token_id)
        assert shared[index].is_accepting == alone[index].is_accepting


@pytest.fixture
def num_compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grammars that were compiled, in order."""
    compiled: list[str] = []

    def compile_and_note(*args: object, **options: object) -> object:
        compiled.append(str(args[1]))
        return real(*args, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    real = llguidance.LLMatcher
    monkeypatch.setattr(llguidance, "LLMatcher", compile_and_note)
    return compiled


def test_a_grammar_is_compiled_once_while_it_is_in_use(
    num_compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_MAX_COMPILED", 2)
    vocabulary = new_vocabulary()
    for text in ("a", "b", "a", "c", "a", "b"):
        vocabulary.matcher(f'start: "{text}"')
    assert num_compiled == [f'start: "{text}"' for text in ("a", "b", "c", "b")]


def test_a_lexer_that_has_served_long_is_replaced(
    num_compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_MAX_SHARED_MASKS", 3)
    vocabulary = new_vocabulary()
    for _ in range(7):
        mask_of(vocabulary.matcher(PERSON))
    assert len(num_compiled) == 3


def test_an_output_goes_on_when_others_have_filled_the_lexer(
    num_compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(grammars, "_LIMITS", limits)
    vocabulary, rng = new_vocabulary(), random.Random(1)
    for _ in range(40):
        matcher = vocabulary.matcher(MANY_STATES)
        for _ in range(16):
            mask = mask_of(matcher)
            assert matcher.error == ""
            assert matcher.consume(rng.choice(allowed_tokens(mask)))
            if matcher.is_complete:
                break
    assert len(num_compiled) > 1


def test_a_grammar_that_is_wrong_is_refused_every_time() -> None:
    vocabulary = new_vocabulary()
    for _ in range(2):
        with pytest.raises(BadGrammar):
            vocabulary.matcher("start: nothing")
