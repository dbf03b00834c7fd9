"""Circuit breakers: when a failing replica is left alone, and how it comes back."""

from __future__ import annotations

import random

from app.router.breakers import FIRST_OPEN_S, MAX_OPEN_S, QUIET_S, CircuitBreakers
from app.router.config import RouterConfig
from app.router.core import RouterCore
from app.router.events import (
    ReplicaReported,
    ReplicaSuspected,
    RequestArrived,
    RequestEnded,
    Send,
    Ticked,
)
from replicas.wire import ReplicaLoad

LOAD = ReplicaLoad(num_slots=8, num_free_pages=100, num_pages=100, page_size=16)


def test_one_failure_changes_nothing_and_two_in_a_row_open_it() -> None:
    breakers = CircuitBreakers()
    breakers.failed("a", 0.0)
    assert breakers.max_outstanding("a", 0.0) is None
    breakers.failed("a", 0.1)
    assert breakers.max_outstanding("a", 0.1 + 0.9 * FIRST_OPEN_S) == 0
    assert breakers.max_outstanding("a", 0.1 + 1.1 * FIRST_OPEN_S) == 1
    assert breakers.max_outstanding("b", 0.1) is None


def test_a_success_closes_it() -> None:
    breakers = CircuitBreakers()
    for at in (0.0, 0.1):
        breakers.failed("a", at)
    breakers.succeeded("a")
    assert breakers.max_outstanding("a", 0.2) is None
    breakers.failed("a", 0.3)
    assert breakers.max_outstanding("a", 0.3) is None


def test_each_failed_trial_doubles_the_pause_up_to_a_limit() -> None:
    breakers = CircuitBreakers()
    now, pauses = 0.0, []
    breakers.failed("a", now)
    for _ in range(8):
        breakers.failed("a", now)
        begin = now
        while breakers.max_outstanding("a", now) == 0:
            now += 0.25
        pauses.append(now - begin)
    assert pauses == [FIRST_OPEN_S * 2**n for n in range(5)] + [MAX_OPEN_S] * 3


def test_failures_of_what_was_sent_before_it_opened_count_once() -> None:
    breakers = CircuitBreakers()
    for number in range(50):
        breakers.failed("a", 1e-3 * number)
    assert breakers.max_outstanding("a", 1.1 + FIRST_OPEN_S) == 1


def test_what_was_quiet_for_long_is_forgotten() -> None:
    breakers = CircuitBreakers()
    for number in range(100):
        breakers.failed(f"replica-{number}", 0.0)
        breakers.failed(f"replica-{number}", 0.0)
    assert len(breakers.tend(FIRST_OPEN_S + 0.9 * QUIET_S)) == len(breakers) == 100
    assert len(breakers.tend(FIRST_OPEN_S + 1.1 * QUIET_S)) == 100
    assert len(breakers) == 0


def test_a_replica_that_fails_every_call_and_reports_well_gets_few_of_them() -> None:
    """Idle as it looks, it would draw most requests: it reports well after each failure."""
    core = RouterCore(RouterConfig(max_waiting_per_replica=0), random.Random(0))
    for replica_id in ("good", "bad"):
        core.on(ReplicaReported(replica_id, 0, LOAD), 0.0)
    sent = {"good": 0, "bad": 0}
    running: list[str] = []
    for number in range(100):
        now = 0.1 * number
        if number % 10 == 0:
            core.on(Ticked(), now)
        if len(running) == 6:
            core.on(RequestEnded(running.pop(0), 1), now)
        name, excluded = f"r{number}", frozenset[str]()
        while True:
            event = RequestArrived(
                request_id=name, num_prompt_tokens=16, max_tokens=16, excluded=excluded
            )
            (send,) = core.on(event, now)
            assert isinstance(send, Send)
            sent[send.replica_id] += 1
            if send.replica_id == "good":
                running.append(name)
                break
            core.on(ReplicaSuspected("bad", has_failed=True), now)
            core.on(RequestEnded(name), now)
            core.on(ReplicaReported("bad", 0, LOAD), now)
            name, excluded = f"{name} again", frozenset(("bad",))
    assert sent["good"] == 100
    assert 2 <= sent["bad"] <= 6
    core.on(Ticked(), 100.0)
    core.on(RequestArrived(request_id="trial", num_prompt_tokens=16, max_tokens=16), 100.0)
    assert core.on(RequestEnded("trial", 16), 100.1) == []
