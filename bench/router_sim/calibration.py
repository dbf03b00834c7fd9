"""Fits the modelled replica to a real one: its step times to load reports, its path to idle calls.

Least squares of relative errors, as in the router's own step model, but of all reports at once and
without a prior. Knows nothing of where the reports come from.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bench.router_sim.hardware import Hardware
from replicas.wire import ReplicaLoad

MIN_BUSY_S = 1e-4
NUM_REWEIGHTINGS = 8
OUTLIER = 0.3
"""Relative error from which a report counts less (Huber): it saw the machine do something else."""


def fit(hardware: Hardware, reports: Sequence[Sequence[ReplicaLoad]]) -> Hardware:
    """Return `hardware` with the step times of real replicas.

    Args:
        hardware: its sizes stay.
        reports: of each replica, in order; what lies between two of them is one sample.

    Raises:
        ValueError: no replica has worked between two reports.
    """
    rows = [
        row
        for loads in reports
        for before, after in itertools.pairwise(loads)
        if (row := _work_per_second(before, after)) is not None
    ]
    if not rows:
        raise ValueError("the reports show no work to fit step times to")
    step_s, token_s, pair_s, context_s = _solve(np.array(rows))
    return dataclasses.replace(
        hardware,
        overhead_s=step_s,
        weights_s=0.0,
        token_s=token_s,
        pair_s=pair_s,
        context_s=context_s,
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


def _work_per_second(before: ReplicaLoad, after: ReplicaLoad) -> tuple[float, ...] | None:
    """Steps, tokens, pairs and context tokens per second of step time; None without any."""
    seconds = after.busy_s - before.busy_s
    work = (
        after.num_steps - before.num_steps,
        after.num_computed_tokens - before.num_computed_tokens,
        after.num_prefill_pairs - before.num_prefill_pairs,
        after.num_context_tokens - before.num_context_tokens,
    )
    if seconds < MIN_BUSY_S or work[0] <= 0 or min(work) < 0:  # idle, or another replica since
        return None
    return tuple(count / seconds for count in work)


def _solve(rows: npt.NDArray[np.float64]) -> list[float]:
    """Seconds of each unit, none negative, such that every row costs about one second.

    Args:
        rows: f64 [reports, 4].
    """
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-12)
    scaled = rows / scale
    weights = np.ones(len(rows))
    costs: npt.NDArray[np.float64] = np.zeros(4)
    for _ in range(NUM_REWEIGHTINGS):
        active = [0, 1, 2, 3]
        while active:
            chosen = scaled[:, active] * weights[:, None]
            solution = np.linalg.lstsq(chosen, weights, rcond=1e-9)[0]
            if solution.min() >= 0:
                break
            del active[int(solution.argmin())]
        costs = np.zeros(4)
        costs[active] = solution
        error = np.abs(scaled @ costs - 1)
        weights = np.sqrt(np.minimum(1.0, OUTLIER / np.maximum(error, 1e-9)))
    found: list[float] = (costs / scale).tolist()
    return found
