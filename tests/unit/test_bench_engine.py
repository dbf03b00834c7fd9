"""The parts of `bench.engine` that need no device: host path and spread, on a fake one."""

from __future__ import annotations

import pytest

from bench import host_path, spread
from bench.constant_time import fake_engine


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
