"""The field's routing rules, as ratings for the same core.

Formulas as published (docs/routing.md names the sources); each sees what ours sees, no less.
"""

from __future__ import annotations

import numpy as np

from app.router.cost import Answer, Policy, PredictedCost, Question
from app.router.fleet import Fleet

TYPICAL_REQUEST_TOKENS = 256
"""Stands for a request of another router, of which least-tokens knows no length."""

DYNAMO_HOST_WEIGHT = 0.75


class Random:
    """Any replica."""

    def rate(self, fleet: Fleet, question: Question, now: float) -> Answer:
        """All equal: the core breaks ties at random."""
        return Answer(cost=np.zeros(fleet.num_rows))


class RoundRobin:
    """The replica whose turn it is."""

    def __init__(self) -> None:
        self._last = -1

    def rate(self, fleet: Fleet, question: Question, now: float) -> Answer:
        """Distance from the one after the last."""
        rows = np.flatnonzero(fleet.is_routable)
        later = rows[rows > self._last]
        self._last = int(later[0] if len(later) else rows[0]) if len(rows) else -1
        return Answer(cost=(np.arange(fleet.num_rows) - self._last) % fleet.num_rows * 1.0)


class LeastRequests:
    """Fewest requests."""

    def rate(self, fleet: Fleet, question: Question, now: float) -> Answer:
        """Requests there."""
        return Answer(cost=fleet.outstanding.copy())


class LeastTokens:
    """Fewest prompt and output tokens owed; what this router did before it predicted."""

    def rate(self, fleet: Fleet, question: Question, now: float) -> Answer:
        """Tokens booked, and others' requests as typical ones."""
        return Answer(cost=fleet.booked_tokens + fleet.foreign * TYPICAL_REQUEST_TOKENS)


class LongestPrefix:
    """Most cached tokens, whatever the load."""

    def rate(self, fleet: Fleet, question: Question, now: float) -> Answer:
        """Minus the cached tokens."""
        return Answer(cost=-question.held_tokens)


class Dynamo:
    """NVIDIA Dynamo's KV router: blocks to prefill, less overlap, plus blocks in decode."""

    def rate(self, fleet: Fleet, question: Question, now: float) -> Answer:
        """In blocks, with the default weights (device 1, host 0.75)."""
        block = np.maximum(fleet.page_size, 1)
        active = fleet.pending_tokens + fleet.claimed_tokens
        on_device = question.held_tokens
        credit = on_device / block
        if question.device_tokens is not None:
            on_device = np.minimum(question.device_tokens, question.held_tokens)
            credit = (on_device + DYNAMO_HOST_WEIGHT * (question.held_tokens - on_device)) / block
        prefill = (active + question.num_prompt_tokens) / block - credit
        return Answer(cost=np.maximum(prefill, 0) + fleet.context / block)


class MooncakeTtft:
    """Mooncake's Conductor: lowest predicted time to first token, with our fitted model."""

    def rate(self, fleet: Fleet, question: Question, now: float) -> Answer:
        """Queue + transfer + prefill."""
        answer = PredictedCost().rate(fleet, question, now)
        assert answer.ttft_s is not None
        return Answer(cost=answer.ttft_s)


POLICIES: dict[str, type[Policy]] = {
    "random": Random,
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "least-tokens": LeastTokens,
    "longest-prefix": LongestPrefix,
    "dynamo": Dynamo,
    "mooncake": MooncakeTtft,
    "ours": PredictedCost,
}
