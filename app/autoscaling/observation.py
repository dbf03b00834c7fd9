"""Turns the replicas' reports into what the policy looks at. Pure; reports are plain numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from app.autoscaling.policy import Observation

Report = Mapping[str, float]
"""By the names of `replicas.autoscaling_stats`."""


def observe(
    reports: Collection[Report], *, now: float, target: int, num_running: int, num_queued: float
) -> Observation:
    """Return what is known.

    Args:
        reports: the latest of each replica that serves.
        now: seconds since the epoch.
        target: replicas ordered so far.
        num_running: of those, that serve.
        num_queued: requests that wait at Serve's handles.
    """
    reports = [report for report in reports if report.get("num_slots", 0) > 0]
    if not reports:
        return Observation(now=now, target=target, num_running=num_running, num_queued=num_queued)
    # Every replica is told the same by the routers: take what was told last.
    routers = max(reports, key=lambda report: report.get("router_num_requests", 0.0))

    def total(name: str) -> float:
        return sum(report.get(name, 0.0) for report in reports)

    def told(name: str) -> float:
        return routers.get(f"router_{name}", 0.0)

    count = len(reports)
    pages, page_size = total("num_pages"), total("page_size") / count
    pending_tokens = total("num_pending_prefill_tokens") + total("num_waiting_tokens")
    return Observation(
        now=now,
        target=target,
        num_running=num_running,
        num_queued=max(num_queued, told("num_queued")),
        num_open=total("num_running") + total("num_waiting"),
        pending_s=told("token_s") * pending_tokens + told("pair_s") * total("num_pending_pairs"),
        total_requests=told("num_requests"),
        total_prompt_tokens=told("num_prompt_tokens"),
        total_sent=told("num_sent"),
        total_uncached_tokens=told("num_uncached_tokens"),
        total_pairs=told("num_pairs"),
        total_ended=told("num_ended"),
        total_output_tokens=told("num_output_tokens"),
        step_s=told("step_s"),
        token_s=told("token_s"),
        pair_s=told("pair_s"),
        context_s=told("context_s"),
        chunk_tokens=total("max_chunk_tokens") / count,
        num_slots=total("num_slots") / count,
        kv_tokens=pages * page_size / count,
        kv_share=1 - total("num_free_pages") / pages if pages else 0.0,
    )
