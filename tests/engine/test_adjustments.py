"""Penalties, biases, bans and min-p against a numpy oracle; their state over a request's life."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from replicas.engine.adjustments import OutputRows, draw, make_slot_row, note_drawn, row_flags
from replicas.engine.engine import Engine
from replicas.engine.sampler import SamplingArrays
from replicas.engine.sequence import Sequence
from replicas.errors import InvalidRequest
from replicas.wire import SamplingParams
from tests.fake_runner import make_request, output, run
from tests.small_engine import NUM_TOKENS, PROMPTS, generate, small_engine

VOCAB_SIZE = 300
NUM_ROWS = 64
DRAW = jax.jit(draw)
NOTE = jax.jit(note_drawn, static_argnames="vocab_size")
PROMPT = [3, 3, 4, 5, 6, 7]
OUTPUT = [5, 8, 9, 8, 8, 10, 11, 12, 13, 14, 15, 16]
EOS = 2


def logits_row() -> np.ndarray:
    row = np.random.default_rng(0).standard_normal(VOCAB_SIZE).astype(np.float32) * 1.5
    row[:24] += 3.0
    return row


def make_sequence(sampling: SamplingParams, output: list[int]) -> Sequence:
    """A migrated one: its prompt holds the output so far."""
    request = make_request("a", PROMPT + output, output_offset=len(output))
    return Sequence(
        type(request)(
            request_id="a",
            prompt_token_ids=request.prompt_token_ids,
            sampling=sampling,
            sink=request.sink,
            output_offset=len(output),
        ),
        arrival_number=0,
        arrival_s=0.0,
        max_total_tokens=100,
        root_key=b"",
        stop_token_ids=frozenset({EOS, *sampling.stop_token_ids}),
    )


def oracle(sampling: SamplingParams, output: list[int] = OUTPUT) -> np.ndarray:
    """Probabilities of the next token, in f64, step by step as the parameters' meaning says."""
    logits = logits_row().astype(np.float64)
    if sampling.allowed_token_ids:
        banned = set(range(VOCAB_SIZE)) - set(sampling.allowed_token_ids)
        logits[list(banned)] = -np.inf
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    if len(output) < sampling.min_tokens:
        logits[[EOS, *sampling.stop_token_ids]] = -np.inf
    for word in sampling.bad_words:
        if tuple(output[len(output) - len(word) + 1 :]) == word[:-1] or len(word) == 1:
            logits[word[-1]] = -np.inf
    for token_id in set(PROMPT + output):
        factor = sampling.repetition_penalty
        logits[token_id] *= factor if logits[token_id] <= 0 else 1 / factor
    for token_id, count in Counter(output).items():
        logits[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    weights[weights < sampling.min_p * weights.max()] = 0.0
    descending = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        weights[descending[sampling.top_k :]] = 0.0
    weights /= weights.sum()
    mass_above = np.cumsum(weights[descending]) - weights[descending]
    weights[descending[mass_above >= sampling.top_p]] = 0.0
    return weights / weights.sum()


def arrays(sampling: SamplingParams, *, first_seed: int, position: int) -> SamplingArrays:
    seeds = np.zeros((NUM_ROWS, 2), np.uint32)
    seeds[:, 1] = first_seed + np.arange(NUM_ROWS)
    return SamplingArrays(
        temperature=np.full(NUM_ROWS, sampling.temperature, np.float32),
        top_k=np.full(NUM_ROWS, sampling.top_k, np.int32),
        top_p=np.full(NUM_ROWS, sampling.top_p, np.float32),
        seeds=seeds,
        positions=np.full(NUM_ROWS, position, np.int32),
    )


def draw_many(sampling: SamplingParams, num_draws: int) -> np.ndarray:
    row = make_slot_row(make_sequence(sampling, OUTPUT), VOCAB_SIZE)
    slot_rows = jnp.asarray(np.stack([np.full_like(row, 7), row]))
    outputs = OutputRows(
        slots=np.ones(NUM_ROWS, np.int32), flags=np.full(NUM_ROWS, row_flags(sampling), np.int32)
    )
    logits = jnp.asarray(np.tile(logits_row(), (NUM_ROWS, 1)))
    position = len(PROMPT) + len(OUTPUT)
    return np.concatenate(
        [
            np.asarray(
                DRAW(
                    logits, arrays(sampling, first_seed=seed, position=position), outputs, slot_rows
                )
            )
            for seed in range(0, num_draws, NUM_ROWS)
        ]
    )


CASES: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.1},
    "min_p_hot": {"min_p": 0.05, "temperature": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "negative_frequency": {"frequency_penalty": -0.5, "presence_penalty": -1.0},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": ((0, 2.0), (1, -100.0), (40, 5.0), (0, -1.0))},
    "allowed": {"allowed_token_ids": (0, 5, 31, 32, 63, 64, 299)},
    "bad_words": {"bad_words": ((4,), (15, 16, 17), (16, 18), (16, 16, 19), (*OUTPUT[-7:], 20))},
    "min_tokens": {"min_tokens": len(OUTPUT) + 1, "stop_token_ids": (0, 7)},
    "min_tokens_reached": {"min_tokens": len(OUTPUT), "stop_token_ids": (0, 7)},
    "penalties": {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
    },
    "everything": {
        "min_p": 0.02,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": ((8, 4.0), (100, 3.0)),
        "allowed_token_ids": tuple(range(200)),
        "bad_words": ((16, 18), (6,)),
        "min_tokens": 20,
        "temperature": 1.3,
        "top_p": 0.95,
    },
}


def combine(seed: int) -> dict[str, Any]:
    """Some of the cases at once, behind any temperature, top-k and top-p."""
    rng = random.Random(seed)
    combined: dict[str, Any] = {
        "temperature": rng.choice((0.7, 1.0, 1.6)),
        "top_k": rng.choice((0, 25, 150)),
        "top_p": rng.choice((1.0, 0.9, 0.6)),
    }
    for case in rng.sample(sorted(CASES), rng.randint(2, 5)):
        combined |= CASES[case]
    return combined


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_draws_follow_the_oracle(fields: dict[str, Any]) -> None:
    assert check_draws(fields) > 3


@pytest.mark.parametrize("seed", range(24))
def test_draws_with_several_parameters_follow_the_oracle(seed: int) -> None:
    check_draws(combine(seed))


def check_draws(fields: dict[str, Any]) -> int:
    """Compare many draws with the oracle by a chi-square test; return in how many bins."""
    sampling = SamplingParams(**{"temperature": 1.0, "max_tokens": 50, **fields})
    expected = oracle(sampling)
    num_draws = 4096
    counts = np.bincount(draw_many(sampling, num_draws), minlength=VOCAB_SIZE)
    assert counts[expected == 0].sum() == 0
    is_frequent = expected * num_draws >= 8
    observed = np.append(counts[is_frequent], counts[~is_frequent].sum())
    wanted = np.append(expected[is_frequent], expected[~is_frequent].sum()) * num_draws
    is_bin = wanted > 1e-9
    if is_bin.sum() > 1:
        assert stats.chisquare(observed[is_bin], wanted[is_bin]).pvalue > 1e-3
    return int(is_bin.sum())


def test_noting_tokens_one_by_one_gives_the_row_of_them_all() -> None:
    """What the device keeps equals what the host would write, at every length."""
    sampling = SamplingParams(presence_penalty=1.0, bad_words=((1, 2),), max_tokens=50)
    slot_rows = jnp.asarray(make_slot_row(make_sequence(sampling, []), VOCAB_SIZE))[None]
    slot_rows = jnp.tile(slot_rows, (2, 1))
    untouched = np.asarray(slot_rows[0])
    flags = np.array([row_flags(sampling), 0], np.int32)
    for index, token_id in enumerate(OUTPUT):
        slot_rows = NOTE(
            slot_rows,
            np.array([token_id, 250], np.int32),
            np.array([len(PROMPT) + index, 3], np.int32),
            OutputRows(slots=np.array([1, 0], np.int32), flags=flags),
            vocab_size=VOCAB_SIZE,
        )
        written = make_slot_row(make_sequence(sampling, OUTPUT[: index + 1]), VOCAB_SIZE)
        np.testing.assert_array_equal(np.asarray(slot_rows[1]), written)
    np.testing.assert_array_equal(np.asarray(slot_rows[0]), untouched)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Adjusted and plain rows side by side draw what they draw alone."""
    rng = np.random.default_rng(3)
    kinds = [
        SamplingParams(temperature=t, top_k=k, **CASES[name])
        for t, k, name in (
            (0.0, 0, "presence"),
            (1.0, 0, "repetition"),
            (0.7, 20, "frequency"),
            (1.0, 300, "allowed"),
            (1.0, 5, "bad_words"),
        )
    ] + [SamplingParams(temperature=1.0), SamplingParams()]
    rows = [make_slot_row(make_sequence(kind, OUTPUT), VOCAB_SIZE) for kind in kinds]
    slot_rows = jnp.asarray(np.stack(rows))
    owners = rng.integers(0, len(kinds), NUM_ROWS).astype(np.int32)
    logits = (rng.standard_normal((NUM_ROWS, VOCAB_SIZE)) * 2).astype(np.float32)
    together = SamplingArrays(
        temperature=np.array([kinds[o].temperature for o in owners], np.float32),
        top_k=np.array([kinds[o].top_k for o in owners], np.int32),
        top_p=np.ones(NUM_ROWS, np.float32),
        seeds=rng.integers(0, 2**32, (NUM_ROWS, 2), dtype=np.uint32),
        positions=np.full(NUM_ROWS, len(PROMPT) + len(OUTPUT), np.int32),
    )
    flags = np.array([row_flags(kinds[o]) for o in owners], np.int32)
    drawn = np.asarray(DRAW(logits, together, OutputRows(owners, flags), slot_rows))
    for part in rng.permutation(NUM_ROWS).reshape(-1, 8):
        own = SamplingArrays(*(a[part] for a in together))
        tokens = DRAW(logits[part], own, OutputRows(owners[part], flags[part]), slot_rows)
        np.testing.assert_array_equal(np.asarray(tokens), drawn[part])


def test_all_kinds_of_rows_are_drawn_by_one_copy_of_the_code() -> None:
    """What a program holds twice costs each of its runs, and its compilation, twice."""
    logits = jnp.zeros((NUM_ROWS, VOCAB_SIZE))
    rows = jnp.zeros(NUM_ROWS, jnp.int32)
    arrays = SamplingArrays(logits[:, 0], rows, logits[:, 0], jnp.zeros((NUM_ROWS, 2), "u4"), rows)
    slot_row = make_slot_row(make_sequence(SamplingParams(), OUTPUT), VOCAB_SIZE)
    text = DRAW.lower(logits, arrays, OutputRows(rows, rows), slot_row[None]).as_text()
    assert text.count("chlo.top_k") == 1


PENALTIES: dict[str, Any] = {
    "temperature": 0.8,
    "presence_penalty": 0.9,
    "frequency_penalty": 0.6,
    "repetition_penalty": 1.3,
    "bad_words": ((5, 6), (7, 8, 9)),
    "min_p": 0.01,
}


def tokens_of(engine: Engine, keys: str = "01234", **sampling: Any) -> dict[str, list[int]]:
    return {key: output(deltas) for key, deltas in generate(engine, keys, **sampling).items()}


def test_penalties_survive_batches_preemption_prefix_hits_and_drafts() -> None:
    roomy = small_engine()
    alone = {key: tokens_of(roomy, key, **PENALTIES)[key] for key in PROMPTS}
    assert alone != {key: tokens_of(roomy, key, temperature=0.8)[key] for key in PROMPTS}
    assert tokens_of(roomy, **PENALTIES) == alone
    cramped = small_engine(num_pages=1 + 18, speculation="prompt_lookup")
    before = cramped.load()
    assert tokens_of(cramped, **PENALTIES) == alone
    assert tokens_of(cramped, **PENALTIES) == alone
    after = cramped.load()
    assert after.num_preemptions > before.num_preemptions
    assert after.num_cached_tokens > before.num_cached_tokens


def test_a_migrated_request_goes_on_as_if_nothing_had_happened() -> None:
    roomy = small_engine()
    whole = tokens_of(roomy, "2", min_tokens=20, **PENALTIES)["2"]
    for cut in (1, 7, 23):
        request = make_request(
            "moved",
            PROMPTS["2"] + whole[:cut],
            NUM_TOKENS - cut,
            output_offset=cut,
            seed=2,
            ignore_eos=True,
            min_tokens=20,
            **PENALTIES,
        )
        roomy.add(request)
        assert output(run(roomy)["moved"]) == whole[cut:]


def test_plain_requests_in_a_slot_that_had_penalties_are_plain() -> None:
    roomy = small_engine()
    plain = tokens_of(roomy, temperature=0.8)
    tokens_of(roomy, **PENALTIES)
    assert tokens_of(roomy, temperature=0.8) == plain


def test_nothing_stops_the_output_before_min_tokens() -> None:
    roomy = small_engine()
    free = tokens_of(roomy, "3")["3"]
    stops = tuple(sorted(set(free)))
    roomy.add(make_request("a", PROMPTS["3"], NUM_TOKENS, stop_token_ids=stops, min_tokens=10))
    held = output(run(roomy)["a"])
    assert len(held) >= 11 or held[-1] not in stops
    assert not set(held[:10]) & set(stops)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("min_p", {"min_p": 1.5}),
        ("presence_penalty", {"presence_penalty": float("nan")}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("logit_bias", {"logit_bias": ((1000, 1.0),)}),
        ("logit_bias", {"logit_bias": ((1, float("inf")),)}),
        ("logit_bias", {"logit_bias": ((1, 1.0),) * 301}),
        ("allowed_token_ids", {"allowed_token_ids": (256,)}),
        ("bad_words", {"bad_words": ((),)}),
        ("bad_words", {"bad_words": ((1,) * 9,)}),
        ("min_tokens", {"min_tokens": 9}),
        ("logprobs", {"logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "prompt_logprobs_start": 0}),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        small_engine().validate(make_request("a", [3], 8, **fields))
    assert refusal.value.param == param
