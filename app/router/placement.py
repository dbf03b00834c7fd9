"""Which replica a request is best given to: what each would cost, and the cheapest of those asked.

Pure but for the ties, which are drawn. Knows the replicas and their pages, and nothing of queues
or credit: the core says which rows may be chosen.
"""

from __future__ import annotations

import random

import numpy as np

from app.router.admission import QueuedRequest
from app.router.cached_pages import CachedPages
from app.router.cost import Answer, Policy, Question
from app.router.fleet import Bools, Fleet, Floats, Rows

TIE_SHARE = 0.02
TIE_S = 1e-3
"""Costs so close to the lowest are equal to it: the prediction is no better."""

PAGES_WAIT_SHARE = 0.25
"""Of what Little's law says of the wait for pages, set on the conversation trace: a replica's pages
come back in lumps, and bookings count output that most requests never have."""


class Placement:
    """Rates the replicas of a fleet for one request after another."""

    def __init__(
        self,
        fleet: Fleet,
        pages: CachedPages,
        policy: Policy,
        rng: random.Random,
        *,
        fetch_s_per_token: float,
    ) -> None:
        """Look at a fleet and its pages, which others keep up to date.

        Args:
            fleet: the replicas.
            pages: what they have cached.
            policy: rates them.
            rng: breaks ties.
            fetch_s_per_token: what a token in a replica's host tier costs.
        """
        self._fleet = fleet
        self._pages = pages
        self._policy = policy
        self._rng = rng
        self._fetch_s_per_token = fetch_s_per_token

    def rate(self, request: QueuedRequest, now: float) -> tuple[Answer, Question]:
        """Ask the policy about every row."""
        fleet = self._fleet
        held, on_device = self._pages.match(request.page_keys, fleet.num_rows)
        held *= fleet.page_size
        if on_device is not None:
            on_device *= fleet.page_size
        question = Question(
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            held_tokens=held,
            device_tokens=on_device,
            fetch_s_per_token=self._fetch_s_per_token,
            is_tpot_wanted=request.tpot_target_s is not None,
        )
        return self._policy.rate(fleet, question, now), question

    def cheapest(self, answer: Answer, candidates: Bools) -> int:
        """Return the row of the lowest cost, ties at random."""
        costs = np.where(candidates, answer.cost, np.inf)
        lowest = float(costs[costs.argmin()])
        (ties,) = (costs <= lowest + _tie(answer, lowest)).nonzero()
        return int(ties[self._rng.randrange(len(ties))] if len(ties) > 1 else ties[0])

    def pages_wait_s(self, request: QueuedRequest, rows: Rows, *, stay_s: float) -> Floats:
        """Predict how long each of `rows` takes to have pages for a request; 0 where it has them.

        By Little's law: in the time that a request stays, all pages change hands.

        Args:
            request: whose prompt needs them.
            rows: intp [n], any replicas; the answer is f64 [n].
            stay_s: how long a request keeps its pages, on average.
        """
        fleet = self._fleet
        lacking = request.num_prompt_tokens - fleet.free_tokens[rows]
        lacking = np.where(lacking >= 0, lacking + fleet.page_size[rows], 0.0)
        return PAGES_WAIT_SHARE * stay_s * lacking / np.maximum(fleet.booked_tokens[rows], 1)

    def allowed(self, request: QueuedRequest, rows: Bools) -> Bools:
        """Return `rows` without those that the request excludes."""
        if not request.excluded:
            return rows
        views = self._fleet.views
        excluded = [views[name].row for name in request.excluded if name in views]
        if not excluded:
            return rows
        allowed = rows.copy()
        allowed[excluded] = False
        return allowed


def is_tie(answer: Answer, cost: float, *, lowest: float) -> bool:
    """Whether a cost is equal to the lowest, as far as the prediction goes."""
    return cost <= lowest + _tie(answer, lowest)


def _tie(answer: Answer, lowest: float) -> float:
    """Return by how much a cost may exceed the lowest and be equal to it."""
    return max(TIE_S, answer.tie_s) + TIE_SHARE * abs(lowest)
