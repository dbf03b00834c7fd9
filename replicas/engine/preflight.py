"""Whether a configuration fits a TPU, before there is one: its programs compiled, its steps priced.

Every bucket's program is compiled for the topology over abstract weights, as a replica would, and
the compiler says what memory it takes. Where it does not fit, the settings that would make it fit
are named, smallest change first.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh

from replicas.config import EngineConfig, ModelConfig
from replicas.engine import tpu_topology
from replicas.engine.buckets import Bucket
from replicas.engine.memory_plan import (
    HBM_SHARE,
    abstract_weights,
    device_bytes,
    memory_budget,
    page_bytes,
)
from replicas.engine.model_runner import ModelRunner
from replicas.engine.startup import EnginePlan
from replicas.engine.step_time import Group, StepTime, measure_sizes, predict_step
from replicas.engine.tpu_chips import Chip
from replicas.models.sharding import TENSOR_AXIS, num_page_groups

DEFAULT_CONTEXT = 2048
_MAX_DEVICES = 64
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCheck:
    """One compiled program; bytes are of one device.

    Attributes:
        bucket: its shape.
        argument_bytes: weights, pages and state.
        temporary_bytes: live at once within a step.
        code_bytes: the executable.
        copied_bytes: pages that are not updated in place.
        num_arguments: arrays that a call passes.
        compile_s: on this machine.
        error: what the compiler said, if it could not; then all bytes are 0.
    """

    bucket: Bucket
    argument_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    copied_bytes: int = 0
    num_arguments: int = 0
    compile_s: float
    error: str | None = None

    @property
    def total_bytes(self) -> int:
        """What a device must hold while it runs."""
        return self.argument_bytes + self.temporary_bytes + self.code_bytes + self.copied_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheck:
    """What one device holds while nothing runs, from shapes alone.

    Attributes:
        chip: the device.
        num_devices: of a replica.
        weight_bytes: of the model.
        kv_bytes: of all pages.
        num_pages: of the replica, null pages included.
        num_tokens: that the pages hold.
        num_full_length: sequences of `max_model_len` that they hold.
    """

    chip: Chip
    num_devices: int
    weight_bytes: int
    kv_bytes: int
    num_pages: int
    num_tokens: int
    num_full_length: float


def check_memory(plan: EnginePlan, chip: Chip) -> MemoryCheck:
    """Return what a plan's device holds."""
    config = plan.config
    assert config.num_pages is not None
    assert config.page_size is not None
    assert config.max_model_len is not None
    num_groups = num_page_groups(plan.model_config, config.tensor_parallel)  # a null page each
    num_tokens = (config.num_pages - num_groups) * config.page_size
    size = page_bytes(config, plan.model_config) // config.tensor_parallel
    return MemoryCheck(
        chip=chip,
        num_devices=config.tensor_parallel,
        weight_bytes=device_bytes(plan.weights),
        kv_bytes=config.num_pages * size,
        num_pages=config.num_pages,
        num_tokens=num_tokens,
        num_full_length=num_tokens / config.max_model_len,
    )


def compile_program(
    runner: ModelRunner, bucket: Bucket, devices: Sequence[Any], *, kv_bytes: int
) -> ProgramCheck:
    """Compile a bucket's program and return what the compiler says of it.

    Args:
        runner: over abstract weights on `devices`.
        bucket: one of its shapes.
        devices: of the replica.
        kv_bytes: of the pages on one device.
    """
    begin_s = time.monotonic()
    with tpu_topology.lowering_for(devices):
        lowered = runner.lower(bucket)
    try:
        memory = runner.compile(lowered).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if _OUT_OF_MEMORY not in str(error):
            raise
        reason = str(error).splitlines()[0]
        return ProgramCheck(bucket=bucket, compile_s=time.monotonic() - begin_s, error=reason)
    assert memory is not None
    return ProgramCheck(
        bucket=bucket,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        copied_bytes=max(0, kv_bytes - memory.alias_size_in_bytes),
        num_arguments=len(jax.tree.leaves(lowered.in_avals)),
        compile_s=time.monotonic() - begin_s,
    )


def predict_bucket(plan: EnginePlan, chip: Chip, bucket: Bucket, *, context: int) -> StepTime:
    """Predict a full step of a bucket.

    One token for each sequence, and where rows remain, a prompt's chunk in them; all sequences have
    `context` tokens, at least those of the chunk.
    """
    num_decodes = bucket.num_seqs
    groups = (Group(num_seqs=num_decodes, q_len=1, context=context),)
    if bucket.num_tokens > bucket.num_seqs:
        chunk = bucket.num_tokens - bucket.num_seqs + 1
        groups = (
            Group(num_seqs=num_decodes - 1, q_len=1, context=context),
            Group(num_seqs=1, q_len=chunk, context=max(context, chunk)),
        )
    sizes = measure_sizes(
        plan.config,
        plan.model_config,
        plan.weights,
        page_bytes=page_bytes(plan.config, plan.model_config),
    )
    return predict_step(sizes, chip, groups, num_logits=bucket.num_seqs)


def advise_on_weights(config: EngineConfig, model_config: ModelConfig, chip: Chip) -> list[str]:
    """Name the settings with which the weights leave room for pages.

    Args:
        config: resolved, but for its pages.
        model_config: of the checkpoint.
        chip: its devices.
    """
    budget = memory_budget(config, chip.device_kind)
    advice = []
    if config.memory_bytes is not None and config.memory_bytes < memory_budget(
        dataclasses.replace(config, memory_bytes=None), chip.device_kind
    ):
        advice.append("memory_bytes: leave it out, the device has more")
    if config.quantization == "none":
        weight_bytes = _weight_bytes(dataclasses.replace(config, quantization="int8"), model_config)
        if weight_bytes is not None and weight_bytes < budget:
            advice.append(f"quantization: int8 ({_gb(weight_bytes)} of weights per device)")
    num_devices = 2 * config.tensor_parallel
    while num_devices <= _MAX_DEVICES:
        more = dataclasses.replace(config, tensor_parallel=num_devices)
        weight_bytes = _weight_bytes(more, model_config)
        if weight_bytes is not None and weight_bytes < budget:
            advice.append(
                f"tensor_parallel: {num_devices} ({_gb(weight_bytes)} of weights per device; the "
                "topology needs as many devices)"
            )
            break
        num_devices *= 2
    return advice or ["a smaller model: neither int8 nor more devices make this one fit"]


def advise_on_programs(
    config: EngineConfig, memory: MemoryCheck, programs: list[ProgramCheck]
) -> list[str]:
    """Name the settings with which every program would fit; none where they all do.

    Args:
        config: resolved.
        memory: of its device.
        programs: all of them.
    """
    limit = memory.chip.hbm_bytes
    failed = [p for p in programs if p.error is not None or p.total_bytes > limit]
    if not failed:
        return []
    advice = []
    page = memory.kv_bytes // memory.num_pages
    # What the compiler gave up on, it does not measure: then the usual share is what may fit.
    excess = max(p.total_bytes for p in failed) - limit
    if any(p.error is not None for p in failed):
        excess = max(excess, memory.weight_bytes + memory.kv_bytes - int(HBM_SHARE * limit))
    num_pages = memory.num_pages - -(-excess // page)
    if 2 <= num_pages < memory.num_pages:
        advice.append(f"num_pages: {num_pages} instead of {memory.num_pages}")
    smallest = min(p.bucket.num_tokens for p in failed)
    below = [p.bucket.num_tokens for p in programs if p.bucket.num_tokens < smallest]
    if below and max(below) >= config.max_mixed_tokens:
        advice.append(f"max_num_batched_tokens: {max(below)}")
    if config.quantization == "none":
        advice.append("quantization: int8")
    return [*advice, f"tensor_parallel: {2 * config.tensor_parallel}, if the topology has as many"]


def _weight_bytes(config: EngineConfig, model_config: ModelConfig) -> int | None:
    """Bytes of the weights on one device, None where the model does not divide over them."""
    mesh = AbstractMesh((config.tensor_parallel,), (TENSOR_AXIS,))
    try:
        return device_bytes(abstract_weights(config, model_config, mesh))
    except ValueError:
        return None


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
