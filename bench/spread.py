"""How evenly decode steps take their time, beside a fixed loop that does nothing but count.

The loop tells how much of the spread is the machine's: where its own p99 / p50 is high, so must be
the engine's. Both are measured in turn, in blocks, so that they see the same machine.
"""

from __future__ import annotations

import time
from typing import Any

from bench.measurement import percentile
from replicas.engine.engine import Engine
from replicas.wire import GenerateRequest, SamplingParams, SinkAddress

_BLOCK = 50
_PROMPT_TOKENS = 64
_CALIBRATION_ROUNDS = 5
_NO_SINK = SinkAddress(host="", port=0, sink_id="", key=b"")


def measure(engine: Engine[Any], *, num_steps: int, concurrency: int = 16) -> dict[str, Any]:
    """Time steady decode steps of `concurrency` sequences and, in turn, equal stretches of a loop.

    Args:
        engine: warmed up and idle.
        num_steps: steps in all, rounded up to whole blocks of 50.
        concurrency: sequences in each step.

    Returns:
        For "step" and "spin": p50 and p99 in ms and their ratio.
    """
    num_blocks = -(-num_steps // _BLOCK)
    _fill(engine, concurrency, num_tokens=(num_blocks + 1) * (_BLOCK + 1) + 8 * concurrency)
    step_s = _block(engine)
    length = _calibrate(percentile(step_s, 0.5))
    steps: list[float] = []
    spins: list[float] = []
    for _ in range(num_blocks):
        steps += _block(engine)
        time.sleep(2 * max(step_s))  # the step in flight ends: the loop has the machine to itself
        spins += [_spin(length) for _ in range(_BLOCK)]
    assert engine.scheduler.num_running == concurrency, "a sequence ended within the measurement"
    _drain(engine)
    return {
        "concurrency": concurrency,
        "num_steps": len(steps),
        "step": _describe(steps),
        "spin": _describe(spins),
    }


def _fill(engine: Engine[Any], concurrency: int, *, num_tokens: int) -> None:
    """Start sequences that outlast the measurement, and compute their prompts."""
    for i in range(concurrency):
        request = GenerateRequest(
            request_id=f"spread-{i}",
            prompt_token_ids=tuple(3 + (i + j) % 100 for j in range(_PROMPT_TOKENS)),
            sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
            sink=_NO_SINK,
        )
        engine.validate(request)
        engine.add(request)
    engine.step()
    while engine.load().num_pending_prefill_tokens or engine.scheduler.num_waiting:
        engine.step()


def _block(engine: Engine[Any]) -> list[float]:
    """Durations of a block of steps; the first, which found the device idle, is left out."""
    engine.step()
    durations: list[float] = []
    for _ in range(_BLOCK):
        begin_s = time.perf_counter()
        engine.step()
        durations.append(time.perf_counter() - begin_s)
    return durations


def _spin(length: int) -> float:
    begin_s = time.perf_counter()
    for _ in range(length):
        pass
    return time.perf_counter() - begin_s


def _calibrate(duration_s: float) -> int:
    """Length of a loop that takes about as long as a step does."""
    probe = 100_000
    fastest_s = min(_spin(probe) for _ in range(_CALIBRATION_ROUNDS))
    return max(1, round(probe * duration_s / fastest_s))


def _drain(engine: Engine[Any]) -> None:
    for sequence in engine.scheduler.running:
        engine.abort(sequence.request.request_id)
    while engine.has_work:
        engine.step()


def _describe(durations_s: list[float]) -> dict[str, float]:
    p50, p99 = percentile(durations_s, 0.5), percentile(durations_s, 0.99)
    return {
        "p50_ms": round(p50 * 1e3, 3),
        "p99_ms": round(p99 * 1e3, 3),
        "ratio": round(p99 / p50, 3),
    }
