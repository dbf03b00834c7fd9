"""Counts what a router is asked for, for the autoscaling policy. Pure; counts only grow."""

from __future__ import annotations

from app.router.replica_view import Booking
from app.router.step_model import StepCosts
from replicas.wire import RouterDemand


class DemandMeter:
    """Totals over a router's requests since its start."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_sent = 0
        self._num_uncached_tokens = 0
        self._num_pairs = 0
        self._num_ended = 0
        self._num_output_tokens = 0

    def arrived(self, num_prompt_tokens: int) -> None:
        """Count a request, whatever becomes of it."""
        self._num_requests += 1
        self._num_prompt_tokens += num_prompt_tokens

    def sent(self, booking: Booking) -> None:
        """Count what a replica has to compute for a request."""
        self._num_sent += 1
        self._num_uncached_tokens += booking.num_uncached_tokens
        self._num_pairs += booking.num_pairs

    def ended(self, num_output_tokens: int) -> None:
        """Count the output of a request that has ended."""
        self._num_ended += 1
        self._num_output_tokens += num_output_tokens

    def read(self, costs: StepCosts, *, num_queued: int, num_queued_tokens: int) -> RouterDemand:
        """Return the totals, with what waits now and what the replicas' steps cost."""
        return RouterDemand(
            num_requests=self._num_requests,
            num_prompt_tokens=self._num_prompt_tokens,
            num_sent=self._num_sent,
            num_uncached_tokens=self._num_uncached_tokens,
            num_pairs=self._num_pairs,
            num_ended=self._num_ended,
            num_output_tokens=self._num_output_tokens,
            num_queued=num_queued,
            num_queued_tokens=num_queued_tokens,
            step_s=costs.step,
            token_s=costs.token,
            pair_s=costs.pair,
            context_s=costs.context,
        )
