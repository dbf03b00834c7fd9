"""Compare routing policies on traces: `python -m bench.router_sim compare`.

Or `capacity`: the highest rate that each serves; `bound`: what none can exceed; `decision`: the
time that one takes.
Writes JSON to bench/results and prints a table. Everything is simulated but the CPU times.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import Any

from bench.report import format_table, result_path, stamp, write_json
from bench.router_sim import decision
from bench.router_sim.bounds import bounds
from bench.router_sim.experiment import TIERS, TOLD, Experiment, capacity, repeat
from bench.router_sim.plots import plot_rates
from bench.router_sim.policies import POLICIES
from bench.router_sim.traces import NAMES, replay

SIZES = (2, 16, 256, 1024, 4096)
COLUMNS = (
    "good_5s_100ms",
    "good_2s_50ms",
    "refused",
    "ttft_mean_s",
    "ttft_p95_s",
    "tpot_p99_ms",
    "hit_share",
    "imbalance",
    "events_per_request",
    "decision_p50_us",
    "decision_p99_us",
    "cpu_s",
)


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    if options.command == "decision":
        rows = [decision.measure(num_replicas=count, num_decisions=2000) for count in SIZES]
        print(format_table(rows))
        path = options.out or result_path("router_decision")
        write_json(path, {"stamp": stamp(), "command": options.command, "results": rows})
        return
    if options.command == "bound":
        _bound(options)
        return
    rows: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    seeds = range(1, options.seeds + 1)
    for trace in options.traces:
        for policy in options.policies:
            base = Experiment(
                trace=trace,
                policy=policy,
                num_requests=options.requests,
                num_replicas=options.replicas,
                num_routers=options.routers,
                copies=options.copies,
                tier=options.tier,
                targets=(options.ttft_s, options.tpot_ms / 1e3),
                event_interval_s=options.event_interval_s,
                event_loss=options.event_loss,
                batch_wait_ms=options.batch_wait_ms,
            )
            if options.command == "capacity":
                low, high = min(options.rates), max(options.rates)
                rates = [capacity(base, seed, low=low, high=high) for seed in seeds]
                results.append({"experiment": dataclasses.asdict(base), "rates": rates})
                row = {"trace": trace, "policy": policy, "rate": f"{statistics.fmean(rates):.2f}"}
                rows.append(row | {"range": f"{min(rates):.2f} - {max(rates):.2f}"})
                print(rows[-1], flush=True)
                continue
            for rate in options.rates:
                result = repeat(dataclasses.replace(base, rate=rate), seeds)
                results.append(result)
                rows.append({"trace": trace, "policy": policy, "rate": rate} | _row(result))
                print(rows[-1], flush=True)
    print(format_table(rows))
    path = options.out or result_path("router_sim")
    write_json(path, {"stamp": stamp(), "command": options.command, "results": results})
    print(path)
    if options.command == "compare" and len(options.rates) > 1:
        plot_rates(path.with_suffix(".png"), results)


def _bound(options: argparse.Namespace) -> None:
    """What no policy can exceed, per trace, rate and seed."""
    hardware = TIERS[options.tier]
    rows = [
        {"trace": trace, "rate": rate, "seed": seed}
        | bounds(
            replay(
                trace, rate=rate, num_requests=options.requests, copies=options.copies, seed=seed
            ),
            hardware,
            num_pages=options.replicas * (hardware.num_pages + hardware.num_host_pages),
            ttft_s=options.ttft_s,
        )
        for trace in options.traces
        for rate in options.rates
        for seed in range(1, options.seeds + 1)
    ]
    shares = ("no_cache", "refusing", "serving", "lru")
    print(format_table([row | {name: f"{row[name]:.4f}" for name in shares} for row in rows]))
    path = options.out or result_path("router_bound")
    write_json(path, {"stamp": stamp(), "command": options.command, "results": rows})


def _row(result: dict[str, Any]) -> dict[str, str]:
    """Means; of the share within the targets also the range over the seeds."""
    row = {name: f"{result['mean'][name]:.3g}" for name in COLUMNS}
    for name in ("good_5s_100ms", "good_2s_50ms"):
        low, high = result["range"][name]
        row[name] = f"{result['mean'][name]:.4f} ({low:.4f}-{high:.4f})"
    return row


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.router_sim", description=__doc__)
    names = [*POLICIES, *(name + TOLD for name in POLICIES)]
    parser.add_argument(
        "command",
        choices=("compare", "capacity", "bound", "decision"),
        nargs="?",
        default="compare",
    )
    parser.add_argument("--traces", nargs="+", choices=list(NAMES), default=["conversation"])
    parser.add_argument("--policies", nargs="+", choices=names, default=list(POLICIES))
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[12.0], help="requests/s; capacity: low and high"
    )
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--copies", type=int, default=1, help="superposed traces")
    parser.add_argument("--tier", choices=list(TIERS), default="hbm")
    parser.add_argument("--ttft-s", type=float, default=5.0)
    parser.add_argument("--tpot-ms", type=float, default=100.0)
    parser.add_argument("--event-interval-s", type=float, default=0.05)
    parser.add_argument("--event-loss", type=float, default=0.0)
    parser.add_argument("--batch-wait-ms", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
