"""The bench of a real service, without one: what it sends, reads, fits and predicts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from app.metrics import IngressMetrics
from app.router.config import RouterConfig
from app.router.cost import PredictedCost
from app.settings import parse_settings
from bench.router_real.client import Ask, Reply
from bench.router_real.prediction import calibrate, measured, predict, predicted
from bench.router_real.service import Sizes, Snapshot, parse_metrics, serve_config
from bench.router_real.workload import distinct, with_shared_prefixes
from bench.router_sim.calibration import path_s
from bench.router_sim.hardware import Hardware
from bench.router_sim.replica import SimReplica, SimSequence
from bench.router_sim.simulation import Record, Scenario, Simulation
from bench.router_sim.traces import SimRequest
from replicas.wire import ReplicaLoad, ServiceStatus

SIZES = Sizes()
REAL = dataclasses.replace(
    SIZES.as_hardware(),
    overhead_s=0.012,
    weights_s=0.0,
    token_s=2e-3,
    pair_s=4e-7,
    context_s=3e-6,
)


def run(replica: SimReplica, arrivals: list[tuple[float, SimSequence]]) -> list[ReplicaLoad]:
    """Give a replica its sequences; return its load after each step."""
    loads = [replica.load()]
    pending = list(arrivals)
    while pending or replica.wakes_at < math.inf:
        if pending and pending[0][0] <= replica.wakes_at:
            at, sequence = pending.pop(0)
            replica.submit(sequence, at)
        else:
            replica.wake(replica.wakes_at)
            loads.append(replica.load())
    return loads


def sequence(number: int, asks: Ask, log: dict[int, list[float]]) -> SimSequence:
    times = log.setdefault(number, [])
    length = len(asks.prompt_token_ids)

    def note(_: SimSequence, at: float) -> None:
        times.append(at)

    return SimSequence(str(number), length, asks.max_tokens, (), note, note)


def test_the_service_gets_the_sizes_and_two_tenants(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    sizes = Sizes(model=str(tmp_path), num_slots=3, max_queued_requests=7)
    (application,) = serve_config(sizes, ("one", "two"))["applications"]
    settings = parse_settings(application["args"])
    assert settings.engine.max_num_seqs == 3
    assert settings.router.max_queued_requests == 7
    assert settings.replicas.num_replicas == 2
    assert len(settings.ingress.key_hashes) == 2


def test_loads_are_read_from_the_metrics() -> None:
    loads = {
        "a": ReplicaLoad(num_slots=8, num_steps=12, busy_s=3.25, num_context_tokens=99),
        "b": ReplicaLoad(num_slots=8, num_free_pages=4),
    }
    status = ServiceStatus(
        ready=True,
        replicas=loads,
        num_queued=5,
        num_queued_tokens=50,
        num_inflight=2,
        model_info=None,
    )
    seen = parse_metrics(IngressMetrics("i").render(status).decode())
    assert seen.num_queued == 5
    assert seen.loads == loads


def test_workloads_repeat_by_seed_and_share_what_they_should() -> None:
    asks = with_shared_prefixes(200, seed=1, rate=5.0)
    assert asks == with_shared_prefixes(200, seed=1, rate=5.0)
    assert asks != with_shared_prefixes(200, seed=2, rate=5.0)
    assert 10 < len({ask.prompt_token_ids[:192] for ask in asks}) <= 24
    assert len({ask.prompt_token_ids for ask in asks}) == 200
    assert asks[-1].arrival_s == pytest.approx(40, rel=0.3)
    alone = distinct(50, prompt_tokens=20, max_tokens=3, seed=1)
    assert len({ask.prompt_token_ids[:8] for ask in alone}) == 50


def test_step_times_are_recovered_from_reports() -> None:
    log: dict[int, list[float]] = {}
    asks = with_shared_prefixes(150, seed=3, rate=2.0)
    arrivals = [(ask.arrival_s, sequence(n, ask, log)) for n, ask in enumerate(asks)]
    loads = run(SimReplica("r", REAL), arrivals)
    snapshots = [Snapshot(float(n), 0, {"r": load}) for n, load in enumerate(loads)]
    step = REAL.step_s(96, 96 * 48, 0)
    idle = [
        Reply(ask=ask, sent_at=0.0, first_token_at=step + 0.02)
        for ask in distinct(3, prompt_tokens=96, max_tokens=1, seed=1)
    ]
    fitted, way_s = calibrate(SIZES, snapshots, idle)
    for work in ((1, 0, 200), (8, 0, 1600), (24, 16 * 100, 1600), (128, 128 * 64, 0)):
        assert fitted.step_s(*work) == pytest.approx(REAL.step_s(*work), rel=0.05), work
    assert way_s == pytest.approx(0.019, abs=0.005)


def test_contention_is_recovered_from_reports() -> None:
    """Two replicas on one machine, each now alone and now beside the other."""
    hardware = dataclasses.replace(REAL, contention=0.6)
    machine: list[SimReplica] = []
    machine += [SimReplica(name, hardware, machine) for name in "ab"]
    asks = with_shared_prefixes(300, seed=4, rate=2.0)
    log: dict[int, list[float]] = {}
    arrivals = [(ask.arrival_s, sequence(n, ask, log)) for n, ask in enumerate(asks)]
    snapshots: list[Snapshot] = []
    while arrivals or any(replica.wakes_at < math.inf for replica in machine):
        replica = min(machine, key=lambda each: each.wakes_at)
        seen_at = 0.1 * len(snapshots)
        arrives_at = arrivals[0][0] if arrivals else math.inf
        now = min(replica.wakes_at, seen_at, arrives_at)
        if now == seen_at:
            loads = {each.replica_id: each.load() for each in machine}
            snapshots.append(Snapshot(now, 0, loads))
        elif now == arrives_at:
            machine[len(arrivals) % 3 % 2].submit(arrivals.pop(0)[1], now)
        else:
            replica.wake(now)
        for each in machine:
            each.notice_machine(now)
    fitted, _ = calibrate(SIZES, snapshots, [Reply(ask=asks[0], sent_at=0.0, first_token_at=1.0)])
    assert fitted.contention == pytest.approx(0.6, abs=0.1)
    for work in ((1, 0, 200), (8, 0, 1600), (24, 16 * 100, 1600)):
        assert fitted.step_s(*work) == pytest.approx(hardware.step_s(*work), rel=0.15), work


def test_reports_without_work_fit_nothing() -> None:
    with pytest.raises(ValueError, match="no work"):
        calibrate(SIZES, [Snapshot(0.0, 0, {"r": ReplicaLoad()})] * 2, [])


def test_the_way_of_a_prompt_of_several_steps_is_what_is_left() -> None:
    first = REAL.step_s(128, 128 * 64, 0)
    second = REAL.step_s(72, 72 * (128 + 36), 0)
    assert path_s(REAL, [(200, first + second + 0.01)]) == pytest.approx(0.01)


def test_a_prediction_covers_every_request_and_finds_the_prefixes() -> None:
    asks = with_shared_prefixes(120, seed=4, rate=2.0)
    figures = predicted(predict(SIZES, REAL, asks, way_s=0.005, seed=1))
    assert 0.4 < figures["hit_share"] < 0.9
    assert figures["ttft_p50_ms"] > 1e3 * REAL.overhead_s
    again = predicted(predict(SIZES, REAL, asks, way_s=0.005, seed=1))
    assert figures == again


def test_real_and_predicted_figures_mean_the_same() -> None:
    asks = with_shared_prefixes(40, seed=5, rate=2.0)
    records = predict(SIZES, REAL, asks, way_s=0.005, seed=1)
    replies = [
        Reply(
            ask=ask,
            sent_at=record.request.arrived_at,
            first_token_at=record.first_token_at,
            ended_at=record.ended_at,
            token_ids=[1] * ask.max_tokens,
            num_cached_tokens=record.num_cached,
        )
        for ask, record in zip(asks, records, strict=True)
    ]
    assert measured(replies) == pytest.approx(predicted(records))


def test_a_planned_step_delays_whoever_arrives_and_mixed_steps_take_few_prompt_tokens() -> None:
    plain: Hardware = dataclasses.replace(REAL, num_planned_steps=0)
    times: dict[int, float] = {}
    stream, late = distinct(2, prompt_tokens=64, max_tokens=60, seed=6)
    for planned in (0, 1):
        log: dict[int, list[float]] = {}
        replica = SimReplica("r", dataclasses.replace(plain, num_planned_steps=planned))
        run(replica, [(0.0, sequence(0, stream, log)), (0.4, sequence(1, late, log))])
        times[planned] = log[1][0]
    assert times[1] - times[0] == pytest.approx(REAL.step_s(1, 0, 80), rel=0.1)
    # 64 tokens beside one stream: 16 at a time.
    assert times[0] - 0.4 > 4 * REAL.step_s(17, 16 * 32, 80)


def overload(rate: float, count: int, *, is_told: bool) -> list[Record]:
    """Short prompts, long answers, few slots: what a small service has."""
    asks = distinct(count, prompt_tokens=64, max_tokens=64, seed=1, rate=rate)
    requests = [SimRequest(str(n), ask.arrival_s, 64, 64, ()) for n, ask in enumerate(asks)]
    scenario = Scenario(
        num_replicas=2,
        hardware=REAL,
        typical_output=64,
        ttft_target_s=6.0,
        tpot_target_s=10.0,
        are_targets_told=is_told,
        event_interval_s=0.02,
    )
    config = RouterConfig(max_queued_requests=48)
    return Simulation(scenario, requests, PredictedCost, config).run().records


def test_where_slots_lack_three_times_the_load_costs_no_goodput() -> None:
    """Admitted for as long as the queue has room, nearly everybody would come just too late."""
    full = [record for record in overload(100.0, 68, is_told=False) if record.error is None]
    capacity = len(full) / max(record.ended_at for record in full)
    records = overload(3 * capacity, int(180 * capacity), is_told=True)
    good = [record for record in records if record.error is None and record.ttft_s <= 6.0]
    goodput = sum(12 <= record.ended_at < 60 for record in good) / 48
    assert goodput >= 0.9 * capacity
    served = sum(record.error is None for record in records)
    assert len(good) >= 0.95 * served
    refused = {record.error for record in records if record.error is not None}
    assert refused == {"overloaded"}, "at once, not after a wait"
