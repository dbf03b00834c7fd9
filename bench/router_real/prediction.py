"""What the simulator says of a run of the real service: the same requests, the same core."""

from __future__ import annotations

from collections.abc import Sequence

from app.router.config import RouterConfig
from app.router.cost import PredictedCost
from bench.measurement import percentile
from bench.router_real.client import Ask, Reply
from bench.router_real.service import NUM_REPLICAS, Sizes, Snapshot
from bench.router_sim.calibration import fit, path_s
from bench.router_sim.hardware import Hardware
from bench.router_sim.simulation import Record, Scenario, Simulation
from bench.router_sim.traces import SimRequest
from replicas.load_events import MIN_INTERVAL_S
from replicas.page_keys import hash_prompt, hash_root

EVENT_DELAY_S = 1e-3


def calibrate(
    sizes: Sizes, snapshots: Sequence[Snapshot], idle: Sequence[Reply]
) -> tuple[Hardware, float]:
    """Fit the modelled replica to what the service reported.

    Args:
        sizes: of the service.
        snapshots: seen while it worked.
        idle: requests that had it to themselves, nothing of which was cached.

    Returns:
        The replica, and the mean seconds of a call's way to it.
    """
    hardware = fit(sizes.as_hardware(), [(seen.at, seen.loads) for seen in snapshots])
    times = [(len(reply.ask.prompt_token_ids), reply.ttft_s) for reply in idle]
    return hardware, max(EVENT_DELAY_S, path_s(hardware, times) - EVENT_DELAY_S)


def predict(
    sizes: Sizes, hardware: Hardware, asks: Sequence[Ask], *, way_s: float, seed: int
) -> list[Record]:
    """Simulate a run.

    Args:
        sizes: of the service.
        hardware: calibrated.
        asks: in order of arrival, all with the same `max_tokens`.
        way_s: mean seconds of a call's way to a replica.
        seed: of delays and ties.
    """
    root = hash_root("simulated", "")
    (max_tokens,) = {ask.max_tokens for ask in asks}
    requests = [
        SimRequest(
            str(number),
            ask.arrival_s,
            len(ask.prompt_token_ids),
            ask.max_tokens,
            hash_prompt(root, ask.prompt_token_ids, page_size=sizes.page_size),
        )
        for number, ask in enumerate(asks)
    ]
    scenario = Scenario(
        num_replicas=NUM_REPLICAS,
        hardware=hardware,
        typical_output=max_tokens,
        rpc_s=way_s,
        event_interval_s=MIN_INTERVAL_S,
        event_delay_s=EVENT_DELAY_S,
        seed=seed,
    )
    config = RouterConfig(max_queued_requests=sizes.max_queued_requests)
    return Simulation(scenario, requests, PredictedCost, config).run().records


def measured(replies: Sequence[Reply]) -> dict[str, float]:
    """Figures of a real run."""
    start = min(reply.sent_at for reply in replies)
    end = max(reply.ended_at for reply in replies)
    return _figures(
        [reply.ttft_s for reply in replies],
        num_tokens=sum(len(reply.token_ids) for reply in replies),
        seconds=end - start,
        num_cached=sum(reply.num_cached_tokens for reply in replies),
        num_prompt=sum(len(reply.ask.prompt_token_ids) for reply in replies),
    )


def predicted(records: Sequence[Record]) -> dict[str, float]:
    """The same figures of a simulated one."""
    start = min(record.request.arrived_at for record in records)
    end = max(record.ended_at for record in records)
    return _figures(
        [record.ttft_s for record in records],
        num_tokens=sum(record.request.num_output_tokens for record in records),
        seconds=end - start,
        num_cached=sum(record.num_cached for record in records),
        num_prompt=sum(record.request.num_prompt_tokens for record in records),
    )


def _figures(
    ttfts: list[float], *, num_tokens: int, seconds: float, num_cached: int, num_prompt: int
) -> dict[str, float]:
    return {
        "ttft_p50_ms": 1e3 * percentile(ttfts, 0.5),
        "ttft_p90_ms": 1e3 * percentile(ttfts, 0.9),
        "tokens_per_s": num_tokens / seconds,
        "hit_share": num_cached / num_prompt,
    }
