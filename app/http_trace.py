"""The span of one HTTP request: from its arrival to its last byte, with what was asked and used.

Attribute names are OpenTelemetry's semantic conventions for HTTP servers and generative AI.
Invariant: no text of a prompt or an answer goes into a span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request

from app.generation import Generation
from app.openai_schema import ChatRequest
from replicas.tracing import PROVIDER, Attribute, Tracing, set_failed

if TYPE_CHECKING:
    from opentelemetry.trace import Span

CLIENT_CLOSED_REQUEST = 499
_MAX_INT64 = (1 << 63) - 1


class HttpTrace:
    """Follows one request from the HTTP edge on."""

    def __init__(self, tracing: Tracing, request: Request) -> None:
        """Begin, as a part of the client's trace if it sent one."""
        path = request.scope["path"]
        self._tracing = tracing
        self._generation: Generation | None = None
        self._span: Span = tracing.start(
            f"{request.method} {path}",
            parent=request.headers.get("traceparent"),
            is_server=True,
            attributes={
                "http.request.method": request.method,
                "http.route": path,
                "url.path": path,
                "url.scheme": request.url.scheme,
                "systole.request.id": request.state.request_id,
            },
        )

    def planned(self, generation: Generation) -> str:
        """Note what was asked; return the traceparent for the calls that it leads to."""
        self._generation = generation
        if self._span.is_recording():
            self._span.set_attributes(_request_attributes(generation))
        return self._tracing.traceparent(self._span)

    def ended(self, status: int, error: BaseException | None) -> None:
        """End the span.

        Args:
            status: as sent; 499 for a client that left.
            error: what the request failed by, or None.
        """
        span, generation = self._span, self._generation
        if span.is_recording():
            span.set_attribute("http.response.status_code", status)
            if generation is not None:
                span.set_attributes(_response_attributes(generation))
            if status == CLIENT_CLOSED_REQUEST:
                set_failed(span, "cancelled", "the client left before the end")
            elif status >= 500:
                kind = str(status) if error is None else type(error).__name__
                set_failed(span, kind, "" if error is None else str(error))
            elif error is not None:  # the client's mistake: by the conventions no failure of ours
                span.set_attribute("error.type", type(error).__name__)
        span.end()


def _request_attributes(generation: Generation) -> dict[str, Attribute]:
    params, sampling = generation.params, generation.choices[0].sampling
    is_chat = isinstance(params, ChatRequest)
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": generation.header.model,
        "gen_ai.request.stream": params.stream,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.id": generation.header.id,
        "gen_ai.response.model": generation.header.model,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if len(generation.choices) > 1:
        attributes["gen_ai.request.choice.count"] = len(generation.choices)
    if params.seed is not None and params.seed <= _MAX_INT64:
        attributes["gen_ai.request.seed"] = params.seed
    return attributes


def _response_attributes(generation: Generation) -> dict[str, Attribute]:
    usage = generation.usage()
    attributes: dict[str, Attribute] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }
    if usage.cached_tokens is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    reasons = [choice.finish_reason for choice in generation.choices if choice.finish_reason]
    if reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    if generation.first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = generation.first_token_s
    return attributes
