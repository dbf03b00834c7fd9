"""`bench.engine` on a device whose steps take a constant time: loads, host path and spread."""

from __future__ import annotations

import argparse

import pytest

from bench import host_path, spread
from bench.constant_time import fake_engine
from bench.engine import make_requests, measure
from replicas.wire import GenerateRequest

STEP_S = 0.002


def requests_for(count: int) -> list[GenerateRequest]:
    args = argparse.Namespace(shared_tokens=0, prompt_tokens=8, max_tokens=4, temperature=0.0)
    return make_requests(args, count, vocab_size=100, seed=1)


def test_closed_loop_keeps_its_concurrency() -> None:
    result = measure(fake_engine(STEP_S, max_num_seqs=4), requests_for(8), 4)
    # Two rounds of four sequences, four steps each; a stop is seen one step late.
    assert 8 <= result.num_steps <= 12
    assert result.num_requests == 8
    assert result.output_tokens_per_s == pytest.approx(32 / result.seconds)


def test_staggered_requests_enter_at_their_own_time() -> None:
    interval_s = 20 * STEP_S
    result = measure(fake_engine(STEP_S, max_num_seqs=4), requests_for(5), 5, interval_s=interval_s)
    # Each has ended before the next comes: nobody queues, and the run lasts four intervals.
    assert result.seconds >= 4 * interval_s
    assert result.ttft_p50_ms < 1e3 * 10 * STEP_S
    assert result.num_steps >= 5 * 4


@pytest.mark.parametrize("case", host_path.CASES)
def test_the_host_path_is_measured_with_as_many_running_and_waiting_as_asked(
    case: tuple[int, int],
) -> None:
    row = host_path.measure(*case, step_s=1e-4)
    assert (row["running"], row["waiting"]) == case
    parts = row["schedule us"] + row["launch us"] + row["postprocess us"]
    assert parts > 0
    assert 0 < row["host us p50"] <= row["host us p99"]
    assert row["host us p50"] < 1e6, "the wait for the device is left out"


def test_the_spread_is_of_steps_and_of_a_loop_and_leaves_the_engine_idle() -> None:
    engine = fake_engine(0.001, max_num_seqs=16)
    result = spread.measure(engine, num_steps=60)
    assert result["num_steps"] == 100, "whole blocks"
    for name in ("step", "spin"):
        assert 0 < result[name]["p50_ms"] <= result[name]["p99_ms"]
        assert result[name]["ratio"] >= 1
    load = engine.load()
    assert not engine.has_work
    assert load.num_free_pages == load.num_pages
