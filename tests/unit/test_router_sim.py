"""The router simulator: replicas in known time, conservation under faults, repeatability."""

from __future__ import annotations

import dataclasses
import gc
import math
from pathlib import Path

import pytest

from app.autoscaling.config import AutoscalingConfig
from app.router.cost import PredictedCost
from bench.autoscaling import SLOW, surge, warp
from bench.router_sim.bounds import bounds
from bench.router_sim.experiment import Experiment, capacity, repeat
from bench.router_sim.hardware import HBM_ONLY, HOST_TIER, Hardware
from bench.router_sim.page_cache import PageCache
from bench.router_sim.plots import plot_rates
from bench.router_sim.policies import POLICIES, LeastTokens, LongestPrefix, RoundRobin
from bench.router_sim.replica import SimReplica, SimSequence
from bench.router_sim.scaling import Fixed, Fleet, Ours
from bench.router_sim.simulation import Outcome, Scenario, Simulation
from bench.router_sim.traces import PAGE_SIZE, SimRequest, load, replay

SMALL = Hardware(num_slots=8, num_pages=60)


def drive(
    replica: SimReplica, arrivals: list[tuple[float, SimSequence]], until: float = math.inf
) -> None:
    """Give a replica sequences at given times and run it to the end."""
    pending = list(arrivals)
    while pending or replica.wakes_at < math.inf:
        if pending and pending[0][0] <= replica.wakes_at:
            at, sequence = pending.pop(0)
            replica.submit(sequence, at)
        else:
            replica.wake(replica.wakes_at)
            replica.pages.check()


def sequence(
    name: str, prompt: int, output: int, log: dict[str, list[float]], keys: tuple[bytes, ...] = ()
) -> SimSequence:
    times = log.setdefault(name, [])

    def note(_: SimSequence, at: float) -> None:
        times.append(at)

    return SimSequence(name, prompt, output, keys, note, note)


def test_one_request_takes_its_steps_time() -> None:
    log: dict[str, list[float]] = {}
    hardware = HBM_ONLY
    drive(SimReplica("r", hardware), [(1.0, sequence("a", 1000, 11, log))])
    first = hardware.step_s(1000, 1000 * 1000 / 2, 0)
    decode = sum(hardware.step_s(1, 0, 1000 + n) for n in range(1, 11))
    assert log["a"] == [pytest.approx(1 + first), pytest.approx(1 + first + decode)]


@pytest.mark.parametrize("num_held", [0, 30])
def test_an_idle_replica_takes_the_time_that_its_hardware_says(num_held: int) -> None:
    log: dict[str, list[float]] = {}
    keys = tuple(bytes([n]) for n in range(num_held))
    first, again = 30 * PAGE_SIZE + 1, 100 * PAGE_SIZE
    drive(
        SimReplica("r", HBM_ONLY),
        [(0.0, sequence("a", first, 1, log, keys)), (9.0, sequence("b", again, 1, log, keys))],
    )
    assert log["a"][0] == pytest.approx(HBM_ONLY.prefill_s(0, first))
    assert log["b"][0] - 9 == pytest.approx(HBM_ONLY.prefill_s(num_held * PAGE_SIZE, again))


def test_bounds_count_who_could_be_in_time_at_best() -> None:
    def request(number: int, num_pages: int, chain: int) -> SimRequest:
        keys = tuple(bytes([chain, page]) for page in range(num_pages))
        return SimRequest(str(number), float(number), num_pages * PAGE_SIZE + 1, 1, keys)

    one_page_s = HBM_ONLY.prefill_s(0, PAGE_SIZE + 1)
    chains = [request(0, 1, 1), request(1, 40, 2), request(2, 41, 2), request(3, 1, 1)]
    found = bounds(chains, HBM_ONLY, num_pages=39, ttft_s=2 * one_page_s)
    assert found == {"no_cache": 0.5, "refusing": 0.5, "serving": 0.75, "lru": 0.5}
    assert bounds(chains, HBM_ONLY, num_pages=41, ttft_s=2 * one_page_s)["lru"] == 0.75


def test_an_arrival_waits_for_the_running_step_only() -> None:
    log: dict[str, list[float]] = {}
    hardware = HBM_ONLY
    replica = SimReplica("r", hardware)
    drive(replica, [(0.0, sequence("a", 100, 400, log)), (1.0, sequence("b", 100, 2, log))])
    step = hardware.step_s(1, 0, 200)
    chunk = hardware.step_s(101, 100 * 50, 200)
    assert log["b"][0] - 1.0 < 1.05 * (step + chunk)
    assert replica.load().num_computed_tokens == 100 + 100 + 399 + 1


def test_pages_run_out_and_the_youngest_is_computed_again() -> None:
    log: dict[str, list[float]] = {}
    replica = SimReplica("r", Hardware(num_slots=8, num_pages=9))
    drive(replica, [(0.0, sequence(name, 1500, 1500, log)) for name in "abc"])
    assert replica.num_preemptions > 0
    assert all(len(times) == 2 for times in log.values())
    assert replica.pages.num_free == 9
    assert replica.load().num_running == 0


def test_the_prefix_cache_and_the_host_tier_save_prompts() -> None:
    keys = tuple(bytes([n]) for n in range(20))
    ttft: dict[str, list[float]] = {}
    for name, hardware in (("none", SMALL), ("host", Hardware(num_pages=60, num_host_pages=100))):
        log: dict[str, list[float]] = {}
        other = tuple(bytes([100, n]) for n in range(55))
        replica = SimReplica("r", hardware)
        again = sequence("again", 20 * PAGE_SIZE + 1, 1, log, keys)
        drive(
            replica,
            [
                (0.0, sequence("first", 20 * PAGE_SIZE + 1, 1, log, keys)),
                (5.0, sequence("hit", 20 * PAGE_SIZE + 1, 1, log, keys)),
                (10.0, sequence("evicts", 55 * PAGE_SIZE + 1, 1, log, other)),
                (20.0, again),
            ],
        )
        ttft[name] = [log["first"][0], log["hit"][0] - 5, log["again"][0] - 20]
    assert ttft["none"][1] < 0.1 * ttft["none"][0]
    assert ttft["none"][2] > 0.5 * ttft["none"][0]
    assert ttft["host"][2] < 0.3 * ttft["host"][0]


def test_a_page_cache_tells_what_it_holds() -> None:
    cache = PageCache(4, num_host_pages=2)
    held: set[bytes] = set()
    for number in range(10):
        assert cache.take((), 3)
        keys = [bytes([number, page]) for page in range(3)]
        assert all(cache.register(key) for key in keys)
        cache.release(keys, 0)
        cache.check()
        stored, dropped, _, _ = cache.take_changes()
        held = (held | set(stored)) - set(dropped)
        assert held == set(cache.snapshot()[0])
    assert len(cache.snapshot()[1]) == 2


def run(scenario: Scenario, requests: list[SimRequest], policy: str = "ours") -> Outcome:
    return Simulation(scenario, requests, POLICIES[policy]).run()


def requests(count: int = 150, rate: float = 4.0) -> list[SimRequest]:
    return replay("conversation", rate=rate, num_requests=count, seed=3)


@pytest.mark.parametrize("tier", [HBM_ONLY, HOST_TIER])
def test_every_request_ends_once_whatever_is_lost(tier: Hardware) -> None:
    scenario = Scenario(
        num_replicas=4,
        num_routers=2,
        hardware=dataclasses.replace(tier, num_pages=400, start_s=5.0),
        event_loss=0.2,
        deaths=((10.0, 0), (15.0, 1)),
        seed=5,
    )
    outcome = run(scenario, requests())
    assert all(record.error is None for record in outcome.records)
    assert all(record.ended_at < math.inf for record in outcome.records)
    assert any(record.num_attempts for record in outcome.records), "nobody was on the dead ones"


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    def times(seed: int) -> list[float]:
        scenario = Scenario(num_replicas=4, hardware=HBM_ONLY, event_loss=0.1, seed=seed)
        return [record.first_token_at for record in run(scenario, requests()).records]

    assert times(1) == times(1)
    assert times(1) != times(2)


def test_a_run_leaves_no_cycles_for_the_collector() -> None:
    gc.collect()
    run(Scenario(num_replicas=4, hardware=HBM_ONLY), requests())
    assert gc.isenabled()
    num_with_few = gc.collect()
    run(Scenario(num_replicas=4, hardware=HBM_ONLY), requests(300))
    assert gc.collect() < num_with_few + 100, "requests stay until the end of a run"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_serves_everybody_at_low_load(policy: str) -> None:
    scenario = Scenario(num_replicas=4, hardware=HBM_ONLY)
    outcome = run(scenario, requests(60, 1.0), policy)
    assert all(record.error is None for record in outcome.records)


def test_a_prefix_that_everyone_shares_does_not_send_everyone_to_one_replica() -> None:
    shared = replay("conversation", rate=4.0, num_requests=200, seed=3)
    scenario = Scenario(num_replicas=4, hardware=HBM_ONLY)
    ours = run(scenario, shared).num_sent
    assert max(ours.values()) < 1.6 * 200 / 4
    longest = Simulation(scenario, shared, LongestPrefix).run().num_sent
    assert max(longest.values()) > max(ours.values())


def test_what_cannot_meet_its_target_is_refused_early() -> None:
    scenario = Scenario(num_replicas=2, hardware=HBM_ONLY, are_targets_told=True)
    outcome = run(scenario, requests(200, 8.0))
    refused = [record for record in outcome.records if record.error is not None]
    served = [record for record in outcome.records if record.error is None]
    assert refused
    assert sum(record.ttft_s > 6.5 for record in served) < 0.1 * len(served)


def test_traces_keep_their_prefixes_rates_and_order() -> None:
    assert len(load("conversation")) == 12_031
    rows = replay("conversation", rate=10.0, num_requests=12_000, seed=0)
    assert [row.arrived_at for row in rows] == sorted(row.arrived_at for row in rows)
    assert rows[-1].arrived_at == pytest.approx(1200, rel=0.15)
    assert len({row.arrived_at for row in rows}) == len(rows), "jittered"
    assert len({row.page_keys[0] for row in rows if row.page_keys}) == 1
    copies = replay("conversation", rate=10.0, num_requests=1000, copies=4, seed=1)
    seconds = {row.page_keys[1] for row in copies if len(row.page_keys) > 1}
    assert len({row.page_keys[0] for row in copies if row.page_keys}) == 1
    assert len(seconds) > 500
    assert not any(len(set(row.page_keys)) < len(row.page_keys) for row in copies)


def test_results_are_means_and_ranges_over_seeds() -> None:
    experiment = Experiment(num_requests=40, num_replicas=2, rate=1.0)
    result = repeat(experiment, (1, 2))
    low, high = result["range"]["ttft_p50_s"]
    assert low <= result["mean"]["ttft_p50_s"] <= high
    assert low < high


def test_a_comparison_is_drawn(tmp_path: Path) -> None:
    experiments = [
        Experiment(num_requests=20, num_replicas=2, rate=rate, policy=policy)
        for rate in (1.0, 2.0)
        for policy in ("ours", "random")
    ]
    plot_rates(tmp_path / "rates.png", [repeat(experiment, (1,)) for experiment in experiments])
    assert (tmp_path / "rates.png").stat().st_size > 10_000


def test_capacity_is_the_rate_where_the_goal_is_just_met() -> None:
    experiment = Experiment(trace="azure-code", num_requests=150, num_replicas=1)
    rate = capacity(experiment, 1, low=0.5, high=64.0, resolution=0.1)
    assert 0.5 < rate < 64.0


def test_round_robin_takes_turns() -> None:
    scenario = Scenario(num_replicas=5, hardware=HBM_ONLY)
    sent = Simulation(scenario, requests(50, 0.5), RoundRobin).run().num_sent
    assert set(sent.values()) == {10}


def test_policies_are_the_cores_own_or_the_fields() -> None:
    assert POLICIES["ours"] is PredictedCost
    assert POLICIES["least-tokens"] is LeastTokens


class Script:
    """Wants what a script says: (time, replicas), by time."""

    def __init__(self, *steps: tuple[float, int]) -> None:
        self._steps = steps
        self.seen: list[Fleet] = []

    def decide(self, fleet: Fleet) -> int:
        self.seen.append(fleet)
        return [count for at, count in self._steps if at <= fleet.now][-1]


def test_replicas_come_late_go_when_idle_and_are_paid_from_order_to_release() -> None:
    hardware = dataclasses.replace(HBM_ONLY, start_s=20.0)
    requests = replay("azure-conv", rate=2.0, num_requests=200, seed=1)
    script = Script((0.0, 1), (30.0, 3), (60.0, 2))
    scenario = Scenario(num_replicas=1, hardware=hardware)
    outcome = Simulation(scenario, requests, PredictedCost, scaler=script).run()
    assert all(record.ended_at < math.inf for record in outcome.records)
    assert outcome.targets == [(0.0, 1), (30.0, 3), (60.0, 2)]
    serving = {fleet.now: len(fleet.loads) for fleet in script.seen}
    assert (serving[48.0], serving[52.0], serving[60.0], serving[62.0]) == (1, 3, 3, 2)
    end = max(record.ended_at for record in outcome.records)
    at_least = end + (end - 30) + 30
    assert at_least <= outcome.replica_s <= at_least + 30


def test_an_order_that_is_taken_back_is_paid_and_never_serves() -> None:
    hardware = dataclasses.replace(HBM_ONLY, start_s=20.0)
    requests = replay("azure-conv", rate=2.0, num_requests=100, seed=1)
    script = Script((0.0, 2), (10.0, 3), (14.0, 2))
    scenario = Scenario(num_replicas=2, hardware=hardware)
    outcome = Simulation(scenario, requests, PredictedCost, scaler=script).run()
    assert {len(fleet.loads) for fleet in script.seen} == {2}
    end = max(record.ended_at for record in outcome.records)
    assert outcome.replica_s == pytest.approx(2 * end + 20, abs=5)


def test_the_policy_beats_one_replica_and_a_warped_trace_keeps_its_length() -> None:
    hardware = dataclasses.replace(SLOW, start_s=30.0)
    plain = replay("azure-conv", rate=5.0, num_requests=1200, seed=2)
    requests = warp(plain, surge)
    assert requests[-1].arrived_at == pytest.approx(plain[-1].arrived_at)
    assert [r.request_id for r in requests] == [r.request_id for r in plain]
    config = AutoscalingConfig(max_replicas=6, ttft_target_s=5.0, boot_s=30.0)

    def goodput(scaler: Fixed | Ours) -> float:
        scenario = Scenario(num_replicas=1, hardware=hardware)
        outcome = Simulation(scenario, requests, PredictedCost, scaler=scaler).run()
        return sum(record.meets(5.0, 0.1) for record in outcome.records) / len(requests)

    assert goodput(Ours(config)) > goodput(Fixed(1)) + 0.2


def test_replicas_of_one_machine_slow_each_other_down_while_both_work() -> None:
    """A stretch of decode steps is planned anew when the other begins, and when it ends."""
    log: dict[str, list[float]] = {}
    hardware = dataclasses.replace(HBM_ONLY, contention=1.0)
    machine: list[SimReplica] = []
    machine += [SimReplica(name, hardware, machine) for name in "ab"]
    pending = [(0.0, "a", 300), (1.0, "b", 20)]
    while pending or any(replica.wakes_at < math.inf for replica in machine):
        replica = min(machine, key=lambda each: each.wakes_at)
        now = replica.wakes_at
        if pending and pending[0][0] <= now:
            now, name, output = pending.pop(0)
            machine["ab".index(name)].submit(sequence(name, 100, output, log), now)
        else:
            replica.wake(now)
        for each in machine:
            each.notice_machine(now)
    step = hardware.step_s(1, 0, 100)
    alone = hardware.step_s(100, 5000, 0) + 299 * step
    beside = log["b"][1] - 1.0
    assert beside == pytest.approx(2 * (hardware.step_s(100, 5000, 0) + 19 * step), rel=0.02)
    assert log["a"][1] == pytest.approx(alone + beside / 2, rel=0.02)
