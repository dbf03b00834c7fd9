"""The spans of one request in the router: `router` for the held call, `router.queue` below it.

The queue's span ends with the decision. Knows nothing of how a replica is chosen.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from replicas.errors import ServingError
from replicas.tracing import Tracing, set_failed
from replicas.wire import GenerateRequest, GenerateResult

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class RouterTrace:
    """Follows one request from its arrival at the router to its end.

    Attributes:
        traceparent: makes the replica's spans children of this one.
    """

    def __init__(self, tracing: Tracing, request: GenerateRequest) -> None:
        self._tracing = tracing
        self._span: Span = tracing.start(
            "router",
            parent=request.traceparent,
            is_server=True,
            attributes={
                "systole.attempt.id": request.request_id,
                "systole.excluded_replicas": list(request.excluded_replicas),
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            },
        )
        self.traceparent = tracing.traceparent(self._span)

    def decided(self, target: str | ServingError, *, queued_ns: int, decision_s: float) -> None:
        """Record the wait for a replica, which is over.

        Args:
            target: the replica, or why there is none.
            queued_ns: when the wait began, Unix time.
            decision_s: what the router's core took to take in the arrival.
        """
        chosen = "" if isinstance(target, ServingError) else target
        self._tracing.record(
            "router.queue",
            parent=self._span,
            start_ns=queued_ns,
            end_ns=time.time_ns(),
            attributes={"systole.replica.id": chosen, "systole.router.decision_s": decision_s},
        )

    def ended(self, answer: GenerateResult | ServingError | None) -> None:
        """End the span; None: the caller left."""
        match answer:
            case None:
                set_failed(self._span, "cancelled", "the caller left before the end")
            case ServingError():
                set_failed(self._span, type(answer).__name__, str(answer))
            case GenerateResult():
                self._span.set_attribute("systole.replica.id", answer.replica_id)
        self._span.end()
