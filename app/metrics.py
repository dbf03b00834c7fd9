"""The ingress' own Prometheus metrics, and the engines' as it learns them.

Every ingress replica counts for itself and labels its series with its id, because a scrape
through the load balancer reaches any one of them. Per-token cost: one histogram observation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from replicas.wire import ReplicaLoad, ServiceStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_ITL_BUCKETS = (
    *(0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_E2E_BUCKETS = (0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

# Fields of ReplicaLoad that only grow since the replica's start; the others are gauges.
_COUNTERS = frozenset(
    {
        "num_steps",
        "num_preemptions",
        "num_prompt_tokens",
        "num_cached_tokens",
        "num_output_tokens",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_compiles_after_warmup",
    }
)


class IngressMetrics:
    """Counts and times the requests of one ingress replica."""

    def __init__(self, ingress_id: str) -> None:
        self._registry = CollectorRegistry()
        self._ingress_id = ingress_id
        label = ["ingress"]
        registry = self._registry
        self._requests = Counter(
            "systole_requests",
            "Requests by endpoint and HTTP status; 499 is a client that left.",
            ["ingress", "endpoint", "status"],
            registry=registry,
        )
        self._duration = Histogram(
            "systole_request_duration_seconds",
            "From the arrival of a request to its last byte.",
            ["ingress", "endpoint"],
            buckets=_E2E_BUCKETS,
            registry=registry,
        )
        self.in_progress = Gauge(
            "systole_requests_in_progress", "Requests being answered.", label, registry=registry
        ).labels(ingress_id)
        self.time_to_first_token = Histogram(
            "systole_time_to_first_token_seconds",
            "From the arrival of a request to the first token of each choice.",
            label,
            buckets=_TTFT_BUCKETS,
            registry=registry,
        ).labels(ingress_id)
        self.inter_token_latency = Histogram(
            "systole_inter_token_latency_seconds",
            "Between consecutive deliveries of tokens of one choice.",
            label,
            buckets=_ITL_BUCKETS,
            registry=registry,
        ).labels(ingress_id)
        self.open_sequences = Gauge(
            "systole_token_sink_entries",
            "Sequences whose tokens this ingress is waiting for.",
            label,
            registry=registry,
        ).labels(ingress_id)
        self.prompt_tokens = Counter(
            "systole_prompt_tokens", "Prompt tokens of finished requests.", label, registry=registry
        ).labels(ingress_id)
        self.cached_prompt_tokens = Counter(
            "systole_cached_prompt_tokens",
            "Of those, tokens found in a prefix cache.",
            label,
            registry=registry,
        ).labels(ingress_id)
        self.output_tokens = Counter(
            "systole_output_tokens", "Tokens delivered to clients.", label, registry=registry
        ).labels(ingress_id)

    def request_ended(self, endpoint: str, status: int, duration_s: float) -> None:
        """Count one answered request."""
        self._requests.labels(self._ingress_id, endpoint, str(status)).inc()
        self._duration.labels(self._ingress_id, endpoint).observe(duration_s)

    def render(self, status: ServiceStatus | None) -> bytes:
        """Return the exposition text of the ingress, and of what the router knows, if anything."""
        text = generate_latest(self._registry)
        if status is None:
            return text
        others = CollectorRegistry()
        others.register(_StatusCollector(status))
        return text + generate_latest(others)


class _StatusCollector(Collector):
    """The router's counts, and one sample per replica and field of its last load report."""

    def __init__(self, status: ServiceStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        yield GaugeMetricFamily(
            "systole_router_queued_requests",
            "Requests that wait in the router.",
            value=self._status.num_queued,
        )
        yield GaugeMetricFamily(
            "systole_router_inflight_requests",
            "Requests that the router sent and that have not ended.",
            value=self._status.num_inflight,
        )
        for field in fields(ReplicaLoad):
            samples = [(i, getattr(load, field.name)) for i, load in self._status.replicas.items()]
            yield _family(field.name, samples)


def _family(name: str, samples: Iterable[tuple[str, float]]) -> Metric:
    family_type = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
    stem = "step_seconds" if name == "step_s" else name.removeprefix("num_")
    help_text = f"ReplicaLoad.{name} of each replica."
    family = family_type(f"systole_engine_{stem}", help_text, labels=["replica"])
    for replica_id, value in samples:
        family.add_metric([replica_id], value)
    return family
