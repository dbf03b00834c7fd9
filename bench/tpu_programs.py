"""The engine's step programs compiled for TPUs over abstract weights: their fit and their cost.

Nothing is allocated: parameters and pages are shapes. A step's time is predicted from bytes and
FLOP of the model's own sizes and from the attention kernel's bundles, not from XLA's estimate,
which does not see what a kernel reads.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from bench import tpu_target
from kernels.tpu.attention import ragged_paged_attention
from replicas.config import EngineConfig, ModelConfig, RopeConfig
from replicas.engine.buckets import Bucket
from replicas.engine.model_runner import Model, ModelRunner
from replicas.models.kv_cache import bytes_per_page, kv_pages_shape
from replicas.models.param_spec import ParamSpec
from replicas.models.registry import get_family
from replicas.models.sharding import (
    TENSOR_AXIS,
    kv_pages_sharding,
    param_shardings,
    shard_forward,
    shard_logits,
)

LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    norm_eps=1e-5,
    rope=RopeConfig(
        kind="llama3", theta=500_000.0, factor=8.0, original_max_position_embeddings=8192
    ),
)
PAGE_SIZE = 128
HBM_SHARE = 0.92
"""Of the memory, for weights and pages; the rest is for temporaries, programs and the runtime."""
LAUNCH_S = 3e-6
"""Of each kernel's launch and first copies, three to a layer: assumed, there is no TPU to ask."""
ICI_BYTES_PER_S = {"v5e": 200e9, "v6e": 400e9, "tpu7x": 600e9}
"""All links of a chip, one direction: cloud.google.com/tpu/docs, system architecture."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A decode step.

    Attributes:
        chip: generation, see `tpu_target`.
        num_devices: of the tensor axis.
        num_seqs: one new token each.
        context: tokens of each.
    """

    chip: str
    num_devices: int
    num_seqs: int
    context: int


WORKLOADS = {
    "v6e-1": Workload(chip="v6e", num_devices=1, num_seqs=64, context=1536),
    "v6e-4": Workload(chip="v6e", num_devices=4, num_seqs=64, context=8192),
    "v5e-4": Workload(chip="v5e", num_devices=4, num_seqs=64, context=1536),
}


@dataclass(frozen=True, kw_only=True)
class ProgramRow:
    """One decode program of Llama-3.1-8B in bf16.

    Attributes:
        name: key of `WORKLOADS`.
        num_arguments: arrays that a call passes.
        weights_gb: per device.
        pages: KV pages that fit, of 128 tokens.
        tokens: in those pages.
        temporaries_mb: per device.
        kv_copied_gb: pages that are not updated in place.
        bound_ms: weights and KV read once, at full bandwidth.
        step_ms: predicted.
        share: bound over step.
        tokens_per_s: of all devices.
        compile_s: on this machine.
    """

    name: str
    num_arguments: int
    weights_gb: float
    pages: int
    tokens: int
    temporaries_mb: float
    kv_copied_gb: float
    bound_ms: float
    step_ms: float
    share: float
    tokens_per_s: float
    compile_s: float


def measure_program(name: str, *, bundles_per_mib: float) -> ProgramRow:
    """Compile the decode program of a workload and predict its step.

    Args:
        name: key of `WORKLOADS`.
        bundles_per_mib: what the decode kernel takes for a MiB of KV.
    """
    workload = WORKLOADS[name]
    chip = tpu_target.chip(workload.chip)
    page_bytes = (
        bytes_per_page(
            LLAMA_8B, page_size=PAGE_SIZE, dtype=jnp.bfloat16, num_shards=workload.num_devices
        )
        // workload.num_devices
    )
    param_bytes = _param_bytes(workload.num_devices)
    num_pages = int((chip.hbm_bytes * HBM_SHARE - param_bytes) // page_bytes)
    started_s = time.monotonic()
    compiled, num_arguments = _compile(workload, num_pages)
    compile_s = time.monotonic() - started_s
    memory = compiled.memory_analysis()
    kv_bytes = num_pages * page_bytes
    bound_s, step_s = _predict(workload, chip, param_bytes, bundles_per_mib)
    return ProgramRow(
        name=name,
        num_arguments=num_arguments,
        weights_gb=round(param_bytes / 1e9, 2),
        pages=num_pages,
        tokens=(num_pages - 1) * PAGE_SIZE,
        temporaries_mb=round(memory.temp_size_in_bytes / 1e6, 1),
        kv_copied_gb=round(max(0, kv_bytes - memory.alias_size_in_bytes) / 1e9, 3),
        bound_ms=round(bound_s * 1e3, 2),
        step_ms=round(step_s * 1e3, 2),
        share=round(bound_s / step_s, 3),
        tokens_per_s=round(workload.num_seqs / step_s),
        compile_s=round(compile_s, 1),
    )


def find_misses(row: ProgramRow) -> list[str]:
    """What a program fails of its bars, as sentences."""
    misses = []
    hbm_bytes = tpu_target.chip(WORKLOADS[row.name].chip).hbm_bytes
    if row.kv_copied_gb > 0:
        misses.append(f"{row.name}: {row.kv_copied_gb} GB of pages are copied")
    if row.temporaries_mb * 1e6 > 0.03 * hbm_bytes:
        misses.append(f"{row.name}: temporaries of {row.temporaries_mb} MB exceed 3% of memory")
    if WORKLOADS[row.name].num_devices == 1 and row.share < 0.85:
        misses.append(f"{row.name}: {row.share:.0%} of the bandwidth bound, below 85%")
    return misses


def _predict(
    workload: Workload, chip: tpu_target.Chip, param_bytes: int, bundles_per_mib: float
) -> tuple[float, float]:
    """Seconds of a step: the bandwidth bound, and with arithmetic, launches and collectives."""
    config = LLAMA_8B
    # The embedding is looked up, not read; a row of it is nothing.
    embedding_bytes = 2 * config.vocab_size * config.hidden_size // workload.num_devices
    weight_bytes = param_bytes - embedding_bytes
    matmul_s = max(
        weight_bytes / chip.hbm_bytes_per_s,
        weight_bytes * workload.num_seqs / chip.bf16_flops,  # 2 FLOP per weight of 2 bytes
    )
    kv_row_bytes = 2 * 2 * config.num_kv_heads * config.head_dim // workload.num_devices
    kv_bytes = config.num_layers * workload.num_seqs * workload.context * kv_row_bytes
    attention_s = max(
        kv_bytes / chip.hbm_bytes_per_s, kv_bytes / 2**20 * bundles_per_mib / chip.clock_hz
    )
    # Residual stream, norms, projections and activations between fused operations, in f32.
    activation_bytes = (
        4
        * workload.num_seqs
        * config.num_layers
        * (8 * config.hidden_size + 3 * config.intermediate_size // workload.num_devices)
    )
    launch_s = 3 * config.num_layers * LAUNCH_S
    collective_s = 0.0
    if workload.num_devices > 1:
        reduced = 4 * workload.num_seqs * config.hidden_size
        share = 2 * (workload.num_devices - 1) / workload.num_devices
        one_s = reduced * share / ICI_BYTES_PER_S[workload.chip] + LAUNCH_S
        collective_s = 2 * config.num_layers * one_s
    bound_s = (weight_bytes + kv_bytes) / chip.hbm_bytes_per_s
    activation_s = activation_bytes / chip.hbm_bytes_per_s
    return bound_s, matmul_s + attention_s + activation_s + launch_s + collective_s


def _compile(workload: Workload, num_pages: int) -> tuple[Any, int]:
    num_devices = workload.num_devices
    family = get_family(LLAMA_8B)
    specs = family.param_specs(LLAMA_8B, num_shards=num_devices)
    devices = tpu_target.get_devices(workload.chip, num_devices)
    mesh = Mesh(np.array(devices), (TENSOR_AXIS,))
    forward = shard_forward(family.forward, mesh, specs)
    compute_logits = shard_logits(family.compute_logits, mesh, specs)
    model = Model(
        forward=lambda params, kv_pages, inputs: forward(
            params, kv_pages, inputs, LLAMA_8B, attention=ragged_paged_attention
        ),
        compute_logits=lambda params, hidden, num_rows: compute_logits(
            params, hidden, num_rows, LLAMA_8B
        ),
        vocab_size=LLAMA_8B.vocab_size,
    )
    whole = (
        SingleDeviceSharding(devices[0])
        if num_devices == 1
        else NamedSharding(mesh, PartitionSpec())
    )
    shardings = param_shardings(specs, mesh)
    params = jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(
            spec.shape,
            spec.abstract(jnp.bfloat16).dtype,
            sharding=whole if num_devices == 1 else sharding,
        ),
        specs,
        shardings,
        is_leaf=lambda node: isinstance(node, ParamSpec),
    )
    pages: Any = jax.ShapeDtypeStruct(
        kv_pages_shape(LLAMA_8B, num_pages=num_pages, page_size=PAGE_SIZE, num_shards=num_devices),
        jnp.bfloat16,
        sharding=whole if num_devices == 1 else kv_pages_sharding(mesh),
    )
    config = EngineConfig(
        model="",
        platform="tpu",
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_num_seqs=workload.num_seqs,
        max_model_len=max(8192, workload.context),
        max_mixed_tokens=workload.num_seqs,
        max_num_batched_tokens=512,
    )
    runner = ModelRunner(
        model,
        config,
        params=params,
        kv_pages=(pages,) * LLAMA_8B.num_layers,
        replicated=whole,
        store=None,
    )
    bucket = Bucket(num_tokens=workload.num_seqs, num_seqs=workload.num_seqs)
    with tpu_target.target(workload.chip, num_devices=num_devices):
        lowered = runner.lower(bucket)
    return runner.compile(lowered), len(jax.tree.leaves(lowered.in_avals))


def _param_bytes(num_devices: int) -> int:
    specs = get_family(LLAMA_8B).param_specs(LLAMA_8B, num_shards=num_devices)
    leaves = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, ParamSpec))
    total = 0
    for spec in leaves:
        array = spec.abstract(jnp.bfloat16)
        total += array.size * array.dtype.itemsize // (1 if spec.is_float32 else num_devices)
    return total
