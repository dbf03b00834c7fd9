"""Percentiles, goodput, the knee and stalls on records whose answer can be seen by eye."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measurement import (
    Objective,
    RequestRecord,
    describe,
    find_knee,
    longest_stall,
    percentile,
    summarise,
)


def record(
    times_s: list[float],
    *,
    sent_s: float = 0.0,
    error: str | None = None,
    tokens: int | None = None,
) -> RequestRecord:
    return RequestRecord(
        index=0,
        sent_s=sent_s,
        num_prompt_tokens=10,
        num_output_tokens=len(times_s) if tokens is None else tokens,
        event_times_s=times_s,
        end_s=None if error else (times_s[-1] if times_s else None),
        error=error,
    )


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    quantile=st.floats(0, 1),
)
def test_percentile_is_numpy_s_linear_one(values: list[float], quantile: float) -> None:
    assert percentile(values, quantile) == pytest.approx(
        float(np.quantile(values, quantile)), rel=1e-9, abs=1e-6
    )


@pytest.mark.parametrize(("values", "quantile"), [([], 0.5), ([1.0], 1.5), ([1.0], -0.1)])
def test_percentile_refuses_what_has_none(values: list[float], quantile: float) -> None:
    with pytest.raises(ValueError, match=r"percentile|quantile"):
        percentile(values, quantile)


def test_describe_scales_and_counts() -> None:
    assert describe([0.001, 0.003], scale=1e3) == {
        "mean": 2.0,
        "p50": 2.0,
        "p90": 2.8,
        "p99": 2.98,
        "max": 3.0,
        "count": 2,
    }
    assert describe([]) is None


def test_latencies_of_one_request() -> None:
    r = record([1.5, 1.6, 1.8], sent_s=1.0)
    assert r.ttft_s == pytest.approx(0.5)
    assert r.tpot_s == pytest.approx(0.15)
    assert r.itl_s == pytest.approx([0.1, 0.2])
    assert r.e2e_s == pytest.approx(0.8)


def test_coalesced_events_divide_by_tokens_not_by_events() -> None:
    r = record([1.0, 1.4], tokens=5)
    assert r.tpot_s == pytest.approx(0.1)


def test_one_token_has_no_tpot() -> None:
    assert record([1.0]).tpot_s is None


def test_goodput_needs_both_objectives_and_counts_failures_as_missed() -> None:
    objective = Objective(ttft_s=0.5, tpot_s=0.1)
    good = record([0.4, 0.45])
    slow_start = record([0.6, 0.65])
    slow_tokens = record([0.4, 0.6])
    failed = record([0.4, 0.45], error="500: no")
    summary = summarise([good, slow_start, slow_tokens, failed], objective)
    assert summary["goodput_share"] == 0.25
    assert summary["goodput_requests_per_s"] == pytest.approx(1 / 0.65, rel=1e-3)
    assert summary["num_failed"] == 1
    assert summary["errors"] == {"500: no": 1}


def test_rates_use_the_wall_time_from_first_send_to_last_end() -> None:
    summary = summarise(
        [record([1.2, 1.3], sent_s=1.0), record([2.0, 3.0], sent_s=1.5)], Objective()
    )
    assert summary["wall_s"] == pytest.approx(2.0)
    assert summary["output_tokens_per_s"] == pytest.approx(2.0)
    assert summary["requests_per_s"] == pytest.approx(1.0)


def test_a_summary_of_failures_only_is_zeros_not_an_exception() -> None:
    summary = summarise([record([], error="ConnectionRefused")], Objective())
    assert summary["output_tokens_per_s"] == 0.0
    assert summary["ttft_ms"] is None
    json.dumps(summary)


def test_the_knee_is_where_doubling_load_stops_paying() -> None:
    # Doubles up to 8, then flat: from there on more load is only more waiting.
    assert find_knee([(1, 100), (2, 200), (4, 400), (8, 800), (16, 820), (32, 830)]) == 8
    assert find_knee([(16, 345), (32, 411), (1, 37), (4, 150)]) == 16


def test_a_line_has_no_knee_but_its_end_and_two_points_none() -> None:
    assert find_knee([(1, 10), (2, 20), (4, 40)]) == 4
    assert find_knee([(1, 10), (2, 20)]) is None


def test_a_stall_is_measured_in_undisturbed_decode_steps() -> None:
    steady = [round(0.1 * i, 3) for i in range(1, 21)]  # a token each 0.1 s until 2.0 s
    stalled = [*steady, 2.5, 2.6]
    other = [*steady, 2.1, 2.2]
    stall = longest_stall([record(stalled), record(other)], start_s=2.05, end_s=2.55)
    assert stall is not None
    assert stall["decode_step_ms"] == pytest.approx(100)
    assert stall["largest_itl_ms"] == pytest.approx(500)
    assert stall["largest_itl_steps"] == pytest.approx(5)


def test_gaps_before_and_after_the_disturbance_do_not_count() -> None:
    times = [0.1, 0.2, 0.3, 0.9, 1.0, 1.1, 1.2, 9.0]  # long gaps at 0.3-0.9 and after 1.2
    stall = longest_stall([record(times)], start_s=0.95, end_s=1.15)
    assert stall is not None
    assert stall["largest_itl_ms"] == pytest.approx(100)


def test_a_stall_without_a_base_line_is_none() -> None:
    assert longest_stall([record([1.0, 2.0])], start_s=0.5, end_s=3.0) is None
    assert longest_stall([], start_s=0.0, end_s=1.0) is None
