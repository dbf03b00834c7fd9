"""How many replicas there should be, decided about once a second from what has been observed.

Pure: `decide(config, state, observation)` returns a decision and the next state; the clock is part
of the observation. Serve's controller and the simulator call the same function. Invariants: a
target lies within the bounds of its time; a replica goes only when it was not needed at any moment
of `downscale_window_s`, so a target that went up stays up for at least that long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from app.autoscaling.capacity import ReplicaModel, Workload, predict, replicas_needed
from app.autoscaling.config import AutoscalingConfig
from app.autoscaling.schedule import bounds_ahead

BOOTS_PER_MEMORY = 5.0
MIN_FAST_S, MAX_FAST_S = 5.0, 60.0
"""The rate of arrivals is remembered for a fifth of a boot: what takes longer to act on may be
looked at for longer."""
SLOW_FACTOR = 4.0
"""A second memory, so many times longer. A rate is ahead of each memory by the growth within it, so
their ratio is the trend."""
MAX_AHEAD_S = 300.0
MAX_GROWTH = 2.0
"""A trend is not drawn on for longer, nor to more than so many times the present rate: a step looks
like a slope at first."""
MIN_WEIGHT_S = 3.0
MIX_S = 600.0
"""Memory of what a request is like: prompts and answers change more slowly than their number."""
MIN_REQUESTS = 8.0
"""With fewer in memory one replica is enough, or nothing is foreseen when memory is short."""
NOISE = 2.0
"""Standard deviations of a Poisson count by which the rate must grow to count as a trend."""
DEADBAND = 0.05
"""A replica goes only if the load could grow by this and `headroom` without it."""
DRAIN_S = 30.0
"""A backlog that will still be there when new replicas are up is to be gone so much later."""
HISTORY_STEP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is known at a moment. Counts with `total_` only grow since the routers' start.

    Attributes:
        now: seconds since the epoch.
        target: replicas ordered so far.
        num_running: of those, that serve.
        num_queued: requests that wait for a replica, at the routers or at Serve's handles.
        num_open: requests at the replicas.
        pending_s: device time of the prompts that wait or run at the replicas.
        total_requests: that arrived, refused ones included.
        total_prompt_tokens: of those.
        total_sent: requests that were given to a replica.
        total_uncached_tokens: prompt tokens of those that the replica had to compute.
        total_pairs: (token, position) pairs that they attend to.
        total_ended: requests whose output is known.
        total_output_tokens: of those.
        step_s, token_s, pair_s, context_s: the routers' fitted costs, app/router/step_model.py.
        chunk_tokens, num_slots, kv_tokens: of one replica; 0 while none has reported.
        kv_share: of all replicas' pages, in use.
    """

    now: float
    target: int
    num_running: int
    num_queued: float = 0.0
    num_open: float = 0.0
    pending_s: float = 0.0
    total_requests: float = 0.0
    total_prompt_tokens: float = 0.0
    total_sent: float = 0.0
    total_uncached_tokens: float = 0.0
    total_pairs: float = 0.0
    total_ended: float = 0.0
    total_output_tokens: float = 0.0
    step_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    context_s: float = 0.0
    chunk_tokens: float = 0.0
    num_slots: float = 0.0
    kv_tokens: float = 0.0
    kv_share: float = 0.0

    @property
    def counts(self) -> tuple[float, ...]:
        """What only grows, in the order of `Mix`."""
        return (
            self.total_requests,
            self.total_prompt_tokens,
            self.total_sent,
            self.total_uncached_tokens,
            self.total_pairs,
            self.total_ended,
            self.total_output_tokens,
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """An exponentially fading sum, and what divides it to a rate.

    Attributes:
        total: of what was added, each faded since.
        weight: the same of the seconds.
    """

    total: float = 0.0
    weight: float = 0.0

    def add(self, amount: float, elapsed_s: float, memory_s: float) -> Memory:
        """Let `elapsed_s` pass in which `amount` came."""
        faded = math.exp(-elapsed_s / memory_s)
        return Memory(self.total * faded + amount, self.weight * faded + elapsed_s)

    @property
    def rate(self) -> float:
        """Amount per second; low while hardly any time has passed."""
        return self.total / max(self.weight, MIN_WEIGHT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a decision leaves to the next.

    Attributes:
        at: time of the last observation; None before the first.
        counts: of the last observation with a report; None before.
        fast, slow: arrivals.
        mix: fading sums of `Observation.counts`.
        needed: (time, replicas that the load needed with all its margins), of the last
            `downscale_window_s`, the largest of every few seconds.
        short_since: since when more than the target was needed without a break.
        active_at: when a request was last seen, or a replica that was still to come.
    """

    at: float | None = None
    counts: tuple[float, ...] | None = None
    fast: Memory = Memory()
    slow: Memory = Memory()
    mix: tuple[float, ...] = (0.0,) * 7
    needed: tuple[tuple[float, int], ...] = ()
    short_since: float | None = None
    active_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many, and why.

    Attributes:
        target: replicas.
        reason: for the log; "" where nothing changes.
        needed: what the foreseen load takes, before delays and bounds; None: nothing is foreseen.
    """

    target: int
    reason: str = ""
    needed: int | None = None


def decide(config: AutoscalingConfig, state: State, seen: Observation) -> tuple[Decision, State]:
    """Return the number of replicas to have from now on."""
    state = _remember(config, state, seen)
    low, high = bounds_ahead(config, seen.now)
    assert state.active_at is not None
    needed, lasting = None, 0
    if seen.now - state.active_at >= config.scale_to_zero_after_s:
        needed, lasting = 0, 0
    elif state.mix[0] < MIN_REQUESTS and state.slow.weight >= MIX_S / 10:
        needed, lasting = 1, 1
    elif (load := _workload(state, seen)) is not None:
        needed = _needed(config, state, seen, load, spare=config.headroom)
        lasting = _needed(config, state, seen, load, spare=config.headroom + DEADBAND)
    if needed is not None:
        state = replace(state, needed=_note(config, state, seen.now, max(needed, lasting)))
    target, reason, state = _step(config, state, seen, needed)
    bounded = min(max(target, low), high)
    if bounded != target:
        reason = f"bounds [{low}, {high}]"
    if bounded == seen.target:
        reason = ""
    return Decision(target=bounded, reason=reason, needed=needed), state


def _step(
    config: AutoscalingConfig, state: State, seen: Observation, needed: int | None
) -> tuple[int, str, State]:
    """Apply the delays: soon upwards, late downwards."""
    current = seen.target
    if current == 0 and seen.num_queued > 0:
        return max(1, needed or 1), "a request waits and there is no replica", state
    if needed is not None and needed > current:
        since = state.short_since if state.short_since is not None else seen.now
        if seen.now - since < config.upscale_delay_s:
            return current, "", replace(state, short_since=since)
        return needed, _describe(state, seen, needed), replace(state, short_since=None)
    state = replace(state, short_since=None)
    if needed == 0:
        return 0, f"no request for {config.scale_to_zero_after_s:.0f} s", state
    if needed is None or seen.now - state.needed[0][0] < config.downscale_window_s:
        return current, "", state
    most = max(1, *(count for _, count in state.needed))
    if most < current:
        return most, f"at most {most} needed for {config.downscale_window_s:.0f} s", state
    return current, "", state


def _memory_s(config: AutoscalingConfig) -> float:
    """Return the shorter memory of the rate of arrivals."""
    return min(max(config.boot_s / BOOTS_PER_MEMORY, MIN_FAST_S), MAX_FAST_S)


def _remember(config: AutoscalingConfig, state: State, seen: Observation) -> State:
    """Take what has been counted since the last observation into the memories."""
    fast_s = _memory_s(config)
    elapsed = 0.0 if state.at is None else max(0.0, seen.now - state.at)
    has_report = seen.num_slots > 0
    if state.counts is None or not has_report:
        grown = (0.0,) * len(seen.counts)
    else:
        # Smaller than before: a router has started anew, and its counts with it.
        is_new = seen.counts[0] < state.counts[0]
        before = (0.0,) * len(seen.counts) if is_new else state.counts
        grown = tuple(max(0.0, n - b) for n, b in zip(seen.counts, before, strict=True))
    # Without a report nothing is known of this time; it counts as not having passed.
    passed = elapsed if has_report and state.counts is not None else 0.0
    faded = math.exp(-passed / MIX_S)
    is_booting = seen.num_running < seen.target  # somebody wanted it, and has yet to get it
    is_active = grown[0] > 0 or seen.num_queued > 0 or seen.num_open > 0 or is_booting
    return replace(
        state,
        at=seen.now,
        counts=seen.counts if has_report else state.counts,
        fast=state.fast.add(grown[0], passed, fast_s),
        slow=state.slow.add(grown[0], passed, SLOW_FACTOR * fast_s),
        mix=tuple(m * faded + g for m, g in zip(state.mix, grown, strict=True)),
        active_at=seen.now if is_active or state.active_at is None else state.active_at,
    )


def _workload(state: State, seen: Observation) -> Workload | None:
    """Return what a request is like and how many come now; None while too few were seen."""
    requests, prompts, sent, uncached, pairs, ended, outputs = state.mix
    if min(requests, sent, ended) < MIN_REQUESTS or not seen.num_slots:
        return None
    output_tokens = outputs / ended
    return Workload(
        requests_per_s=max(state.fast.rate, state.slow.rate),
        prefill_s=(seen.token_s * uncached + seen.pair_s * pairs) / sent,
        uncached_tokens=uncached / sent,
        output_tokens=output_tokens,
        context_tokens=prompts / requests + output_tokens / 2,
    )


def _needed(
    config: AutoscalingConfig, state: State, seen: Observation, load: Workload, *, spare: float
) -> int:
    """Return the replicas that the load takes at the time when one ordered now would be up."""
    rate = load.requests_per_s * _growth(config, state) * (1 + spare)
    ahead = replace(load, requests_per_s=rate)
    model = ReplicaModel(
        step_s=seen.step_s,
        token_s=seen.token_s,
        context_s=seen.context_s,
        chunk_tokens=seen.chunk_tokens,
        num_slots=seen.num_slots,
        kv_tokens=seen.kv_tokens,
    )

    def needed_for(requests_per_s: float) -> int:
        return replicas_needed(
            replace(ahead, requests_per_s=requests_per_s),
            model,
            ttft_s=config.ttft_target_s,
            tpot_s=config.tpot_target_s,
            kv_share=config.kv_target,
            max_replicas=config.max_replicas,
        )

    count = needed_for(ahead.requests_per_s)
    backlog = _backlog(config, seen, ahead, model)
    return needed_for(ahead.requests_per_s + backlog / DRAIN_S) if backlog > 0 else count


def _backlog(
    config: AutoscalingConfig, seen: Observation, ahead: Workload, model: ReplicaModel
) -> float:
    """Return the requests that will still wait when a replica ordered now is up."""
    waiting = seen.num_queued + seen.pending_s / max(ahead.prefill_s, 1e-9)
    if waiting <= 0 or not seen.target:
        return 0.0
    here = predict(ahead, model, seen.target)
    if here.utilisation < 1:
        spare = ahead.requests_per_s * (1 / here.utilisation - 1)
        waiting -= spare * config.boot_s
    return max(0.0, waiting)


def _growth(config: AutoscalingConfig, state: State) -> float:
    """Return by what factor arrivals will have grown when a replica ordered now is up; at least 1.

    As they have grown between the two memories, if that is more than noise.
    """
    fast, slow, memory_s = state.fast.rate, state.slow.rate, _memory_s(config)
    if slow <= 0 or fast - slow <= NOISE * math.sqrt(slow / (2 * memory_s)):
        return 1.0
    ahead_s = memory_s + min(config.upscale_delay_s + config.boot_s, MAX_AHEAD_S)
    return min((fast / slow) ** (ahead_s / ((SLOW_FACTOR - 1) * memory_s)), MAX_GROWTH)


def _note(
    config: AutoscalingConfig, state: State, now: float, count: int
) -> tuple[tuple[float, int], ...]:
    """Return the history with `count`, without what is older than the window.

    The oldest entry is kept until its successor covers the window.
    """
    history = state.needed
    if history and now - history[-1][0] < HISTORY_STEP_S:
        at, last = history[-1]
        history = (*history[:-1], (at, max(last, count)))
    else:
        history = (*history, (now, count))
    while len(history) > 1 and now - history[1][0] >= config.downscale_window_s:
        history = history[1:]
    return history


def _describe(state: State, seen: Observation, needed: int) -> str:
    return (
        f"{needed} needed: {state.fast.rate:.2f} requests/s (before {state.slow.rate:.2f}), "
        f"{seen.num_queued:.0f} queued, {seen.pending_s:.1f} s of prompts pending, "
        f"{100 * seen.kv_share:.0f}% of KV pages in use"
    )
