"""The policy as Serve runs it: by value, in a process without this checkout."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from ray.serve._private.common import TimeStampedValue

from app.autoscaling.config import AutoscalingConfig, Window
from app.autoscaling.observation import observe
from app.autoscaling.serve_policy import latest_reports, serve_autoscaling
from app.router.core import RouterConfig, RouterCore
from app.router.events import ReplicaReported, RequestArrived, RequestEnded
from replicas.autoscaling_stats import RouterDemands, autoscaling_stats
from replicas.wire import ReplicaLoad, RouterDemand

CONFIG = AutoscalingConfig(
    min_replicas=0,
    max_replicas=8,
    schedule=(Window(start="22:00", end="05:00", days=("sat",), max_replicas=0),),
    timezone="Europe/Berlin",
)

CONTROLLER = """
import json, sys
sys.modules["app"] = None  # importing it fails
from types import SimpleNamespace
from ray import cloudpickle

kwargs = json.loads(sys.argv[1])
policy = cloudpickle.loads(sys.stdin.buffer.read())(**kwargs)
context = SimpleNamespace(
    current_time=1767571200.0, raw_metrics={}, target_num_replicas=0, current_num_replicas=0,
    total_queued_requests=1.0, policy_state={}, deployment_id="Engine",
)
target, context.policy_state = policy(context)
again, _ = policy(context)
print(target, again, policy.config.schedule[0].days)
"""


def test_the_policy_runs_where_this_checkout_is_not(tmp_path: Path) -> None:

    policy = serve_autoscaling(CONFIG).policy
    run = subprocess.run(
        [sys.executable, "-I", "-c", CONTROLLER, json.dumps(policy.policy_kwargs)],
        input=policy.get_serialized_policy_def(),
        capture_output=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert run.stdout.decode().strip() == "1 1 ('sat',)", run.stderr.decode()


def test_serve_is_given_no_delays_of_its_own() -> None:
    serve = serve_autoscaling(CONFIG)
    assert (serve.min_replicas, serve.max_replicas, serve.initial_replicas) == (0, 8, 1)
    assert serve.upscale_delay_s == serve.downscale_delay_s == serve.downscale_to_zero_delay_s == 0
    assert serve.metrics_interval_s == CONFIG.report_interval_s
    assert serve_autoscaling(AutoscalingConfig(max_replicas=2)).min_replicas == 1


def test_the_last_point_of_each_replica_counts_and_a_stale_one_does_not() -> None:
    series = {
        "num_slots": {
            "a": [TimeStampedValue(95.0, 8.0), TimeStampedValue(99.0, 16.0)],
            "b": [TimeStampedValue(40.0, 8.0)],
        },
        "num_running": {"a": [TimeStampedValue(99.0, 3.0)]},
    }
    assert latest_reports(series, 100.0) == [{"num_slots": 16.0, "num_running": 3.0}]


def test_what_routers_and_replicas_count_reaches_the_policy() -> None:
    core = RouterCore(RouterConfig(), random.Random(0))
    load = ReplicaLoad(
        num_slots=4, num_free_pages=60, num_pages=100, page_size=16, max_chunk_tokens=64
    )
    core.on(ReplicaReported("a", 0, load), 0.0)
    for number in range(3):
        core.on(RequestArrived(request_id=f"r{number}", num_prompt_tokens=50, max_tokens=10), 0.1)
    core.on(RequestEnded("r0", 7), 0.2)
    core.on(RequestEnded("r1", None), 0.2)
    demands = RouterDemands(lease_s=5.0)
    demands.tell("one", core.demand(), 10.0)
    demands.tell("two", RouterDemand(num_requests=5, num_queued=2, step_s=1.0), 10.0)
    report = autoscaling_stats(load, demands.total(12.0))
    seen = observe([report], now=1e9, target=2, num_running=1, num_queued=0.0)
    assert (seen.total_requests, seen.total_prompt_tokens, seen.total_sent) == (8, 150, 3)
    assert (seen.total_uncached_tokens, seen.total_ended, seen.total_output_tokens) == (150, 1, 7)
    assert (seen.num_queued, seen.num_slots, seen.kv_tokens) == (2, 4, 1600)
    assert seen.kv_share == 0.4
    assert seen.step_s == (1.0 + core.fleet.model.costs.step) / 2
    assert demands.total(16.0) == RouterDemand()


def test_a_migrated_request_counts_once() -> None:
    core = RouterCore(RouterConfig(), random.Random(0))
    for excluded in (frozenset[str](), frozenset({"a"})):
        core.on(
            RequestArrived(
                request_id=f"r{len(excluded)}",
                num_prompt_tokens=5,
                max_tokens=1,
                excluded=excluded,
            ),
            0.0,
        )
    assert core.demand().num_requests == 1
