"""The ingress' own Prometheus metrics, and the engines' as it learns them.

Every ingress replica counts for itself and labels its series with its id, because a scrape
through the load balancer reaches any one of them. Per-token cost: one histogram observation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from replicas.histograms import INTER_TOKEN_BUCKETS_S, LATENCY_BUCKETS_S, REQUEST_BUCKETS_S
from replicas.load_metrics import LOAD_COUNTERS, LOAD_FIELDS, load_metric_name
from replicas.wire import ServiceStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.in_progress = Gauge(
            "systole_requests_in_progress", "Requests being answered.", label, registry=registry
        ).labels(ingress_id)
        self.time_to_first_token = Histogram(
            "systole_time_to_first_token_seconds",
            "From the arrival of a request to the first token of each choice.",
            label,
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        ).labels(ingress_id)
        self.inter_token_latency = Histogram(
            "systole_inter_token_latency_seconds",
            "Between consecutive deliveries of tokens of one choice.",
            label,
            buckets=INTER_TOKEN_BUCKETS_S,
            registry=registry,
        ).labels(ingress_id)
        self.time_per_output_token = Histogram(
            "systole_time_per_output_token_seconds",
            "Mean over the tokens of a choice after its first; one observation a choice.",
            label,
            buckets=INTER_TOKEN_BUCKETS_S,
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
        for field in LOAD_FIELDS:
            samples = [(i, getattr(load, field)) for i, load in self._status.replicas.items()]
            yield _family(field, samples)


def _family(field: str, samples: Iterable[tuple[str, float]]) -> Metric:
    family_type = CounterMetricFamily if field in LOAD_COUNTERS else GaugeMetricFamily
    help_text = f"ReplicaLoad.{field} of each replica."
    family = family_type(load_metric_name(field), help_text, labels=["replica"])
    for replica_id, value in samples:
        family.add_metric([replica_id], value)
    return family
