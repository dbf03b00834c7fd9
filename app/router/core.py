"""The router's decisions as a pure state machine: `on(event, now)` returns what to do.

No asyncio, no Ray, no clock of its own: the Serve deployment and a simulator drive the same object.
It sends at once while a replica has credit, holds requests in a bounded queue while none has, and
refuses what it cannot hold. Invariants: every request that arrived is queued, or booked on exactly
one replica, until one `Fail` or one `RequestEnded`; a replica never gets more than its credit.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from app.router.admission import DrainRate, QueuedRequest, WaitingQueue
from app.router.cost import cost_of
from app.router.replica_view import Booking, ReplicaView
from replicas.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineNotReady,
    Overloaded,
    ServingError,
)
from replicas.wire import ReplicaLoad

NOT_READY_RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Limits of one router.

    Attributes:
        max_queued_requests: requests that may wait here.
        max_queued_tokens: prompt tokens of those.
        max_waiting_per_replica: requests sent beyond a replica's slots, so that a slot that
            becomes free is refilled in the next step without a round trip.
        replica_wait_s: how long a new request waits for a replica while none is ready; 0 refuses.
        discovery_s: a router that has just started refuses nothing for want of a replica: a
            restarted one hears of its replicas within a second.
        migration_wait_s: the same as `replica_wait_s` for a request that was accepted before, by
            this router's queue or by a replica that it lost.
        max_silent_ticks: ticks (of about 1 s) without a word after which a replica counts as lost.
    """

    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    max_waiting_per_replica: int = 2
    replica_wait_s: float = 0.0
    discovery_s: float = 3.0
    migration_wait_s: float = 30.0
    max_silent_ticks: int = 10

    def __post_init__(self) -> None:
        for name in ("max_queued_requests", "max_queued_tokens", "max_silent_ticks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in (
            "max_waiting_per_replica",
            "replica_wait_s",
            "discovery_s",
            "migration_wait_s",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestArrived:
    """A request wants a replica.

    Attributes:
        request_id: unique among all requests that have not ended.
        num_prompt_tokens: >= 1.
        max_tokens: most output tokens.
        deadline: router clock, seconds, or None.
        priority: lower goes first.
        excluded: replicas that must not run it.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    deadline: float | None = None
    priority: int = 0
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request is over, for whatever reason: finished, failed, cancelled. Idempotent."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ReplicaReported:
    """A replica introduced itself, or repaired its stream: it takes requests."""

    replica_id: str
    sequence: int
    load: ReplicaLoad


@dataclass(frozen=True, slots=True)
class LoadChanged:
    """A replica's load event; `sequence` is one more than that of its last."""

    replica_id: str
    sequence: int
    load: ReplicaLoad


@dataclass(frozen=True, slots=True)
class ReplicaSuspected:
    """A sign of trouble, or of draining: send nothing until it reports; what it runs may go on."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class ReplicaRemoved:
    """A replica is gone with everything that it ran."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """About a second has passed, or `next_wakeup` has come."""

    is_second: bool = True


Event = (
    RequestArrived
    | RequestEnded
    | ReplicaReported
    | LoadChanged
    | ReplicaSuspected
    | ReplicaRemoved
    | Ticked
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request to the replica; it is booked there."""

    request_id: str
    replica_id: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer the request with the error; it is forgotten. It may have been sent before."""

    request_id: str
    error: ServingError


@dataclass(frozen=True, slots=True)
class Resubscribe:
    """The replica's event stream has a gap: ask for a report."""

    replica_id: str


Action = Send | Fail | Resubscribe


class RouterCore:
    """Queue, bookings and replicas of one router."""

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._queue = WaitingQueue(
            max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens
        )
        self._drain_rate = DrainRate()
        self._replicas: dict[str, ReplicaView] = {}
        self._booked_on: dict[str, str] = {}
        self._started_at: float | None = None

    @property
    def num_queued(self) -> int:
        """Requests that wait here."""
        return len(self._queue)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of those."""
        return self._queue.num_tokens

    @property
    def num_booked(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self._booked_on)

    @property
    def routable(self) -> dict[str, ReplicaView]:
        """Replicas that take requests, by id."""
        return {view.replica_id: view for view in self._replicas.values() if view.is_routable}

    def next_wakeup(self) -> float:
        """Return when `Ticked(is_second=False)` is due on the router clock, or infinity."""
        return self._queue.next_due()

    def on(self, event: Event, now: float) -> list[Action]:
        """Take an event at time `now` (seconds, never decreasing); return what to do, in order."""
        actions: list[Action] = []
        if self._started_at is None:
            self._started_at = now
        match event:
            case RequestArrived():
                self._arrive(event, now, actions)
            case RequestEnded(request_id):
                self._end(request_id, now)
            case ReplicaReported(replica_id, sequence, load):
                view = self._replicas.setdefault(replica_id, ReplicaView(replica_id))
                view.is_routable = True
                view.update(load, sequence)
            case LoadChanged():
                self._update(event, actions)
            case ReplicaSuspected(replica_id):
                self._suspect(replica_id, now, actions)
            case ReplicaRemoved(replica_id):
                self._remove(replica_id, now, actions)
            case Ticked(is_second):
                if is_second:
                    self._count_silence(now, actions)
        self._expire(now, actions)
        self._dispatch(actions)
        return actions

    def _arrive(self, event: RequestArrived, now: float, actions: list[Action]) -> None:
        request_id = event.request_id
        assert request_id not in self._queue, request_id
        assert request_id not in self._booked_on, request_id
        config = self._config
        is_new = not event.excluded and not any(v.is_routable for v in self._replicas.values())
        wait_s = config.replica_wait_s if is_new else config.migration_wait_s
        assert self._started_at is not None
        wait_until = max(now + wait_s, self._started_at + config.discovery_s)
        if event.deadline is not None and event.deadline <= now:
            actions.append(Fail(request_id, _deadline_exceeded()))
        elif self._queue.is_full_for(event.num_prompt_tokens):
            actions.append(Fail(request_id, self._overloaded(event.num_prompt_tokens, now)))
        else:
            request = QueuedRequest(
                request_id=request_id,
                num_prompt_tokens=event.num_prompt_tokens,
                max_tokens=event.max_tokens,
                deadline=event.deadline,
                priority=event.priority,
                excluded=event.excluded,
                replica_wait_until=wait_until,
            )
            self._queue.push(request)

    def _end(self, request_id: str, now: float) -> None:
        if request_id in self._queue:
            self._queue.remove(request_id)
        replica_id = self._booked_on.pop(request_id, None)
        if replica_id is not None:
            view = self._replicas[replica_id]
            booking = view.release(request_id)
            self._drain_rate.add(booking.num_prompt_tokens, now)
            self._forget_if_done(view)

    def _update(self, event: LoadChanged, actions: list[Action]) -> None:
        view = self._replicas.get(event.replica_id)
        if view is None or not view.is_routable or event.sequence != view.sequence + 1:
            actions.append(Resubscribe(event.replica_id))
        if view is not None:
            view.update(event.load, event.sequence)

    def _suspect(self, replica_id: str, now: float, actions: list[Action]) -> None:
        view = self._replicas.get(replica_id)
        if view is None:
            return
        view.is_routable = False
        actions.append(Resubscribe(replica_id))
        self._forget_if_done(view)
        self._fail_orphans(now, actions)

    def _remove(self, replica_id: str, now: float, actions: list[Action]) -> None:
        view = self._replicas.pop(replica_id, None)
        if view is None:
            return
        for request_id in view.bookings:
            del self._booked_on[request_id]
            error = EngineDead(f"replica {replica_id} was lost", replica_id=replica_id)
            actions.append(Fail(request_id, error))
        self._fail_orphans(now, actions)

    def _count_silence(self, now: float, actions: list[Action]) -> None:
        """Remove replicas that should speak and do not.

        Counted in ticks, not seconds: when this process itself was stalled, one tick has passed.
        A replica that is not routable owes us nothing; its calls tell how they end.
        """
        for view in tuple(self._replicas.values()):
            if view.is_routable:
                view.num_silent_ticks += 1
                if view.num_silent_ticks > self._config.max_silent_ticks:
                    self._remove(view.replica_id, now, actions)

    def _expire(self, now: float, actions: list[Action]) -> None:
        for request in self._queue.pop_due(now):
            if request.request_id not in self._queue:
                continue
            if request.deadline is not None and request.deadline <= now:
                self._queue.remove(request.request_id)
                actions.append(Fail(request.request_id, _deadline_exceeded()))
            elif not self._has_candidate(request):
                self._queue.remove(request.request_id)
                actions.append(Fail(request.request_id, _not_ready()))

    def _fail_orphans(self, now: float, actions: list[Action]) -> None:
        """Refuse what waited long enough for a replica and has none to wait for any more."""
        for request in self._queue.drain():
            if request.replica_wait_until <= now and not self._has_candidate(request):
                self._queue.remove(request.request_id)
                actions.append(Fail(request.request_id, _not_ready()))

    def _dispatch(self, actions: list[Action]) -> None:
        """Send queued requests, in order, while any replica has credit."""
        blocked: set[str] = set()
        for request in self._queue.drain():
            with_slots = [
                view
                for view in self._replicas.values()
                if view.is_routable
                and view.replica_id not in blocked
                and view.free_slots(max_waiting=self._config.max_waiting_per_replica) > 0
            ]
            if not with_slots:
                break
            allowed = [view for view in with_slots if view.replica_id not in request.excluded]
            view = self._choose(request, allowed)
            if view is None:
                # It waits for pages: nothing behind it may take those of the same replicas.
                blocked.update(view.replica_id for view in allowed)
                continue
            self._queue.remove(request.request_id)
            booking = Booking(
                request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens
            )
            view.book(request.request_id, booking)
            self._booked_on[request.request_id] = view.replica_id
            actions.append(Send(request.request_id, view.replica_id))

    def _choose(self, request: QueuedRequest, views: list[ReplicaView]) -> ReplicaView | None:
        """Return the cheapest replica that has pages for the prompt, ties at random, or None."""
        best: list[ReplicaView] = []
        best_cost = math.inf
        for view in views:
            if not view.has_pages_for(request.num_prompt_tokens):
                continue
            cost = cost_of(view)
            if cost < best_cost:
                best, best_cost = [view], cost
            elif cost == best_cost:
                best.append(view)
        return self._rng.choice(best) if best else None

    def _has_candidate(self, request: QueuedRequest) -> bool:
        return any(
            view.is_routable and view.replica_id not in request.excluded
            for view in self._replicas.values()
        )

    def _forget_if_done(self, view: ReplicaView) -> None:
        if not view.is_routable and not view.bookings:
            del self._replicas[view.replica_id]

    def _overloaded(self, num_prompt_tokens: int, now: float) -> Overloaded:
        config = self._config
        num_tokens = self._queue.num_tokens + num_prompt_tokens
        return Overloaded(
            f"the queue is full: {len(self._queue)} requests with {self._queue.num_tokens} prompt "
            f"tokens wait (limits {config.max_queued_requests} and {config.max_queued_tokens})",
            retry_after_s=self._drain_rate.retry_after_s(num_tokens, now),
        )


def _deadline_exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("the request's time budget was spent before a replica could take it")


def _not_ready() -> EngineNotReady:
    return EngineNotReady(
        "no replica is ready to take the request", retry_after_s=NOT_READY_RETRY_AFTER_S
    )
