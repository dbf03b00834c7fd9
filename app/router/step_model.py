"""How long a replica's steps take: four coefficients, fitted online to what the replicas report.

Pure. A step takes `step + token * tokens + pair * pairs + context * context_tokens` seconds, where
pairs are what prompt tokens attend to and context tokens what decode rows attend to. The model is
linear, so a report may sum over any number of steps. Invariant: no coefficient is negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replicas.wire import ReplicaLoad

FORGETTING = 0.998
"""Weight that a report loses with each one after it: about the last 500 count."""
PRIOR_WEIGHT = 1e-4
PRIOR_FORGETTING = 0.99
RIDGE = 1e-8
"""What is left of the prior for good, relative to what was seen of a kind of work: it decides
between kinds that came together. Its proportions count only: the speed as a whole is measured."""
MIN_RIDGE = 1e-14
SPEED_WEIGHT = 0.02
REFIT_EVERY = 32
FIRST_REFITS = 64
"""So many reports are each followed by a fit."""
MIN_SCALE = 0.1
_UPPER = tuple((i, j) for i in range(4) for j in range(i, 4))
"""Entries of a symmetric matrix that are kept."""
MIN_BUSY_S = 1e-4


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds for each unit of work.

    Attributes:
        step: of a step that does nothing else.
        token: of one token, prompt or decode row.
        pair: of one prompt token attending to one position.
        context: of one decode row attending to one position.
    """

    step: float
    token: float
    pair: float
    context: float


PRIOR = StepCosts(step=10e-3, token=50e-6, pair=1e-9, context=4e-8)
"""A 70B model on a v6e-8 host, roughly; a hundred reports outweigh it, however wrong it is."""


class StepModel:
    """Recursive least squares of relative errors, with outliers weighted down (Huber).

    Errors are relative because steps differ by orders of magnitude. The scale that makes an outlier
    is itself tracked, so a lasting change is followed after some tens of reports.

    Attributes:
        costs: the current fit.
    """

    def __init__(self, prior: StepCosts = PRIOR) -> None:
        self.costs = prior
        self._prior = (prior.step, prior.token, prior.pair, prior.context)
        # Plain floats: this runs for every report, and on four numbers numpy takes longer.
        self._normal = [0.0] * len(_UPPER)
        self._target = [0.0] * 4
        self._prior_weight = PRIOR_WEIGHT
        self._speed = 0.0
        self._scale = 0.5
        self._num_reports = 0

    def observe(
        self, before: ReplicaLoad, after: ReplicaLoad, *, learns: bool = True
    ) -> float | None:
        """Compare two loads of one replica with the prediction, and learn from them.

        Args:
            before, after: one after the other; what lies between is one sample.
            learns: false: only compare, which takes a fraction of the time.

        Returns:
            measured / predicted duration of the steps between them; None when there were none.
        """
        seconds = after.busy_s - before.busy_s
        num_steps = after.num_steps - before.num_steps
        if seconds < MIN_BUSY_S or num_steps <= 0:
            return None
        work = (
            num_steps,
            after.num_computed_tokens - before.num_computed_tokens,
            after.num_prefill_pairs - before.num_prefill_pairs,
            after.num_context_tokens - before.num_context_tokens,
        )
        costs = self.costs
        predicted = (
            work[0] * costs.step
            + work[1] * costs.token
            + work[2] * costs.pair
            + work[3] * costs.context
        )
        if min(work) < 0 or predicted <= 0:
            return None
        if learns:
            self._learn(work, seconds, predicted)
        return seconds / predicted

    def _learn(self, work: tuple[int, int, int, int], seconds: float, predicted: float) -> None:
        """Take a sample: its steps, tokens, pairs and context tokens, and how long they took."""
        error = abs(math.log(predicted / seconds))
        weight = min(1.0, 2 * self._scale / error) if error > 0 else 1.0
        self._scale += 0.01 * (min(error, 4 * self._scale) - self._scale)
        self._scale = max(self._scale, MIN_SCALE)
        self._prior_weight *= PRIOR_FORGETTING
        row = [count * prior / seconds for count, prior in zip(work, self._prior, strict=True)]
        # sum(row) is what the prior predicts for a second's work.
        self._speed += SPEED_WEIGHT * (math.log(sum(row)) - self._speed)
        weighted = [weight * value for value in row]
        self._normal = [
            FORGETTING * old + weighted[i] * row[j]
            for old, (i, j) in zip(self._normal, _UPPER, strict=True)
        ]
        self._target = [
            FORGETTING * old + value for old, value in zip(self._target, weighted, strict=True)
        ]
        self._num_reports += 1
        if self._num_reports < FIRST_REFITS or self._num_reports % REFIT_EVERY == 0:
            self._refit()

    def _refit(self) -> None:
        """Solve for the coefficients in units of the prior; negative ones become 0."""
        normal = np.zeros((4, 4))
        for value, (i, j) in zip(self._normal, _UPPER, strict=True):
            normal[i, j] += value
            normal[j, i] = normal[i, j]
        weight = self._prior_weight + RIDGE * normal.diagonal() + MIN_RIDGE
        normal += np.diag(weight)
        target = np.array(self._target) + weight * math.exp(-self._speed)
        factors: npt.NDArray[np.float64] = np.zeros(4)
        active = [0, 1, 2, 3]
        while active:
            solution = np.linalg.solve(normal[np.ix_(active, active)], target[active])
            if solution.min() >= 0:
                factors[active] = solution
                break
            del active[int(solution.argmin())]
        step, token, pair, context = (factors * np.array(self._prior)).tolist()
        self.costs = StepCosts(step, token, pair, context)
