"""What is counted of steps and requests, and that what is exported is what was counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from ray.util.metrics import Counter, Histogram, Metric

from app.router.metrics import RouterMetrics
from bench.metrics_cost import measure
from replicas.engine.buckets import Bucket
from replicas.engine.step_stats import PHASES, StepStats
from replicas.engine_metrics import EngineMetrics, StepMetrics
from replicas.histograms import (
    CPU_TIME_BUCKETS_S,
    INTER_TOKEN_BUCKETS_S,
    LATENCY_BUCKETS_S,
    REQUEST_BUCKETS_S,
)
from replicas.load_metrics import LOAD_COUNTERS, load_metric_name
from tests.fake_runner import make_engine, make_request


def ticking_clock() -> Iterator[float]:
    """One millisecond passes between two looks at the clock."""
    return (tick * 0.001 for tick in itertools.count())


def run_engine() -> StepStats:
    engine, runner = make_engine()
    ticks = ticking_clock()
    engine._clock = lambda: next(ticks)
    for i in range(3):
        engine.add(make_request(str(i), list(range(1 + i, 13 + i)), max_tokens=4))
    while engine.has_work:
        engine.step()
    stats = engine.stats
    assert stats.num_tokens == sum(plan.num_tokens for plan in runner.plans)
    assert stats.num_sequences == sum(len(plan.scheduled) for plan in runner.plans)
    assert sum(stats.num_steps.values()) == len(runner.plans)
    return stats


def test_steps_are_counted_with_their_time_their_rows_and_their_kind() -> None:
    stats = run_engine()
    assert stats.num_token_rows == sum(b.num_tokens * n for b, n in stats.num_steps.items())
    assert stats.num_sequence_rows == sum(b.num_seqs * n for b, n in stats.num_steps.items())
    assert stats.num_token_rows % 8 == 0
    num_decode, num_mixed = (sum(stats.durations[kind]) for kind in ("decode", "mixed"))
    assert num_decode > 0
    assert num_mixed > 0
    assert num_decode + num_mixed == sum(stats.num_steps.values())
    assert all(seconds > 0 for seconds in stats.phase_s)


def test_a_launch_after_idleness_is_no_step_time() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a", [1, 2, 3], max_tokens=4))
    engine.step()
    assert sum(map(sum, engine.stats.durations.values())) == 0
    engine.step()
    assert sum(map(sum, engine.stats.durations.values())) == 1


class Ledger:
    """Sums what counters are raised by: what a scrape would show."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[tuple[Any, ...], float] = {}
        monkeypatch.setattr(Counter, "inc", lambda *args, **named: self._inc(*args, **named))

    def _inc(self, metric: Metric, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(metric.info["tag_keys"]) - {"deployment", "replica", "application"}
        key = (metric.info["name"], *tags.values())
        self.values[key] = self.values.get(key, 0.0) + value


def test_repeated_exports_add_up_to_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(monkeypatch)
    engine, _ = make_engine()
    exporter = StepMetrics()
    engine.add(make_request("a", list(range(1, 30)), max_tokens=9))
    while engine.has_work:
        engine.step()
        exporter.export(engine.stats)
        exporter.export(engine.stats)
    stats, values = engine.stats, ledger.values
    name = "systole_engine_step_time_seconds_bucket"
    for kind, counts in stats.durations.items():
        assert values[name, kind, "+Inf"] == sum(counts)
        for index, bound in enumerate(INTER_TOKEN_BUCKETS_S):
            assert values.get((name, kind, str(bound)), 0) == sum(counts[: index + 1])
    for phase, seconds in zip(PHASES, stats.phase_s, strict=True):
        assert values["systole_engine_step_phase_seconds", phase] == pytest.approx(seconds)
    assert values[("systole_engine_step_tokens",)] == stats.num_tokens
    assert values[("systole_engine_step_token_rows",)] == stats.num_token_rows
    assert values[("systole_engine_step_sequences",)] == stats.num_sequences
    assert values[("systole_engine_step_sequence_rows",)] == stats.num_sequence_rows
    for bucket, count in stats.num_steps.items():
        assert values["systole_engine_bucket_steps", str(bucket)] == count


def test_counters_begin_at_zero_with_all_labels_that_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, list[float]] = {}

    def record(metric: Metric, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(metric.info["tag_keys"])
        seen.setdefault(metric.info["name"], []).append(value)

    monkeypatch.setattr(Metric, "_record", record)
    EngineMetrics()
    RouterMetrics()
    assert {value for values in seen.values() for value in values} == {0.0}
    numbers = {name: len(values) for name, values in seen.items()}
    assert {name: number for name, number in numbers.items() if number > 1} == {
        "systole_engine_requests": 8,
        "systole_router_requests": 4,
        "systole_engine_step_phase_seconds": len(PHASES),
        "systole_engine_step_time_seconds_bucket": 2 * (len(INTER_TOKEN_BUCKETS_S) + 1),
    }
    assert {load_metric_name(field) for field in LOAD_COUNTERS} <= seen.keys()


def test_a_step_beyond_the_last_bound_is_counted() -> None:
    engine, runner = make_engine()
    engine.add(make_request("a", [1, 2, 3], max_tokens=2))
    engine.step()
    stats = StepStats()
    times = engine.times
    times.wait = 1000.0
    stats.add(times, runner.plans[0], Bucket(8, 8))
    stats.add(times, None, Bucket(8, 8))
    assert stats.durations["mixed"][-1] == 1


@pytest.mark.parametrize(
    ("bounds", "per_decade"),
    [
        (LATENCY_BUCKETS_S, 6),
        (INTER_TOKEN_BUCKETS_S, 8),
        (REQUEST_BUCKETS_S, 5),
        (CPU_TIME_BUCKETS_S, 5),
    ],
)
def test_bounds_grow_evenly_enough_for_a_p999(bounds: tuple[float, ...], per_decade: int) -> None:
    ratio = 10 ** (1 / per_decade)
    for before, after in itertools.pairwise(bounds):
        assert after / before == pytest.approx(ratio, rel=0.06)


def test_every_histogram_says_its_unit() -> None:
    owners = (EngineMetrics(), RouterMetrics())
    histograms = [m for o in owners for m in vars(o).values() if isinstance(m, Histogram)]
    assert len(histograms) == 7
    units = ("_seconds", "_ratio")
    assert all(histogram.info["name"].endswith(units) for histogram in histograms)


def test_the_cost_of_metrics_is_measured() -> None:
    costs = measure(count=200)
    print(costs)
    assert all(cost > 0 for cost in costs.values())
