"""The engine gives the naive tokens, whatever runs beside a request and however it is cut."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from replicas.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.startup import build_engine
from tests.fake_runner import make_request, output, run
from tests.naive import NaiveLlama

GOLDEN = Path(__file__).parents[1] / "golden"
NUM_TOKENS = 16
LENGTHS = (1, 3, 7, 16, 17, 40, 90, 33)
"""Prompt lengths of a ragged batch; the last two share a prefix of two pages."""

Outputs = dict[str, list[int]]


@cache
def prompts(name: str) -> dict[str, list[int]]:
    rng = random.Random(name)
    shared = [rng.randrange(3, 256) for _ in range(32)]
    own = {str(i): [rng.randrange(3, 256) for _ in range(n)] for i, n in enumerate(LENGTHS)}
    for key in list(own)[-2:]:
        own[key][: len(shared)] = shared[: len(own[key])]
    return own


@cache
def naive(name: str) -> Outputs:
    model = NaiveLlama(GOLDEN / name)
    return {key: model.greedy(prompt, NUM_TOKENS) for key, prompt in prompts(name).items()}


@cache
def build(name: str = "llama", **overrides) -> Engine:
    """An engine with few and small programs; the same one for the same arguments."""
    fields = {
        "model": str(GOLDEN / name),
        "platform": "cpu",
        "dtype": "float32",
        "page_size": 16,
        "num_pages": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_mixed_tokens": 16,
        "max_model_len": 256,
    }
    return build_engine(EngineConfig(**(fields | overrides)))


def generate(engine: Engine, name: str = "llama", **sampling) -> Outputs:
    """All prompts at once; checks that the engine is clean and compiled nothing afterwards."""
    for key, prompt in prompts(name).items():
        seed = {"seed": int(key)} if sampling else {}
        request = make_request(
            key, prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling, **seed
        )
        engine.validate(request)
        engine.add(request)
    outputs = {key: output(deltas) for key, deltas in run(engine).items()}
    load = engine.load()
    assert load.num_free_pages == load.num_pages
    assert load.num_compiles_after_warmup == 0
    return outputs


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("llama", "native"),
        ("llama", "reference"),
        ("mistral_swa", "native"),
        ("mistral_swa", "reference"),
        ("llama_hd64_kv3", "native"),
    ],
)
def test_a_ragged_batch_equals_the_naive_loop(name: str, attention: str) -> None:
    assert generate(build(name, attention=attention), name) == naive(name)


def test_tensor_parallel_shards_give_the_naive_tokens() -> None:
    assert generate(build(tensor_parallel=2)) == naive("llama")


def test_a_prefix_cache_hit_changes_nothing() -> None:
    engine = build(attention="native")
    assert generate(engine) == naive("llama")
    num_cached = engine.load().num_cached_tokens
    assert generate(engine) == naive("llama")
    assert engine.load().num_cached_tokens - num_cached >= 160


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(dtype: str) -> dict[str, Outputs]:
    """Greedy and sampled tokens of each prompt when nothing else runs."""
    engine = build(dtype=dtype, attention="native")
    outputs: dict[str, Outputs] = {"greedy": {}, "sampled": {}}
    for key, prompt in prompts("llama").items():
        for mode, fields in (("greedy", {}), ("sampled", SAMPLING | {"seed": int(key)})):
            request = make_request(key, prompt, NUM_TOKENS, ignore_eos=True, **fields)
            engine.add(request)
            outputs[mode][key] = output(run(engine)[key])
    return outputs


SAMPLING = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 64, "max_mixed_tokens": 64},
        {"max_num_batched_tokens": 512, "max_mixed_tokens": 512, "max_num_seqs": 3},
        {"page_size": 32, "num_pages": 64},
    ],
    ids=["batch", "chunk16", "chunk64", "chunk512_three_slots", "page32"],
)
def test_every_condition_gives_the_tokens_of_a_request_alone(
    dtype: str, alone: dict[str, Outputs], overrides: dict
) -> None:
    engine = build(dtype=dtype, attention="native", **overrides)
    assert generate(engine) == alone["greedy"]
    assert generate(engine, **SAMPLING) == alone["sampled"]


def test_preempted_sequences_give_the_tokens_of_a_request_alone(
    dtype: str, alone: dict[str, Outputs]
) -> None:
    engine = build(dtype=dtype, attention="native", num_pages=1 + 14, page_size=8)
    assert generate(engine) == alone["greedy"]
    assert generate(engine, **SAMPLING) == alone["sampled"]
    assert engine.load().num_preemptions > 0


@pytest.mark.parametrize(
    "fields",
    [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}],
    ids=["weights", "kv"],
)
def test_int8_gives_the_tokens_of_a_request_alone_in_chunks_and_after_preemption(fields) -> None:
    fields = {"dtype": "bfloat16", "attention": "native", **fields}
    engine = build(**fields)
    alone: Outputs = {}
    for key, prompt in prompts("llama").items():
        engine.add(make_request(key, prompt, NUM_TOKENS, ignore_eos=True))
        alone[key] = output(run(engine)[key])
    assert generate(engine) == alone
    cramped = build(**fields, max_num_batched_tokens=16, num_pages=1 + 14, page_size=8)
    assert generate(cramped) == alone
    assert cramped.load().num_preemptions > 0


def test_seeds_give_different_and_reproducible_samples() -> None:
    engine = build(attention="native")

    def sample(seed: int) -> list[int]:
        engine.add(make_request("a", [5, 6, 7], NUM_TOKENS, seed=seed, temperature=1.0))
        return output(run(engine)["a"])

    first = [sample(seed) for seed in (1, 2, -1, 2**63)]
    assert len({tuple(tokens) for tokens in first}) == 4
    assert [sample(seed) for seed in (1, 2, -1, 2**63)] == first


def test_a_second_start_takes_its_programs_from_the_store(
    tmp_path: Path,
) -> None:
    store = str(tmp_path / "programs")
    first = generate(build(program_store=store))
    files = sorted((tmp_path / "programs").glob("*.program"))
    written = [file.stat().st_mtime_ns for file in files]
    assert len(files) == 3

    damaged = files[0]
    damaged.write_bytes(damaged.read_bytes()[:-10])
    build.cache_clear()
    assert generate(build(program_store=store)) == first
    assert sorted((tmp_path / "programs").glob("*.program")) == files
    rewritten = [f.stat().st_mtime_ns != t for f, t in zip(files, written, strict=True)]
    assert rewritten == [True] + [False] * (len(files) - 1), "only the damaged program is replaced"
