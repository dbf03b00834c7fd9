"""The price of Ray and HTTP, from a report of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import overhead


def serve_report(*, prompt_tokens: int = 128) -> dict[str, Any]:
    def run(rate: float, ttft: float) -> dict[str, Any]:
        return {
            "mode": "sweep",
            "concurrency": 4,
            "summary": {
                "num_ok": 8,
                "output_tokens_per_s": rate,
                "ttft_ms": {"p50": ttft, "p99": 2 * ttft},
                "cpu_outside_engine_us_per_token": 100.0,
                "cpu_outside_engine_above_idle_us_per_token": None,
            },
        }

    return {
        "arguments": {"prompt_tokens": prompt_tokens, "max_tokens": 64},
        "runs": [run(90.0, 20.0), run(95.0, 22.0), run(80.0, 90.0)],
    }


def engine_report() -> dict[str, Any]:
    result = {"output_tokens_per_s": 100.0, "ttft_p50_ms": 15.0, "ttft_p99_ms": 30.0}
    return {
        "arguments": {"prompt_tokens": "128", "max_tokens": "64"},
        "results": [{"concurrency": 4, **result}, {"concurrency": 8, **result}],
    }


def test_common_concurrencies_are_compared_by_medians() -> None:
    (row,) = overhead.compare(serve_report(), engine_report())
    assert row["conc"] == 4
    assert row["share %"] == pytest.approx(90)
    assert row["ttft p50 +ms"] == pytest.approx(7)
    assert row["ttft p99 +ms"] == pytest.approx(14)
    assert row["outside us/tok"] == 100.0
    assert row["above idle"] is None


def test_reports_of_other_lengths_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = (tmp_path / "serve.json", tmp_path / "engine.json")
    paths[1].write_text(json.dumps(engine_report()))
    paths[0].write_text(json.dumps(serve_report()))
    overhead.main([str(path) for path in paths])
    assert "90.0" in capsys.readouterr().out
    paths[0].write_text(json.dumps(serve_report(prompt_tokens=64)))
    with pytest.raises(SystemExit, match="prompt_tokens differs: 64 over HTTP, 128"):
        overhead.main([str(path) for path in paths])


def test_staggered_streams_are_compared_with_staggered_streams() -> None:
    serve, engine = serve_report(), engine_report()
    engine["arguments"]["stagger_s"] = "8.0"
    assert overhead.compare(serve, engine) == []
    for run, stagger_s in zip(serve["runs"], (8.0, 8.0, 4.0), strict=True):
        run.update(mode="staggered", streams=4, stagger_s=stagger_s)
    (row,) = overhead.compare(serve, engine)
    assert row["share %"] == pytest.approx(92.5)
