"""How fast a number of replicas would serve a load: the queueing model behind the policy. Pure.

A replica's steps all carry its decode rows; those with prompts to compute take longer. In a second,
`N` steps of `step + a d` (d rows of `a` seconds each) and the prompts' own time `p` fill the time,
and each row gets `N` tokens: with `r` output tokens per second, `d N = r`, so

    d = r step / (1 - p - r a)          rows of a replica
    TPOT = (step + a d) / (1 - p)       a step, and the prompts between two of them

A prompt of `u` tokens is computed in chunks, each in a step with the rows: `S = ceil(u / chunk)
(step + a d) + w`. The prompts queue for that, over n replicas with one router (M/G/n, mean wait by
Sakasegawa's approximation, Annals of the ISM 29, 1977; a light tail, so 95% wait for less than
three times the mean).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

VARIABILITY = 3.0
"""(ca^2 + cs^2) / 2 of arrivals and prompts: Poisson arrivals and prompts of the public traces."""
TAIL = 3.0
"""The 95th percentile of an exponential wait against its mean."""
MAX_UTILISATION = 0.95
SLACK = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What arrives.

    Attributes:
        requests_per_s: of the whole fleet.
        prefill_s: device time of a request's prompt, less what the prefix cache holds.
        uncached_tokens: of that prompt.
        output_tokens: of a request.
        context_tokens: that a decode row attends to.
    """

    requests_per_s: float
    prefill_s: float
    uncached_tokens: float
    output_tokens: float
    context_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaModel:
    """What a replica can do.

    Attributes:
        step_s: of a step that does nothing else.
        token_s: of one decode row.
        context_s: of one position that a decode row attends to.
        chunk_tokens: prompt tokens of a step.
        num_slots: sequences at once.
        kv_tokens: tokens that its pages hold.
    """

    step_s: float
    token_s: float
    context_s: float
    chunk_tokens: float
    num_slots: float
    kv_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How a load would be served.

    Attributes:
        ttft_s: 95th percentile of the time to first token; infinity when the queue only grows.
        tpot_s: mean time per output token.
        slot_share, kv_share: of a replica, in use.
        utilisation: share of the time in which prompts wait or run.
    """

    ttft_s: float
    tpot_s: float
    slot_share: float
    kv_share: float
    utilisation: float


OVERLOADED = Prediction(
    ttft_s=math.inf, tpot_s=math.inf, slot_share=math.inf, kv_share=math.inf, utilisation=math.inf
)


def predict(load: Workload, replica: ReplicaModel, num_replicas: int) -> Prediction:
    """Return how `num_replicas` (>= 1) would serve a load."""
    rate = load.requests_per_s / num_replicas
    row_s = replica.token_s + replica.context_s * load.context_tokens
    tokens_per_s = rate * load.output_tokens
    left = 1 - rate * load.prefill_s
    if left - tokens_per_s * row_s <= 0:
        return OVERLOADED
    rows = tokens_per_s * replica.step_s / (left - tokens_per_s * row_s)
    step_s = replica.step_s + row_s * rows
    tpot_s = step_s / left
    num_chunks = math.ceil(load.uncached_tokens / max(replica.chunk_tokens, 1.0))
    service_s = num_chunks * step_s + load.prefill_s
    utilisation = rate * service_s
    if utilisation >= MAX_UTILISATION:
        return OVERLOADED
    power = math.sqrt(2 * (num_replicas + 1)) - 1
    wait_s = VARIABILITY * service_s * utilisation**power / (num_replicas * (1 - utilisation))
    ttft_s = service_s + TAIL * wait_s
    num_sequences = rows + rate * ttft_s
    return Prediction(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        slot_share=num_sequences / max(replica.num_slots, 1.0),
        kv_share=num_sequences * load.context_tokens / max(replica.kv_tokens, 1.0),
        utilisation=utilisation,
    )


def replicas_needed(
    load: Workload,
    replica: ReplicaModel,
    *,
    ttft_s: float,
    tpot_s: float,
    kv_share: float,
    max_replicas: int,
) -> int:
    """Return the fewest replicas, from 1 to `max_replicas`, that serve a load within the targets.

    Targets that a request misses even on an idle replica count as what it takes there and a
    quarter more: nothing but a faster replica would meet them. More load never needs fewer.
    """
    idle = predict(dataclasses.replace(load, requests_per_s=1e-9), replica, 1)
    ttft_s, tpot_s = max(ttft_s, SLACK * idle.ttft_s), max(tpot_s, SLACK * idle.tpot_s)
    low, high = 1, max_replicas
    while low < high:
        middle = (low + high) // 2
        found = predict(load, replica, middle)
        is_enough = (
            found.ttft_s <= ttft_s
            and found.tpot_s <= tpot_s
            and found.slot_share <= 1
            and found.kv_share <= kv_share
        )
        if is_enough:
            high = middle
        else:
            low = middle + 1
    return low
