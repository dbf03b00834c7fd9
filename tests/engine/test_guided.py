"""Outputs that must follow a grammar do, whatever the model would rather say and whatever runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from replicas.engine.engine import Engine
from replicas.errors import InvalidRequest
from replicas.grammar import grammar_of_choices, grammar_of_json_schema, grammar_of_regex
from replicas.wire import FinishReason, TokenDelta
from tests.fake_runner import make_request, output, run
from tests.guided_engine import (
    EOS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    add,
    guided_engine,
    prompt_of,
    text_of,
)
from tests.small_engine import small_engine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "tags": {"type": "array", "items": {"enum": ["old", "new"]}, "maxItems": 3},
        "inner": {
            "type": "object",
            "properties": {"is": {"type": "boolean"}},
            "required": ["is"],
            "additionalProperties": False,
        },
    },
    "required": ["age", "tags", "inner"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CHOICES = ["yes", "no", "maybe so", 'a "quoted" \\ one\n', "Ä日"]
LARK = 'start: item+\nitem: NAME "=" NUMBER ";"\nNAME: /[a-z]{1,4}/\nNUMBER: /[0-9]{1,3}/\n'
OPEN_ENDED = grammar_of_regex("[a-z ]{1500}")
"""Longer than any output of these tests."""


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


Check = Callable[[str], object]
GRAMMARS: dict[str, tuple[str, Check]] = {
    "json": (grammar_of_json_schema(SCHEMA), is_json),
    "regex": (
        grammar_of_regex(r"(foo|ba[rz]){1,4}-\d{2}"),
        re.compile(r"(foo|ba[rz]){1,4}-\d{2}").fullmatch,
    ),
    "open_end": (grammar_of_regex("[a-f]{2,40}"), re.compile("[a-f]{2,40}").fullmatch),
    "choice": (grammar_of_choices(CHOICES), CHOICES.__contains__),
    "lark": (LARK, re.compile("([a-z]{1,4}=[0-9]{1,3};)+").fullmatch),
    "nothing": (grammar_of_regex("a?"), ("", "a").__contains__),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "greedy": {"temperature": 0.0},
    "narrow": {"top_k": 5, "top_p": 0.9},
    "adjusted": {
        "presence_penalty": 0.9,
        "frequency_penalty": 0.6,
        "repetition_penalty": 1.3,
        "min_p": 0.01,
        "bad_words": ((5, 6), (7,)),
        "logit_bias": ((80, 5.0), (90, -5.0)),
    },
    "unwilling": {"min_tokens": 30, "allowed_token_ids": (2, 3, 4)},
    "logprobs": {"logprobs": 3},
}


def check(grammar: str, deltas: list[TokenDelta]) -> FinishReason:
    """Check a finished output, or that an unfinished one could have gone on."""
    text_grammar, is_right = GRAMMARS[grammar]
    token_ids, result = output(deltas), deltas[-1].result
    assert result is not None
    assert EOS not in token_ids[:-1]
    text = text_of(token_ids)
    if result.finish_reason is FinishReason.LENGTH:
        matcher = guided_engine().make_matcher(make_request("a", [3], grammar=text_grammar))
        assert matcher is not None
        assert matcher.replay(token_ids)
    else:
        assert result.finish_reason in (FinishReason.STOP, FinishReason.COMPLETE)
        assert is_right(text), text
        assert (token_ids[-1] == EOS) == (result.finish_reason is FinishReason.STOP)
    return result.finish_reason


def test_every_output_follows_its_grammar() -> None:
    """All grammars with all kinds of parameters at once, each other's neighbours; none compiles."""
    engine = guided_engine()
    num_compiles = engine.load().num_compiles_after_warmup  # of the whole process
    for sampling, fields in SAMPLINGS.items():
        for grammar, (text, _) in GRAMMARS.items():
            for seed in range(2):
                add(engine, f"{grammar}-{sampling}-{seed}", seed, grammar=text, **fields)
    deltas = run(engine)
    reasons = {check(key.partition("-")[0], parts) for key, parts in deltas.items()}
    assert reasons == {FinishReason.STOP, FinishReason.COMPLETE, FinishReason.LENGTH}
    hot = {
        tuple(output(deltas[f"json-{name}-{seed}"])) for name in ("hot", "plain") for seed in (0, 1)
    }
    assert len(hot) > 1
    load = engine.load()
    assert load.num_compiles_after_warmup == num_compiles
    assert load.num_free_pages == load.num_pages


def test_what_cannot_go_on_ends_whatever_else_was_asked() -> None:
    """A grammar without continuation ends the output, with min_tokens and without end tokens."""
    engine = guided_engine()
    add(engine, "a", 0, grammar=grammar_of_choices(["yes"]), min_tokens=20, ignore_eos=True)
    add(engine, "b", 0, grammar=grammar_of_regex("(ab)+"), min_tokens=20, max_tokens=40)
    deltas = run(engine)
    assert text_of(output(deltas["a"])) == "yes"
    assert deltas["a"][-1].result.finish_reason is FinishReason.COMPLETE
    assert len(output(deltas["b"])) > 20
    assert re.fullmatch("(ab)*a?", text_of(output(deltas["b"])))


def test_stop_tokens_and_limits_hold() -> None:
    engine = guided_engine()
    add(engine, "all", 1, grammar=OPEN_ENDED, max_tokens=30)
    whole = run(engine)["all"]
    assert whole[-1].result.finish_reason is FinishReason.LENGTH
    tokens = output(whole)
    assert len(tokens) == 30
    stop = tokens[20]
    add(engine, "stop", 1, grammar=OPEN_ENDED, max_tokens=30, stop_token_ids=(stop,))
    stopped = run(engine)["stop"]
    assert stopped[-1].result.finish_reason is FinishReason.STOP
    assert output(stopped) == tokens[: tokens.index(stop) + 1]


def test_neighbours_are_what_they_are_alone() -> None:
    """Plain rows draw bit for bit what they draw without guided ones, and without the feature."""
    engine = guided_engine()
    plain = {f"p{i}": {"temperature": 0.8 if i % 2 else 0.0, "max_tokens": 40} for i in range(5)}

    def add_plain(engine: Engine[Any]) -> None:
        for seed, (key, fields) in enumerate(plain.items()):
            extra = {"logprobs": 2, "frequency_penalty": 0.5} if seed == 3 else {}
            add(engine, key, seed, ignore_eos=True, **fields, **extra)

    add_plain(engine)
    alone = {key: output(deltas) for key, deltas in run(engine).items()}
    add_plain(engine)
    for seed, name in enumerate(GRAMMARS):
        add(engine, f"{name}-{seed}", seed, grammar=GRAMMARS[name][0])
    together = run(engine)
    assert {key: output(together[key]) for key in plain} == alone
    off = guided_engine(structured_output=False)
    add_plain(off)
    assert {key: output(deltas) for key, deltas in run(off).items()} == alone


def test_outputs_do_not_depend_on_batch_chunks_preemption_prefix_hits_or_drafts() -> None:
    fields = {"max_tokens": 40, "frequency_penalty": 0.4}
    prompts = [prompt_of(seed, 10 + 9 * seed) for seed in range(5)]
    names = ["json", "open_end", "long"]

    def all_of(engine: Engine[Any], *, is_alone: bool) -> dict[str, list[int]]:
        outputs: dict[str, list[int]] = {}
        for seed, prompt in enumerate(prompts):
            for name in names:
                grammar = OPEN_ENDED if name == "long" else GRAMMARS[name][0]
                key = f"{name}-{seed}"
                add(engine, key, seed, prompt=prompt, grammar=grammar, **fields)
                if is_alone:
                    outputs[key] = output(run(engine)[key])
        return outputs or {key: output(deltas) for key, deltas in run(engine).items()}

    alone = all_of(guided_engine(), is_alone=True)
    cramped = guided_engine(num_pages=1 + 20, speculation="prompt_lookup")
    before = cramped.load()
    assert all_of(cramped, is_alone=False) == alone
    assert all_of(cramped, is_alone=False) == alone
    after = cramped.load()
    assert after.num_preemptions > before.num_preemptions
    assert after.num_cached_tokens > before.num_cached_tokens


def test_a_migrated_output_goes_on_in_its_grammar() -> None:
    engine = guided_engine()
    grammar, prompt = GRAMMARS["json"][0], prompt_of(2)
    add(engine, "whole", 2, grammar=grammar, presence_penalty=0.5)
    whole = output(run(engine)["whole"])
    for cut in (1, len(whole) // 2, len(whole) - 1):
        add(
            engine,
            "moved",
            2,
            prompt=prompt + whole[:cut],
            output_offset=cut,
            grammar=grammar,
            presence_penalty=0.5,
        )
        deltas = run(engine)["moved"]
        assert output(deltas) == whole[cut:]
        assert deltas[0].start_index == cut
    with pytest.raises(InvalidRequest, match="does not follow"):
        add(engine, "moved", 2, prompt=[*prompt, EOS], output_offset=1, grammar=grammar)


def test_logprobs_are_the_models_own() -> None:
    """Of guided tokens too they are those of the text, as an unguided request computes them."""
    engine = guided_engine()
    prompt = prompt_of(4)
    add(engine, "a", 4, grammar=OPEN_ENDED, max_tokens=20, logprobs=2)
    deltas = run(engine)["a"]
    guided = [entry for delta in deltas for entry in delta.logprobs or ()]
    add(engine, "b", 4, prompt=prompt + output(deltas), max_tokens=1, prompt_logprobs=2)
    forced = [entry for delta in run(engine)["b"] for entry in delta.prompt_logprobs or ()]
    assert len(guided) == 20
    for ours, theirs in zip(guided, forced[len(prompt) - 1 :], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]


def test_an_aborted_output_leaves_its_slot_to_others() -> None:
    engine = guided_engine()
    add(engine, "plain", 0, max_tokens=30, ignore_eos=True)
    alone = output(run(engine)["plain"])
    for seed in range(10):
        add(engine, f"gone-{seed}", seed, grammar=OPEN_ENDED)
    deltas: dict[str, list[TokenDelta]] = {}
    for _ in range(6):
        for delta in engine.step().deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
    for seed in range(10):
        engine.abort(f"gone-{seed}")
    add(engine, "plain", 0, max_tokens=30, ignore_eos=True)
    assert output(run(engine, deltas)["plain"]) == alone


@pytest.mark.parametrize("grammar", ["start: nobody", "start: /(/", '{"grammars": 3}', "\0"])
def test_a_bad_grammar_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="bad grammar"):
        guided_engine().make_matcher(make_request("a", [3], grammar=grammar))


def test_an_engine_without_tokenizer_refuses_grammars() -> None:
    engine = small_engine()
    assert not engine.model_info.takes_grammars
    with pytest.raises(InvalidRequest, match="structured output"):
        engine.validate(make_request("a", [3], grammar=OPEN_ENDED))


def test_every_token_of_the_vocabulary_has_its_bit() -> None:
    """Tokens that only the model has are never allowed; the output fills the context."""
    engine = guided_engine()
    prompt = prompt_of(1, 20)
    add(engine, "a", 1, prompt=prompt, grammar=OPEN_ENDED, max_tokens=MAX_MODEL_LEN - 20)
    tokens = output(run(engine)["a"])
    assert len(tokens) == MAX_MODEL_LEN - 20
    assert max(tokens) < VOCAB_SIZE - 30
    assert re.fullmatch("[a-z ]*", text_of(tokens))
