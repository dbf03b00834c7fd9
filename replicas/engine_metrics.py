"""Prometheus series of one engine replica, through Ray's endpoints.

Ray adds `ray_` in front of each name, `_total` to counters, and the labels deployment, replica and
application. A request costs five observations of about 2.5 us; everything else is exported once a
second from counts that the engine keeps, so a token costs nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence

from ray.serve import metrics

from replicas.counters import record_zero, start_at_zero
from replicas.engine.device_memory import DeviceMemory
from replicas.engine.step_stats import PHASES, STEP_KINDS, StepKind, StepStats
from replicas.errors import ServingError
from replicas.histograms import INTER_TOKEN_BUCKETS_S, LATENCY_BUCKETS_S, REQUEST_BUCKETS_S
from replicas.load_metrics import LOAD_COUNTERS, LOAD_FIELDS, load_metric_name
from replicas.token_stream import TokenStream
from replicas.wire import FinishReason, GenerateResult, ReplicaLoad

ENDINGS = (*FinishReason, "cancelled", "deadline", "refused", "error")
"""How a request ends, for the label of the counter."""


class EngineMetrics:
    """What a replica counts and times."""

    def __init__(self) -> None:
        self._load = ReplicaLoad()
        self._requests = metrics.Counter(
            "systole_engine_requests",
            description="Requests that ended, by how.",
            tag_keys=("ending",),
        )
        start_at_zero(self._requests, "ending", ENDINGS)
        self._request_s = _histogram(
            "systole_engine_request_seconds",
            "From a request's arrival at the replica to its end.",
            REQUEST_BUCKETS_S,
        )
        self._queue_s = _histogram(
            "systole_engine_queue_time_seconds",
            "From a request's arrival at the replica to the first step with a part of it.",
            LATENCY_BUCKETS_S,
        )
        self._prefill_s = _histogram(
            "systole_engine_prefill_time_seconds",
            "From that step to the request's first token.",
            LATENCY_BUCKETS_S,
        )
        self._decode_s = _histogram(
            "systole_engine_decode_time_seconds",
            "From the request's first token to its end.",
            REQUEST_BUCKETS_S,
        )
        self._load_metrics = {
            field: (metrics.Counter if field in LOAD_COUNTERS else metrics.Gauge)(
                load_metric_name(field), description=f"ReplicaLoad.{field}."
            )
            for field in LOAD_FIELDS
        }
        for metric in self._load_metrics.values():
            if isinstance(metric, metrics.Counter):
                start_at_zero(metric)
        self._stream_requests = metrics.Gauge(
            "systole_engine_token_stream_requests",
            description="Requests whose tokens are kept: running, or not yet acknowledged.",
        )
        self._stream_bytes = metrics.Gauge(
            "systole_engine_token_stream_buffered_bytes",
            description="Tokens' bytes that token sinks have not taken yet.",
        )
        self._device_memory = {
            kind: metrics.Gauge(
                f"systole_engine_device_memory_{kind}_bytes",
                description=description,
                tag_keys=("device",),
            )
            for kind, description in (
                ("used", "Memory that is allocated on a device (HBM)."),
                ("peak", "Most that ever was."),
                ("limit", "What the device has for programs."),
            )
        }
        self._steps = StepMetrics()

    def observe_request(
        self, ending: str, duration_s: float, answer: GenerateResult | ServingError | None
    ) -> None:
        """Count and time a request that ended."""
        self._requests.inc(tags={"ending": ending})
        self._request_s.observe(duration_s)
        if isinstance(answer, GenerateResult):
            self._queue_s.observe(answer.queue_s)
            if answer.first_token_s is not None:
                self._prefill_s.observe(max(0.0, answer.first_token_s - answer.queue_s))
                self._decode_s.observe(max(0.0, duration_s - answer.first_token_s))

    def observe_load(self, load: ReplicaLoad) -> None:
        """Export a load; called about once a second."""
        for field, metric in self._load_metrics.items():
            value = getattr(load, field)
            if isinstance(metric, metrics.Gauge):
                metric.set(value)
            else:
                _grow(metric, value - getattr(self._load, field), {})
        self._load = load

    def observe_stream(self, stream: TokenStream) -> None:
        """Export how far the token sinks are behind; called about once a second."""
        self._stream_requests.set(stream.num_records)
        self._stream_bytes.set(stream.num_buffered_bytes)

    def observe_memory(self, memory: Sequence[DeviceMemory]) -> None:
        """Export what the devices say of their memory; called about once a second."""
        for one in memory:
            tags = {"device": one.device}
            self._device_memory["used"].set(one.used_bytes, tags=tags)
            self._device_memory["peak"].set(one.peak_bytes, tags=tags)
            self._device_memory["limit"].set(one.limit_bytes, tags=tags)

    def observe_steps(self, stats: StepStats) -> None:
        """Export what the steps took and held; called about once a second."""
        self._steps.export(stats)


_STEP_BOUNDS = (*map(str, INTER_TOKEN_BUCKETS_S), "+Inf")


class StepMetrics:
    """What has been added to StepStats since the last export.

    The histogram of step times has counters for buckets: Ray's own takes one call per observation,
    this one a fixed number a second. `histogram_quantile` reads it as any other.
    """

    def __init__(self) -> None:
        self._exported: dict[tuple[str, ...], float] = {}
        self._phases = metrics.Counter(
            "systole_engine_step_phase_seconds",
            description="Time of all steps in each phase; wait is the device's.",
            tag_keys=("phase",),
        )
        self._durations = metrics.Counter(
            "systole_engine_step_time_seconds_bucket",
            description="Steps that took at most `le` seconds, by what they hold.",
            tag_keys=("kind", "le"),  # pyright: ignore[reportArgumentType]  # any number
        )
        self._bucket_steps = metrics.Counter(
            "systole_engine_bucket_steps",
            description="Steps launched, by the bucket that they were padded to.",
            tag_keys=("bucket",),
        )
        self._counts = {
            field: metrics.Counter(name, description=description)
            for field, name, description in (
                ("num_tokens", "systole_engine_step_tokens", "Tokens that steps computed."),
                (
                    "num_token_rows",
                    "systole_engine_step_token_rows",
                    "Token rows of their buckets, padding included.",
                ),
                (
                    "num_sequences",
                    "systole_engine_step_sequences",
                    "Sequences in steps, counted in each.",
                ),
                (
                    "num_sequence_rows",
                    "systole_engine_step_sequence_rows",
                    "Sequence rows of their buckets, padding included.",
                ),
            )
        }
        start_at_zero(self._phases, "phase", PHASES)
        for kind in STEP_KINDS:
            for bound in _STEP_BOUNDS:
                record_zero(self._durations, {"kind": kind, "le": bound})
        for metric in self._counts.values():
            start_at_zero(metric)

    def export(self, stats: StepStats) -> None:
        """Add what is new."""
        for phase, seconds in zip(PHASES, stats.phase_s, strict=True):
            self._add(self._phases, seconds, {"phase": phase})
        for kind in STEP_KINDS:
            self._add_durations(kind, stats.durations[kind])
        for bucket, count in dict(stats.num_steps).items():
            self._add(self._bucket_steps, count, {"bucket": str(bucket)})
        for field, metric in self._counts.items():
            self._add(metric, getattr(stats, field), {}, field)

    def _add_durations(self, kind: StepKind, counts: Sequence[int]) -> None:
        below = 0
        for bound, count in zip(_STEP_BOUNDS, counts, strict=True):
            below += count
            self._add(self._durations, below, {"kind": kind, "le": bound})

    def _add(self, metric: metrics.Counter, value: float, tags: dict[str, str], *key: str) -> None:
        """Raise a counter to `value`, of which it had a part."""
        key = (*key, *tags, *tags.values())
        _grow(metric, value - self._exported.get(key, 0.0), tags)
        self._exported[key] = value


def _histogram(name: str, description: str, bounds: Sequence[float]) -> metrics.Histogram:
    return metrics.Histogram(name, description=description, boundaries=list(bounds))


def _grow(metric: metrics.Counter, amount: float, tags: dict[str, str]) -> None:
    if amount > 0:  # Ray refuses 0
        metric.inc(amount, tags=tags)
