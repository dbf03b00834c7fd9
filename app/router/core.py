"""The router's decisions as a pure state machine: `on(event, now)` returns what to do.

No asyncio, no Ray, no clock of its own: the Serve deployment and a simulator drive the same object.
It sends at once while a replica has credit, holds requests in a bounded queue while none has, and
refuses what it cannot hold. Invariants: every request that arrived is queued, or booked on exactly
one replica, until one `Fail` or one `RequestEnded`; a replica never gets more than its credit.
"""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np

from app.router import refusals
from app.router.admission import AGEING, DrainRate, QueuedRequest, StayTime, WaitingQueue
from app.router.batch_window import BatchWindow
from app.router.breakers import CircuitBreakers
from app.router.cached_pages import CachedPages
from app.router.config import RouterConfig
from app.router.cost import Answer, Policy, PredictedCost, Question, fits
from app.router.demand import DemandMeter
from app.router.events import (
    Action,
    Event,
    Fail,
    LoadChanged,
    ReplicaDrained,
    ReplicaRemoved,
    ReplicaReported,
    ReplicaSuspected,
    RequestArrived,
    RequestEnded,
    Resubscribe,
    Send,
    Ticked,
)
from app.router.fleet import Bools, Fleet
from app.router.held import HeldRequests
from app.router.placement import Placement, is_tie
from app.router.replica_view import Booking, ReplicaView
from replicas.errors import EngineDead, Overloaded
from replicas.wire import RouterDemand

REFUSAL_MARGIN = 1.1
"""A request is refused when its predicted first token is so many times later than wanted."""

SLOT_WAIT_SHARE = 0.65
"""Of its time, what a request may be predicted to wait for a slot: under overload the queue is as
long as is let in, so that without a margin everybody would come just too late."""

MIN_AGED_PREFILL_S = 0.1
"""A request with a shorter prompt may also wait for its replica for as long as this one."""


class RouterCore:
    """Queue, bookings, replicas and their cached pages, of one router."""

    def __init__(
        self,
        config: RouterConfig,
        rng: random.Random,
        policy: Policy | None = None,
        *,
        fetch_s_per_token: float = 0.0,
    ) -> None:
        """Know no replica yet.

        Args:
            config: limits.
            rng: breaks ties.
            policy: rates replicas; None: `PredictedCost`.
            fetch_s_per_token: what a token in a replica's host tier costs.
        """
        self._config = config
        self._queue = WaitingQueue(
            max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens
        )
        self._window = BatchWindow(
            wait_s=config.max_batch_wait_ms / 1e3, max_size=config.max_batch_size
        )
        self._drain_rate = DrainRate()
        self._meter = DemandMeter()
        self._fleet = Fleet(max_waiting_per_replica=config.max_waiting_per_replica)
        self._pages = CachedPages(max_keys=config.max_indexed_pages)
        self._placement = Placement(
            self._fleet,
            self._pages,
            policy or PredictedCost(),
            rng,
            fetch_s_per_token=fetch_s_per_token,
        )
        self._breakers = CircuitBreakers()
        self._stays = StayTime()
        self._sent: dict[str, tuple[QueuedRequest, ReplicaView, float]] = {}
        self._held = HeldRequests()
        self._hopes_until: float | None = None

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
        return len(self._sent)

    @property
    def num_indexed_pages(self) -> int:
        """Keys of cached pages that the index holds."""
        return len(self._pages)

    @property
    def page_size(self) -> int:
        """Tokens of a page, as a replica reported it; 0 before the first."""
        return next((view.load.page_size for view in self._fleet.routable()), 0)

    @property
    def fleet(self) -> Fleet:
        """The replicas, to be read only."""
        return self._fleet

    @property
    def has_replicas(self) -> bool:
        """Whether any replica can take requests, be it drained."""
        return any(True for _ in self._fleet.routable())

    @property
    def routable(self) -> dict[str, ReplicaView]:
        """Replicas that can take requests, by id; of these the fleet's `drained` get none."""
        return {view.replica_id: view for view in self._fleet.routable()}

    def configure(self, config: RouterConfig) -> None:
        """Take other limits from the next event on; what was accepted stays.

        `max_indexed_pages` stays as it was: it sizes what is held already.
        """
        self._config = dataclasses.replace(config, max_indexed_pages=self._config.max_indexed_pages)
        self._queue.max_requests = config.max_queued_requests
        self._queue.max_tokens = config.max_queued_tokens
        self._fleet.set_max_waiting(config.max_waiting_per_replica)

    def demand(self) -> RouterDemand:
        """Return what has been asked for since the start, and what waits now."""
        return self._meter.read(
            self._fleet.model.costs,
            num_queued=self.num_queued,
            num_queued_tokens=self.num_queued_tokens,
        )

    def next_wakeup(self) -> float:
        """Return when `Ticked(is_second=False)` is due on the router clock, or infinity."""
        if not len(self._queue):  # all three are about what waits
            return math.inf
        return min(self._queue.next_due(), self._window.next_due, self._held.next_due)

    def on(self, event: Event, now: float) -> list[Action]:
        """Take an event at time `now` (seconds, never decreasing); return what to do, in order."""
        actions: list[Action] = []
        if self._hopes_until is None:
            self._hopes_until = now + self._config.discovery_s
        match event:  # the frequent ones first
            case LoadChanged():
                self._update(event, now, actions)
            case RequestArrived():
                self._arrive(event, now, actions)
            case RequestEnded(request_id, num_output_tokens):
                self._end(request_id, num_output_tokens, now)
            case ReplicaReported():
                self._introduce(event, now)
            case ReplicaSuspected(replica_id, has_failed):
                if has_failed:
                    self._breakers.failed(replica_id, now)
                self._suspect(replica_id, now, actions)
            case ReplicaRemoved(replica_id):
                self._remove(replica_id, now, actions)
            case ReplicaDrained(replica_id, is_drained):
                self._drain(replica_id, now, actions, is_drained=is_drained)
            case Ticked(is_second):
                if is_second:
                    self._tend_breakers(now)
                    self._count_silence(now, actions)
        self._expire(now, actions)
        self._dispatch(now, actions)
        return actions

    def _arrive(self, event: RequestArrived, now: float, actions: list[Action]) -> None:
        request_id = event.request_id
        assert request_id not in self._queue, request_id
        assert request_id not in self._sent, request_id
        config = self._config
        if not event.excluded:
            self._meter.arrived(event.num_prompt_tokens)
        is_new = not event.excluded and not self._fleet.has_routable
        wait_s = config.replica_wait_s if is_new else config.migration_wait_s
        assert self._hopes_until is not None
        request = QueuedRequest(
            request_id=request_id,
            num_prompt_tokens=event.num_prompt_tokens,
            max_tokens=event.max_tokens,
            deadline=event.deadline,
            priority=event.priority,
            excluded=event.excluded,
            replica_wait_until=max(now + wait_s, self._hopes_until),
            arrived_at=now,
            tenant=event.tenant,
            page_keys=event.page_keys,
            ttft_target_s=event.ttft_target_s,
            tpot_target_s=event.tpot_target_s,
        )
        if request.first_token_by <= now:
            actions.append(Fail(request_id, refusals.deadline_exceeded()))
            return
        displaced: list[QueuedRequest] = []
        if self._queue.is_full_for(event.num_prompt_tokens):
            displaced = self._queue.displaced_by(request)
            if not displaced:
                actions.append(Fail(request_id, self._queue_full(request, now)))
                return
        can_start_at_once = (
            not len(self._queue)
            and not self._window.is_used
            and self._send(request, self._ready(), now, actions)
        )
        if not can_start_at_once:
            self._enqueue(request, displaced, now, actions)

    def _end(self, request_id: str, num_output_tokens: int | None, now: float) -> None:
        if request_id in self._queue:
            self._queue.remove(request_id)
        request, view, sent_at = self._sent.pop(request_id, (None, None, now))
        if request is not None and view is not None:
            view.release(request_id)
            self._fleet.refresh(view)
            self._drain_rate.add(request.num_prompt_tokens, now)
            if num_output_tokens is not None:
                self._stays.add(now - sent_at)
                self._queue.refund(request, num_output_tokens)
                self._close_breaker(view)
                self._meter.ended(num_output_tokens)
            self._forget_if_done(view)

    def _introduce(self, event: ReplicaReported, now: float) -> None:
        view = self._fleet.add(event.replica_id)
        view.is_routable = True
        view.max_outstanding = self._breakers.max_outstanding(event.replica_id, now)
        self._fleet.update(view, event.load, event.sequence, now)
        self._pages.replace(view.row, event)

    def _update(self, event: LoadChanged, now: float, actions: list[Action]) -> None:
        view = self._fleet.views.get(event.replica_id)
        is_next = view is not None and view.is_routable and event.sequence == view.sequence + 1
        if not is_next:
            actions.append(Resubscribe(event.replica_id))
        if view is None:
            return
        self._fleet.update(view, event.load, event.sequence, now)
        self._pages.change(view.row, event)

    def _suspect(self, replica_id: str, now: float, actions: list[Action]) -> None:
        view = self._fleet.views.get(replica_id)
        if view is None:
            return
        if view.is_routable:
            self._hopes_until = now + self._config.discovery_s
        view.is_routable = False
        self._fleet.refresh(view)
        actions.append(Resubscribe(replica_id))
        self._forget_if_done(view)
        self._fail_orphans(now, actions)

    def _remove(self, replica_id: str, now: float, actions: list[Action]) -> None:
        view = self._fleet.views.get(replica_id)
        if view is None:
            return
        self._forget(view)
        for request_id in view.bookings:
            del self._sent[request_id]
            error = EngineDead(f"replica {replica_id} was lost", replica_id=replica_id)
            actions.append(Fail(request_id, error))
        self._fail_orphans(now, actions)

    def _drain(
        self, replica_id: str, now: float, actions: list[Action], *, is_drained: bool
    ) -> None:
        (self._fleet.drained.add if is_drained else self._fleet.drained.discard)(replica_id)
        if (view := self._fleet.views.get(replica_id)) is not None:
            self._fleet.refresh(view)
        self._fail_orphans(now, actions)

    def _count_silence(self, now: float, actions: list[Action]) -> None:
        """Remove replicas that should speak and do not.

        Counted in ticks, not seconds: when this process itself was stalled, one tick has passed.
        A replica that is not routable owes us nothing; its calls tell how they end.
        """
        for view in tuple(self._fleet.routable()):
            view.num_silent_ticks += 1
            if view.num_silent_ticks > self._config.max_silent_ticks:
                self._remove(view.replica_id, now, actions)

    def _tend_breakers(self, now: float) -> None:
        """Let replicas try again whose breakers have been open for long enough."""
        for replica_id in self._breakers.tend(now):
            if (view := self._fleet.views.get(replica_id)) is not None:
                view.max_outstanding = self._breakers.max_outstanding(replica_id, now)
                self._fleet.refresh(view)

    def _close_breaker(self, view: ReplicaView) -> None:
        self._breakers.succeeded(view.replica_id)
        if view.max_outstanding is not None:
            view.max_outstanding = None
            self._fleet.refresh(view)

    def _expire(self, now: float, actions: list[Action]) -> None:
        for request in self._queue.pop_due(now):
            if request.request_id not in self._queue:
                continue
            if request.first_token_by <= now:
                self._queue.remove(request.request_id)
                actions.append(Fail(request.request_id, refusals.deadline_exceeded()))
            elif request.replica_wait_until <= now and not self._has_candidate(request):
                self._queue.remove(request.request_id)
                actions.append(Fail(request.request_id, refusals.not_ready()))

    def _fail_orphans(self, now: float, actions: list[Action]) -> None:
        """Refuse what waited long enough for a replica and has none to wait for any more."""
        for request in self._queue.drain():
            if request.replica_wait_until <= now and not self._has_candidate(request):
                self._queue.remove(request.request_id)
                actions.append(Fail(request.request_id, refusals.not_ready()))

    def _enqueue(
        self,
        request: QueuedRequest,
        displaced: list[QueuedRequest],
        now: float,
        actions: list[Action],
    ) -> None:
        """Let a request wait in the place of others, or refuse it when it would wait too long."""
        routable = self._placement.allowed(request, self._fleet.is_routable)
        if np.count_nonzero(routable):
            answer = self._placement.rate(request, now)[0]
            if answer.ttft_s is not None and answer.queued_s is not None:
                best = int(np.where(routable, answer.ttft_s, np.inf).argmin())
                ttft_s = float(answer.ttft_s[best])
                prefill_s = ttft_s - float(answer.queued_s[best])
                ttft_s += self._queue.prefill_s / int(routable.sum())
                ttft_s = max(ttft_s, prefill_s + self._slot_wait_s(request) / SLOT_WAIT_SHARE)
                left_s = request.first_token_by - now
                if ttft_s > REFUSAL_MARGIN * left_s:
                    actions.append(Fail(request.request_id, refusals.cannot_meet(ttft_s, left_s)))
                    return
                request = dataclasses.replace(request, prefill_s=prefill_s)
        for victim in displaced:
            self._queue.remove(victim.request_id)
            actions.append(Fail(victim.request_id, self._queue_full(victim, now)))
        self._queue.push(request)
        if self._window.is_used:
            self._window.join(now, start_by=request.first_token_by - request.prefill_s)

    def _slot_wait_s(self, request: QueuedRequest) -> float:
        """Predict how long a new request will wait for a slot, here and at its replica.

        By Little's law over those that were sent: as many end in a second as stay, divided by how
        long they stay. Nothing where a replica has a slot to give: then it is not slots that lack.
        """
        if np.count_nonzero(self._ready()):
            return 0.0
        num_routable = np.count_nonzero(self._fleet.is_routable)
        num_before = self._queue.num_before(request)
        num_before += int(num_routable) * self._config.max_waiting_per_replica
        return (num_before + 1) * self._stays.mean_s / max(1, len(self._sent))

    def _dispatch(self, now: float, actions: list[Action]) -> None:
        """Send queued requests, in order, while any replica has credit."""
        num_queued = len(self._queue)
        if not num_queued:
            self._window.close()
            self._held.clear()
            return
        self._held.let_go(now)
        if not self._window.holds(now, num_queued):
            self._window.let_go()
            ready = self._ready()
            for request in self._queue.drain():
                if not np.count_nonzero(ready):
                    break
                if request.request_id in self._held:
                    continue
                if self._send(request, ready, now, actions):
                    ready &= self._ready()
        if not len(self._queue):
            self._window.close()
            self._held.clear()

    def _ready(self) -> Bools:
        """Which rows have a slot to give."""
        return self._fleet.free_slots > 0

    def _send(
        self, request: QueuedRequest, ready: Bools, now: float, actions: list[Action]
    ) -> bool:
        """Send a request to the best ready replica; whether it is over with for the queue.

        Rows that turn out to have too long a backlog already leave `ready`. So do those that lack
        pages for the request: nothing behind it may take pages that it waits for.
        """
        if not np.count_nonzero(ready):  # several times as fast as any()
            return False
        answer, question = self._placement.rate(request, now)
        if answer.queued_s is not None:
            ready &= answer.queued_s <= self._config.max_backlog_s
        allowed = self._placement.allowed(request, ready)
        candidates = allowed & self._fleet.has_pages_for(request.num_prompt_tokens)
        if not np.count_nonzero(candidates):
            ready &= ~allowed
            return False
        is_queued = request.request_id in self._queue
        left_s = request.first_token_by - now
        if left_s < np.inf and answer.ttft_s is not None:
            best = float(
                answer.ttft_s[self._placement.allowed(request, self._fleet.is_routable)].min()
            )
            if best > REFUSAL_MARGIN * left_s:
                if is_queued:
                    self._queue.remove(request.request_id)
                error = (
                    refusals.deadline_exceeded()
                    if is_queued
                    else refusals.cannot_meet(best, left_s)
                )
                actions.append(Fail(request.request_id, error))
                return True
        meets = fits(
            answer,
            ttft_s=None if left_s == np.inf else left_s,
            tpot_s=request.tpot_target_s,
        )
        preferred = candidates
        if meets is not None and np.count_nonzero(good := candidates & meets):
            preferred = good
        row = self._placement.cheapest(answer, preferred)
        if self._holds_for_better(request, answer, candidates, row, now):
            return False
        view = self._fleet.view_of(row)
        if is_queued:
            self._queue.serve(request.request_id)
        else:
            self._queue.pass_by(request)
        self._book(request, view, question, now)
        ttft_s = None if answer.ttft_s is None else float(answer.ttft_s[row])
        actions.append(Send(request.request_id, view.replica_id, ttft_s))
        return True

    def _holds_for_better(
        self, request: QueuedRequest, answer: Answer, candidates: Bools, row: int, now: float
    ) -> bool:
        """Whether a request waits for a replica that is none of `candidates`, instead of `row`.

        Its pages may be there, and worth more than the wait. Under overload hardly more than one
        replica has room at a time, and who took that one would always leave its pages behind. It
        stays in its place here, and is looked at again when the better one should have room.
        """
        if answer.queued_s is None or self._held.is_full:
            return False
        (others,) = (self._placement.allowed(request, self._ready()) & ~candidates).nonzero()
        if not len(others):
            return False
        pages_s = self._placement.pages_wait_s(request, others, stay_s=self._stays.mean_s)
        cost = answer.cost[others] + pages_s
        first = int(cost.argmin())
        best = int(others[first])
        wait_s = max(float(answer.queued_s[best]) - self._config.max_backlog_s, pages_s[first])
        if wait_s <= 0 or is_tie(answer, float(answer.cost[row]), lowest=float(cost[first])):
            return False
        longest_s = AGEING * max(request.prefill_s, MIN_AGED_PREFILL_S)
        if pages_s[first] and now - request.arrived_at > longest_s:
            return False
        if answer.ttft_s is not None:
            first_token_at = now + answer.ttft_s[best] + pages_s[first]
            if first_token_at > request.first_token_by:
                return False
        self._held.hold(request.request_id, now=now, for_s=wait_s)
        return True

    def _book(
        self, request: QueuedRequest, view: ReplicaView, question: Question, now: float
    ) -> None:
        length = request.num_prompt_tokens
        held = min(int(question.held_tokens[view.row]), length - 1)
        booking = Booking(
            num_prompt_tokens=length,
            num_tokens=length + request.max_tokens,
            num_uncached_tokens=length - held,
            num_pairs=(length - held) * (length + held) // 2,
        )
        view.book(request.request_id, booking, now)
        self._meter.sent(booking)
        self._fleet.refresh(view)
        self._sent[request.request_id] = (request, view, now)

    def _has_candidate(self, request: QueuedRequest) -> bool:
        return bool(np.count_nonzero(self._placement.allowed(request, self._fleet.is_routable)))

    def _forget_if_done(self, view: ReplicaView) -> None:
        if not view.is_routable and not view.bookings:
            self._forget(view)

    def _forget(self, view: ReplicaView) -> None:
        self._pages.forget(view.row)
        self._fleet.remove(view)

    def _queue_full(self, request: QueuedRequest, now: float) -> Overloaded:
        return refusals.queue_full(
            self._queue, self._drain_rate, num_prompt_tokens=request.num_prompt_tokens, now=now
        )
