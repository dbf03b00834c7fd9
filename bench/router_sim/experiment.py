"""Runs, repeated over seeds, and what they come to.

A policy's name ends in "+slo" when its requests carry their targets, so that the router may refuse
what cannot meet them; a refusal counts as a miss everywhere.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.router_sim.hardware import HBM_ONLY, HOST_TIER, Hardware
from bench.router_sim.policies import POLICIES
from bench.router_sim.simulation import SIM_CONFIG, Outcome, Scenario, Simulation
from bench.router_sim.traces import replay

TIERS: dict[str, Hardware] = {"hbm": HBM_ONLY, "host": HOST_TIER}
TOLD = "+slo"
LOOSE = (5.0, 0.1)
TIGHT = (2.0, 0.05)
GOAL = 0.95
"""Share of requests within their targets at which a rate counts as served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One point of a comparison.

    Attributes:
        trace: of `traces.NAMES`.
        policy: of `policies.POLICIES`, perhaps with "+slo".
        rate: requests per second.
        num_requests: of the run.
        num_replicas, num_routers: sizes.
        copies: superposed traces.
        tier: of `TIERS`.
        targets: (TTFT, TPOT) in seconds that requests carry under "+slo".
        event_interval_s: staleness of the load events.
        event_loss: share of events that are lost.
        batch_wait_ms: the routers' `max_batch_wait_ms`.
    """

    trace: str = "conversation"
    policy: str = "ours"
    rate: float = 10.0
    num_requests: int = 4000
    num_replicas: int = 16
    num_routers: int = 1
    copies: int = 1
    tier: str = "hbm"
    targets: tuple[float, float] = LOOSE
    event_interval_s: float = 0.05
    event_loss: float = 0.0
    batch_wait_ms: float = 0.0

    def run(self, seed: int) -> Outcome:
        """Simulate once."""
        scenario = Scenario(
            num_replicas=self.num_replicas,
            num_routers=self.num_routers,
            hardware=TIERS[self.tier],
            ttft_target_s=self.targets[0],
            tpot_target_s=self.targets[1],
            are_targets_told=self.policy.endswith(TOLD),
            event_interval_s=self.event_interval_s,
            event_loss=self.event_loss,
            seed=seed,
        )
        requests = replay(
            self.trace,
            rate=self.rate,
            num_requests=self.num_requests,
            copies=self.copies,
            seed=seed,
        )
        config = dataclasses.replace(SIM_CONFIG, max_batch_wait_ms=self.batch_wait_ms)
        policy = POLICIES[self.policy.removesuffix(TOLD)]
        return Simulation(scenario, requests, policy, config).run()


def summarise(outcome: Outcome) -> dict[str, float]:
    """Figures of one run; shares are of all requests, latencies of those that were served."""
    records = outcome.records
    served = [record for record in records if record.error is None]
    ttfts = sorted(record.ttft_s for record in served)
    tpots = sorted(record.tpot_s for record in served)
    prompt_tokens = sum(record.request.num_prompt_tokens for record in served)
    sent = outcome.num_sent.values()
    decisions = sorted(outcome.decision_s)
    return {
        "good_5s_100ms": sum(record.meets(*LOOSE) for record in records) / len(records),
        "good_2s_50ms": sum(record.meets(*TIGHT) for record in records) / len(records),
        "refused": 1 - len(served) / len(records),
        "ttft_mean_s": statistics.fmean(ttfts),
        "ttft_p50_s": quantile(ttfts, 0.5),
        "ttft_p95_s": quantile(ttfts, 0.95),
        "tpot_p50_ms": 1e3 * quantile(tpots, 0.5),
        "tpot_p99_ms": 1e3 * quantile(tpots, 0.99),
        "hit_share": sum(record.num_cached for record in served) / prompt_tokens,
        "imbalance": max(sent) * len(sent) / sum(sent),
        "tokens_per_s": sum(record.request.num_output_tokens for record in served)
        / max(record.ended_at for record in served),
        "preemptions": float(outcome.num_preemptions),
        "events_per_request": outcome.num_events / len(records),
        "decision_p50_us": 1e6 * quantile(decisions, 0.5),
        "decision_p99_us": 1e6 * quantile(decisions, 0.99),
        "cpu_s": outcome.cpu_s,
    }


def repeat(experiment: Experiment, seeds: Sequence[int]) -> dict[str, Any]:
    """Run with each seed; per figure the mean, and the range as [low, high]."""
    runs = [summarise(experiment.run(seed)) for seed in seeds]
    mean = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
    spread = {name: [min(r[name] for r in runs), max(r[name] for r in runs)] for name in runs[0]}
    return {
        "experiment": dataclasses.asdict(experiment),
        "seeds": list(seeds),
        "mean": mean,
        "range": spread,
    }


def capacity(
    experiment: Experiment, seed: int, *, low: float, high: float, resolution: float = 0.02
) -> float:
    """Highest rate, to `resolution` of itself, at which `GOAL` of the requests are within `LOOSE`.

    Bisects: assumes that a rate is served if a higher one is. `low` must be served.
    """
    while high - low > resolution * low:
        rate = (low + high) / 2
        run = summarise(dataclasses.replace(experiment, rate=rate).run(seed))
        if run["good_5s_100ms"] >= GOAL:
            low = rate
        else:
            high = rate
    return low


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of an ordered sequence lies."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
