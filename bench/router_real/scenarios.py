"""The promises that only a real service can keep: each scenario runs one and says how it went.

A scenario returns plain figures; "passed" holds the bars by name. Invariant: it leaves the service
idle, with all its replicas.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

from bench.measurement import percentile
from bench.router_real.client import Ask, Reply
from bench.router_real.prediction import calibrate, measured, predict, predicted
from bench.router_real.service import NUM_REPLICAS, Service, Watch
from bench.router_real.workload import distinct, with_shared_prefixes

MAX_HIT_ERROR = 0.05
MAX_PREDICTION_ERROR = 0.15
NUM_STREAMS = 16
OVERLOAD = 3.0
MIN_GOODPUT = 0.9
MAX_REFUSAL_P50_S, MAX_REFUSAL_P99_S = 0.02, 0.1
MAX_MEMORY_GROWTH = 0.05
MEMORY_SETTLES_S = 15.0
OFFERED_RATIO = 10.0
MAX_SERVICE_RATIO = 1.15
PREDICTED_SEEDS = (1, 2, 3)


async def validation(
    service: Service, *, num_requests: int = 500, load: float = 0.6
) -> dict[str, Any]:
    """Requests with shared prefixes, spread and in one burst, against the simulator's prediction.

    Calibrated by requests of the same kind, none of which comes again, and by prompts and streams
    alone: without them nothing tells a step's parts apart.

    Args:
        service: idle.
        num_requests: of the spread run.
        load: its rate, of what the calibration's burst was served at.
    """
    sizes = service.sizes
    burst_size = NUM_REPLICAS * sizes.num_slots + sizes.max_queued_requests // 2
    async with service.watched(interval_s=0.1) as watch:
        idle: list[Reply] = []
        for seed, prompt_tokens in enumerate((32, 96, 512)):
            asks = distinct(6, prompt_tokens=prompt_tokens, max_tokens=2, seed=110 + seed)
            idle += await service.client.run_closed(asks, concurrency=1)
        for concurrency in (2, NUM_REPLICAS * sizes.num_slots):
            asks = distinct(
                2 * concurrency, prompt_tokens=32, max_tokens=48, seed=120 + concurrency
            )
            await service.client.run_closed(asks, concurrency=concurrency)
        first = await service.client.run_open(with_shared_prefixes(burst_size, seed=101, rate=None))
        burst_rate = len(first) / _span_s(first)
        rate = load * burst_rate
        await service.client.run_open(with_shared_prefixes(num_requests // 5, seed=102, rate=rate))
    hardware, way_s = calibrate(sizes, watch.snapshots, idle)
    runs: dict[str, Any] = {}
    passed: dict[str, bool] = {}
    for name, asks in (
        ("spread", with_shared_prefixes(num_requests, seed=103, rate=rate)),
        ("burst", with_shared_prefixes(burst_size, seed=104, rate=None)),
    ):
        replies = await service.client.run_open(asks)
        await service.wait_for_replicas(NUM_REPLICAS)
        failed = [reply.error for reply in replies if not reply.is_complete]
        assert not failed, failed[:3]
        real = measured(replies)
        by_seed = [
            predicted(predict(sizes, hardware, asks, way_s=way_s, seed=seed))
            for seed in PREDICTED_SEEDS
        ]
        simulated = {key: statistics.fmean(run[key] for run in by_seed) for key in real}
        runs[name] = {"measured": real, "predicted": simulated}
        for key, value in real.items():
            if key == "hit_share":
                passed[f"{name} {key}"] = abs(simulated[key] - value) <= MAX_HIT_ERROR
            else:
                passed[f"{name} {key}"] = abs(simulated[key] / value - 1) <= MAX_PREDICTION_ERROR
    return {
        "num_requests": num_requests,
        "rate": rate,
        "burst_size": burst_size,
        "step_times": {
            "step_ms": 1e3 * hardware.overhead_s,
            "token_ms": 1e3 * hardware.token_s,
            "pair_us": 1e6 * hardware.pair_s,
            "context_us": 1e6 * hardware.context_s,
            "contention": hardware.contention,
            "way_ms": 1e3 * way_s,
        },
        "runs": runs,
        "passed": passed,
    }


async def kill(service: Service, *, max_tokens: int = 256, kill_after: int = 4) -> dict[str, Any]:
    """One engine replica is killed under streams; all of them end as if nothing had happened.

    Args:
        service: idle.
        max_tokens: of each stream.
        kill_after: tokens that half of the streams have when it happens.
    """
    asks = [
        Ask(
            prompt_token_ids=ask.prompt_token_ids,
            max_tokens=max_tokens,
            seed=ask.seed,
            temperature=0.0 if ask.seed % 2 else 0.8,
        )
        for ask in distinct(NUM_STREAMS, prompt_tokens=40, max_tokens=max_tokens, seed=200)
    ]
    undisturbed = await service.client.run_open(asks)
    pids = service.engine_pids()
    replies = [Reply(ask=ask) for ask in asks]
    streams = [asyncio.create_task(service.client.stream(reply)) for reply in replies]
    while sorted(len(reply.token_ids) for reply in replies)[NUM_STREAMS // 2] < kill_after:
        assert not any(reply.error for reply in replies), [reply.error for reply in replies]
        await asyncio.sleep(0.02)
    num_running = sum(len(reply.token_ids) < max_tokens for reply in replies)
    service.kill_engine(pids[0])
    await asyncio.gather(*streams)
    await service.wait_for_replicas(NUM_REPLICAS)
    same = [a.token_ids == b.token_ids for a, b in zip(undisturbed, replies, strict=True)]
    slowdown = max(reply.duration_s for reply in replies) / max(
        reply.duration_s for reply in undisturbed
    )
    return {
        "num_streams": NUM_STREAMS,
        "num_running_at_kill": num_running,
        "num_complete": sum(reply.is_complete for reply in replies),
        "num_identical": sum(same),
        "slowdown": slowdown,
        "errors": [reply.error for reply in replies if reply.error],
        "passed": {
            "killed under load": num_running == NUM_STREAMS,
            "complete": all(reply.is_complete for reply in replies),
            "identical, nothing twice, no gap": all(same)
            and all(reply.is_complete for reply in undisturbed),
        },
    }


async def capacity(
    service: Service, *, prompt_tokens: int, max_tokens: int, seed: int, num_rounds: int = 4
) -> float:
    """Requests per second that a service served which never lacked any: closed loop."""
    concurrency = NUM_REPLICAS * (service.sizes.num_slots + 2)
    asks = distinct(
        num_rounds * concurrency, prompt_tokens=prompt_tokens, max_tokens=max_tokens, seed=seed
    )
    replies = await service.client.run_closed(asks, concurrency=concurrency)
    assert all(reply.is_complete for reply in replies), [r.error for r in replies if r.error][:3]
    # Without the ramp at both ends: between the first ends and the last starts.
    ends = sorted(reply.ended_at for reply in replies)
    begin, end = ends[concurrency // 2], ends[-concurrency]
    return (len(ends) - concurrency - concurrency // 2) / (end - begin)


async def overload(
    service: Service,
    *,
    seconds: float = 60.0,
    prompt_tokens: int = 64,
    max_tokens: int = 64,
    ttft_target_s: float = 6.0,
) -> dict[str, Any]:
    """Three times as many requests as can be served: the rest is refused, and costs little.

    Capacity is measured before and after: other work on the machine may have changed it.

    Args:
        service: idle.
        seconds: how long.
        prompt_tokens, max_tokens: of a request.
        ttft_target_s: what the requests want; a later first token does not count.
    """
    shape = {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens}
    before = await capacity(service, seed=300, **shape)
    rate = OVERLOAD * before
    asks = [
        Ask(
            prompt_token_ids=ask.prompt_token_ids,
            max_tokens=ask.max_tokens,
            arrival_s=ask.arrival_s,
            ttft_target_s=ttft_target_s,
        )
        for ask in distinct(int(rate * seconds), seed=301, rate=rate, **shape)
    ]
    async with service.watched() as watch:
        replies = await service.client.run_open(asks)
    await service.wait_for_replicas(NUM_REPLICAS)
    after = await capacity(service, seed=302, **shape)
    start = replies[0].sent_at
    # From when the queue is full to when requests cease to come.
    window = (start + 0.2 * seconds, start + seconds)
    good = [r for r in replies if r.is_complete and r.ttft_s <= ttft_target_s]
    goodput = sum(window[0] <= r.ended_at < window[1] for r in good) / (window[1] - window[0])
    refusals = [reply.duration_s for reply in replies if reply.status == 429]
    expired = sum(reply.status == 504 for reply in replies)
    other = [r.error for r in replies if not r.is_complete and not r.is_refused]
    growth = _memory_growth(watch)
    available = statistics.fmean((before, after))
    max_queued = max(seen.num_queued for seen in watch.snapshots)
    refusal_p50_s, refusal_p99_s = percentile(refusals, 0.5), percentile(refusals, 0.99)
    return {
        "capacity": [before, after],
        "offered": rate,
        "num_requests": len(replies),
        "goodput": goodput,
        "num_good": len(good),
        "num_refused": len(refusals),
        "num_expired": expired,
        "refusal_p50_ms": 1e3 * refusal_p50_s,
        "refusal_p99_ms": 1e3 * refusal_p99_s,
        "max_queued": max_queued,
        "memory_growth": growth,
        "other_errors": other[:5],
        "passed": {
            "goodput": goodput >= MIN_GOODPUT * available,
            "refusal p50": refusal_p50_s < MAX_REFUSAL_P50_S,
            "refusal p99": refusal_p99_s < MAX_REFUSAL_P99_S,
            "queue is bounded": max_queued <= service.sizes.max_queued_requests,
            "memory is flat": max(growth.values()) <= MAX_MEMORY_GROWTH,
            "nothing else failed": not other,
        },
    }


async def fairness(
    service: Service, *, seconds: float = 60.0, prompt_tokens: int = 32, max_tokens: int = 32
) -> dict[str, Any]:
    """Two tenants, one of which sends ten times as much, both more than their half: equal service.

    Args:
        service: idle.
        seconds: how long.
        prompt_tokens, max_tokens: of a request.
    """
    shape = {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens}
    available = await capacity(service, seed=400, **shape)
    asks: list[Ask] = []
    for index, rate in enumerate((available, OFFERED_RATIO * available)):
        own = distinct(int(rate * seconds), seed=401 + index, rate=rate, **shape)
        asks += [
            Ask(
                prompt_token_ids=ask.prompt_token_ids,
                max_tokens=max_tokens,
                arrival_s=ask.arrival_s,
                api_key=service.keys[index],
            )
            for ask in own
        ]
    replies = await service.client.run_open(asks)
    await service.wait_for_replicas(NUM_REPLICAS)
    start = min(reply.sent_at for reply in replies)
    # What was sent before both had a backlog has ended by then.
    window = (start + 0.4 * seconds, start + seconds)
    served = [0, 0]
    for reply in replies:
        if reply.is_complete and window[0] <= reply.ended_at < window[1]:
            assert reply.ask.api_key is not None
            served[service.keys.index(reply.ask.api_key)] += 1
    ratio = served[1] / max(1, served[0])
    other = [r.error for r in replies if not r.is_complete and not r.is_refused]
    return {
        "capacity": available,
        "offered": [available, OFFERED_RATIO * available],
        "num_served_light": served[0],
        "num_served_heavy": served[1],
        "heavy_to_light": ratio,
        "other_errors": other[:5],
        "passed": {
            "equal service": 1 / MAX_SERVICE_RATIO <= ratio <= MAX_SERVICE_RATIO,
            "nothing else failed": not other,
        },
    }


def _span_s(replies: Sequence[Reply]) -> float:
    return max(reply.ended_at for reply in replies) - min(reply.sent_at for reply in replies)


def _memory_growth(watch: Watch) -> dict[str, float]:
    """By kind of process: the last quarter's memory against that after the start, a share."""
    begin = watch.resident_bytes[0][0] + MEMORY_SETTLES_S
    later = [sizes for at, sizes in watch.resident_bytes if at >= begin] or [
        sizes for _, sizes in watch.resident_bytes
    ]
    count = max(1, len(later) // 4)
    growth: dict[str, float] = {}
    for group in later[0]:
        if group.startswith(("replica:", "haproxy")):
            first = statistics.median(sizes.get(group, 0) for sizes in later[:count])
            last = statistics.median(sizes.get(group, 0) for sizes in later[-count:])
            growth[group] = last / first - 1 if first else 0.0
    return growth
