"""The engine's step programs compiled for TPUs over abstract weights: their fit and their cost.

What `python -m replicas.engine.programs check` does for a configuration, done for a table of models
and slices. Nothing is allocated: of a model there is only its config.json.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicas.config import EngineConfig
from replicas.engine import tpu_topology
from replicas.engine.buckets import Bucket
from replicas.engine.memory_plan import page_bytes
from replicas.engine.preflight import check_memory, compile_program
from replicas.engine.startup import EnginePlan, build_abstract_runner, plan_engine
from replicas.engine.step_time import Group, StepTime, measure_sizes, predict_step
from replicas.engine.tpu_chips import Chip

_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3.3-70b": {
        **_LLAMA3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    # A dense model of 7B with grouped queries: the sizes of Mistral-7B-v0.3, without a window.
    "dense-7b": {
        **_LLAMA3,
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
    },
}
_SLICES = {
    "v5e-1": ("v5e:1x1", 1),
    "v5e-4": ("v5e:2x2", 4),
    "v5e-8": ("v5e:2x4", 8),
    "v6e-1": ("v6e:1x1", 1),
    "v6e-4": ("v6e:2x2", 4),
    "v6e-8": ("v6e:2x4", 8),
    "tpu7x-2": ("tpu7x:1x1x1", 2),
}
"""Name of a slice to its topology and jax devices."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model on a slice, and a step of it.

    Attributes:
        model: key of `MODELS`.
        slice: key of `_SLICES`.
        quantization: as in `EngineConfig`.
        kv_cache_dtype: as in `EngineConfig`.
        num_seqs: sequences with one new token each.
        chunk: tokens of a prompt beside them; 0 for a decode step.
        context: tokens of each sequence after the step.
    """

    model: str
    slice: str
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    num_seqs: int = 64
    chunk: int = 0
    context: int = 1536

    @property
    def name(self) -> str:
        """As the table and the command line call it."""
        weights = "int8" if self.quantization == "int8" else "bf16"
        if self.kv_cache_dtype == "int8":
            weights += " int8-kv"
        step = f"{self.num_seqs}"
        if self.chunk:
            step += f"+{self.chunk}"
        return f"{self.model} {weights} {self.slice} {step}@{self.context}"

    @property
    def groups(self) -> tuple[Group, ...]:
        """The sequences of the step."""
        decodes = Group(num_seqs=self.num_seqs, q_len=1, context=self.context)
        if not self.chunk:
            return (decodes,)
        context = max(self.context, self.chunk)
        return (decodes, Group(num_seqs=1, q_len=self.chunk, context=context))


def _decodes(model: str, slice_: str, quantization: str = "none") -> list[Workload]:
    make = functools.partial(Workload, model=model, slice=slice_, quantization=quantization)
    steps = [
        make(num_seqs=num_seqs, context=context)
        for num_seqs, context in ((64, 1536), (64, 8192), (16, 32768), (4, 131072))
    ]
    return [*steps, make(num_seqs=8, chunk=504), make(num_seqs=64, chunk=448)]


WORKLOADS = [
    *_decodes("llama-3.1-8b", "v6e-1"),
    *_decodes("llama-3.1-8b", "v6e-1", "int8"),
    *_decodes("llama-3.1-8b", "v6e-4"),
    *_decodes("llama-3.1-8b", "v5e-4"),
    *_decodes("llama-3.1-8b", "v5e-4", "int8"),
    *_decodes("llama-3.1-8b", "v5e-8", "int8"),
    *_decodes("llama-3.3-70b", "v6e-8"),
    *_decodes("llama-3.3-70b", "v6e-8", "int8"),
    Workload(model="smollm2-135m", slice="v5e-1"),
    Workload(model="smollm2-135m", slice="v5e-1", num_seqs=8, chunk=504),
    *(
        Workload(model="dense-7b", slice="v5e-8", quantization="int8", num_seqs=n, context=32768)
        for n in (1, 4, 8, 16, 32, 64)
    ),
    *(
        Workload(
            model="dense-7b",
            slice="v5e-8",
            quantization="int8",
            kv_cache_dtype="int8",
            num_seqs=n,
            context=32768,
        )
        for n in (1, 4, 8, 16, 32, 64)
    ),
    *(
        Workload(model="qwen3-30b-a3b", slice="v6e-8", num_seqs=n, context=context)
        for n, context in ((64, 1536), (64, 8192), (16, 32768))
    ),
    Workload(model="qwen3-30b-a3b", slice="v6e-8", num_seqs=64, chunk=448),
]
PUBLISHED = {1: 42, 4: 156, 8: 298, 16: 544, 32: 896, 64: 1240}
"""Tokens/s by batch that a write-up gives for a dense 7B model on v5e-8 at a context of 32k."""
_TARGET_SHARE = 0.85
_TARGET_SPEEDUP = 1.5
_MAX_TEMPORARIES = 0.03


@dataclass(frozen=True, kw_only=True)
class ProgramRow:
    """One workload.

    Attributes:
        name: of the workload.
        tokens: that the pages hold.
        fits: whether the sequences' contexts fit these pages.
        bound_ms: weights and KV read once at full bandwidth, or matmuls at peak.
        step_ms: predicted.
        share: bound over step.
        tokens_per_s: of all devices: new tokens, those of the prompt chunk included.
        dollars: per million of them, on demand; None where no price is known.
        weights_gb: per device.
        num_arguments: arrays that a call passes; this and all below None where not compiled.
        temporaries_mb: per device.
        kv_copied_gb: pages that are not updated in place.
        compile_s: on this machine.
    """

    name: str
    tokens: int
    fits: bool
    bound_ms: float
    step_ms: float
    share: float
    tokens_per_s: float
    dollars: float | None
    weights_gb: float
    num_arguments: int | None
    temporaries_mb: float | None
    kv_copied_gb: float | None
    compile_s: float | None


def measure_workload(workload: Workload, *, compiles: bool) -> ProgramRow:
    """Predict a workload's step and, if asked, compile its program."""
    plan, chip = _plan(workload)
    memory = check_memory(plan, chip)
    sizes = measure_sizes(
        plan.config,
        plan.model_config,
        plan.weights,
        page_bytes=page_bytes(plan.config, plan.model_config),
    )
    logits = workload.num_seqs + (workload.chunk > 0)
    time = predict_step(sizes, chip, workload.groups, num_logits=logits)
    num_tokens = workload.num_seqs + workload.chunk
    context_tokens = sum(group.num_seqs * group.context for group in workload.groups)
    program = None
    if compiles:
        bucket = Bucket(num_tokens=num_tokens, num_seqs=workload.num_seqs)
        devices = plan.mesh.devices.flatten().tolist()
        program = compile_program(
            build_abstract_runner(plan), bucket, devices, kv_bytes=memory.kv_bytes
        )
        if program.error is not None:
            raise RuntimeError(f"{workload.name}: {program.error}")
    return ProgramRow(
        name=workload.name,
        tokens=memory.num_tokens,
        fits=context_tokens <= memory.num_tokens,
        bound_ms=round(time.bound_s * 1e3, 2),
        step_ms=round(time.step_s * 1e3, 2),
        share=round(time.bound_s / time.step_s, 2),
        tokens_per_s=round(num_tokens / time.step_s),
        dollars=_dollars(time, num_tokens, plan, chip),
        weights_gb=round(memory.weight_bytes / 1e9, 2),
        num_arguments=None if program is None else program.num_arguments,
        temporaries_mb=None if program is None else round(program.temporary_bytes / 1e6),
        kv_copied_gb=None if program is None else round(program.copied_bytes / 1e9, 3),
        compile_s=None if program is None else round(program.compile_s, 1),
    )


def find_failures(workload: Workload, row: ProgramRow) -> list[str]:
    """What a compiled program must never do, as sentences."""
    failures = []
    topology, _ = _SLICES[workload.slice]
    if row.kv_copied_gb:
        failures.append(f"{row.name}: {row.kv_copied_gb} GB of pages are copied")
    if not workload.chunk and row.temporaries_mb is not None:
        share = row.temporaries_mb * 1e6 / tpu_topology.chip_of(topology).hbm_bytes
        if share > _MAX_TEMPORARIES:
            failures.append(f"{row.name}: temporaries take {share:.1%} of memory, limit 3%")
    return failures


def find_misses(workload: Workload, row: ProgramRow) -> list[str]:
    """What a workload fails of its targets, as sentences."""
    misses = []
    _, num_devices = _SLICES[workload.slice]
    is_large = num_devices == 1 and workload.model != "smollm2-135m"
    if not workload.chunk and is_large and row.share < _TARGET_SHARE:
        misses.append(f"{row.name}: {row.share:.0%} of the bound, below 85%")
    if workload.model == "dense-7b":
        target = _TARGET_SPEEDUP * PUBLISHED[workload.num_seqs]
        if row.tokens_per_s < target:
            misses.append(f"{row.name}: {row.tokens_per_s} tokens/s, target {target:.0f}")
        if not row.fits:
            misses.append(f"{row.name}: the contexts do not fit {row.tokens} tokens of pages")
    return misses


def _dollars(time: StepTime, num_tokens: int, plan: EnginePlan, chip: Chip) -> float | None:
    if chip.dollars_per_chip_hour is None:
        return None
    num_chips = plan.mesh.size / chip.devices_per_chip
    per_token = num_chips * chip.dollars_per_chip_hour / 3600 * time.step_s / num_tokens
    return round(per_token * 1e6, 3)


def _plan(workload: Workload) -> tuple[EnginePlan, Chip]:
    topology, num_devices = _SLICES[workload.slice]
    with tempfile.TemporaryDirectory() as directory:
        config = json.dumps(MODELS[workload.model])
        (Path(directory) / "config.json").write_text(config)
        engine = EngineConfig(
            model=directory,
            platform="tpu",
            quantization="int8" if workload.quantization == "int8" else "none",
            kv_cache_dtype="int8" if workload.kv_cache_dtype == "int8" else "auto",
            tensor_parallel=num_devices,
            max_num_seqs=workload.num_seqs,
            max_model_len=min(
                max(8192, workload.context), MODELS[workload.model]["max_position_embeddings"]
            ),
            max_mixed_tokens=workload.num_seqs + workload.chunk,
            max_num_batched_tokens=max(512, workload.num_seqs + workload.chunk),
        )
        plan = plan_engine(engine, tpu_topology.get_devices(topology))
    return plan, tpu_topology.chip_of(topology)
