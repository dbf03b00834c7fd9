"""The autoscaling policy: how it follows a load, and that it never flaps, whatever it sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.autoscaling.capacity import ReplicaModel, Workload, predict, replicas_needed
from app.autoscaling.config import AutoscalingConfig, Window
from app.autoscaling.policy import Observation, State, decide

REPLICA = ReplicaModel(
    step_s=0.0125,
    token_s=4.2e-5,
    context_s=3.6e-8,
    chunk_tokens=2048,
    num_slots=64,
    kv_tokens=335_000,
)
CHAT = Workload(
    requests_per_s=10.0,
    prefill_s=0.045,
    uncached_tokens=1000,
    output_tokens=200,
    context_tokens=1100,
)
CONFIG = AutoscalingConfig(max_replicas=32, tpot_target_s=0.05)
MONDAY = 1_767_571_200.0
"""2026-01-05 00:00 UTC."""


def needed(load: Workload, *, most: int = 64) -> int:
    return replicas_needed(load, REPLICA, ttft_s=2.0, tpot_s=0.05, kv_share=0.9, max_replicas=most)


class Service:
    """A service under the policy: replicas boot, requests arrive at a rate and are served."""

    def __init__(self, config: AutoscalingConfig, *, at: float = MONDAY, target: int = 1) -> None:
        self.config = config
        self.now = at
        self.target = target
        self.running = target
        self.booting: list[tuple[float, int]] = []
        self.state = State()
        self.requests = 0.0
        self.queued = 0.0
        self.targets: list[tuple[float, int]] = []

    def run(self, seconds: float, rate: Callable[[float], float], *, step_s: float = 2.0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.tick(rate(self.now) * step_s, step_s)

    def tick(self, arrived: float, step_s: float = 2.0) -> None:
        self.now += step_s
        self.requests += arrived
        while self.booting and self.booting[0][0] <= self.now:
            self.running = min(self.target, self.booting.pop(0)[1])
        decision, self.state = decide(self.config, self.state, self.observation(arrived))
        if decision.target > self.target:
            self.booting.append((self.now + self.config.boot_s, decision.target))
        self.running = min(self.running, decision.target)
        self.target = decision.target
        self.targets.append((self.now, self.target))

    def observation(self, arrived: float) -> Observation:
        count = self.requests
        seen = Observation(
            now=self.now, target=self.target, num_running=self.running, num_queued=self.queued
        )
        if not self.running:
            return replace(seen, num_queued=max(self.queued, arrived))
        return replace(
            seen,
            num_open=arrived,
            total_requests=count,
            total_prompt_tokens=1000 * count,
            total_sent=count,
            total_uncached_tokens=1000 * count,
            total_pairs=0.5e6 * count,
            total_ended=count,
            total_output_tokens=200 * count,
            step_s=REPLICA.step_s,
            token_s=REPLICA.token_s,
            pair_s=0.8e-9,
            context_s=REPLICA.context_s,
            chunk_tokens=2048.0,
            num_slots=64.0,
            kv_tokens=335_000.0,
        )

    def changes(self) -> Iterator[tuple[float, int]]:
        """(time, difference) of each change of the target."""
        before = self.targets[0][1]
        for at, target in self.targets:
            if target != before:
                yield at, target - before
            before = target


def test_an_idle_replica_serves_at_its_own_speed() -> None:
    idle = predict(replace(CHAT, requests_per_s=1e-9), REPLICA, 1)
    assert idle.ttft_s == pytest.approx(REPLICA.step_s + CHAT.prefill_s)
    assert idle.tpot_s == pytest.approx(REPLICA.step_s, rel=1e-3)


def test_what_cannot_be_served_is_overload() -> None:
    assert predict(replace(CHAT, requests_per_s=23.0), REPLICA, 1).ttft_s == math.inf


@given(
    st.floats(0.01, 200.0),
    st.floats(1.0, 3.0),
    st.floats(1.0, 20_000.0),
    st.floats(1.0, 4000.0),
)
def test_more_load_never_needs_fewer_and_more_replicas_never_serve_worse(
    rate: float, growth: float, prompt: float, output: float
) -> None:
    load = Workload(
        requests_per_s=rate,
        prefill_s=4.5e-5 * prompt,
        uncached_tokens=prompt,
        output_tokens=output,
        context_tokens=prompt + output / 2,
    )
    count = needed(load)
    assert count <= needed(replace(load, requests_per_s=growth * rate))
    few, many = predict(load, REPLICA, count), predict(load, REPLICA, count + 1)
    assert many.ttft_s <= few.ttft_s or few.ttft_s == many.ttft_s == math.inf
    assert many.tpot_s <= few.tpot_s


@given(
    rates=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=12),
    spans=st.lists(st.integers(1, 1000), min_size=12, max_size=12),
    low=st.integers(0, 4),
    high=st.integers(4, 12),
    window_s=st.sampled_from([0.0, 60.0, 600.0]),
)
@settings(max_examples=25, deadline=None)
def test_bounds_hold_and_what_went_up_stays_up(
    rates: list[float], spans: list[int], low: int, high: int, window_s: float
) -> None:
    """Whatever arrives: after each increase no decrease for a window, so no flapping."""
    config = replace(
        CONFIG, min_replicas=low, max_replicas=high, downscale_window_s=window_s, boot_s=60.0
    )
    service = Service(config, target=max(1, low))
    for rate, span in zip(rates, spans, strict=False):
        service.run(span, lambda _, rate=rate: rate, step_s=10.0)
    assert all(low <= target <= high for _, target in service.targets)
    raised_at = -math.inf
    for at, difference in service.changes():
        if difference > 0:
            raised_at = at
        else:
            assert at - raised_at >= min(window_s, config.scale_to_zero_after_s) - 15.0


@given(st.floats(0.05, 120.0), st.integers(1, 16), st.integers(0, 1 << 30))
@settings(max_examples=10, deadline=None)
def test_a_constant_load_with_noise_comes_to_rest(rate: float, first: int, seed: int) -> None:
    """After a window and a boot the target does not swing: at most one step down comes late."""
    service = Service(CONFIG, target=first)

    def noisy(now: float) -> float:
        return rate * (1 + 0.1 * math.sin(seed + now) * math.cos(seed + 1.7 * now))

    service.run(1500, noisy, step_s=5.0)
    service.targets = service.targets[-1:]
    service.run(1800, noisy, step_s=5.0)
    assert [difference for _, difference in service.changes()] in ([], [-1])
    rest = service.target
    assert needed(replace(CHAT, requests_per_s=rate, prefill_s=0.0424)) <= rest


def test_a_wave_is_followed_up_at_once_and_down_late() -> None:
    service = Service(CONFIG)
    service.run(600, lambda _: 5.0)
    before = service.target
    start = service.now
    service.run(300, lambda _: 60.0)
    peak = service.target
    assert peak >= needed(replace(CHAT, requests_per_s=60.0, prefill_s=0.0424))
    first = next(at for at, difference in service.changes() if at > start and difference > 0)
    assert first - start <= 20.0
    service.run(400, lambda _: 5.0)
    assert service.target == peak
    service.run(1500, lambda _: 5.0)
    assert service.target == before


def test_growth_is_met_before_it_is_there() -> None:
    """A ramp: when the load reaches what n replicas carry, more are up already."""
    service = Service(CONFIG)
    start = service.now + 300
    service.run(300, lambda _: 2.0)
    late = 0
    while service.now < start + 1200:
        service.run(10, lambda now: 2.0 + 0.05 * (now - start))
        rate = 2.0 + 0.05 * (service.now - start)
        enough = needed(replace(CHAT, requests_per_s=rate, prefill_s=0.0424))
        late += service.running < enough and service.now > start + 600
    assert late <= 3, "of sixty looks, each crossing of a threshold may cost one"


def test_zero_after_idleness_and_one_for_a_waiting_request() -> None:
    config = replace(CONFIG, min_replicas=0, scale_to_zero_after_s=300.0)
    service = Service(config)
    service.run(600, lambda _: 2.0)
    assert service.target >= 1
    service.run(290, lambda _: 0.0)
    assert service.target >= 1
    service.run(20, lambda _: 0.0)
    assert service.target == 0
    service.run(3600, lambda _: 0.0)
    assert service.target == 0
    service.tick(1.0)
    assert service.target == 1


def test_a_replica_that_boots_for_longer_than_idleness_lasts_is_not_taken_back() -> None:
    config = replace(CONFIG, min_replicas=0, scale_to_zero_after_s=60.0, boot_s=300.0)
    service = Service(config, target=0)
    service.tick(1.0)
    service.run(280, lambda _: 0.0)
    assert (service.running, service.target) == (0, 1)
    service.run(70, lambda _: 0.0)
    assert (service.running, service.target) == (1, 1)
    service.run(60, lambda _: 0.0)
    assert service.target == 0


def test_a_trickle_keeps_one_replica() -> None:
    service = Service(replace(CONFIG, min_replicas=0), target=3)
    service.run(3600, lambda now: 0.5 if now % 900 < 2 else 0.0)
    assert service.target == 1


def test_a_backlog_that_will_last_orders_replicas_and_one_that_will_not_does_not() -> None:
    for queued, grows in ((30_000.0, True), (20.0, False)):
        service = Service(CONFIG, target=3)
        service.run(600, lambda _: 15.0)
        before = service.target
        service.queued = queued
        service.run(30, lambda _: 15.0)
        assert (service.target > before) is grows


def test_without_reports_nothing_changes() -> None:
    """A controller that has restarted knows nothing for a while; so does one with hung replicas."""
    state = State()
    for second in range(0, 7200, 10):
        seen = Observation(now=MONDAY + second, target=5, num_running=5, num_open=1.0)
        seen = replace(seen, num_queued=1.0)
        decision, state = decide(CONFIG, state, seen)
        assert decision.target == 5


def test_a_router_that_starts_anew_is_no_surge() -> None:
    service = Service(CONFIG)
    service.run(900, lambda _: 20.0)
    before = service.target
    service.requests = 0.0
    service.run(120, lambda _: 20.0)
    assert service.target == before


NIGHTS = (
    Window(start="20:00", end="06:00", max_replicas=0),
    Window(start="08:00", end="18:00", days=("mon", "tue", "wed", "thu", "fri"), min_replicas=4),
)


@pytest.mark.parametrize(
    ("hours", "expected"),
    [
        (5.5, 0),  # shut down since Sunday evening
        (6.5, 1),
        (7.5, 1),
        (7.95, 4),  # four minutes ahead of eight o'clock, for the replicas to boot
        (12.0, 4),
        (19.0, 1),
        (20.5, 0),
        (24 + 12.0, 4),
        (5 * 24 + 12.0, 1),  # Saturday
    ],
)
def test_a_schedule_shuts_down_and_orders_ahead(hours: float, expected: int) -> None:
    config = replace(CONFIG, schedule=NIGHTS, downscale_window_s=300.0)
    service = Service(config, at=MONDAY + 3600 * hours - 1200, target=1)
    service.run(1200, lambda now: 0.01)
    assert service.target == expected
