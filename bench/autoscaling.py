"""Replays public traces under autoscaling policies: goodput against TPU-hours.

    python -m bench.autoscaling [--traces ...] [--loads ...] [--seeds N]

Simulated time only: modelled replicas, the real router core, the real policies. A replica costs
from its order to its release, boot included. Writes JSON to bench/results and prints a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.autoscaling.config import AutoscalingConfig
from bench.report import format_table, result_path, stamp, write_json
from bench.router_sim.experiment import quantile
from bench.router_sim.hardware import HBM_ONLY, Hardware
from bench.router_sim.policies import POLICIES
from bench.router_sim.scaling import Fixed, Oracle, Ours, Scaler, ServeDefault
from bench.router_sim.simulation import Scenario, Simulation
from bench.router_sim.traces import SimRequest, replay

ONGOING = (2, 8, 16)
"""Values of Serve's target_ongoing_requests; 2 is its default."""
POLICY_NAMES = ("oracle", "ours", *(f"serve-{target}" for target in ONGOING), "fixed")
"""`fixed` has as many replicas as the oracle at its peak, all the time."""
CHIPS = 8
"""Of a modelled replica."""
SLOW = dataclasses.replace(
    HBM_ONLY,
    weights_s=22e-3,
    context_s=7.2e-8,
    token_s=168e-6,
    pair_s=3.2e-9,
    chunk_tokens=512,
)
"""A quarter of the arithmetic and half the bandwidth, about v5e's against v6e's: the Azure traces
are light, and a fleet needs more than one replica."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace at a mean rate.

    Attributes:
        rate: requests per second.
        hardware: of the replicas.
        hit_share: of its prompt tokens, what prefix caches hold; only the oracle is told.
    """

    rate: float
    hardware: Hardware
    hit_share: float


TRACES = {
    "conversation": Trace(rate=3.5, hardware=HBM_ONLY, hit_share=0.3),
    "azure-conv": Trace(rate=9.0, hardware=SLOW, hit_share=0.0),
    "azure-code": Trace(rate=6.0, hardware=SLOW, hit_share=0.0),
}


def wave(share: float) -> float:
    """A day in an hour: from a quarter of the mean to nearly twice it."""
    return 1 - 0.75 * math.cos(2 * math.pi * share)


def surge(share: float) -> float:
    """A third of the peak, and the peak for a fifth of the time, reached within two minutes."""
    if share < 0.4 or share > 0.65:
        return 0.7
    return min(0.7 + (share - 0.4) * 30 * 1.4, 2.1, 0.7 + (0.65 - share) * 30 * 1.4)


LOADS: dict[str, Callable[[float], float]] = {
    "as recorded": lambda _: 1.0,
    "wave": wave,
    "surge": surge,
}


def warp(requests: Sequence[SimRequest], rate: Callable[[float], float]) -> list[SimRequest]:
    """Move arrivals so that their rate follows a curve over the run; order and length stay.

    Args:
        requests: in order of arrival.
        rate: share of the run in [0, 1] -> factor of the rate, > 0.
    """
    length = requests[-1].arrived_at
    num_steps = 2000
    total = sum(rate(step / num_steps) for step in range(num_steps))
    moved: list[SimRequest] = []
    step, passed = 0, 0.0
    for request in requests:
        wanted = request.arrived_at / length * total
        while step < num_steps - 1 and passed + rate(step / num_steps) < wanted:
            passed += rate(step / num_steps)
            step += 1
        at = (step + (wanted - passed) / rate(step / num_steps)) / num_steps * length
        moved.append(dataclasses.replace(request, arrived_at=at))
    return moved


def run(
    name: str,
    load: str,
    seed: int,
    config: AutoscalingConfig,
    *,
    minutes: float,
    policies: Sequence[str] = POLICY_NAMES,
) -> list[dict[str, Any]]:
    """Replay one trace under each policy; one row each."""
    trace = TRACES[name]
    hardware = dataclasses.replace(trace.hardware, start_s=config.boot_s)
    count = int(trace.rate * 60 * minutes)
    requests = warp(replay(name, rate=trace.rate, num_requests=count, seed=seed), LOADS[load])
    oracle = Oracle(requests, hardware, config, hit_share=trace.hit_share)
    most = config.max_replicas
    scalers: dict[str, Scaler] = {
        "oracle": oracle,
        "ours": Ours(config),
        **{
            f"serve-{target}": ServeDefault(target_ongoing_requests=target, max_replicas=most)
            for target in ONGOING
        },
        "fixed": Fixed(oracle.peak),
    }
    rows: list[dict[str, Any]] = []
    for policy in policies:
        scaler = scalers[policy]
        first = oracle.peak if policy == "fixed" else oracle.decide_at(0.0)
        scenario = Scenario(num_replicas=first, hardware=hardware, seed=seed)
        simulation = Simulation(scenario, requests, POLICIES["ours"], scaler=scaler)
        outcome = simulation.run()
        records = outcome.records
        good = sum(r.meets(config.ttft_target_s, config.tpot_target_s) for r in records)
        tpu_hours = outcome.replica_s * CHIPS / 3600
        ttfts = sorted(record.ttft_s for record in records)
        changes = [b - a for (_, a), (_, b) in itertools.pairwise(outcome.targets)]
        turns = sum(a * b < 0 for a, b in itertools.pairwise(changes))
        rows.append(
            {
                "trace": name,
                "load": load,
                "policy": policy,
                "seed": seed,
                "goodput": good / len(records),
                "tpu_hours": tpu_hours,
                "good_per_tpu_hour": good / tpu_hours,
                "ttft_p95_s": quantile(ttfts, 0.95),
                "replicas": outcome.replica_s / records[-1].ended_at,
                "peak": max(target for _, target in outcome.targets),
                "changes": len(changes),
                "turns": turns,
            }
        )
    return rows


def mean_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds, in the order of the first seed."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["trace"], row["load"], row["policy"]), []).append(row)
    return [
        {
            **dict(zip(("trace", "load", "policy"), key, strict=True)),
            **{
                name: f"{statistics.fmean(row[name] for row in group):.{digits}f}"
                for name, digits in (
                    ("goodput", 3),
                    ("tpu_hours", 1),
                    ("good_per_tpu_hour", 0),
                    ("ttft_p95_s", 1),
                    ("replicas", 1),
                    ("peak", 0),
                    ("changes", 0),
                    ("turns", 0),
                )
            },
        }
        for key, group in groups.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.autoscaling", description=__doc__)
    parser.add_argument("--traces", nargs="+", choices=list(TRACES), default=list(TRACES))
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--policies", nargs="+", choices=POLICY_NAMES, default=list(POLICY_NAMES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--boot-s", type=float, default=240.0)
    parser.add_argument("--max-replicas", type=int, default=24)
    parser.add_argument("--ttft-s", type=float, default=5.0)
    parser.add_argument("--tpot-ms", type=float, default=100.0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    config = AutoscalingConfig(
        max_replicas=options.max_replicas,
        ttft_target_s=options.ttft_s,
        tpot_target_s=options.tpot_ms / 1e3,
        boot_s=options.boot_s,
    )
    rows: list[dict[str, Any]] = []
    for name in options.traces:
        for load in options.loads:
            found: list[dict[str, Any]] = []
            for seed in range(1, options.seeds + 1):
                found += run(
                    name,
                    load,
                    seed,
                    config,
                    minutes=options.minutes,
                    policies=options.policies,
                )
            print(format_table(mean_rows(found)), flush=True)
            rows += found
    path = options.out or result_path("autoscaling")
    config_json = dataclasses.asdict(config)
    write_json(path, {"stamp": stamp(), "config": config_json, "results": rows})
    print(path)


if __name__ == "__main__":
    main()
