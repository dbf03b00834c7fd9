"""Spans of one process, as OpenTelemetry sees them, and the W3C trace context between processes.

Nothing here runs per token: a span is made once per request and stage, from timestamps where the
stage is over already. The SDK is imported only where tracing is on. Invariant: `start_tracing`
returns None when it is off, so that a request then costs a look at an attribute.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from replicas.config import TracingConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

OTLP_MODULE = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
OTLP_PACKAGE = "opentelemetry-exporter-otlp-proto-http"

EXPORT_INTERVAL_MS = 1000.0
"""How long an ended span may wait to be exported: what a killed process loses at most."""

PROVIDER = "systole"
"""Value of gen_ai.provider.name."""

Attribute = str | bool | int | float | list[str]


def check_exporter(config: TracingConfig) -> None:
    """Refuse an exporter whose package is not here.

    Raises:
        ValueError: names the package.
    """
    if config.exporter == "otlp" and not _is_importable(OTLP_MODULE):
        raise ValueError(
            f"exporter 'otlp' needs the package {OTLP_PACKAGE}, which is not installed: install it "
            "on every node, or write the spans to files with exporter 'file'"
        )


def start_tracing(config: TracingConfig, *, service: str, instance: str) -> Tracing | None:
    """Start to trace in this process; None when tracing is off.

    Args:
        config: where the spans go.
        service: "ingress", "router" or "engine".
        instance: which replica of it.

    Raises:
        ValueError: as `check_exporter`.
        OSError: the directory cannot be written.
    """
    if config.exporter == "none":
        return None
    return Tracing(config, service=service, instance=instance)


class Tracing:
    """Makes spans and exports them on a thread of its own.

    A full buffer drops spans rather than waiting.
    """

    def __init__(self, config: TracingConfig, *, service: str, instance: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        check_exporter(config)
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(
            # A client that asks for its request to be sampled, or not, decides.
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=Resource.create(
                {
                    "service.namespace": "systole",
                    "service.name": f"systole-{service}",
                    "service.instance.id": instance,
                }
            ),
            shutdown_on_exit=False,  # `shutdown` below sees to it
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _make_exporter(config, service), schedule_delay_millis=EXPORT_INTERVAL_MS
            )
        )
        self._tracer = self._provider.get_tracer("systole")
        atexit.register(self.shutdown)

    def start(
        self,
        name: str,
        *,
        parent: str | None,
        is_server: bool = False,
        start_ns: int | None = None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> Span:
        """Begin a span; `end` must follow.

        Args:
            name: of low cardinality.
            parent: W3C traceparent; None, or a malformed one, begins a trace.
            is_server: whether it answers a caller in another process.
            start_ns: Unix time; None: now.
            attributes: what is known of it already.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        kind = SpanKind.SERVER if is_server else SpanKind.INTERNAL
        # Into an empty context: what Serve may have left in the current one is not our trace.
        carrier = {} if parent is None else {"traceparent": parent}
        context = self._propagator.extract(carrier, context=Context())
        return self._tracer.start_span(
            name, context=context, kind=kind, start_time=start_ns, attributes=attributes
        )

    def record(
        self,
        name: str,
        *,
        parent: Span,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> None:
        """Make a span of a stage that is over."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(parent, Context())
        span = self._tracer.start_span(
            name, context=context, start_time=start_ns, attributes=attributes
        )
        span.end(end_ns)

    def traceparent(self, span: Span) -> str:
        """Return what makes spans of another process children of this one."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span, Context()))
        return carrier["traceparent"]

    def shutdown(self) -> None:
        """Export what is left; idempotent."""
        atexit.unregister(self.shutdown)
        self._provider.shutdown()


def set_failed(span: Span, error_type: str, message: str) -> None:
    """Mark a span as failed."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR, message))


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # one of its parents
        return False


def _make_exporter(config: TracingConfig, service: str) -> SpanExporter:
    if config.exporter == "otlp":
        trace_exporter = importlib.import_module(OTLP_MODULE)
        return trace_exporter.OTLPSpanExporter(endpoint=config.endpoint)
    from replicas.span_file import SpanFile

    return SpanFile(Path(config.directory) / f"{service}-{os.getpid()}.jsonl")
