"""Fits the modelled replica to a real one: its step times to load reports, its path to idle calls.

Least squares of relative errors, as in the router's own step model, but of all reports at once and
without a prior. Knows nothing of where the reports come from.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.router_sim.hardware import Hardware
from replicas.wire import ReplicaLoad

MIN_BUSY_S = 1e-4
MIN_SAMPLE_S = 0.5
"""A sample counts steps that ended in its time: the shorter, the less of them ran in it."""
NUM_REWEIGHTINGS = 8
OUTLIER = 0.3
"""Relative error from which a report counts less (Huber): it saw the machine do something else."""
CONTENTIONS = np.linspace(0.0, 2.0, 81)
"""Tried one by one: with each the rest is linear."""


class Sample(NamedTuple):
    """What one replica did between two moments.

    Attributes:
        work: steps, tokens, pairs and context tokens per second of step time.
        num_others: other replicas that worked meanwhile, on average.
    """

    work: tuple[float, float, float, float]
    num_others: float


def fit(hardware: Hardware, reports: Sequence[tuple[float, Mapping[str, ReplicaLoad]]]) -> Hardware:
    """Return `hardware` with the step times of real replicas, and how these slow each other down.

    Args:
        hardware: its sizes stay.
        reports: (seconds, load of each replica by id), in order; what lies between two of them
            that are `MIN_SAMPLE_S` apart is a sample of each replica.

    Raises:
        ValueError: no replica has worked between two reports.
    """
    samples = [
        sample
        for before, after in itertools.pairwise(_apart(reports))
        for sample in _samples(*before, *after)
    ]
    if not samples:
        raise ValueError("the reports show no work to fit step times to")
    work = np.array([sample.work for sample in samples])
    num_others = np.array([sample.num_others for sample in samples])
    # Replicas that never worked beside others say nothing of it.
    tried = CONTENTIONS if num_others.any() else CONTENTIONS[:1]
    fitted = [(*_solve(work, 1 + contention * num_others), contention) for contention in tried]
    (step_s, token_s, pair_s, context_s), _, contention = min(fitted, key=lambda each: each[1])
    return dataclasses.replace(
        hardware,
        overhead_s=step_s,
        weights_s=0.0,
        token_s=token_s,
        pair_s=pair_s,
        context_s=context_s,
        contention=float(contention),
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


def _apart[ReportT: tuple[float, object]](reports: Iterable[ReportT]) -> Iterator[ReportT]:
    """The reports, without those that come too soon after the one before."""
    due_s = -math.inf
    for report in reports:
        if report[0] >= due_s:
            due_s = report[0] + MIN_SAMPLE_S
            yield report


def _samples(
    begin_s: float,
    before: Mapping[str, ReplicaLoad],
    end_s: float,
    after: Mapping[str, ReplicaLoad],
) -> Iterator[Sample]:
    """What each replica that worked did between two moments."""
    if end_s <= begin_s:
        return
    both = before.keys() & after.keys()
    busy_s = {name: max(0.0, after[name].busy_s - before[name].busy_s) for name in both}
    for name in sorted(both):
        work = _work_per_second(before[name], after[name])
        if work is not None:
            others = (busy_s[other] / (end_s - begin_s) for other in both if other != name)
            yield Sample(work, sum(min(1.0, share) for share in others))


def _work_per_second(
    before: ReplicaLoad, after: ReplicaLoad
) -> tuple[float, float, float, float] | None:
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
    steps, tokens, pairs, context = work
    return steps / seconds, tokens / seconds, pairs / seconds, context / seconds


def _solve(
    work: npt.NDArray[np.float64], slowdowns: npt.NDArray[np.float64]
) -> tuple[list[float], float]:
    """Seconds of each unit, none negative, such that every row costs about one second.

    Args:
        work: f64 [samples, 4].
        slowdowns: f64 [samples], factors of what a row costs.

    Returns:
        The seconds, and the mean error, outliers counted for less.
    """
    rows = work * slowdowns[:, None]
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-12)
    scaled = rows / scale
    weights = np.ones(len(rows))
    costs: npt.NDArray[np.float64] = np.zeros(4)
    error: npt.NDArray[np.float64] = np.zeros(len(rows))
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
    # Huber's loss: quadratic up to an outlier's error, linear from there on.
    loss = np.where(error <= OUTLIER, error**2, OUTLIER * (2 * error - OUTLIER))
    return found, float(loss.mean())
