"""The waiting queue: order within a tenant, fairness between tenants."""

from __future__ import annotations

import random

import pytest

from app.router.admission import AGEING, OUTPUT_WEIGHT, QueuedRequest, StayTime, WaitingQueue


def queued(name: str, **fields: object) -> QueuedRequest:
    defaults: dict[str, object] = {
        "request_id": name,
        "num_prompt_tokens": 10,
        "max_tokens": 10,
        "deadline": None,
        "priority": 0,
        "excluded": frozenset(),
        "replica_wait_until": 0.0,
    }
    return QueuedRequest(**(defaults | fields))  # type: ignore[arg-type]


def make_queue() -> WaitingQueue:
    return WaitingQueue(max_requests=10_000, max_tokens=10**9)


def serve_all(queue: WaitingQueue) -> list[str]:
    order: list[str] = []
    for request in queue.drain():
        queue.serve(request.request_id)
        order.append(request.request_id)
    return order


def test_the_shortest_goes_first_and_age_makes_up_for_length() -> None:
    queue = make_queue()
    queue.push(queued("long", prefill_s=1.0, arrived_at=0.0))
    queue.push(queued("short", prefill_s=0.1, arrived_at=0.5))
    queue.push(queued("late", prefill_s=0.1, arrived_at=AGEING))
    assert serve_all(queue) == ["short", "long", "late"]


def test_a_deadline_that_comes_near_goes_before_the_shortest() -> None:
    queue = make_queue()
    queue.push(queued("short", prefill_s=0.1, arrived_at=0.0))
    queue.push(queued("urgent", prefill_s=1.0, arrived_at=0.0, ttft_target_s=1.5))
    queue.push(queued("patient", prefill_s=1.0, arrived_at=0.0, ttft_target_s=60.0))
    assert serve_all(queue) == ["urgent", "short", "patient"]


def test_priority_goes_before_everything_else() -> None:
    queue = make_queue()
    queue.push(queued("later", priority=1))
    queue.push(queued("long", priority=0, prefill_s=9.0, tenant="b"))
    assert serve_all(queue) == ["long", "later"]


@pytest.mark.parametrize("seed", range(5))
def test_tenants_that_wait_are_never_further_apart_than_two_requests(seed: int) -> None:
    """A heavy tenant sends ten times as much in requests of other sizes; service stays equal."""
    rng = random.Random(seed)
    queue = make_queue()
    largest = 0.0
    for tenant, count, size in (("heavy", 2000, 400), ("light", 200, 900)):
        for number in range(count):
            request = queued(
                f"{tenant}{number}",
                tenant=tenant,
                num_prompt_tokens=rng.randint(1, size),
                max_tokens=rng.randint(1, size),
                prefill_s=rng.random(),
                arrived_at=rng.random(),
            )
            largest = max(largest, request.num_prompt_tokens + OUTPUT_WEIGHT * request.max_tokens)
            queue.push(request)
    served = {"heavy": 0.0, "light": 0.0}
    num_light = 0
    for request in queue.drain():
        served[request.tenant] += queue.serve(request.request_id).service
        num_light += request.tenant == "light"
        if num_light == 200:
            break
        assert abs(served["heavy"] - served["light"]) <= 2 * largest
    assert num_light == 200


def test_nobody_saves_up_service_while_not_waiting() -> None:
    queue = make_queue()
    for number in range(100):
        queue.push(queued(f"busy{number}", tenant="busy"))
        queue.serve(f"busy{number}")
    for number in range(10):
        queue.push(queued(f"busy again{number}", tenant="busy", arrived_at=1.0))
        queue.push(queued(f"new{number}", tenant="new", arrived_at=2.0))
    order = [name.rstrip("0123456789") for name in serve_all(queue)]
    assert 3 <= order[:10].count("busy again") <= 7


def test_a_refund_puts_a_tenant_forward_again() -> None:
    queue = make_queue()
    first = queued("a1", tenant="a", max_tokens=1000)
    queue.push(first)
    queue.push(queued("a2", tenant="a"))
    queue.push(queued("b1", tenant="b", max_tokens=100))
    queue.push(queued("b2", tenant="b"))
    queue.serve("a1")
    queue.serve("b1")
    queue.refund(first, num_output_tokens=0)
    assert serve_all(queue)[0] == "a2"


def test_the_memory_of_tenants_that_left_is_bounded() -> None:
    queue = make_queue()
    for number in range(20_000):
        queue.push(queued("r", tenant=f"t{number}"))
        queue.serve("r")
    assert len(queue._tenants) < 10_000


def test_equal_turns_decide_how_many_leave_before_a_new_request() -> None:
    queue = make_queue()
    new = queued("new", tenant="light")
    assert queue.num_before(new) == 0
    for number in range(20):
        queue.push(queued(f"heavy{number}", tenant="heavy"))
    assert queue.num_before(new) == 1
    assert queue.num_before(queued("more", tenant="heavy")) == 20
    for number in range(3):
        queue.push(queued(f"light{number}", tenant="light"))
    assert queue.num_before(new) == 7
    assert queue.num_before(queued("more", tenant="heavy")) == 23


def test_stays_are_averaged_from_the_first_on() -> None:
    stays = StayTime()
    assert stays.mean_s == 0
    stays.add(4.0)
    assert stays.mean_s == 4.0
    for _ in range(300):
        stays.add(1.0)
    assert stays.mean_s == pytest.approx(1.0, abs=0.01)


def bounded(max_requests: int, *, max_tokens: int = 10**9) -> WaitingQueue:
    return WaitingQueue(max_requests=max_requests, max_tokens=max_tokens)


def test_a_full_queue_makes_room_for_whoever_holds_less_of_it() -> None:
    queue = bounded(4)
    for number in range(4):
        queue.push(queued(f"heavy{number}", tenant="heavy", arrived_at=number))
    light = [queued(f"light{number}", tenant="light", arrived_at=9.0) for number in range(3)]
    for request, victim in zip(light, ("heavy3", "heavy2"), strict=False):
        (displaced,) = queue.displaced_by(request)
        assert displaced.request_id == victim
        queue.remove(victim)
        queue.push(request)
    assert queue.displaced_by(light[2]) == []
    assert queue.displaced_by(queued("heavy4", tenant="heavy")) == []


def test_room_is_made_by_tokens_where_tokens_are_what_is_short() -> None:
    queue = bounded(100, max_tokens=100)
    for number in range(3):
        queue.push(queued(f"short{number}", tenant="short", num_prompt_tokens=5))
    for number in range(4):
        queue.push(queued(f"long{number}", tenant="long", num_prompt_tokens=20, arrived_at=number))
    wide = queued("wide", tenant="wide", num_prompt_tokens=30)
    assert [victim.request_id for victim in queue.displaced_by(wide)] == ["long3", "long2"]
    assert queue.displaced_by(queued("too wide", tenant="wide", num_prompt_tokens=50)) == []


def test_nobody_is_displaced_by_a_lower_priority() -> None:
    queue = bounded(2)
    for number in range(2):
        queue.push(queued(f"heavy{number}", tenant="heavy", priority=1, arrived_at=number))
    assert queue.displaced_by(queued("light", tenant="light", priority=2)) == []
    assert len(queue.displaced_by(queued("light", tenant="light", priority=1))) == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_that_offers_more_than_its_share_gets_it_beside_one_that_offers_ten_times_more(
    seed: int,
) -> None:
    """Both always offer more than is served, so that the queue is full: service stays equal."""
    rng = random.Random(seed)
    queue = bounded(20)
    served = {"heavy": 0, "light": 0}
    for number in range(4000):
        tenant = "light" if rng.random() < 1 / 11 else "heavy"
        request = queued(f"{number}", tenant=tenant, arrived_at=float(number))
        if queue.is_full_for(request.num_prompt_tokens):
            displaced = queue.displaced_by(request)
            for victim in displaced:
                queue.remove(victim.request_id)
            if displaced:
                queue.push(request)
        else:
            queue.push(request)
        if number > 200 and number % 7 == 0:
            first = next(iter(queue.drain()))
            served[queue.serve(first.request_id).tenant] += 1
    assert abs(served["heavy"] - served["light"]) <= 2
