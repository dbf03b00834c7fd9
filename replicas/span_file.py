"""Writes spans as JSON lines, for those who run no collector.

Imports the OpenTelemetry SDK: only `replicas.tracing` imports this, and only where it is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import override

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


class SpanFile(SpanExporter):
    """Appends one object a line, in the SDK's own JSON form of a span."""

    def __init__(self, path: Path) -> None:
        """Open it; what it holds stays.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._file.writelines(f"{span.to_json(indent=None)}\n" for span in spans)
        self._file.flush()
        return SpanExportResult.SUCCESS

    @override
    def shutdown(self) -> None:
        self._file.close()
