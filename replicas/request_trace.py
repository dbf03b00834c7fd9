"""The spans of one request on a replica, all made when it has ended, from its timestamps.

`engine` covers the call; below it `engine.queue`, `engine.prefill` and `engine.decode` follow each
other without a gap. Invariant: an aborted request has the spans of the stages it reached.
"""

from __future__ import annotations

from replicas.errors import ServingError
from replicas.tracing import PROVIDER, Attribute, Tracing, set_failed
from replicas.wire import GenerateRequest, GenerateResult

_NS = 1_000_000_000


def record_request(
    tracing: Tracing,
    request: GenerateRequest,
    answer: GenerateResult | ServingError | None,
    *,
    replica_id: str,
    start_ns: int,
    end_ns: int,
) -> None:
    """Make the spans.

    Args:
        tracing: of this process.
        request: its traceparent is the router's.
        answer: how it ended; None: the caller left.
        replica_id: who ran it.
        start_ns: its arrival, Unix time.
        end_ns: its end.
    """
    attributes: dict[str, Attribute] = {
        "systole.attempt.id": request.request_id,
        "systole.replica.id": replica_id,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.max_tokens": request.sampling.max_tokens,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
    }
    span = tracing.start(
        "engine",
        parent=request.traceparent,
        is_server=True,
        start_ns=start_ns,
        attributes=attributes,
    )
    if not span.is_recording():
        return
    match answer:
        case None:
            set_failed(span, "cancelled", "the caller left before the end")
        case ServingError():
            set_failed(span, type(answer).__name__, str(answer))
        case GenerateResult():
            span.set_attributes(
                {
                    "gen_ai.usage.output_tokens": answer.num_output_tokens,
                    "gen_ai.usage.cache_read.input_tokens": answer.num_cached_tokens,
                    "gen_ai.response.finish_reasons": [answer.finish_reason.value],
                }
            )
            for name, first_ns, last_ns in _stages(answer, start_ns, end_ns):
                tracing.record(name, parent=span, start_ns=first_ns, end_ns=last_ns)
    span.end(end_ns)


def _stages(result: GenerateResult, start_ns: int, end_ns: int) -> list[tuple[str, int, int]]:
    """Cut the request's time in order; no stage ends after the request."""
    queued_ns = min(end_ns, start_ns + round(result.queue_s * _NS))
    stages = [("engine.queue", start_ns, queued_ns)]
    if result.first_token_s is not None:
        token_ns = max(queued_ns, min(end_ns, start_ns + round(result.first_token_s * _NS)))
        stages += [("engine.prefill", queued_ns, token_ns), ("engine.decode", token_ns, end_ns)]
    return stages
