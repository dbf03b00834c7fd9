"""The event loop: clients, routers and replicas, with delays, losses and deaths between them.

Timed calls in order; every random draw comes from one seed, so a run can be repeated exactly.
Invariant: every request ends once, as served, refused or expired.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from app.router.config import RouterConfig
from app.router.core import RouterCore
from app.router.cost import Policy
from app.router.events import (
    Event,
    Fail,
    LoadChanged,
    ReplicaRemoved,
    ReplicaReported,
    ReplicaSuspected,
    RequestArrived,
    RequestEnded,
    Resubscribe,
    Send,
    Ticked,
)
from bench.collector import collector_off
from bench.router_sim.hardware import Hardware
from bench.router_sim.replica import SimReplica, SimSequence
from bench.router_sim.scaling import Fleet, Scaler
from bench.router_sim.traces import SimRequest
from replicas.errors import EngineDead


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What surrounds the requests.

    Attributes:
        num_replicas: at the start.
        num_routers: requests are spread over them at random.
        hardware: of every replica.
        ttft_target_s, tpot_target_s: what the client wants.
        are_targets_told: whether requests carry their targets: the router may then refuse them.
        typical_output: what requests give as their `max_tokens`; nobody knows the true length.
        rpc_s: mean of a call's delay, one way; each is drawn in [0.5, 1.5] of it.
        event_interval_s: least time between two events of a replica.
        event_delay_s: an event's way.
        event_loss: share of events that are lost.
        deaths: (time, replica) when a replica dies; another starts at once.
        detect_s: until the routers know of a death.
        scale_period_s: between two decisions of the scaler.
        seed: of delays, losses and ties.
    """

    num_replicas: int
    hardware: Hardware
    num_routers: int = 1
    ttft_target_s: float = 5.0
    tpot_target_s: float = 0.1
    are_targets_told: bool = False
    typical_output: int = 512
    rpc_s: float = 2e-3
    event_interval_s: float = 0.05
    event_delay_s: float = 1e-3
    event_loss: float = 0.0
    deaths: tuple[tuple[float, int], ...] = ()
    detect_s: float = 0.07
    scale_period_s: float = 2.0
    seed: int = 0


@dataclass(slots=True)
class Record:
    """How one request went.

    Attributes:
        request: what was asked.
        first_token_at, ended_at: seconds; infinity when it never happened.
        num_cached: prompt tokens found in the cache, on the first replica that ran it.
        num_attempts: replicas that it was sent to.
        error: code of the refusal, or None.
    """

    request: SimRequest
    first_token_at: float = math.inf
    ended_at: float = math.inf
    num_cached: int = 0
    num_attempts: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_at - self.request.arrived_at

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for a single one."""
        count = self.request.num_output_tokens - 1
        return (self.ended_at - self.first_token_at) / count if count else 0.0

    def meets(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether it was served within both."""
        return self.error is None and self.ttft_s <= ttft_s and self.tpot_s <= tpot_s


@dataclass(slots=True)
class Outcome:
    """What a run gave.

    Attributes:
        records: one per request.
        decision_s: wall time of the routers' answer to each arrival.
        num_events: load and cache events that reached a router.
        num_preemptions: on all replicas.
        num_sent: requests that each replica was sent.
        targets: (time, number of replicas ordered), at the start and at each change.
        replica_s: seconds that replicas were paid for, from order to release.
        wall_s, cpu_s: what the run took here.
    """

    records: list[Record]
    decision_s: list[float] = field(default_factory=list)
    num_events: int = 0
    num_preemptions: int = 0
    num_sent: dict[str, int] = field(default_factory=dict)
    targets: list[tuple[float, int]] = field(default_factory=list)
    replica_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0


_Call = tuple[float, int, Callable[..., None], tuple[object, ...]]
"""When, the number of the call, which makes equal times ordered, and what."""


class _Replica:
    """A replica and its event stream."""

    __slots__ = (
        "draining_since",
        "engine",
        "is_alive",
        "is_due",
        "sent_at",
        "sequence",
        "wake_number",
    )

    def __init__(self, engine: SimReplica) -> None:
        self.engine = engine
        self.is_alive = True
        self.draining_since = math.inf
        self.sequence = 0
        self.sent_at = -math.inf
        self.is_due = False
        self.wake_number = 0

    @property
    def is_draining(self) -> bool:
        """Whether it takes no more requests and leaves when it has none."""
        return self.draining_since < math.inf


class Simulation:
    """One run."""

    def __init__(
        self,
        scenario: Scenario,
        requests: Sequence[SimRequest],
        make_policy: Callable[[], Policy],
        config: RouterConfig | None = None,
        scaler: Scaler | None = None,
    ) -> None:
        """Prepare.

        Args:
            scenario: see there.
            requests: in order of arrival.
            make_policy: called for each router.
            config: limits of each router.
            scaler: decides how many replicas there are; None: as many as at the start.
        """
        self._scenario = scenario
        self._rng = random.Random(scenario.seed)
        self._heap: list[_Call] = []
        self._reports: deque[_Call] = deque()  # all as long on their way: in order without a heap
        self._numbers = itertools.count()
        self._outcome = Outcome([Record(request) for request in requests])
        fetch_s = scenario.hardware.fetch_s / scenario.hardware.page_size
        self._routers = [
            RouterCore(
                config or SIM_CONFIG,
                random.Random(self._rng.random()),
                make_policy(),
                fetch_s_per_token=fetch_s,
            )
            for _ in range(scenario.num_routers)
        ]
        self._wakes: dict[RouterCore, float] = {}  # for when each was last planned
        self._replicas: dict[str, _Replica] = {}
        self._is_contended = scenario.hardware.contention > 0
        self._machine: list[SimReplica] = []  # all of them, for their contention
        self._open: dict[str, tuple[Record, RouterCore]] = {}
        self._names = itertools.count()
        self._now = 0.0
        self._scaler = scaler
        self._num_booting = 0
        self._num_cancelled = 0
        self._paid_since: dict[str, float] = {}
        self._are_all_here = False

    def run(self) -> Outcome:
        """Run to the end of the last request.

        Without the cyclic garbage collector: a run makes no cycles, and millions of objects that a
        collection would look at.
        """
        with collector_off():
            return self._run()

    def _run(self) -> Outcome:
        wall, cpu = time.perf_counter(), time.process_time()
        scenario = self._scenario
        for _ in range(scenario.num_replicas):
            self._start_replica(0.0)
        for at, number in scenario.deaths:
            self._at(at, self._die, f"replica-{number}")
        arrivals = iter(self._outcome.records)
        self._arrive_next(arrivals)
        self._outcome.targets.append((0.0, scenario.num_replicas))
        if self._scaler is not None:
            self._at(0.0, self._scale, self._scaler)
        heap, reports = self._heap, self._reports
        while heap or reports:
            if reports and (not heap or reports[0] < heap[0]):
                self._now, _, call, arguments = reports.popleft()
            else:
                self._now, _, call, arguments = heapq.heappop(heap)
            call(*arguments)
        assert not self._open, f"{len(self._open)} requests never ended"
        for replica in self._replicas.values():
            replica.engine.pages.check()
            self._outcome.num_preemptions += replica.engine.num_preemptions
        ends = self._now
        self._outcome.replica_s += sum(ends - since for since in self._paid_since.values())
        self._outcome.wall_s = time.perf_counter() - wall
        self._outcome.cpu_s = time.process_time() - cpu
        return self._outcome

    def _at(self, at: float, call: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._heap, (at, next(self._numbers), call, arguments))

    def _delay(self, mean_s: float) -> float:
        return mean_s * (0.5 + self._rng.random())

    def _arrive_next(self, arrivals: Iterator[Record]) -> None:
        record = next(arrivals, None)
        self._are_all_here = record is None
        if record is not None:
            self._at(record.request.arrived_at, self._arrive, record, arrivals)

    def _arrive(self, record: Record, arrivals: Iterator[Record]) -> None:
        self._arrive_next(arrivals)
        self._submit(record, frozenset())

    def _submit(self, record: Record, excluded: frozenset[str]) -> None:
        scenario, request = self._scenario, record.request
        attempt_id = f"{request.request_id}~{record.num_attempts}"
        routers = self._routers
        core = routers[0] if len(routers) == 1 else self._rng.choice(routers)
        self._open[attempt_id] = (record, core)
        told = scenario.are_targets_told and not excluded
        event = RequestArrived(
            request_id=attempt_id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=scenario.typical_output,
            excluded=excluded,
            page_keys=request.page_keys,
            ttft_target_s=scenario.ttft_target_s if told else None,
            tpot_target_s=scenario.tpot_target_s if told else None,
        )
        begin = time.perf_counter()
        actions = core.on(event, self._now)
        self._outcome.decision_s.append(time.perf_counter() - begin)
        self._do(core, actions)

    def _feed(self, core: RouterCore, event: Event) -> None:
        self._do(core, core.on(event, self._now))

    def _do(self, core: RouterCore, actions: list[Send | Fail | Resubscribe]) -> None:
        for action in actions:
            match action:
                case Send(attempt_id, replica_id):
                    sent = self._outcome.num_sent
                    sent[replica_id] = sent.get(replica_id, 0) + 1
                    self._at(
                        self._now + self._delay(self._scenario.rpc_s),
                        self._begin,
                        attempt_id,
                        replica_id,
                    )
                case Fail(attempt_id, error):
                    record, _ = self._open.pop(attempt_id)
                    if isinstance(error, EngineDead):
                        record.num_attempts += 1
                        self._submit(record, frozenset((str(error.replica_id),)))
                    else:
                        record.error = error.code or error.type
                case Resubscribe(replica_id):
                    self._at(
                        self._now + self._delay(self._scenario.rpc_s),
                        self._report,
                        replica_id,
                        core,
                    )
        due_at = core.next_wakeup()
        if due_at < math.inf and due_at != self._wakes.get(core):
            self._wakes[core] = due_at
            self._at(max(due_at, self._now), self._wake_router, core, due_at)

    def _wake_router(self, core: RouterCore, due_at: float) -> None:
        if self._wakes.get(core) == due_at:
            del self._wakes[core]
        if core.next_wakeup() == due_at:
            self._do(core, core.on(Ticked(is_second=False), self._now))

    def _begin(self, attempt_id: str, replica_id: str) -> None:
        """A request arrives at its replica."""
        if attempt_id not in self._open:
            return
        replica = self._replicas.get(replica_id)
        if replica is None:
            return  # died on the way: the router will say so
        record, core = self._open[attempt_id]
        request = record.request
        sequence = SimSequence(
            attempt_id,
            request.num_prompt_tokens,
            request.num_output_tokens,
            request.page_keys,
            lambda _, at: self._note_first_token(record, at),
            lambda ended, at: self._end(record, core, ended, at),
        )
        replica.engine.submit(sequence, self._now)
        self._plan_wake(replica)

    def _note_first_token(self, record: Record, at: float) -> None:
        record.first_token_at = min(record.first_token_at, at + self._scenario.event_delay_s)

    def _end(self, record: Record, core: RouterCore, sequence: SimSequence, at: float) -> None:
        record.ended_at = at + self._scenario.event_delay_s
        record.num_cached = sequence.num_cached or 0
        self._at(at + self._delay(self._scenario.rpc_s), self._tell_end, core, sequence)

    def _tell_end(self, core: RouterCore, sequence: SimSequence) -> None:
        if self._open.pop(sequence.request_id, None) is not None:
            self._feed(core, RequestEnded(sequence.request_id, sequence.num_output_tokens))

    def _plan_wake(self, replica: _Replica) -> None:
        self._plan_wake_alone(replica)
        if self._is_contended:
            for other in self._replicas.values():
                if other is not replica and other.engine.notice_machine(self._now):
                    self._plan_wake_alone(other)

    def _plan_wake_alone(self, replica: _Replica) -> None:
        engine = replica.engine
        replica.wake_number += 1
        if engine.wakes_at < math.inf:
            self._at(engine.wakes_at, self._wake_replica, replica, replica.wake_number)
        if engine.is_changed and not replica.is_due:
            due_at = max(self._now, replica.sent_at + self._scenario.event_interval_s)
            replica.is_due = True
            self._at(due_at, self._publish, replica)

    def _wake_replica(self, replica: _Replica, wake_number: int) -> None:
        if replica.is_alive and wake_number == replica.wake_number:
            replica.engine.wake(self._now)
            self._plan_wake(replica)

    def _publish(self, replica: _Replica) -> None:
        """Send a replica's event to all routers."""
        replica.is_due = False
        if not replica.is_alive or replica.is_draining:
            return
        engine, scenario = replica.engine, self._scenario
        engine.is_changed = False
        replica.sent_at = self._now
        replica.sequence += 1
        cache, tier = engine.take_cache_changes()
        event = LoadChanged(engine.replica_id, replica.sequence, engine.load(), cache, tier)
        for core in self._routers:
            if scenario.event_loss and self._rng.random() < scenario.event_loss:
                continue
            self._outcome.num_events += 1
            self._send_event(core, event)

    def _report(self, replica_id: str, core: RouterCore) -> None:
        replica = self._replicas.get(replica_id)
        if replica is None or replica.is_draining:
            return
        # Changes not published yet are in the snapshot, and will come again: both are idempotent.
        stored, offloaded = replica.engine.pages.snapshot()
        event = ReplicaReported(
            replica_id, replica.sequence, replica.engine.load(), stored, offloaded
        )
        self._send_event(core, event)

    def _send_event(self, core: RouterCore, event: Event) -> None:
        at = self._now + self._scenario.event_delay_s
        self._reports.append((at, next(self._numbers), self._feed, (core, event)))

    def _start_replica(self, ordered_at: float) -> None:
        name = f"replica-{next(self._names)}"
        self._paid_since[name] = ordered_at
        engine = SimReplica(name, self._scenario.hardware, self._machine)
        self._machine.append(engine)
        self._replicas[name] = _Replica(engine)
        for core in self._routers:
            self._feed(core, ReplicaReported(name, 0, self._replicas[name].engine.load()))

    def _scale(self, scaler: Scaler) -> None:
        """Ask for the number of replicas; order or release what differs."""
        if self._are_all_here and not self._open:
            return
        serving = [r for r in self._replicas.values() if not r.is_draining]
        target = len(serving) + self._num_booting
        fleet = Fleet(
            now=self._now,
            target=target,
            loads=[replica.engine.load() for replica in serving],
            demands=[core.demand() for core in self._routers],
            num_open=len(self._open),
        )
        wanted = max(1, scaler.decide(fleet))
        if wanted != target:
            self._outcome.targets.append((self._now, wanted))
        for _ in range(target, wanted):
            self._order()
        for _ in range(wanted, target):
            self._release(serving)
        for replica in tuple(self._replicas.values()):
            if replica.is_draining:
                self._remove_if_idle(replica)
        self._at(self._now + self._scenario.scale_period_s, self._scale, scaler)

    def _order(self) -> None:
        self._num_booting += 1
        self._at(self._now + self._scenario.hardware.start_s, self._boot, self._now)

    def _boot(self, ordered_at: float) -> None:
        if self._num_cancelled:
            self._num_cancelled -= 1
            self._outcome.replica_s += self._now - ordered_at
            return
        self._num_booting -= 1
        self._start_replica(ordered_at)

    def _release(self, serving: list[_Replica]) -> None:
        """Take back an order that is still booting, else drain the replica with least to do."""
        if self._num_booting:
            self._num_booting -= 1
            self._num_cancelled += 1
            return
        replica = min(serving, key=lambda r: r.engine.load().num_running)
        serving.remove(replica)
        replica.draining_since = self._now
        for core in self._routers:
            self._feed(core, ReplicaSuspected(replica.engine.replica_id))

    def _remove_if_idle(self, replica: _Replica) -> None:
        load = replica.engine.load()
        name = replica.engine.replica_id
        is_sent_on = self._now < replica.draining_since + self._scenario.scale_period_s
        if load.num_running or load.num_waiting or is_sent_on:
            return
        del self._replicas[name]
        self._machine.remove(replica.engine)
        replica.is_alive = False
        replica.engine.pages.check()
        self._outcome.num_preemptions += replica.engine.num_preemptions
        self._outcome.replica_s += self._now - self._paid_since.pop(name)

    def _die(self, replica_id: str) -> None:
        replica = self._replicas.pop(replica_id)
        self._machine.remove(replica.engine)
        replica.is_alive = False
        replica.engine.lose()
        for core in self._routers:
            self._at(
                self._now + self._scenario.detect_s, self._feed, core, ReplicaRemoved(replica_id)
            )
        self._outcome.replica_s += self._now - self._paid_since.pop(replica_id)
        start_s = self._scenario.hardware.start_s
        self._at(self._now + start_s, self._start_replica, self._now)


SIM_CONFIG = RouterConfig(max_queued_requests=1 << 20, max_queued_tokens=1 << 34)
"""Nothing is refused for want of queue space: policies are compared by what they do with it."""
