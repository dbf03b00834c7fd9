"""How much of the machine's memory bandwidth a decode step makes use of.

A decode step reads every matmul weight and the keys and values of all its sequences; at low
concurrency nothing else takes time of note. The share is the bytes that must be read, over the
step's time, over the bandwidth of a plain read by all cores. Steps and reads take turns, because
the bandwidth of a shared machine changes by the minute. Bytes are counted from the model's shapes,
not from what an implementation keeps.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.kernels import read_memory
from replicas.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.models.kv_cache import bytes_per_page
from replicas.models.registry import get_family, load_model_config
from replicas.wire import GenerateRequest

_READ_BYTES = 1 << 28
_NUM_ROUNDS = 9
_STEPS_PER_ROUND = 6
_SETTLE_S = 0.1
"""More than a step takes: the one in flight has ended before memory is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """One concurrency's use of memory.

    Attributes:
        concurrency: sequences that decode.
        step_ms: median decode step.
        step_mb: weights, keys and values that it must read.
        read_gb_per_s: median bandwidth of the plain read.
        share: of that bandwidth, used by the step.
    """

    concurrency: int
    step_ms: float
    step_mb: float
    read_gb_per_s: float
    share: float


def weight_bytes(config: EngineConfig) -> int:
    """Bytes of the weights that every step reads: all but the embedding, unless it is the head."""
    model = load_model_config(Path(config.model))
    params = get_family(model).abstract_params(model, jnp.dtype(config.dtype))
    total = 0
    for matrix in _matrices(params):
        num_outputs, num_inputs = matrix.shape
        if config.quantization == "int8":
            total += num_outputs * (num_inputs + 4)  # and an f32 scale
        else:
            total += matrix.size * matrix.dtype.itemsize
    return total


def kv_bytes_per_token(config: EngineConfig) -> int:
    """Bytes of keys and values of one token, over all layers."""
    model = load_model_config(Path(config.model))
    return bytes_per_page(model, page_size=1, dtype=jnp.dtype(config.kv_dtype))


def measure_share(
    engine: Engine[Any], requests: list[GenerateRequest], config: EngineConfig
) -> MemoryShare:
    """Decode all requests at once, reading memory between bursts of steps; then abort them.

    Args:
        engine: warmed up and idle.
        requests: of equal prompt lengths; they generate as long as the model lets them.
        config: what the engine was built from.
    """
    limit = engine.model_info.max_request_tokens
    for request in requests:
        max_tokens = limit - len(request.prompt_token_ids)
        sampling = dataclasses.replace(request.sampling, max_tokens=max_tokens)
        engine.add(dataclasses.replace(request, sampling=sampling))
    num_tokens = sum(len(request.prompt_token_ids) for request in requests)
    while engine.load().num_pending_prefill_tokens > 0:
        num_tokens += sum(len(delta.token_ids) for delta in engine.step().deltas)
    read = read_memory(_READ_BYTES)
    step_s: list[float] = []
    read_s: list[float] = []
    contexts: list[int] = []
    for _ in range(_NUM_ROUNDS):
        time.sleep(_SETTLE_S)
        began_s = time.perf_counter()
        read()
        read_s.append(time.perf_counter() - began_s)
        # The step in flight has ended meanwhile: fetching it takes no time, and is not counted.
        num_tokens += sum(len(delta.token_ids) for delta in engine.step().deltas)
        for _ in range(_STEPS_PER_ROUND):
            began_s = time.perf_counter()
            deltas = engine.step().deltas
            step_s.append(time.perf_counter() - began_s)
            num_tokens += sum(len(delta.token_ids) for delta in deltas)
            contexts.append(num_tokens)
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    median_s = statistics.median(step_s)
    num_bytes = weight_bytes(config) + statistics.mean(contexts) * kv_bytes_per_token(config)
    bandwidth = _READ_BYTES / statistics.median(read_s)
    return MemoryShare(
        concurrency=len(requests),
        step_ms=median_s * 1e3,
        step_mb=num_bytes / 1e6,
        read_gb_per_s=bandwidth / 1e9,
        share=num_bytes / median_s / bandwidth,
    )


def _matrices(params: Any) -> list[Any]:
    """The matmul weights of a tree in which they are the leaves with two dimensions."""
    is_tied = params.head is None
    leaves = jax.tree.leaves(params if is_tied else params._replace(embedding=None))
    return [leaf for leaf in leaves if leaf.ndim == 2]
