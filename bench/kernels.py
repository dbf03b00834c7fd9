"""The native CPU kernels against the machine: `python -m bench.kernels`.

Attention and matmul at the default model's shapes, beside XLA's own dot and beside a bandwidth and
an arithmetic limit measured in the same run. All contenders of a table take turns, so that another
load on the machine hits each alike; medians over rounds, with the best round beside them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels import reference
from kernels.cpu import attention, int8_matmul, library, matmul
from kernels.grouped_matmul import grouped_matmul

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 9, 3, 64, 16, 30
MATMULS = {"qkv": (960, 576), "out": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
EXPERTS, EXPERT_SHAPE = 32, (1024, 512)
ACTIVE_EXPERTS = (1, 4, 16, 32)
ROUTED_ROWS = (64, 1024)
ROWS = (1, 8, 16, 32, 64, 128, 512)
BATCHES = {  # name: (tokens per sequence in the step, tokens of context, sequences)
    "decode 1 x 256": (1, 256, 1),
    "decode 8 x 256": (1, 256, 8),
    "decode 32 x 256": (1, 256, 32),
    "decode 1 x 4000": (1, 4000, 1),
    "prefill 512": (512, 512, 1),
}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One contender at one size.

    Attributes:
        name: contender and size.
        median_ms: over rounds, of all layers.
        best_ms: the fastest round.
        gb_per_s: bytes of weights or KV that must be read, over the median.
        gflop_per_s: useful arithmetic over the median.
    """

    name: str
    median_ms: float
    best_ms: float
    gb_per_s: float
    gflop_per_s: float


def measure[K](contenders: dict[K, Callable[[], Any]], num_rounds: int) -> dict[K, list[float]]:
    """Time contenders in turns, seconds; each is run once first."""
    for run in contenders.values():
        jax.block_until_ready(run())
    times: dict[K, list[float]] = {name: [] for name in contenders}
    for _ in range(num_rounds):
        for name, run in contenders.items():
            started_s = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - started_s)
    return times


def read_memory(num_bytes: int) -> Callable[[], Any]:
    """A read of `num_bytes` by a thread per core: the bandwidth that the kernels compete for.

    numpy's vectorised maximum of bytes does less work per line than memory takes to bring it.
    """
    num_threads = os.cpu_count() or 1
    parts = np.array_split(np.ones(num_bytes, np.uint8), num_threads)
    pool = concurrent.futures.ThreadPoolExecutor(num_threads)
    return lambda: max(pool.map(np.max, parts))


def multiply_square(size: int) -> Callable[[], Any]:
    """An f32 product of XLA's, large enough to run near the arithmetic limit."""
    square = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    return lambda: product(square, square)


def attention_step(
    implementation: Callable[..., Any], batch: tuple[int, int, int]
) -> Callable[[], Any]:
    """One step of all layers over donated pages, in the order in which pages are handed out."""
    q_len, kv_len, num_seqs = batch
    pages_per_seq = -(-kv_len // PAGE_SIZE)
    num_pages = 1 + num_seqs * pages_per_seq
    rng = np.random.default_rng(0)
    indices = rng.permutation(np.arange(1, num_pages)).reshape(num_seqs, pages_per_seq)
    num_rows = q_len * num_seqs
    q, k, v = (
        jnp.asarray(rng.standard_normal((num_rows, heads, HEAD_DIM)), jnp.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    metadata = (
        jnp.full(num_seqs, kv_len, jnp.int32),
        jnp.asarray(indices, jnp.int32),
        jnp.arange(num_seqs + 1, dtype=jnp.int32) * q_len,
        jnp.asarray([num_seqs], jnp.int32),
    )
    attend = functools.partial(implementation, sm_scale=HEAD_DIM**-0.5)

    def step(q: jax.Array, pages: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        updated = []
        for layer_pages in pages:
            q, layer_pages = attend(q, k, v, layer_pages, *metadata)
            updated.append(layer_pages)
        return q, updated

    compiled = jax.jit(step, donate_argnums=1)
    shape = (num_pages, 2 * KV_HEADS, PAGE_SIZE, HEAD_DIM)
    pages = [jnp.ones(shape, jnp.bfloat16) for _ in range(LAYERS)]

    def run() -> jax.Array:
        nonlocal pages
        out, pages = compiled(q, pages)
        return out

    return run


def matmul_steps(num_rows: int) -> dict[str, Callable[[], Any]]:
    """The matmuls of all layers, each over weights of its own: packed bf16, int8, XLA's [N, K]."""
    rng = np.random.default_rng(0)
    weights = {
        name: (rng.standard_normal(shape) * 0.05).astype(ml_dtypes.bfloat16)
        for name, shape in MATMULS.items()
    }
    int8_weights = {name: int8_matmul.pack(weight) for name, weight in weights.items()}
    # Copies: each layer reads its weights from memory, as a model does.
    packed = [
        {name: jax.tree.map(jnp.array, matmul.pack(weight)) for name, weight in weights.items()}
        for _ in range(LAYERS)
    ]
    quantized = [
        {name: jax.tree.map(jnp.array, int8_weight) for name, int8_weight in int8_weights.items()}
        for _ in range(LAYERS)
    ]
    plain = [{name: jnp.array(weight) for name, weight in weights.items()} for _ in range(LAYERS)]
    inputs = {
        name: jnp.asarray(rng.standard_normal((num_rows, shape[1])), jnp.bfloat16)
        for name, shape in MATMULS.items()
    }

    def xla_linear(x: jax.Array, weight: jax.Array) -> jax.Array:
        dimensions = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, weight, dimensions, preferred_element_type=jnp.float32)

    def native_linear(x: jax.Array, weight: matmul.PackedWeight) -> jax.Array:
        return matmul.linear(x, weight, out_dtype=jnp.float32)

    def int8_linear(x: jax.Array, weight: int8_matmul.Int8Weight) -> jax.Array:
        return int8_matmul.linear(x, weight, out_dtype=jnp.float32)

    def chain(linear: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.jit(
            lambda x, layers: [linear(x[name], layer[name]) for layer in layers for name in MATMULS]
        )

    native, int8, xla = chain(native_linear), chain(int8_linear), chain(xla_linear)
    contenders = {
        "native": lambda: native(inputs, packed),
        "int8": lambda: int8(inputs, quantized),
    }
    if num_rows > 1:  # XLA's one-row dot takes some 200 ms: nothing to compare
        contenders["xla"] = lambda: xla(inputs, plain)
    return contenders


def expert_steps(num_rows: int) -> dict[tuple[str, int], Callable[[], Any]]:
    """Matmuls over the weights of all experts, bf16 and int8, by how many of them have rows."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((num_rows, EXPERT_SHAPE[1])), jnp.bfloat16)
    weights = rng.standard_normal((EXPERTS, *EXPERT_SHAPE)).astype(jnp.bfloat16)
    contenders = {
        "bf16": (jax.jit(grouped_matmul), jnp.asarray(weights)),
        "int8": (
            jax.jit(int8_matmul.linear_of_experts),
            jax.device_put(int8_matmul.pack_experts(weights)),
        ),
    }

    def step(name: str, num_active: int) -> Callable[[], Any]:
        multiply, weight = contenders[name]
        sizes = np.zeros(EXPERTS, np.int32)
        sizes[rng.permutation(EXPERTS)[:num_active]] = num_rows // num_active
        group_sizes = jnp.asarray(sizes)
        return lambda: multiply(x, weight, group_sizes)

    return {
        (name, num_active): step(name, num_active)
        for num_active in ACTIVE_EXPERTS
        for name in contenders
    }


def summarise(name: str, times: list[float], *, num_bytes: float, num_flops: float) -> Measurement:
    median_s = statistics.median(times)
    return Measurement(
        name=name,
        median_ms=median_s * 1e3,
        best_ms=min(times) * 1e3,
        gb_per_s=num_bytes / median_s / 1e9,
        gflop_per_s=num_flops / median_s / 1e9,
    )


def bench_attention(num_rounds: int, *, with_reference: bool) -> list[Measurement]:
    results = []
    for name, batch in BATCHES.items():
        q_len, kv_len, num_seqs = batch
        contenders = {"native": attention_step(attention.ragged_paged_attention, batch)}
        if with_reference:
            contenders["jnp"] = attention_step(reference.ragged_paged_attention, batch)
        num_keys = sum(kv_len - q_len + i + 1 for i in range(q_len)) * num_seqs
        for contender, times in measure(contenders, num_rounds).items():
            results.append(
                summarise(
                    f"attention {name}, {contender}",
                    times,
                    num_bytes=LAYERS * num_seqs * kv_len * 2 * KV_HEADS * HEAD_DIM * 2,
                    num_flops=LAYERS * num_keys * HEADS * HEAD_DIM * 4,
                )
            )
    return results


def bench_matmul(num_rounds: int) -> list[Measurement]:
    results = []
    num_weights = LAYERS * sum(rows * columns for rows, columns in MATMULS.values())
    for num_rows in ROWS:
        rounds = num_rounds if num_rows <= 64 else max(3, num_rounds // 4)
        for contender, times in measure(matmul_steps(num_rows), rounds).items():
            results.append(
                summarise(
                    f"matmul {num_rows} rows, {contender}",
                    times,
                    num_bytes=num_weights * (1 if contender == "int8" else 2),
                    num_flops=num_weights * 2 * num_rows,
                )
            )
    return results


def bench_experts(num_rounds: int) -> list[Measurement]:
    results = []
    expert_size = EXPERT_SHAPE[0] * EXPERT_SHAPE[1]
    for num_rows in ROUTED_ROWS:
        for (contender, num_active), times in measure(expert_steps(num_rows), num_rounds).items():
            results.append(
                summarise(
                    f"{num_rows} rows to {num_active} of {EXPERTS} experts, {contender}",
                    times,
                    num_bytes=num_active * expert_size * (1 if contender == "int8" else 2),
                    num_flops=num_rows * expert_size * 2,
                )
            )
    return results


def bench_limits(num_rounds: int) -> list[Measurement]:
    num_bytes, size = 1 << 28, 1024
    times = measure({"read": read_memory(num_bytes), "dot": multiply_square(size)}, num_rounds)
    return [
        summarise("limit: memory read", times["read"], num_bytes=num_bytes, num_flops=0),
        summarise("limit: f32 product", times["dot"], num_bytes=0, num_flops=2 * size**3),
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write JSON; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--reference", action="store_true", help="measure the jnp attention too")
    parser.add_argument("--output", type=Path, default=Path("bench/results/kernels.json"))
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    library.load()
    # Limits before, between and after: the spread says how quiet the machine was.
    measurements = bench_limits(args.rounds)
    measurements += bench_attention(args.rounds, with_reference=args.reference)
    measurements += bench_limits(args.rounds)
    measurements += bench_matmul(args.rounds)
    measurements += bench_limits(args.rounds)
    measurements += bench_experts(args.rounds)
    print(f"{'':38}{'median ms':>10}{'best ms':>10}{'GB/s':>8}{'GFLOP/s':>9}")
    for m in measurements:
        print(
            f"{m.name:38}{m.median_ms:10.2f}{m.best_ms:10.2f}{m.gb_per_s:8.1f}{m.gflop_per_s:9.0f}"
        )
    report = {
        "machine": {
            "instruction_set": library.instruction_set(),
            "cores": os.cpu_count(),
            "arch": platform.machine(),
            "load_average": os.getloadavg(),
        },
        "jax": jax.__version__,
        "kernels": library.fingerprint(),
        "measurements": [asdict(m) for m in measurements],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
