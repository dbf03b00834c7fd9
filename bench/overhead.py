"""What Ray and HTTP cost: a `bench.serve` report against a `bench.engine` one.

    python -m bench.overhead SERVE.json ENGINE.json

Compares the concurrencies that both measured. Only meaningful for reports of one session, with the
same lengths: it refuses reports whose prompt or output lengths differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import report

_LENGTHS = ("prompt_tokens", "max_tokens")


def compare(serve: dict[str, Any], engine: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per concurrency that both reports hold; medians over the repeats of each.

    Raises:
        ValueError: the reports measured other lengths.
    """
    for name in _LENGTHS:
        ours, bare = int(serve["arguments"][name]), int(engine["arguments"][name])
        if ours != bare:
            raise ValueError(f"{name} differs: {ours} over HTTP, {bare} in the bare engine")
    rows: list[dict[str, Any]] = []
    stagger_s = engine["arguments"].get("stagger_s")
    for level in sorted({result["concurrency"] for result in engine["results"]}):
        over_http = [
            run["summary"]
            for run in serve["runs"]
            if _is_same_load(run, level, stagger_s) and run["summary"]["num_ok"]
        ]
        bare = [result for result in engine["results"] if result["concurrency"] == level]
        if not over_http:
            continue
        rate = statistics.median(summary["output_tokens_per_s"] for summary in over_http)
        bare_rate = statistics.median(result["output_tokens_per_s"] for result in bare)
        row: dict[str, Any] = {
            "conc": level,
            "tok/s http": rate,
            "tok/s bare": bare_rate,
            "share %": rate / bare_rate * 100,
        }
        for quantile in ("p50", "p99"):
            ttft = statistics.median(summary["ttft_ms"][quantile] for summary in over_http)
            bare_ttft = statistics.median(result[f"ttft_{quantile}_ms"] for result in bare)
            row[f"ttft {quantile} +ms"] = ttft - bare_ttft
        for name, key in (
            ("outside us/tok", "cpu_outside_engine_us_per_token"),
            ("above idle", "cpu_outside_engine_above_idle_us_per_token"),
        ):
            known = [summary[key] for summary in over_http if summary[key] is not None]
            row[name] = statistics.median(known) if known else None
        rows.append(row)
    return rows


def _is_same_load(run: dict[str, Any], level: int, stagger_s: str | None) -> bool:
    """Whether a run over HTTP offered what the bare engine was offered."""
    if stagger_s is None:
        return run["mode"] == "sweep" and run["concurrency"] == level
    is_staggered = run["mode"] == "staggered" and run["streams"] == level
    return is_staggered and run["stagger_s"] == float(stagger_s)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("serve", type=Path, help="report of bench.serve")
    parser.add_argument("engine", type=Path, help="report of bench.engine")
    arguments = parser.parse_args(argv)
    try:
        rows = compare(
            json.loads(arguments.serve.read_text()), json.loads(arguments.engine.read_text())
        )
    except (OSError, ValueError) as error:
        raise SystemExit(f"bench.overhead: {error}") from None
    if not rows:
        raise SystemExit("bench.overhead: no concurrency is in both reports")
    print(report.format_table(rows))


if __name__ == "__main__":
    main()
