"""What a router replica tells Prometheus.

Knows the core's counts, not its decisions. Invariant: every series is named in docs/operations.md.
"""

from __future__ import annotations

from ray.serve import metrics

from app.router.core import RouterCore
from replicas.counters import start_at_zero
from replicas.errors import ServingError
from replicas.histograms import CPU_TIME_BUCKETS_S, LATENCY_BUCKETS_S, RATIO_BUCKETS
from replicas.wire import FinishReason, GenerateResult

MIN_RATIO = 0.01
"""A prediction of 0 counts as this: a histogram of Ray's takes nothing that is not positive."""


class RouterMetrics:
    """Prometheus series of one router replica."""

    def __init__(self) -> None:
        self._answers = metrics.Counter(
            "systole_router_requests",
            description="Requests answered, by how.",
            tag_keys=("answer",),
        )
        start_at_zero(self._answers, "answer", FinishReason)
        self._queue_s = metrics.Histogram(
            "systole_router_queue_time_seconds",
            description="From a request's arrival at the router to the choice of its replica.",
            boundaries=list(LATENCY_BUCKETS_S),
        )
        self._decision_s = metrics.Histogram(
            "systole_router_decision_time_seconds",
            description="What the router's core takes to take in a request, choice included.",
            boundaries=list(CPU_TIME_BUCKETS_S),
        )
        self._ttft_ratio = metrics.Histogram(
            "systole_router_ttft_prediction_ratio",
            description="Predicted over actual time from sending to first token; 1 is right.",
            boundaries=list(RATIO_BUCKETS),
        )
        self._queued = metrics.Gauge(
            "systole_router_num_queued", description="Requests that wait in the router."
        )
        self._queued_tokens = metrics.Gauge(
            "systole_router_num_queued_tokens", description="Prompt tokens of those."
        )
        self._inflight = metrics.Gauge(
            "systole_router_num_inflight", description="Requests sent that have not ended."
        )
        self._replicas = metrics.Gauge(
            "systole_router_num_replicas", description="Replicas that take requests."
        )

    def observe_decision(self, queue_s: float, *, decision_s: float) -> None:
        """Time one wait for a replica, and the core's part in it."""
        self._queue_s.observe(queue_s)
        self._decision_s.observe(decision_s)

    def observe_ttft(self, predicted_s: float | None, actual_s: float | None) -> None:
        """Compare what was predicted when a request was sent with what came."""
        if predicted_s is not None and actual_s:
            self._ttft_ratio.observe(max(predicted_s, MIN_RATIO * actual_s) / actual_s)

    def observe_answer(self, answer: GenerateResult | ServingError) -> None:
        """Count a request that ended."""
        if isinstance(answer, GenerateResult):
            label = answer.finish_reason.value
        else:
            label = answer.code or answer.type
        self._answers.inc(tags={"answer": label})

    def observe_core(self, core: RouterCore) -> None:
        """Export the core's state; called about once a second."""
        self._queued.set(core.num_queued)
        self._queued_tokens.set(core.num_queued_tokens)
        self._inflight.set(core.num_booked)
        self._replicas.set(len(core.routable))
