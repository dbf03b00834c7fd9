"""What every request passes on its way in and out, by whatever protocol it came.

Rate limits before any work, metrics, span and audit line at its end. Knows neither HTTP nor gRPC.
Invariant: an exchange that was opened ends once, and what it acquired and did not use is given
back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from app.audit import AuditLog
from app.auth import default_name
from app.generation import Generation
from app.http_trace import HttpTrace
from app.ingress_config import IngressConfig
from app.metrics import IngressMetrics
from app.rate_limits import estimate_tokens
from app.shared_state import SharedAccess
from replicas.errors import EngineNotReady
from replicas.tracing import Tracing

# Serve sets up this logger's handlers in every replica, with the request id on each line.
logger = logging.getLogger("ray.serve")

ANONYMOUS = "anonymous"
"""Name of all callers where no key is asked for: they share one limit."""


class Exchange:
    """One request of a client, and what is noted of it until its end.

    Attributes:
        key: the name of the API key.
        request_id: of the request.
        headers: of the answer, besides its own.
        num_tokens: that a request uses which generates nothing.
    """

    def __init__(
        self, edge: Edge, *, key: str, request_id: str, endpoint: str, trace: HttpTrace | None
    ) -> None:
        """Begin; use `Edge.open`."""
        self.key = key
        self.request_id = request_id
        self.headers: dict[str, str] = {}
        self.num_tokens = 0
        self._edge = edge
        self._endpoint = endpoint
        self._trace = trace
        self._start_s = time.perf_counter()
        self._generation: Generation | None = None
        self._num_acquired: int | None = None
        self._body: dict[str, Any] | None = None
        self._is_detached = False

    @property
    def includes_text(self) -> bool:
        """Whether the choices have to keep their texts for the audit file."""
        return self._edge.audit is not None and self._edge.audit.includes_text

    async def admit(self, body: dict[str, Any], *, num_bytes: int) -> None:
        """Ask for admission, before any work is done.

        Args:
            body: of the request, parsed.
            num_bytes: its size.

        Raises:
            RateLimited: the key has used up what it may.
        """
        self._body = body
        if self._edge.config.limits.of(self.key).is_none:
            return
        num_tokens = estimate_tokens(body, num_bytes)
        try:
            allowance = await self._edge.shared.acquire(self.key, num_tokens)
        except EngineNotReady as error:
            # Limits are there to be fair, not to be safe: without them the service goes on.
            logger.warning("%s passes without limits: %s", self.request_id, error)
            return
        self.headers |= allowance.headers()
        if allowance.is_granted:
            self._num_acquired = num_tokens
        allowance.check()

    def planned(self, generation: Generation, traceparent: str | None) -> None:
        """Note what is going to be done, and give it its trace context.

        Args:
            generation: planned for this request.
            traceparent: as the client sent it.
        """
        self._generation = generation
        generation.keeps_text = self.includes_text
        if self._trace is not None:
            traceparent = self._trace.planned(generation)
        generation.traceparent = traceparent

    def detach(self) -> None:
        """The work outlives the answer: its end, not the answer's, is what counts."""
        self._is_detached = True

    def ended(self, status: int, error: BaseException | None) -> None:
        """Note the end of the answer, which is that of the work unless it was detached.

        Args:
            status: as sent; 499 for a client that left.
            error: what it failed by, or None.
        """
        if not self._is_detached:
            self.work_ended(status, error)

    def work_ended(self, status: int, error: BaseException | None) -> None:
        """Note the end of the work; arguments as in `ended`."""
        edge, generation = self._edge, self._generation
        duration_s = time.perf_counter() - self._start_s
        edge.metrics.in_progress.dec()
        edge.metrics.request_ended(self._endpoint, status, duration_s)
        if self._trace is not None:
            self._trace.ended(status, error)
        num_tokens = self.num_tokens
        if generation is not None:
            usage = generation.usage()
            num_tokens = usage.prompt_tokens + usage.completion_tokens
        if self._num_acquired is not None and num_tokens != self._num_acquired:
            edge.spawn(self._settle(num_tokens - self._num_acquired))
        if edge.audit is not None:
            edge.audit.write(
                request_id=self.request_id,
                key=self.key,
                endpoint=self._endpoint,
                status=status,
                error=error,
                generation=generation,
                num_tokens=num_tokens,
                duration_s=duration_s,
                request=self._body,
                output=None if generation is None else generation.texts(),
            )

    async def _settle(self, num_tokens: int) -> None:
        try:
            await self._edge.shared.settle(self.key, num_tokens)
        except EngineNotReady as error:
            logger.warning("%s: %d tokens were not charged: %s", self.request_id, num_tokens, error)


class Edge:
    """What the exchanges of one ingress have in common.

    Attributes:
        config: limits and names of the keys.
        metrics: count the requests.
        shared: rate limits and stored responses of all ingress replicas.
        tracing: makes a span of each request, or None.
        audit: where requests are noted, or None.
    """

    def __init__(
        self,
        config: IngressConfig,
        metrics: IngressMetrics,
        shared: SharedAccess,
        *,
        tracing: Tracing | None = None,
    ) -> None:
        self.config = config
        self.tracing = tracing
        self.metrics = metrics
        self.shared = shared
        self.audit = None if config.audit is None else AuditLog(config.audit)
        self._tasks: set[asyncio.Task[None]] = set()

    def key_name(self, digest: str | None) -> str:
        """Name a key by its digest; None: no key was asked for."""
        if digest is None:
            return ANONYMOUS
        return self.config.key_names.get(digest) or default_name(digest)

    def open(
        self, *, key: str, request_id: str, endpoint: str, trace: HttpTrace | None = None
    ) -> Exchange:
        """Begin an exchange.

        Args:
            key: the name of the API key.
            request_id: of the request.
            endpoint: path or method, for metrics and audit.
            trace: its span, or None.
        """
        self.metrics.in_progress.inc()
        return Exchange(self, key=key, request_id=request_id, endpoint=endpoint, trace=trace)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Wait for what nobody waits for, then close the audit file."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
        if self.audit is not None:
            self.audit.close()
            self.audit = None
