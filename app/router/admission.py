"""What waits in the router: the bounded queue, its order, its deadlines, and how fast it drains.

Pure. Invariant: the queue holds at most the configured requests, and at most the configured tokens
unless it holds a single request.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

DRAIN_WINDOW_S = 10.0
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A request that has not been sent.

    Attributes:
        request_id: unique among all requests that have not ended.
        num_prompt_tokens: >= 1.
        max_tokens: most output tokens.
        deadline: router clock, seconds, or None.
        priority: lower goes first; equal ones in order of arrival.
        excluded: replicas that must not run it.
        replica_wait_until: router clock; from then on, refused when no replica may run it.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    deadline: float | None
    priority: int
    excluded: frozenset[str]
    replica_wait_until: float


class WaitingQueue:
    """Requests by priority, then arrival, bounded in number and in prompt tokens."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._requests: dict[str, QueuedRequest] = {}
        self._order: list[tuple[int, int, str]] = []
        self._timers: list[tuple[float, str]] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def is_full_for(self, num_prompt_tokens: int) -> bool:
        """Whether one more request would exceed a bound."""
        if not self._requests:
            return False
        return (
            len(self._requests) >= self.max_requests
            or self.num_tokens + num_prompt_tokens > self.max_tokens
        )

    def push(self, request: QueuedRequest) -> None:
        """Append a request behind those of its priority."""
        assert request.request_id not in self._requests, request
        self._requests[request.request_id] = request
        self.num_tokens += request.num_prompt_tokens
        heapq.heappush(self._order, (request.priority, next(self._arrivals), request.request_id))
        heapq.heappush(self._timers, (request.replica_wait_until, request.request_id))
        if request.deadline is not None:
            heapq.heappush(self._timers, (request.deadline, request.request_id))

    def remove(self, request_id: str) -> QueuedRequest:
        """Take a request out; its heap entries are skipped later."""
        request = self._requests.pop(request_id)
        self.num_tokens -= request.num_prompt_tokens
        return request

    def drain(self) -> Iterator[QueuedRequest]:
        """Yield the requests in order; the caller may remove each one as it gets it."""
        kept: list[tuple[int, int, str]] = []
        try:
            while self._order:
                entry = heapq.heappop(self._order)
                request = self._requests.get(entry[2])
                if request is None:
                    continue
                kept.append(entry)
                yield request
        finally:
            for entry in kept:
                if entry[2] in self._requests:
                    heapq.heappush(self._order, entry)

    def pop_due(self, now: float) -> list[QueuedRequest]:
        """Return the requests whose `deadline` or `replica_wait_until` has newly come."""
        due: list[QueuedRequest] = []
        while self._timers and self._timers[0][0] <= now:
            _, request_id = heapq.heappop(self._timers)
            request = self._requests.get(request_id)
            if request is not None:
                due.append(request)
        return due

    def next_due(self) -> float:
        """Return when `pop_due` will have something, or infinity."""
        while self._timers and self._timers[0][1] not in self._requests:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else math.inf


class DrainRate:
    """Tokens that end per second, as an exponential average: what a Retry-After is made from."""

    def __init__(self, window_s: float = DRAIN_WINDOW_S) -> None:
        self._window_s = window_s
        self._rate = 0.0
        self._updated_at = 0.0

    def add(self, num_tokens: int, now: float) -> None:
        """Count tokens of a request that has ended."""
        self._rate = self.tokens_per_s(now) + num_tokens / self._window_s
        self._updated_at = now

    def tokens_per_s(self, now: float) -> float:
        """Return the average of the last seconds."""
        return self._rate * math.exp((self._updated_at - now) / self._window_s)

    def retry_after_s(self, num_tokens: int, now: float) -> float:
        """Return the seconds until `num_tokens` will have drained, in [1, 60]."""
        rate = self.tokens_per_s(now)
        estimate = num_tokens / rate if rate > 0 else MIN_RETRY_AFTER_S
        return min(max(estimate, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
