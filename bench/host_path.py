"""The host's time per decode step, on a device of constant step time: what the device waits for."""

from __future__ import annotations

import time
from typing import Any

from bench.constant_time import fake_engine
from bench.measurement import percentile
from replicas.wire import GenerateRequest, SamplingParams, SinkAddress

CASES = ((32, 0), (256, 0), (32, 64), (32, 1024))
"""Running and waiting sequences. Goals: 300 us at 32, 1 ms at 256, and 1,024 cost as 64 do."""

_NUM_STEPS = 300
_PROMPT_TOKENS = 32
_NO_SINK = SinkAddress(host="", port=0, sink_id="", key=b"")


def measure(
    num_running: int, num_waiting: int, *, step_s: float, num_steps: int = _NUM_STEPS
) -> dict[str, Any]:
    """Time steady decode steps, all slots taken.

    Args:
        num_running: sequences in each step.
        num_waiting: sequences that wait for a slot meanwhile.
        step_s: what the device takes; more than the host does, or the device is never waited for.
        num_steps: how many steps.

    Returns:
        Microseconds per step: everything but the wait for the device, and its parts.
    """
    engine = fake_engine(step_s, max_num_seqs=num_running)
    for i in range(num_running + num_waiting):
        request = GenerateRequest(
            request_id=str(i),
            prompt_token_ids=tuple(range(3 + i, 3 + i + _PROMPT_TOKENS)),
            sampling=SamplingParams(max_tokens=num_steps + 2 * num_running, ignore_eos=True),
            sink=_NO_SINK,
        )
        engine.validate(request)
        engine.add(request)
    while engine.scheduler.num_running < num_running or engine.load().num_pending_prefill_tokens:
        engine.step()
    host_us: list[float] = []
    parts: dict[str, list[float]] = {"schedule": [], "launch": [], "postprocess": []}
    for _ in range(num_steps):
        begin_s = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begin_s
        host_us.append((seconds - engine.times.wait) * 1e6)
        for name, values in parts.items():
            values.append(getattr(engine.times, name) * 1e6)
    assert engine.scheduler.num_running == num_running, "a sequence ended within the measurement"
    return {
        "running": num_running,
        "waiting": num_waiting,
        "host us p50": percentile(host_us, 0.5),
        "host us p99": percentile(host_us, 0.99),
        **{f"{name} us": percentile(values, 0.5) for name, values in parts.items()},
    }


def measure_all(step_s: float) -> list[dict[str, Any]]:
    """Measure every one of `CASES`."""
    return [measure(running, waiting, step_s=step_s) for running, waiting in CASES]
