"""What it costs to give a request to each replica, in seconds of delay to everybody.

Pure, over the fleet's arrays. The terms are physical times, so that there is hardly a weight to
tune, and whether a target can be met falls out of the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from app.router.fleet import Bools, Fleet, Floats

STALL_WEIGHT = 0.02
"""What a second of delay to a running stream counts against a second of delay to a first token."""

MAX_STALL_S = 1.0
"""A prompt that takes longer counts as this one for the streams: it has hardly time to spare, and
goes where it is computed first."""

DECODE_WEIGHT = 0.05
"""What a second of the request's own output counts: of `max_tokens` most are never produced."""

MAX_PREFILL_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The request that a replica is sought for.

    Attributes:
        num_prompt_tokens: >= 1.
        max_tokens: most output tokens.
        held_tokens: f64 [rows], leading prompt tokens that each replica has, in whatever tier.
        device_tokens: f64 [rows], of those, what it need not fetch; None: all.
        fetch_s_per_token: seconds to fetch a token's KV from the replica's host tier.
        is_tpot_wanted: whether `Answer.tpot_s` will be looked at.
    """

    num_prompt_tokens: int
    max_tokens: int
    held_tokens: Floats
    device_tokens: Floats | None = None
    fetch_s_per_token: float = 0.0
    is_tpot_wanted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a policy says of every row; rows without a replica hold anything.

    Attributes:
        cost: the lower the better.
        queued_s: predicted wait for the prompts that are there; None: the policy predicts nothing.
        ttft_s: predicted time to first token.
        tpot_s: predicted time per output token after it.
        tie_s: costs this close to the lowest are equal to it: what is not seen differs by more.
    """

    cost: Floats
    queued_s: Floats | None = None
    ttft_s: Floats | None = None
    tpot_s: Floats | None = None
    tie_s: float = 0.0


class Policy(Protocol):
    """Rates replicas. The service runs `PredictedCost`; the simulator compares others with it."""

    def rate(self, fleet: Fleet, question: Question, now: float) -> Answer:
        """Return the cost of each row."""
        ...


class PredictedCost:
    """Time to first token, stall of the running streams, pressure on the pages.

    cost = queued + own + fetch + stall + decode + pressure, where
    - queued: prompts at the replica, as reported and worked off since, and booked since. What other
      routers have sent since is not seen: as much work as they send in that time is poured over
      the emptiest replicas, which then look the same, so that routers with the same old view do
      not all choose the same one (Dahlin, "Interpreting stale load information", 2000);
    - own: the request's own uncached prompt;
    - fetch: its pages in the replica's host tier, if that is faster than to compute them;
    - stall: what `own` delays the streams that run there;
    - decode: its own output, at the pace of the replica's steps;
    - pressure: pages in use near the limit.
    """

    def rate(self, fleet: Fleet, question: Question, now: float) -> Answer:
        """Return cost and predictions of each row."""
        costs = fleet.model.costs
        length = question.num_prompt_tokens
        token_s, half_pair_s = fleet.token_s, fleet.half_pair_s
        queued = fleet.free_at - now
        np.maximum(queued, 0, out=queued)
        unseen_s = fleet.unseen_prefill_s(now)
        if unseen_s > 0:
            depths = np.where(fleet.is_routable, queued, np.inf)
            np.maximum(queued, water_level(depths, unseen_s), out=queued)
        queued += fleet.claimed_s
        held = question.held_tokens
        own = prefill_s(held, length, token_s, half_pair_s)
        if question.device_tokens is not None:
            on_device = np.minimum(question.device_tokens, held)
            own += (held - on_device) * question.fetch_s_per_token
            np.minimum(own, prefill_s(on_device, length, token_s, half_pair_s), out=own)
        ttft = queued + own
        ttft += fleet.step_s
        cost = np.minimum(own, MAX_STALL_S)
        cost *= fleet.outstanding
        cost *= STALL_WEIGHT
        cost += ttft
        cost += (DECODE_WEIGHT * costs.context * question.max_tokens) * fleet.coming_context
        pressure = length - fleet.calm_tokens
        np.maximum(pressure, 0, out=pressure)
        pressure *= fleet.pressure_s_per_token
        cost += pressure
        tpot = None
        if question.is_tpot_wanted:
            tpot = fleet.step_s + costs.token * (fleet.decodes + 1) + costs.context * length
            tpot /= 1 - np.minimum(fleet.prefill_share, MAX_PREFILL_SHARE)
        tie_s = unseen_s / max(1, len(fleet.views))
        return Answer(cost=cost, queued_s=queued, ttft_s=ttft, tpot_s=tpot, tie_s=tie_s)


def water_level(depths: Floats, amount: float) -> float:
    """Return how high water stands when `amount` is poured over columns of these heights.

    Infinite ones stay dry; one at least must be finite.
    """
    heights = np.sort(depths)
    levels = heights.cumsum()
    levels += amount
    levels /= np.arange(1, len(heights) + 1)
    is_below_next = levels[:-1] <= heights[1:]
    first = int(is_below_next.argmax()) if len(heights) > 1 else 0
    is_found = len(heights) > 1 and is_below_next[first]
    return float(levels[first if is_found else -1])


def prefill_s(held: Floats, length: int, token_s: Floats, half_pair_s: Floats) -> Floats:
    """Return the seconds to compute prompt tokens [held, length)."""
    seconds = held + length
    seconds *= half_pair_s
    seconds += token_s
    seconds *= length - held
    return seconds


def fits(answer: Answer, *, ttft_s: float | None, tpot_s: float | None) -> Bools | None:
    """Return which rows meet the targets, or None where there is nothing to check."""
    meets: Bools | None = None
    if ttft_s is not None and answer.ttft_s is not None:
        meets = answer.ttft_s <= ttft_s
    if tpot_s is not None and answer.tpot_s is not None:
        in_time = answer.tpot_s <= tpot_s
        meets = in_time if meets is None else meets & in_time
    return meets
