"""What the metrics cost, in microseconds of CPU: per token, per step, per request, per export.

    .venv/bin/python -m bench.metrics_cost

Goals: at most 2 us per token and 50 us per request, all processes together. The figures are of this
process without a cluster; with one, each of Ray's observations costs about 1 us more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from app.metrics import IngressMetrics
from app.router.metrics import RouterMetrics
from replicas.engine.buckets import Bucket
from replicas.engine.engine import StepTimes
from replicas.engine.scheduler import ScheduledSequence, StepPlan
from replicas.engine.sequence import Sequence
from replicas.engine.step_stats import StepStats
from replicas.engine_metrics import EngineMetrics
from replicas.wire import FinishReason, GenerateRequest, GenerateResult, SamplingParams, SinkAddress

_RESULT = GenerateResult(
    request_id="r",
    finish_reason=FinishReason.LENGTH,
    num_output_tokens=100,
    num_prompt_tokens=100,
    num_cached_tokens=0,
    queue_s=0.01,
    first_token_s=0.1,
)
_NO_SINK = SinkAddress(host="", port=0, sink_id="", key=b"")


def cpu_us(call: Callable[[], object], *, count: int, repeats: int = 5) -> float:
    """Return the median CPU time of a call, microseconds."""
    times_us: list[float] = []
    for _ in range(repeats):
        begin_s = time.thread_time()
        for _ in range(count):
            call()
        times_us.append((time.thread_time() - begin_s) / count * 1e6)
    return median(times_us)


def measure(*, count: int = 2000) -> dict[str, float]:
    """Measure each part, `count` calls at a time."""
    plan, bucket = _decode_plan(), Bucket(8, 8)
    stats, times = StepStats(), StepTimes(0.001, 0.001, 0.02, 0.001)
    ingress, engine, router = IngressMetrics("i"), EngineMetrics(), RouterMetrics()

    def token() -> None:
        ingress.inter_token_latency.observe(0.03)
        ingress.output_tokens.inc(1)

    def ingress_request() -> None:
        ingress.in_progress.inc()
        ingress.time_to_first_token.observe(0.1)
        ingress.time_per_output_token.observe(0.03)
        ingress.prompt_tokens.inc(100)
        ingress.cached_prompt_tokens.inc(0)
        ingress.in_progress.dec()
        ingress.request_ended("/v1/completions", 200, 1.0)

    def router_request() -> None:
        router.observe_decision(0.001, decision_s=0.0001)
        router.observe_answer(_RESULT)

    def export() -> None:
        stats.add(times, plan, bucket)
        engine.observe_steps(stats)

    return {
        "ingress us/token": cpu_us(token, count=count),
        "engine us/step": cpu_us(lambda: stats.add(times, plan, bucket), count=count),
        "engine us/request": cpu_us(
            lambda: engine.observe_request("length", 3.0, _RESULT), count=count
        ),
        "router us/request": cpu_us(router_request, count=count),
        "ingress us/request": cpu_us(ingress_request, count=count),
        "engine us/export (1 a second)": cpu_us(export, count=max(1, count // 20)),
    }


def _decode_plan() -> StepPlan:
    request = GenerateRequest(
        request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), sink=_NO_SINK
    )
    sequence = Sequence(
        request, arrival_number=0, arrival_s=0.0, max_total_tokens=10, root_key=b"\0" * 16
    )
    part = ScheduledSequence(sequence=sequence, slot=0, start=1, num_tokens=1, samples=True)
    return StepPlan(scheduled=(part,), num_tokens=1)


def main() -> None:
    """Print a line for each part."""
    for name, microseconds in measure().items():
        print(f"{name:32} {microseconds:8.2f}")


if __name__ == "__main__":
    main()
