"""Fits the modelled replica to a real one: its step times to load reports, its path to idle calls.

The fit is the router's own step model. Knows nothing of where the reports come from.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from app.router.step_model import StepModel
from bench.router_sim.hardware import Hardware
from replicas.wire import ReplicaLoad


def fit(hardware: Hardware, reports: Sequence[Sequence[ReplicaLoad]]) -> Hardware:
    """Return `hardware` with the step times of real replicas.

    Args:
        hardware: its sizes stay.
        reports: of each replica, in order; what lies between two of them is one sample.

    Raises:
        ValueError: no replica has worked between two reports.
    """
    model = StepModel()
    num_samples = 0
    # Taken in turns: what came last counts most, and no replica should.
    for index in range(1, max((len(loads) for loads in reports), default=0)):
        for loads in reports:
            if index < len(loads):
                num_samples += model.observe(loads[index - 1], loads[index]) is not None
    if not num_samples:
        raise ValueError("the reports show no work to fit step times to")
    costs = model.costs
    return dataclasses.replace(
        hardware,
        overhead_s=costs.step,
        weights_s=0.0,
        token_s=costs.token,
        pair_s=costs.pair,
        context_s=costs.context,
    )


def path_s(hardware: Hardware, idle: Sequence[tuple[int, float]]) -> float:
    """Return the time to first token that is not the step's, a median.

    Args:
        hardware: fitted.
        idle: prompt tokens and measured seconds of requests that had the service to themselves.
    """
    left: list[float] = []
    for num_tokens, ttft_s in idle:
        own_s, position = 0.0, 0
        while position < num_tokens:
            count = min(hardware.chunk_tokens, num_tokens - position)
            own_s += hardware.step_s(count, count * (position + count / 2), 0)
            position += count
        left.append(max(0.0, ttft_s - own_s))
    return statistics.median(left)
