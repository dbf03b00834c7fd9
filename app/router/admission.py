"""What waits in the router: the bounded queue, its order, its deadlines, and how fast it drains.

Pure. Invariant: the queue holds at most the configured requests, and at most the configured tokens
unless it holds a single request.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

DRAIN_WINDOW_S = 10.0
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0

AGEING = 10.0
"""A request may be overtaken by shorter ones for so many times its own prefill time."""

STAY_WEIGHT = 0.03
"""Weight of the latest request in `StayTime`."""

OUTPUT_WEIGHT = 2.0
"""What an output token counts against a prompt token in a tenant's service (VTC's w_q / w_p)."""

MAX_IDLE_TENANTS = 4096
"""With more tenants, half of those that do not wait are forgotten: the least served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A request that has not been sent.

    Attributes:
        request_id: unique among all requests that have not ended.
        num_prompt_tokens: >= 1.
        max_tokens: most output tokens.
        deadline: router clock, seconds, or None: nobody waits for the request any more.
        priority: lower goes first; equal ones by fairness, then `rank`.
        excluded: replicas that must not run it.
        replica_wait_until: router clock; from then on, refused when no replica may run it.
        arrived_at: router clock.
        tenant: whose it is; tenants that wait share the service equally.
        page_keys: of the prompt's full pages.
        ttft_target_s: wanted time to first token from arrival, or None.
        tpot_target_s: wanted time per output token, or None.
        prefill_s: predicted time of its prompt on the best replica.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    deadline: float | None
    priority: int
    excluded: frozenset[str]
    replica_wait_until: float
    arrived_at: float = 0.0
    tenant: str = ""
    page_keys: tuple[bytes, ...] = ()
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    prefill_s: float = 0.0

    @property
    def first_token_by(self) -> float:
        """When its first token is too late, router clock, or infinity."""
        target = math.inf if self.ttft_target_s is None else self.arrived_at + self.ttft_target_s
        return target if self.deadline is None else min(target, self.deadline)

    @property
    def rank(self) -> float:
        """Place among its tenant's requests: shortest first with ageing, or when it must start."""
        return min(self.arrived_at + AGEING * self.prefill_s, self.first_token_by - self.prefill_s)

    @property
    def service(self) -> float:
        """What it counts as for its tenant, in prompt tokens."""
        return self.num_prompt_tokens + OUTPUT_WEIGHT * self.max_tokens


@dataclass(slots=True)
class _Tenant:
    """One tenant's requests, by (priority, rank), and what it has been served."""

    order: list[tuple[int, float, int, str]] = field(default_factory=list)
    num_requests: int = 0
    num_tokens: int = 0
    served: float = 0.0


class WaitingQueue:
    """Requests by priority, then fairness between tenants, then rank; bounded.

    Fairness is by virtual token counters: of the tenants that wait, the one that has been served
    least goes first, and one that begins to wait starts from the least served of the others. So two
    tenants that both wait are never further apart than two of their largest requests.

    The room is shared likewise: see `displaced_by`.
    """

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.prefill_s = 0.0
        self._requests: dict[str, QueuedRequest] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._virtual_time = 0.0
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

    def num_before(self, request: QueuedRequest) -> int:
        """Estimate how many leave before a new request: turns are equal between tenants."""
        tenant = self._tenants.get(request.tenant)
        own = 0 if tenant is None else tenant.num_requests
        num_tenants = sum(1 for known in self._tenants.values() if known.num_requests)
        return min(len(self._requests), own * max(1, num_tenants) + num_tenants - (own > 0))

    def displaced_by(self, request: QueuedRequest) -> list[QueuedRequest]:
        """Choose what a request takes the place of in a full queue; empty: it has to stay out.

        While the tenant that holds most of the queue holds more than the request's own would, its
        last request makes room, unless it has a higher priority (push-out of the longest queue).
        Otherwise whoever sends most would hold the queue, and equal turns at leaving it would be
        worth nothing.
        """
        held = {
            name: [tenant.num_requests, tenant.num_tokens]
            for name, tenant in self._tenants.items()
            if tenant.num_requests
        }
        own = held.pop(request.tenant, [0, 0])
        own_share = self._share(own[0] + 1, own[1] + request.num_prompt_tokens)
        num_requests, num_tokens = len(self._requests), self.num_tokens
        lasts: dict[str, list[QueuedRequest]] = {}
        displaced: list[QueuedRequest] = []
        while num_requests and (
            num_requests >= self.max_requests
            or num_tokens + request.num_prompt_tokens > self.max_tokens
        ):
            name = max(held, key=lambda known: self._share(*held[known]), default=None)
            if name is None or self._share(*held[name]) <= own_share:
                return []
            if name not in lasts:
                lasts[name] = self._in_order(name)
            victim = lasts[name].pop()
            if victim.priority < request.priority:
                return []
            displaced.append(victim)
            held[name][0] -= 1
            held[name][1] -= victim.num_prompt_tokens
            num_requests -= 1
            num_tokens -= victim.num_prompt_tokens
        return displaced

    def push(self, request: QueuedRequest) -> None:
        """Put a request in its place."""
        assert request.request_id not in self._requests, request
        self._requests[request.request_id] = request
        self.num_tokens += request.num_prompt_tokens
        self.prefill_s += request.prefill_s
        tenant = self._tenant(request.tenant)
        tenant.num_requests += 1
        tenant.num_tokens += request.num_prompt_tokens
        entry = (request.priority, request.rank, next(self._arrivals), request.request_id)
        heapq.heappush(tenant.order, entry)
        for due_at in {request.replica_wait_until, request.first_token_by}:
            if due_at < math.inf:
                heapq.heappush(self._timers, (due_at, request.request_id))

    def remove(self, request_id: str) -> QueuedRequest:
        """Take a request out; its heap entries are skipped later."""
        request = self._requests.pop(request_id)
        self.num_tokens -= request.num_prompt_tokens
        self.prefill_s -= request.prefill_s
        if not self._requests:
            self.prefill_s = 0.0
            self._timers.clear()
        tenant = self._tenants[request.tenant]
        tenant.num_requests -= 1
        tenant.num_tokens -= request.num_prompt_tokens
        return request

    def serve(self, request_id: str) -> QueuedRequest:
        """Take a request out because it is sent: its tenant has been served."""
        request = self.remove(request_id)
        self._charge(self._tenants[request.tenant], request)
        return request

    def pass_by(self, request: QueuedRequest) -> None:
        """Count a request that is sent without having waited: its tenant has been served."""
        self._charge(self._tenant(request.tenant), request)

    def refund(self, request: QueuedRequest, num_output_tokens: int) -> None:
        """Give a tenant back what a request that ended did not use of its `max_tokens`."""
        tenant = self._tenants.get(request.tenant)
        if tenant is not None:
            unused = max(0, request.max_tokens - num_output_tokens)
            tenant.served = max(0.0, tenant.served - OUTPUT_WEIGHT * unused)

    def drain(self) -> Iterator[QueuedRequest]:
        """Yield the requests in order; the caller may take each one out as it gets it."""
        kept: list[tuple[_Tenant, tuple[int, float, int, str]]] = []
        heads: list[tuple[int, float, int, str]] = []

        def advance(name: str) -> None:
            """Queue the tenant by its first request."""
            tenant = self._tenants[name]
            while tenant.order and tenant.order[0][3] not in self._requests:
                heapq.heappop(tenant.order)
            if tenant.order:
                first = tenant.order[0]
                heapq.heappush(heads, (first[0], tenant.served, first[2], name))

        for name, tenant in self._tenants.items():
            if tenant.num_requests:
                advance(name)
        try:
            while heads:
                name = heapq.heappop(heads)[3]
                tenant = self._tenants[name]
                entry = heapq.heappop(tenant.order)
                kept.append((tenant, entry))
                request = self._requests.get(entry[3])
                if request is not None:
                    yield request
                advance(name)
        finally:
            for tenant, entry in kept:
                if entry[3] in self._requests:
                    heapq.heappush(tenant.order, entry)

    def pop_due(self, now: float) -> list[QueuedRequest]:
        """Return the requests for which a timer has newly come due."""
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

    def _share(self, num_requests: int, num_tokens: int) -> float:
        """Of the queue's room, by the bound that is nearer."""
        return max(num_requests / self.max_requests, num_tokens / self.max_tokens)

    def _in_order(self, name: str) -> list[QueuedRequest]:
        """Requests of a tenant, the last one last."""
        entries = sorted(self._tenants[name].order)
        return [self._requests[entry[3]] for entry in entries if entry[3] in self._requests]

    def _charge(self, tenant: _Tenant, request: QueuedRequest) -> None:
        self._virtual_time = max(self._virtual_time, tenant.served)
        tenant.served += request.service

    def _tenant(self, name: str) -> _Tenant:
        """Return a tenant that asks; one that did not wait starts from the virtual time."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._add_tenant(name)
        if tenant.num_requests == 0:
            tenant.served = max(tenant.served, self._virtual_time)
        return tenant

    def _add_tenant(self, name: str) -> _Tenant:
        if len(self._tenants) >= MAX_IDLE_TENANTS:
            idle = [known for known, tenant in self._tenants.items() if not tenant.num_requests]
            # Who comes back starts from the virtual time: raised to what the dropped ones had been
            # served, it gives nobody an advantage for being forgotten.
            idle.sort(key=lambda known: self._tenants[known].served)
            for known in idle[: len(idle) // 2]:
                self._virtual_time = max(self._virtual_time, self._tenants.pop(known).served)
        return self._tenants.setdefault(name, _Tenant())


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


class StayTime:
    """How long a request keeps its slot, an average of the last ones."""

    def __init__(self, weight: float = STAY_WEIGHT) -> None:
        self.mean_s = 0.0
        self._weight = weight
        self._num_added = 0

    def add(self, seconds: float) -> None:
        """Count a request that has ended."""
        self._num_added += 1
        self.mean_s += max(self._weight, 1 / self._num_added) * (seconds - self.mean_s)
