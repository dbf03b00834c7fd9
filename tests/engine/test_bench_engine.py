"""The bare-engine bench, on a device whose steps take a constant time."""

from __future__ import annotations

import argparse

import pytest

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
