"""The router core: what it decides in given situations, and what holds in all of them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from app.router.admission import DrainRate
from app.router.config import RouterConfig
from app.router.core import RouterCore
from app.router.cost import water_level
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
from replicas.errors import DeadlineExceeded, EngineDead, EngineNotReady, Overloaded
from replicas.wire import CacheChange, ReplicaLoad

IDLE = ReplicaLoad(num_slots=4, num_free_pages=100, num_pages=100, page_size=16)


def arrived(request_id: str, *, num_prompt_tokens: int = 10, **extras: object) -> RequestArrived:
    return RequestArrived(
        request_id=request_id,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=10,
        **extras,  # type: ignore[arg-type]
    )


def make_core(*replica_ids: str, load: ReplicaLoad = IDLE, **config: object) -> RouterCore:
    core = RouterCore(RouterConfig(**config), random.Random(0))  # type: ignore[arg-type]
    for replica_id in replica_ids:
        core.on(ReplicaReported(replica_id, 0, load), 0.0)
    return core


def sends(actions: Iterable[Action]) -> dict[str, str]:
    return {a.request_id: a.replica_id for a in actions if isinstance(a, Send)}


def failures(actions: Iterable[Action]) -> dict[str, type[Exception]]:
    return {a.request_id: type(a.error) for a in actions if isinstance(a, Fail)}


def test_a_request_goes_out_at_once_while_there_is_credit() -> None:
    core = make_core("a")
    assert core.on(arrived("r"), 1.0) == [Send("r", "a")]
    assert (core.num_booked, core.num_queued) == (1, 0)


def test_a_request_is_sent_with_a_prediction_that_grows_with_its_prompt() -> None:
    core = make_core("a", max_backlog_s=60)
    for second in range(1, 40):
        load = IDLE._replace(
            num_steps=10 * second,
            num_computed_tokens=1000 * second,
            num_prefill_tokens=1000 * second,
            busy_s=1.0 * second,
            step_s=0.1,
        )
        core.on(LoadChanged("a", second, load), float(second))
    predicted: list[float] = []
    for name, num_prompt_tokens in (("short", 10), ("long", 1000)):
        (send,) = core.on(arrived(name, num_prompt_tokens=num_prompt_tokens), 40.0)
        assert isinstance(send, Send)
        assert send.ttft_s is not None
        predicted.append(send.ttft_s)
        core.on(RequestEnded(name), 40.0)
    assert 0 < predicted[0] < predicted[1]


def test_the_replica_with_fewest_outstanding_tokens_is_chosen() -> None:
    core = make_core("a", "b")
    first = sends(core.on(arrived("long", num_prompt_tokens=500), 0.0))["long"]
    other = {"a": "b", "b": "a"}[first]
    for number in range(3):
        assert sends(core.on(arrived(f"s{number}"), 0.0)) == {f"s{number}": other}


def test_ties_are_broken_at_random() -> None:
    core = make_core("a", "b", "c")
    chosen: set[str] = set()
    for number in range(40):
        chosen |= set(sends(core.on(arrived(f"r{number}"), 0.0)).values())
        core.on(RequestEnded(f"r{number}"), 0.0)
    assert chosen == {"a", "b", "c"}


def test_requests_of_other_routers_count() -> None:
    core = make_core("a", "b")
    busy = ReplicaLoad(num_running=3, num_slots=4, num_free_pages=50, num_pages=100, page_size=16)
    core.on(LoadChanged("a", 1, busy), 0.0)
    assert sends(core.on(arrived("r"), 0.0)) == {"r": "b"}


def test_without_credit_requests_wait_and_go_in_order_of_priority_then_arrival() -> None:
    core = make_core("a", max_waiting_per_replica=0)
    for number in range(4):
        core.on(arrived(f"running{number}"), 0.0)
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        assert core.on(arrived(name, priority=priority), 0.0) == []
    order = [
        name for number in range(4) for name in sends(core.on(RequestEnded(f"running{number}"), 1))
    ]
    assert order == ["urgent", "first", "second", "late"]


def test_an_ending_frees_its_slot_at_once_although_the_last_load_still_shows_it() -> None:
    core = make_core("a", max_waiting_per_replica=0)
    for number in range(4):
        core.on(arrived(f"r{number}"), 0.0)
    full = ReplicaLoad(num_running=4, num_slots=4, num_free_pages=96, num_pages=100, page_size=16)
    core.on(LoadChanged("a", 1, full), 0.1)
    assert core.on(arrived("next"), 0.1) == []
    assert sends(core.on(RequestEnded("r0"), 0.2)) == {"next": "a"}


def test_a_prompt_waits_for_pages_and_is_overtaken_by_shorter_ones_only_for_a_while() -> None:
    core = make_core("a")
    core.on(arrived("running", num_prompt_tokens=16 * 80), 0.0)
    assert core.on(arrived("big", num_prompt_tokens=16 * 40), 0.0) == []
    assert sends(core.on(arrived("small"), 0.0)) == {"small": "a"}
    assert core.on(arrived("late"), 5.0) == [], "nothing takes the pages that it waits for"
    core.on(RequestEnded("small"), 5.0)
    core.on(LoadChanged("a", 1, IDLE), 5.1)
    assert core.num_queued == 0
    assert sends(core.on(RequestEnded("running"), 5.2)) == {}


def test_an_idle_replica_takes_even_what_does_not_fit() -> None:
    core = make_core("a")
    assert sends(core.on(arrived("huge", num_prompt_tokens=10**6), 0.0)) == {"huge": "a"}


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    core = make_core("a", load=ReplicaLoad(), max_queued_requests=3, max_waiting_per_replica=0)
    for number in range(3):
        assert core.on(arrived(f"q{number}"), 0.0) == []
    assert failures(core.on(arrived("over"), 0.0)) == {"over": Overloaded}
    core = make_core("a", load=ReplicaLoad(), max_queued_tokens=100, max_waiting_per_replica=0)
    assert core.on(arrived("alone", num_prompt_tokens=1000), 0.0) == []
    assert failures(core.on(arrived("over"), 0.0)) == {"over": Overloaded}


def test_retry_after_is_what_the_queue_takes_to_drain() -> None:
    core = make_core("a", max_queued_requests=1, max_waiting_per_replica=0)
    now = 0.0
    for number in range(400):  # a steady 100 tokens per second
        core.on(arrived(f"r{number}", num_prompt_tokens=10), now)
        now += 0.1
        core.on(RequestEnded(f"r{number}"), now)
    for number in range(4):
        core.on(arrived(f"running{number}"), now)
    core.on(arrived("queued", num_prompt_tokens=900), now)
    (action,) = core.on(arrived("over", num_prompt_tokens=100), now)
    assert isinstance(action, Fail)
    assert action.error.retry_after_s == pytest.approx(10, rel=0.1)


def test_the_drain_rate_forgets() -> None:
    rate = DrainRate(window_s=10)
    rate.add(1000, 0.0)
    assert rate.tokens_per_s(0.0) == pytest.approx(100)
    assert rate.tokens_per_s(100.0) < 0.01
    assert rate.retry_after_s(1, 1000.0) == pytest.approx(60)


def test_a_request_that_waited_past_its_deadline_is_dropped() -> None:
    core = make_core("a", load=ReplicaLoad(), max_waiting_per_replica=0)
    core.on(arrived("r", deadline=5.0), 0.0)
    assert core.next_wakeup() == 5.0
    assert core.on(Ticked(is_second=False), 4.9) == []
    assert failures(core.on(Ticked(is_second=False), 5.0)) == {"r": DeadlineExceeded}
    assert failures(core.on(arrived("late", deadline=5.0), 6.0)) == {"late": DeadlineExceeded}


def test_without_a_replica_a_new_request_is_refused_at_once() -> None:
    core = make_core()
    core.on(Ticked(), 0.0)
    (action,) = core.on(arrived("r"), 10.0)
    assert isinstance(action, Fail)
    assert isinstance(action.error, EngineNotReady)
    assert action.error.retry_after_s


def test_a_router_that_has_just_started_waits_for_its_replicas_to_report() -> None:
    core = make_core(discovery_s=3.0)
    core.on(Ticked(), 100.0)
    assert core.on(arrived("r"), 101.0) == []
    assert core.on(arrived("s"), 102.0) == []
    assert sends(core.on(ReplicaReported("a", 0, IDLE), 102.5)) == {"r": "a", "s": "a"}
    core = make_core(discovery_s=3.0)
    core.on(arrived("r"), 100.0)
    assert failures(core.on(Ticked(is_second=False), 103.0)) == {"r": EngineNotReady}


def test_a_new_request_may_wait_for_a_replica_where_configured() -> None:
    core = make_core(replica_wait_s=3.0, discovery_s=0.0)
    assert core.on(arrived("r"), 0.0) == []
    assert core.on(arrived("s"), 1.0) == []
    assert failures(core.on(Ticked(is_second=False), 3.0)) == {"r": EngineNotReady}
    assert sends(core.on(ReplicaReported("a", 0, IDLE), 3.5)) == {"s": "a"}


def test_a_migrated_request_waits_for_a_replica_that_it_does_not_exclude() -> None:
    core = make_core("a")
    assert core.on(arrived("r", excluded=frozenset({"a"})), 0.0) == []
    assert sends(core.on(arrived("other"), 1.0)) == {"other": "a"}
    assert sends(core.on(ReplicaReported("b", 0, IDLE), 6.0)) == {"r": "b"}


def test_a_migrated_request_does_not_wait_for_ever() -> None:
    core = make_core("a", migration_wait_s=30.0)
    core.on(arrived("r", excluded=frozenset({"a"})), 0.0)
    assert failures(core.on(Ticked(), 30.0)) == {"r": EngineNotReady}


def test_a_suspected_replica_gets_nothing_until_it_reports() -> None:
    core = make_core("a", "b")
    running = sends(core.on(arrived("r"), 0.0))["r"]
    assert core.on(ReplicaSuspected(running), 0.0) == [Resubscribe(running)]
    other = {"a": "b", "b": "a"}[running]
    assert [sends(core.on(arrived(f"s{n}"), 0.0))[f"s{n}"] for n in range(3)] == [other] * 3
    assert core.num_booked == 4, "what runs there may go on"
    core.on(ReplicaReported(running, 9, IDLE), 0.0)
    assert sends(core.on(arrived("t"), 0.0)) == {"t": running}


def test_a_router_that_lost_touch_with_its_only_replica_waits_for_it_for_a_moment() -> None:
    core = make_core("a", discovery_s=3.0)
    core.on(ReplicaSuspected("a"), 100.0)
    assert core.on(arrived("r"), 100.1) == []
    assert sends(core.on(ReplicaReported("a", 9, IDLE), 101.0)) == {"r": "a"}
    core.on(ReplicaSuspected("a"), 200.0)
    assert core.on(arrived("s"), 202.9) == []
    assert failures(core.on(Ticked(is_second=False), 203.0)) == {"s": EngineNotReady}
    assert failures(core.on(arrived("t"), 203.1)) == {"t": EngineNotReady}


def test_a_removed_replica_fails_what_it_ran_and_names_itself() -> None:
    core = make_core("a")
    core.on(arrived("r"), 0.0)
    (action,) = core.on(ReplicaRemoved("a"), 1.0)
    assert isinstance(action, Fail)
    assert isinstance(action.error, EngineDead)
    assert action.error.replica_id == "a"
    assert core.num_booked == 0
    assert core.on(RequestEnded("r"), 1.0) == []


def test_a_gap_in_the_events_asks_for_a_report() -> None:
    core = make_core("a")
    assert core.on(LoadChanged("a", 1, IDLE), 0.0) == []
    assert core.on(LoadChanged("a", 3, IDLE), 0.0) == [Resubscribe("a")]
    assert core.on(LoadChanged("unknown", 1, IDLE), 0.0) == [Resubscribe("unknown")]


def test_a_silent_replica_is_removed_and_a_stalled_router_removes_nobody() -> None:
    core = make_core("a", max_silent_ticks=3)
    core.on(arrived("r"), 0.0)
    assert core.on(Ticked(), 1000.0) == [], "one tick after a long stall"
    core.on(LoadChanged("a", 1, IDLE), 1000.1)
    now = 1000.0
    for _ in range(3):
        now += 1
        assert core.on(Ticked(), now) == []
    assert failures(core.on(Ticked(), now + 1)) == {"r": EngineDead}


def test_a_draining_replica_may_be_silent() -> None:
    core = make_core("a", max_silent_ticks=3)
    core.on(arrived("r"), 0.0)
    core.on(ReplicaSuspected("a"), 0.0)
    for second in range(100):
        assert core.on(Ticked(), float(second)) == []
    assert core.num_booked == 1


def test_a_drained_replica_gets_nothing_new_until_it_is_resumed() -> None:
    core = make_core("a", "b")
    for number in range(4):
        core.on(arrived(f"before{number}"), 0.0)
    running = {r: view.replica_id for view in core.routable.values() for r in view.bookings}
    assert core.on(ReplicaDrained("a", is_drained=True), 0.0) == []
    after = [sends(core.on(arrived(f"after{number}"), 0.0)) for number in range(2)]
    assert [set(sent.values()) for sent in after] == [{"b"}, {"b"}]
    assert core.num_booked == 6, "what ran goes on"
    # A report does not bring it back, nor does its silence in between.
    core.on(ReplicaReported("a", 1, IDLE), 0.0)
    core.on(ReplicaRemoved("b"), 0.0)
    assert failures(core.on(arrived("new"), 10.0)) == {"new": EngineNotReady}
    for request_id, replica_id in running.items():
        if replica_id == "a":
            core.on(RequestEnded(request_id, 1), 10.0)
    core.on(ReplicaDrained("a", is_drained=False), 10.0)
    assert sends(core.on(arrived("newer"), 10.0)) == {"newer": "a"}


def test_the_limits_are_validated() -> None:
    with pytest.raises(ValueError, match="max_queued_requests must be >= 1, got 0"):
        RouterConfig(max_queued_requests=0)
    with pytest.raises(ValueError, match="replica_wait_s"):
        RouterConfig(replica_wait_s=-1)


CHAIN = tuple(bytes([n]) * 16 for n in range(200))
BIG = ReplicaLoad(
    num_slots=64, num_free_pages=9000, num_pages=9000, page_size=16, max_chunk_tokens=512
)


def prompt_of(num_pages: int, request_id: str = "r", **extras: object) -> RequestArrived:
    return arrived(
        request_id, num_prompt_tokens=16 * num_pages + 1, page_keys=CHAIN[:num_pages], **extras
    )


def test_a_prompt_goes_where_its_pages_are() -> None:
    core = make_core("a", "b", "c", load=BIG)
    core.on(LoadChanged("b", 1, BIG, CacheChange(stored=CHAIN[:100])), 0.0)
    for number in range(10):
        assert sends(core.on(prompt_of(100, f"r{number}"), 1.0 + number)) == {f"r{number}": "b"}
        core.on(RequestEnded(f"r{number}"), 1.5 + number)
    core.on(LoadChanged("b", 2, BIG, CacheChange(dropped=CHAIN[:100])), 20.0)
    found: set[str] = set()
    for number in range(30):
        found |= set(sends(core.on(prompt_of(100, f"s{number}"), 21.0)).values())
        core.on(RequestEnded(f"s{number}"), 21.0)
    assert found == {"a", "b", "c"}, "evicted: nobody is better than another"


def test_a_hit_does_not_outweigh_a_queue() -> None:
    core = make_core("a", "b", load=BIG)
    core.on(LoadChanged("a", 1, BIG, CacheChange(stored=CHAIN[:5])), 0.0)
    targets = [sends(core.on(prompt_of(20, f"r{n}"), 0.0))[f"r{n}"] for n in range(40)]
    assert targets[0] == "a"
    assert targets.count("b") >= 10, "a prefix that everyone shares does not draw everyone"


def test_a_request_waits_a_moment_for_a_replica_whose_pages_are_worth_more_than_its_backlog() -> (
    None
):
    core = make_core("a", "b", load=BIG, max_backlog_s=0.1)
    busy = BIG._replace(num_running=1, num_pending_prefill_tokens=2500)
    core.on(LoadChanged("a", 1, busy, CacheChange(stored=CHAIN)), 0.0)
    num_pages = len(CHAIN)
    assert core.on(prompt_of(num_pages, "r"), 0.0) == []
    assert core.next_wakeup() < 1.0
    assert sends(core.on(arrived("other"), 0.0)) == {"other": "b"}, "it holds up nobody else"
    assert sends(core.on(LoadChanged("a", 2, BIG), 0.1)) == {"r": "a"}
    core.on(RequestEnded("r"), 0.2)
    far = BIG._replace(num_running=1, num_pending_prefill_tokens=100_000)
    core.on(LoadChanged("a", 3, far), 0.3)
    assert sends(core.on(prompt_of(num_pages, "s"), 0.3)) == {"s": "b"}, "worth less"


def test_a_request_waits_for_a_replica_that_holds_its_prefix_and_has_no_pages_left() -> None:
    core = make_core("a", "b", load=BIG)
    core.on(LoadChanged("a", 1, BIG, CacheChange(stored=CHAIN)), 0.0)
    long = prompt_of(len(CHAIN), "long")
    assert sends(core.on(prompt_of(len(CHAIN), "stays"), 0.0)) == {"stays": "a"}
    assert sends(core.on(arrived("short"), 0.0)) == {"short": "b"}
    core.on(RequestEnded("short", 1), 0.1)  # so long does a request stay
    full = BIG._replace(num_running=1, num_free_pages=len(CHAIN) - 1)
    core.on(LoadChanged("a", 2, full), 0.2)
    core.on(LoadChanged("b", 1, full._replace(num_free_pages=len(CHAIN) + 40)), 0.2)
    assert core.on(long, 0.2) == []
    assert core.next_wakeup() < 0.3, "it is looked at again"
    assert sends(core.on(arrived("other", num_prompt_tokens=500), 0.2)) == {"other": "b"}
    assert sends(core.on(LoadChanged("a", 3, BIG), 0.3)) == {"long": "a"}


def test_a_request_does_not_wait_for_a_replica_for_longer_than_others_may_overtake_it() -> None:
    core = make_core("a", "b", load=BIG)
    core.on(LoadChanged("a", 1, BIG, CacheChange(stored=CHAIN)), 0.0)
    core.on(prompt_of(len(CHAIN), "stays"), 0.0)
    core.on(arrived("short"), 0.0)
    core.on(RequestEnded("short", 1), 0.1)
    full = BIG._replace(num_running=1, num_free_pages=len(CHAIN) - 1)
    core.on(LoadChanged("a", 2, full), 0.2)
    core.on(LoadChanged("b", 1, full._replace(num_free_pages=len(CHAIN) + 40)), 0.2)
    core.on(prompt_of(len(CHAIN), "long"), 0.2)
    now = 0.2
    while not (sent := sends(core.on(Ticked(is_second=False), now))):
        assert core.next_wakeup() > now
        now = core.next_wakeup()
        assert now < 5, "a never has pages"
    assert sent == {"long": "b"}
    assert now > 0.5


def test_a_long_prompt_goes_where_it_is_computed_first_for_all_the_streams_there() -> None:
    core = make_core("a", "b", load=BIG)
    streams = BIG._replace(num_running=20, num_decodes=20, num_decode_context_tokens=2000)
    core.on(LoadChanged("a", 1, streams), 0.0)
    core.on(LoadChanged("b", 1, BIG._replace(num_pending_prefill_tokens=10_000)), 0.0)
    assert sends(core.on(arrived("r", num_prompt_tokens=60_000), 0.0)) == {"r": "a"}


def test_a_gap_in_the_events_is_repaired_by_a_snapshot_of_the_cache() -> None:
    core = make_core("a", "b", load=BIG)
    core.on(LoadChanged("a", 1, BIG, CacheChange(stored=CHAIN[:100])), 0.0)
    assert core.on(LoadChanged("a", 3, BIG), 0.0) == [Resubscribe("a")]
    core.on(ReplicaReported("a", 3, BIG, CHAIN[:3]), 0.0)
    core.on(LoadChanged("b", 1, BIG, CacheChange(stored=CHAIN[:100])), 0.0)
    assert sends(core.on(prompt_of(100), 1.0)) == {"r": "b"}


def test_a_replica_that_died_and_another_in_its_place_share_no_pages() -> None:
    core = make_core("a", load=BIG)
    core.on(LoadChanged("a", 1, BIG, CacheChange(stored=CHAIN[:100])), 0.0)
    core.on(ReplicaRemoved("a"), 0.0)
    core.on(ReplicaReported("b", 0, BIG), 0.0)
    core.on(ReplicaReported("c", 0, BIG, CHAIN[:50]), 0.0)
    assert sends(core.on(prompt_of(100), 1.0)) == {"r": "c"}


def test_what_cannot_meet_its_target_is_refused_with_the_time_to_come_back() -> None:
    busy = BIG._replace(num_running=1, num_pending_prefill_tokens=400_000)
    core = make_core("a", load=busy, max_backlog_s=60.0)
    (action,) = core.on(arrived("r", ttft_target_s=2.0), 0.0)
    assert isinstance(action, Fail)
    assert isinstance(action.error, Overloaded)
    assert action.error.retry_after_s == pytest.approx(400_000 * 70e-6 - 2, rel=0.2)
    assert sends(core.on(arrived("patient", ttft_target_s=60.0), 0.0)) == {"patient": "a"}


def test_a_backlog_keeps_requests_in_the_router_until_it_is_worked_off() -> None:
    busy = BIG._replace(num_running=1, num_pending_prefill_tokens=400_000)
    core = make_core("a", load=busy)
    assert core.on(arrived("r"), 0.0) == []
    assert core.on(arrived("s", ttft_target_s=60.0), 0.0) == []
    assert sends(core.on(LoadChanged("a", 1, BIG), 1.0)) == {"r": "a", "s": "a"}


def test_queued_work_past_its_target_gets_a_deadline_error() -> None:
    busy = BIG._replace(num_running=1, num_pending_prefill_tokens=35_000)
    core = make_core("a", load=busy)
    core.on(arrived("r", ttft_target_s=3.0), 0.0)
    assert core.next_wakeup() == 3.0
    assert failures(core.on(Ticked(is_second=False), 3.0)) == {"r": DeadlineExceeded}


def test_a_replica_that_decodes_too_slowly_is_avoided() -> None:
    crowded = BIG._replace(num_running=40, num_decodes=40, num_decode_context_tokens=2_000_000)
    loaded = BIG._replace(num_running=1, num_pending_prefill_tokens=10_000)
    core = make_core("a", "b", load=crowded)
    core.on(LoadChanged("b", 1, loaded), 0.0)
    assert sends(core.on(arrived("r", tpot_target_s=0.03), 0.0)) == {"r": "b"}


def test_tenants_that_wait_take_turns() -> None:
    core = make_core("a", load=BIG._replace(num_slots=1), max_waiting_per_replica=0)
    core.on(arrived("running"), 0.0)
    for number in range(20):
        core.on(arrived(f"heavy{number}", tenant="h"), 0.0)
    core.on(arrived("light0", tenant="l"), 0.1)
    core.on(arrived("light1", tenant="l"), 0.1)
    order: list[str] = []
    last = "running"
    for _ in range(6):
        (last,) = sends(core.on(RequestEnded(last), 1.0))
        order.append(last)
    assert sum(name.startswith("light") for name in order) == 2


class RouterMachine(RuleBasedStateMachine):
    """Any order of events; the test keeps its own books from the actions alone."""

    CONFIG = RouterConfig(
        max_queued_requests=5,
        max_queued_tokens=2000,
        max_waiting_per_replica=1,
        replica_wait_s=2.0,
        migration_wait_s=4.0,
        max_silent_ticks=2,
    )
    replica_ids = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.core = RouterCore(self.CONFIG, random.Random(0))
        self.now = 0.0
        self.num_requests = 0
        self.waiting: dict[str, RequestArrived] = {}
        self.running: dict[str, str] = {}
        self.over: set[str] = set()
        self.sequences: dict[str, int] = {}

    def feed(self, event: Event) -> None:
        for action in self.core.on(event, self.now):
            match action:
                case Send(request_id, replica_id):
                    request = self.waiting.pop(request_id)
                    assert replica_id not in request.excluded
                    assert request.deadline is None or request.deadline > self.now
                    assert replica_id in self.core.routable
                    self.running[request_id] = replica_id
                    view = self.core.routable[replica_id]
                    assert view.free_slots(max_waiting=1) >= 0, "more than its credit"
                case Fail(request_id, error):
                    was_running = self.running.pop(request_id, None) is not None
                    was_waiting = self.waiting.pop(request_id, None) is not None
                    assert was_running != was_waiting
                    assert isinstance(error, EngineDead) == was_running
                    self.over.add(request_id)
                case Resubscribe():
                    pass

    @rule(
        num_prompt_tokens=st.sampled_from([1, 15, 16, 200, 900]),
        budget_s=st.none() | st.sampled_from([0.0, 1.0, 3.0]),
        priority=st.integers(-1, 1),
        excluded=st.frozensets(replica_ids, max_size=2),
    )
    def arrive(
        self,
        num_prompt_tokens: int,
        budget_s: float | None,
        priority: int,
        excluded: frozenset[str],
    ) -> None:
        request = RequestArrived(
            request_id=f"r{self.num_requests}",
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=7,
            deadline=None if budget_s is None else self.now + budget_s,
            priority=priority,
            excluded=excluded,
        )
        self.num_requests += 1
        self.waiting[request.request_id] = request
        self.feed(request)

    @precondition(lambda self: self.num_requests > 0)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request_id = f"r{data.draw(st.integers(0, self.num_requests - 1))}"
        self.waiting.pop(request_id, None)
        self.running.pop(request_id, None)
        self.over.add(request_id)
        self.feed(RequestEnded(request_id))

    @rule(
        replica_id=replica_ids,
        is_report=st.booleans(),
        gap=st.booleans(),
        num_foreign=st.integers(0, 3),
        num_free_pages=st.integers(0, 60),
    )
    def hear(
        self, replica_id: str, *, is_report: bool, gap: bool, num_foreign: int, num_free_pages: int
    ) -> None:
        num_own = sum(1 for target in self.running.values() if target == replica_id)
        load = ReplicaLoad(
            num_running=num_own + num_foreign,
            num_slots=3,
            num_free_pages=num_free_pages,
            num_pages=60,
            page_size=16,
        )
        sequence = self.sequences.get(replica_id, 0) + (2 if gap else 1)
        self.sequences[replica_id] = sequence
        kind = ReplicaReported if is_report else LoadChanged
        self.feed(kind(replica_id, sequence, load))

    @rule(replica_id=replica_ids)
    def suspect(self, replica_id: str) -> None:
        self.feed(ReplicaSuspected(replica_id))
        assert replica_id not in self.core.routable

    @rule(replica_id=replica_ids)
    def remove(self, replica_id: str) -> None:
        self.feed(ReplicaRemoved(replica_id))
        assert replica_id not in self.running.values()

    @rule(elapsed_s=st.sampled_from([0.01, 0.5, 1.0, 5.0]))
    def tick(self, elapsed_s: float) -> None:
        self.now += elapsed_s
        self.feed(Ticked())

    @invariant()
    def no_request_is_lost(self) -> None:
        assert self.core.num_queued == len(self.waiting)
        assert self.core.num_booked == len(self.running)
        everyone = set(self.waiting) | set(self.running) | self.over
        assert everyone == {f"r{n}" for n in range(self.num_requests)}

    @invariant()
    def bookings_match(self) -> None:
        for replica_id, view in self.core.routable.items():
            assert set(view.bookings) == {r for r, t in self.running.items() if t == replica_id}
            assert view.num_booked_tokens == sum(b.num_tokens for b in view.bookings.values())

    @invariant()
    def the_queue_is_bounded(self) -> None:
        num_tokens = sum(request.num_prompt_tokens for request in self.waiting.values())
        assert self.core.num_queued_tokens == num_tokens
        assert len(self.waiting) <= self.CONFIG.max_queued_requests
        assert num_tokens <= self.CONFIG.max_queued_tokens or len(self.waiting) == 1

    @invariant()
    def nobody_waits_past_a_deadline_or_without_a_wakeup(self) -> None:
        for request in self.waiting.values():
            if request.deadline is not None:
                assert request.deadline > self.now
                assert self.core.next_wakeup() <= request.deadline

    @invariant()
    def the_largest_waits_only_without_credit(self) -> None:
        """Others may wait behind it for its pages, in whatever order."""
        if not self.waiting:
            return
        largest = max(self.waiting.values(), key=lambda request: request.num_prompt_tokens)
        for replica_id, view in self.core.routable.items():
            if replica_id not in largest.excluded:
                assert view.free_slots(max_waiting=1) <= 0 or not view.has_pages_for(
                    largest.num_prompt_tokens
                )


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_decision_is_a_function_of_the_seed() -> None:
    def run() -> list[Action]:
        core = RouterCore(RouterConfig(), random.Random(42))
        actions: list[Action] = []
        for replica_id in "abcdefgh":
            actions += core.on(ReplicaReported(replica_id, 0, IDLE), 0.0)
        for number in range(100):
            actions += core.on(arrived(f"r{number}"), number * 0.1)
            actions += core.on(RequestEnded(f"r{number // 2}"), number * 0.1)
        return actions

    assert run() == run()


def test_time_is_only_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    own_thread, monotonic = threading.get_ident(), time.monotonic

    def forbidden() -> float:
        if threading.get_ident() != own_thread:
            return monotonic()  # others that run in this process may look at a clock
        raise AssertionError("the core read a clock")

    monkeypatch.setattr(time, "monotonic", forbidden)
    monkeypatch.setattr(time, "time", forbidden)
    core = make_core("a")
    core.on(arrived("r", deadline=5.0), 0.0)
    core.on(RequestEnded("r"), 1.0)
    core.on(Ticked(), 2.0)


def test_what_other_routers_may_have_sent_makes_the_emptiest_replicas_equal() -> None:
    assert water_level(np.array([0.0, 1.0, 5.0]), 3.0) == pytest.approx(2.0)
    assert water_level(np.array([4.0, 0.0]), 1.0) == pytest.approx(1.0)
    assert water_level(np.array([2.0, 2.0]), 6.0) == pytest.approx(5.0)


def test_a_full_queue_refuses_the_heaviest_tenants_last_request_instead_of_a_light_ones() -> None:
    core = make_core("a", max_waiting_per_replica=0, max_queued_requests=2)
    for number in range(6):
        core.on(arrived(f"heavy{number}", tenant="heavy"), float(number))
    actions = core.on(arrived("light", tenant="light"), 7.0)
    assert failures(actions) == {"heavy5": Overloaded}
    assert failures(core.on(arrived("heavy6", tenant="heavy"), 8.0)) == {"heavy6": Overloaded}
    assert sends(core.on(RequestEnded("heavy0"), 9.0)).keys() <= {"light", "heavy4"}
    assert core.num_queued == 1


def test_a_batch_window_lets_requests_go_together_when_its_time_is_up() -> None:
    core = make_core("a", "b", max_batch_wait_ms=10.0)
    assert core.on(arrived("r"), 1.0) == []
    assert core.on(arrived("s"), 1.005) == []
    assert core.next_wakeup() == pytest.approx(1.01)
    assert core.on(Ticked(is_second=False), 1.009) == []
    assert sends(core.on(Ticked(is_second=False), 1.011)).keys() == {"r", "s"}
    assert core.next_wakeup() == float("inf")
    assert core.on(arrived("t"), 2.0) == [], "the next one opens a window of its own"


def test_a_batch_that_nobody_waits_for_any_more_wakes_nobody() -> None:
    core = make_core("a", max_batch_wait_ms=10.0)
    core.on(arrived("r"), 1.0)
    core.on(RequestEnded("r"), 1.001)
    assert core.next_wakeup() == float("inf")
    core.on(arrived("s"), 1.005)
    assert core.next_wakeup() == pytest.approx(1.015)


def test_a_full_batch_does_not_wait() -> None:
    core = make_core("a", max_batch_wait_ms=1000.0, max_batch_size=3)
    assert core.on(arrived("r"), 0.0) == core.on(arrived("s"), 0.0) == []
    assert sends(core.on(arrived("t"), 0.0)).keys() == {"r", "s", "t"}


def test_a_batch_does_not_wait_longer_than_its_members_can() -> None:
    core = make_core("a", max_batch_wait_ms=1000.0)
    core.on(arrived("patient"), 0.0)
    core.on(arrived("urgent", ttft_target_s=0.2), 0.0)
    assert 0.05 < core.next_wakeup() <= 0.1
    assert len(sends(core.on(Ticked(is_second=False), core.next_wakeup()))) == 2


def test_what_waits_for_a_replica_is_not_held_as_well() -> None:
    core = make_core("a", max_batch_wait_ms=10.0, max_waiting_per_replica=0)
    for number in range(6):
        core.on(arrived(f"r{number}"), 0.0)
    assert len(sends(core.on(Ticked(is_second=False), 0.011))) == 4
    assert core.next_wakeup() > 1
    assert len(sends(core.on(RequestEnded("r0"), 0.02))) == 1
    assert core.on(arrived("late"), 0.03) == []
    assert len(sends(core.on(RequestEnded("r1"), 0.031))) == 1
