"""Workloads are reproducible and have the lengths, gaps and shared prefixes that were asked for."""

from __future__ import annotations

import itertools
import statistics

import pytest

from bench import workloads
from bench.workloads import Shape, Vocabulary


def test_the_same_seed_gives_the_same_workload_and_another_seed_another() -> None:
    shape = Shape(prompt_tokens=64, max_tokens=8)
    assert workloads.fixed(4, shape, seed=1) == workloads.fixed(4, shape, seed=1)
    assert workloads.fixed(4, shape, seed=1) != workloads.fixed(4, shape, seed=2)


def test_prompts_have_the_length_asked_for_and_ids_inside_the_vocabulary() -> None:
    vocabulary = Vocabulary(low=10, high=20)
    specs = workloads.fixed(5, Shape(prompt_tokens=33, max_tokens=7), vocabulary=vocabulary)
    assert {len(spec.prompt_token_ids) for spec in specs} == {33}
    assert {spec.max_tokens for spec in specs} == {7}
    assert {token for spec in specs for token in spec.prompt_token_ids} <= set(range(10, 20))


@pytest.mark.parametrize(("fraction", "shared"), [(0.0, 0), (0.5, 50), (0.75, 75)])
def test_exactly_the_shared_fraction_is_shared(fraction: float, shared: int) -> None:
    first, second, *_ = workloads.fixed(4, Shape(prompt_tokens=100, shared_prefix=fraction))
    common = 0
    for a, b in zip(first.prompt_token_ids, second.prompt_token_ids, strict=True):
        if a != b:
            break
        common += 1
    assert common == shared


def test_a_burst_arrives_at_once_and_a_stagger_evenly() -> None:
    assert {spec.arrival_s for spec in workloads.fixed(8, Shape())} == {0.0}
    arrivals = [spec.arrival_s for spec in workloads.fixed(4, Shape(), interval_s=0.25)]
    assert arrivals == [0.0, 0.25, 0.5, 0.75]


def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential() -> None:
    specs = workloads.poisson(2000, Shape(prompt_tokens=1), rate=4.0, seed=3)
    times = [0.0, *(spec.arrival_s for spec in specs)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize("name", sorted(workloads.TRACE_FILES))
def test_a_trace_replays_in_order_from_zero_and_repeatably(name: str) -> None:
    specs = workloads.trace(name, count=200, length_scale=0.1)
    arrivals = [spec.arrival_s for spec in specs]
    assert len(specs) == 200
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert specs == workloads.trace(name, count=200, length_scale=0.1)


def test_azure_rows_keep_their_lengths_and_times() -> None:
    first, second = workloads.trace("azure-conv", count=2)
    assert (len(first.prompt_token_ids), first.max_tokens) == (374, 44)
    assert (len(second.prompt_token_ids), second.max_tokens) == (396, 109)
    assert second.arrival_s == pytest.approx(4.314579)


def test_speed_scale_and_caps_apply() -> None:
    (_, plain) = workloads.trace("azure-conv", count=2)
    (_, fast) = workloads.trace(
        "azure-conv",
        count=2,
        speed=2.0,
        length_scale=0.5,
        max_prompt_tokens=100,
        max_output_tokens=20,
    )
    assert fast.arrival_s == pytest.approx(plain.arrival_s / 2)
    assert (len(fast.prompt_token_ids), fast.max_tokens) == (100, 20)


def test_mooncake_prompts_share_tokens_exactly_where_the_trace_shares_blocks() -> None:
    specs = workloads.trace("mooncake", count=50)
    block = workloads.MOONCAKE_BLOCK
    heads = {spec.prompt_token_ids[:block] for spec in specs if len(spec.prompt_token_ids) > block}
    assert len(heads) == 1  # block 0 is in every request of the trace
    tails = [spec.prompt_token_ids[block : 2 * block] for spec in specs]
    assert len(set(tails)) > 25


def test_mooncake_arrivals_are_not_the_trace_s_three_second_bursts() -> None:
    specs = workloads.trace("mooncake", count=100, length_scale=0.01)
    assert len({spec.arrival_s for spec in specs}) == 100


@pytest.mark.parametrize(
    "call",
    [
        lambda: Shape(prompt_tokens=0),
        lambda: Shape(max_tokens=0),
        lambda: Shape(shared_prefix=1.0),
        lambda: Vocabulary(low=5, high=5),
        lambda: workloads.poisson(1, Shape(), rate=0.0),
        lambda: workloads.trace("nope", count=1),
        lambda: workloads.trace("azure-conv", count=1, speed=0.0),
    ],
)
def test_impossible_arguments_are_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=r"must be|need|unknown"):
        call()


def test_traces_are_small_and_say_where_they_come_from() -> None:
    files = list(workloads.TRACES.iterdir())
    assert sum(file.stat().st_size for file in files) < 1_000_000
    notes = (workloads.TRACES / "README.md").read_text()
    assert all(f"`{file.name}`" in notes for file in files if file.name != "README.md")
