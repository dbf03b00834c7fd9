"""Drafts from prompt lookup: what is guessed, and that verifying them changes no token."""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicas.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.prompt_lookup import PromptLookup, find_drafts
from replicas.engine.startup import build_engine
from tests.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.fake_runner import make_request, output, run

NUM_TOKENS = 60
PROMPTS = {
    str(i): [random.Random(i).randrange(3, 128) for _ in range(length)]
    for i, length in enumerate((1, 9, 16, 33, 40, 3))
}
SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
LOOKUP = PromptLookup(min_ngram=2, max_ngram=3, num_drafts=5)


def guess(text: list[int], lookup: PromptLookup) -> list[int]:
    """What `find_drafts` has to find, the slow way."""
    best, end = 0, 0
    for candidate in range(1, len(text)):
        agree = 0
        while (
            agree < min(lookup.max_ngram, candidate)
            and text[candidate - 1 - agree] == text[len(text) - 1 - agree]
        ):
            agree += 1
        if agree >= max(best, lookup.min_ngram):
            best, end = agree, candidate
    if best == 0:
        return []
    grown = list(text)
    for i in range(lookup.num_drafts):
        grown.append(grown[end + i])
    return grown[len(text) :][: 2 * best]


@pytest.mark.parametrize("lookup", [LOOKUP, PromptLookup(min_ngram=1, max_ngram=4, num_drafts=7)])
def test_drafts_continue_the_longest_and_latest_match(lookup: PromptLookup) -> None:
    rng = np.random.default_rng(0)
    find = jax.jit(find_drafts, static_argnums=2)
    num_with_drafts = 0
    for num_symbols in (2, 3, 8):
        # Random text from the length on: nothing there may be found.
        token_ids = rng.integers(0, num_symbols, (64, 40)).astype(np.int32)
        lengths = rng.integers(0, 41, 64).astype(np.int32)
        drafts, counts = find(jnp.asarray(token_ids), jnp.asarray(lengths), lookup)
        for row, length, drafted, count in zip(token_ids, lengths, drafts, counts, strict=True):
            expected = guess(row[:length].tolist(), lookup)
            assert drafted[:count].tolist() == expected
            num_with_drafts += bool(expected)
    assert num_with_drafts > 80


def test_a_repeated_token_is_drafted_again_and_again() -> None:
    text = jnp.asarray([[7, 7, 7, 7, 0, 0]], jnp.int32)
    drafts, counts = find_drafts(text, jnp.asarray([4], jnp.int32), LOOKUP)
    assert drafts[0, : counts[0]].tolist() == [7] * 5


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Engine, Engine]:
    """A plain engine, and one that speculates and has too few pages for two long texts.

    The model runs into loops: its context counts little beside the latest token.
    """
    tensors = random_tensors(TINY_LLAMA, seed=3)
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] *= 0.2
    config = EngineConfig(
        model=str(write_checkpoint(tmp_path_factory.mktemp("looping"), tensors=tensors)),
        platform="cpu",
        dtype=request.param,
        page_size=8,
        num_pages=64,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_mixed_tokens=16,
        max_model_len=128,
    )
    speculating = dataclasses.replace(config, speculation="prompt_lookup", num_pages=1 + 16)
    return build_engine(config), build_engine(speculating)


def generate(engine: Engine, **sampling) -> dict[str, list[int]]:
    num_compiles = engine.load().num_compiles_after_warmup  # of the whole process
    for key, prompt in PROMPTS.items():
        fields = {"ignore_eos": True, "seed": int(key), **sampling}
        engine.add(make_request(key, prompt, NUM_TOKENS, **fields))
    outputs = {key: output(deltas) for key, deltas in run(engine).items()}
    load = engine.load()
    assert load.num_free_pages == load.num_pages
    assert load.num_compiles_after_warmup == num_compiles
    return outputs


def test_tokens_with_speculation_are_those_without(engines: tuple[Engine, Engine]) -> None:
    """Alone and beside others, chunked, preempted, from the prefix cache; greedy and sampled."""
    plain, engine = engines
    greedy, sampled = generate(plain), generate(plain, **SAMPLING)
    for _ in range(2):
        assert generate(engine) == greedy
        assert generate(engine, **SAMPLING) == sampled
    load = engine.load()
    assert 200 < load.num_accepted_tokens < load.num_draft_tokens
    assert load.num_preemptions > 0
    assert load.num_cached_tokens > 0


def test_stop_tokens_and_limits_inside_the_drafts_hold(engines: tuple[Engine, Engine]) -> None:
    plain, engine = engines
    prompt = PROMPTS["3"]
    plain.add(make_request("all", prompt, NUM_TOKENS, ignore_eos=True))
    tokens = output(run(plain)["all"])
    before = engine.load().num_accepted_tokens
    for count in range(NUM_TOKENS - 12, NUM_TOKENS):
        engine.add(make_request("short", prompt, count, ignore_eos=True))
        assert output(run(engine)["short"]) == tokens[:count]
    for stop in set(tokens[20:]):
        engine.add(make_request("stop", prompt, NUM_TOKENS, stop_token_ids=(stop,)))
        assert output(run(engine)["stop"]) == tokens[: tokens.index(stop) + 1]
    assert engine.load().num_accepted_tokens > before + 200


def test_a_text_as_long_as_the_model_allows_is_completed(engines: tuple[Engine, Engine]) -> None:
    outputs = []
    for engine in engines:
        request = make_request("a", PROMPTS["1"], 128 - len(PROMPTS["1"]), ignore_eos=True)
        engine.validate(request)
        engine.add(request)
        outputs.append(output(run(engine)["a"]))
    assert outputs[0] == outputs[1]
