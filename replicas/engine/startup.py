"""From configuration to a running engine: device, weights, pages, programs, warm-up.

The one place that turns "auto" and None in an `EngineConfig` into values, and says once what it
chose.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from kernels.cpu import library
from replicas.config import EngineConfig, ModelConfig
from replicas.engine.backend import check_xla_options, start_backend
from replicas.engine.engine import Engine
from replicas.engine.engine_loop import EngineLoop
from replicas.engine.kernel_choice import (
    bind_attention,
    bind_token_masks,
    choose_attention,
    choose_matmul,
    load_native,
)
from replicas.engine.memory_plan import abstract_weights, choose_num_pages, device_bytes
from replicas.engine.model_runner import LaunchedStep, Model, ModelRunner, ProgressFn
from replicas.engine.page_allocator import PageAllocator
from replicas.engine.program_key import describe_environment, hash_parts, hash_sources
from replicas.engine.program_store import ProgramStore
from replicas.engine.scheduler import Scheduler
from replicas.engine.step_trace import Profiler
from replicas.grammar import NoVocabulary, Vocabulary
from replicas.model_files.fetch import fetch_model
from replicas.model_files.source import parse_source
from replicas.models.kv_cache import abstract_kv_pages, zeros
from replicas.models.packing import pack_params
from replicas.models.quantize import quantize_params
from replicas.models.registry import get_family, load_model_config
from replicas.models.sharding import (
    kv_pages_sharding,
    make_mesh,
    num_page_groups,
    param_shardings,
    shard_forward,
    shard_logits,
)
from replicas.models.weights import load_params
from replicas.wire import ModelInfo, StepEvents

logger = logging.getLogger(__name__)

_DEFAULT_PAGE_SIZE = {"cpu": 16, "tpu": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What an engine will be, before anything large exists.

    Attributes:
        config: resolved: nothing in it is None or "auto".
        model_config: of the checkpoint.
        mesh: devices of the replica.
        is_ahead: the devices need not exist here.
        weights: their shapes, as from `abstract_weights`.
        fingerprint: digest of what determines the programs and, with equal weights, the tokens.
        store: where its programs are kept, or None.
    """

    config: EngineConfig
    model_config: ModelConfig
    mesh: Mesh
    is_ahead: bool
    weights: Any
    fingerprint: str
    store: ProgramStore | None

    @property
    def whole(self) -> jax.sharding.Sharding | None:
        """Sharding of what every device holds whole; None on a single device that is here."""
        if self.mesh.size > 1:
            return NamedSharding(self.mesh, PartitionSpec())
        return SingleDeviceSharding(self.mesh.devices.flat[0]) if self.is_ahead else None


def resolve_config(
    config: EngineConfig, model_config: ModelConfig, *, platform: str, has_native: bool
) -> EngineConfig:
    """Return the configuration with every None and "auto" replaced by a value, but `num_pages`.

    Raises:
        ValueError: a value does not fit the model, named with its limit.
    """
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    if max_model_len > model_config.max_position_embeddings:
        raise ValueError(
            f"max_model_len {max_model_len} exceeds the model's own limit of "
            f"{model_config.max_position_embeddings}"
        )
    page_size = config.page_size or _DEFAULT_PAGE_SIZE.get(platform, 16)
    if config.kv_cache_dtype != "auto" and model_config.mla is not None:
        raise ValueError(
            f"kv_cache_dtype {config.kv_cache_dtype!r} is not for latents, which "
            f"{model_config.family!r} attends over and which are small already: set it to 'auto'"
        )
    return dataclasses.replace(
        config,
        platform=platform,
        max_model_len=max_model_len,
        page_size=page_size,
        attention=choose_attention(
            config, model_config, platform=platform, page_size=page_size, has_native=has_native
        ),
        matmul=choose_matmul(config, model_config, platform=platform, has_native=has_native),
        structured_output=config.structured_output and has_tokenizer(config),
    )


def start_engine_loop(
    config: EngineConfig,
    on_step: Callable[[StepEvents], None],
    report_progress: ProgressFn | None = None,
) -> EngineLoop:
    """Load, compile, warm up and start the device thread; blocks for seconds to minutes.

    Args:
        config: may hold None and "auto".
        on_step: see `EngineLoop`.
        report_progress: called with (stage, done, total).

    Raises:
        ValueError: the configuration or the model directory is unusable.
    """
    engine = build_engine(config, report_progress or _ignore_progress)
    loop = EngineLoop(
        engine,
        on_step,
        max_silence_s=config.max_step_s,
        profiler=Profiler(jax.profiler.start_trace, jax.profiler.stop_trace),
        devices=jax.local_devices()[: config.tensor_parallel],
    )
    loop.start()
    return loop


def build_engine(
    config: EngineConfig, report_progress: ProgressFn | None = None
) -> Engine[LaunchedStep]:
    """Return a warmed-up engine without a thread; what benches and tests drive directly."""
    report = report_progress or _ignore_progress
    started_s = time.monotonic()
    plan = plan_engine(config)
    config, model_config, store = plan.config, plan.model_config, plan.store
    assert config.page_size is not None
    assert config.num_pages is not None
    assert config.max_model_len is not None
    logger.info("engine configuration: %s", config)
    if store is not None:
        store.prefetch()
    with ThreadPoolExecutor(max_workers=1) as pool:
        vocabulary = pool.submit(_load_vocabulary, plan)
        runner = _build_runner(plan, report)
        runner.warm_up(report)
    if store is not None:
        logger.info("programs: %d loaded, %d compiled", store.num_loaded, store.num_compiled)
    logger.info("engine ready after %.1f s", time.monotonic() - started_s)
    allocator = PageAllocator(
        config.num_pages,
        num_groups=num_page_groups(model_config, config.tensor_parallel),
        enable_prefix_caching=config.enable_prefix_caching,
    )
    scheduler = Scheduler(
        allocator,
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_mixed_tokens=config.max_mixed_tokens,
        break_even_context=_break_even_context(model_config),
        max_drafts=config.num_speculative_tokens if config.speculation != "none" else 0,
    )
    model_info = ModelInfo(
        model_id=parse_source(config.model).name,
        max_model_len=config.max_model_len,
        max_request_tokens=min(config.max_model_len, allocator.max_per_sequence * config.page_size),
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        fingerprint=plan.fingerprint[:16],
        takes_grammars=vocabulary.result() is not None,
    )
    return Engine(scheduler, runner, model_info=model_info, vocabulary=vocabulary.result())


def has_tokenizer(config: EngineConfig) -> bool:
    """Whether the model, downloaded where it is not here, has what structured output needs.

    Raises:
        ModelSourceError: it cannot be downloaded.
    """
    directory = fetch_model(config.model, "tokenizer", cache=config.model_cache)
    return (directory / "tokenizer.json").is_file()


def _load_vocabulary(plan: EnginePlan) -> Vocabulary | None:
    """Read the tokenizer for grammars, if there will be any."""
    if not plan.config.structured_output:
        return None
    config, model_config = plan.config, plan.model_config
    try:
        return Vocabulary.load(
            fetch_model(config.model, "tokenizer", cache=config.model_cache),
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
        )
    except NoVocabulary as error:
        logger.warning("requests for structured output will be refused: %s", error)
        return None


def plan_engine(config: EngineConfig, devices: Sequence[Any] | None = None) -> EnginePlan:
    """Resolve a configuration for this machine and open its program store; loads no weights.

    Args:
        config: may hold None and "auto".
        devices: what the programs are for; None: those that jax finds here.

    Raises:
        ValueError: the configuration or the model directory is unusable.
        ModelSourceError: config.json cannot be downloaded.
    """
    model_config = load_model_config(fetch_model(config.model, "config", cache=config.model_cache))
    platform = start_backend(config) if devices is None else devices[0].platform
    native_error = load_native(config, platform)
    config = resolve_config(
        config, model_config, platform=platform, has_native=native_error is None
    )
    assert config.max_model_len is not None
    model_config = model_config.for_length(config.max_model_len)
    if model_config.rope.is_long:
        logger.warning(
            "max_model_len %d exceeds the original context of %d tokens: longrope uses its long "
            "factors for all requests; a max_model_len up to that is exact for shorter ones",
            config.max_model_len,
            model_config.rope.original_max_position_embeddings,
        )
    if config.has_native_kernels and native_error is not None:
        raise ValueError(f"attention or matmul is 'native', but: {native_error}")
    mesh = make_mesh(config, devices)
    if devices is None:
        check_xla_options(config.xla_options)
    mesh_devices = mesh.devices.flatten().tolist()
    weights = abstract_weights(config, model_config, mesh)
    config = dataclasses.replace(
        config,
        num_pages=choose_num_pages(
            config,
            model_config,
            weight_bytes=device_bytes(weights),
            device_kind=mesh_devices[0].device_kind,
        ),
    )
    environment = describe_environment(
        mesh_devices,
        native=library.fingerprint() if config.has_native_kernels else "",
        xla_options=config.xla_options,
    )
    sources = hash_sources()
    fingerprint = _fingerprint(config, model_config, environment=environment, sources=sources)
    store = None
    if config.program_store is not None:
        store = ProgramStore(
            Path(config.program_store),
            environment=environment,
            fingerprint=fingerprint,
            sources=sources,
            model=parse_source(config.model).name,
            devices=mesh_devices,
        )
    return EnginePlan(
        config=config,
        model_config=model_config,
        mesh=mesh,
        is_ahead=devices is not None,
        weights=weights,
        fingerprint=fingerprint,
        store=store,
    )


def build_abstract_runner(plan: EnginePlan) -> ModelRunner:
    """Return a runner of shapes only: it lowers the plan's programs and holds no weights."""
    return _make_runner(plan, _on_devices(plan, plan.weights), kv_page_shapes(plan))


def _on_devices(plan: EnginePlan, shapes: Any) -> Any:
    """Say of shapes without a sharding where they lie, if that is not here."""
    if plan.mesh.size > 1 or not plan.is_ahead:
        return shapes
    return jax.tree.map(lambda leaf: leaf.update(sharding=plan.whole), shapes)


def _build_runner(plan: EnginePlan, report: ProgressFn) -> ModelRunner:
    """Lay weights and pages out over the mesh of this replica."""
    config, model_config = plan.config, plan.model_config
    dtype, is_sharded = jnp.dtype(config.dtype), plan.mesh.size > 1
    specs = _param_specs(plan)
    directory = fetch_model(
        config.model,
        "weights",
        cache=config.model_cache,
        progress=lambda done, total: report("download", done, total),
    )
    params = load_params(
        directory,
        model_config,
        dtype=dtype,
        shardings=param_shardings(specs, plan.mesh) if is_sharded else None,
        num_shards=config.tensor_parallel,
        progress=lambda done, total: report("weights", done, total),
    )
    if config.quantization == "int8":
        params = quantize_params(
            params, model_config, is_native=config.matmul == "native", consumes=True
        )
    elif config.matmul == "native":
        params = pack_params(params, model_config, consumes=True)
    return _make_runner(plan, params, zeros(kv_page_shapes(plan)))


def kv_page_shapes(plan: EnginePlan) -> Any:
    """Return the shapes of the KV pages that the plan's engine allocates."""
    config, is_sharded = plan.config, plan.mesh.size > 1
    assert config.page_size is not None
    assert config.num_pages is not None
    return abstract_kv_pages(
        plan.model_config,
        num_pages=config.num_pages,
        page_size=config.page_size,
        dtype=jnp.dtype(config.kv_dtype),
        num_shards=config.tensor_parallel,
        sharding=kv_pages_sharding(plan.mesh, plan.model_config) if is_sharded else plan.whole,
        is_stacked=config.attention == "native" and not is_sharded,
        fills_lanes=config.attention == "pallas",
    )


def _make_runner(plan: EnginePlan, params: Any, kv_pages: Any) -> ModelRunner:
    """Bind configuration, kernels and mesh into the model's traced functions."""
    config, model_config, mesh = plan.config, plan.model_config, plan.mesh
    family = get_family(model_config)
    specs = None
    if mesh.size > 1:
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, plan.weights)
    forward = shard_forward(family.forward, mesh, specs)
    compute_logits = shard_logits(family.compute_logits, mesh, specs)
    attention = bind_attention(config, model_config)
    model = Model(
        forward=lambda params, kv_pages, inputs: forward(
            params, kv_pages, inputs, model_config, attention=attention
        ),
        compute_logits=lambda params, hidden, num_rows: compute_logits(
            params, hidden, num_rows, model_config
        ),
        apply_token_masks=bind_token_masks(config, is_sharded=mesh.size > 1),
        vocab_size=model_config.vocab_size,
    )
    return ModelRunner(
        model,
        config,
        params=params,
        kv_pages=kv_pages,
        replicated=plan.whole,
        store=plan.store,
    )


def _param_specs(plan: EnginePlan) -> Any:
    family = get_family(plan.model_config)
    return family.param_specs(plan.model_config, num_shards=plan.config.tensor_parallel)


def _break_even_context(model_config: ModelConfig) -> int:
    """Context at which a token's attention takes as many FLOP as its projections.

    Projections: 2 per weight. Attention: 2 H D for a score and 2 H D for its value, per position.
    """
    attention_size = model_config.num_heads * model_config.head_dim
    kv_size = model_config.num_kv_heads * model_config.head_dim
    moe = model_config.moe
    ffn_size = model_config.intermediate_size if moe is None else moe.active_intermediate_size
    per_channel = 2 * attention_size + 2 * kv_size + 3 * ffn_size
    mla = model_config.mla
    if mla is not None:  # scores over the whole cached row, values over its latent
        attention_size = model_config.num_heads * (mla.cache_dim + mla.kv_lora_rank) // 2
    return max(1, model_config.hidden_size * per_channel // (2 * attention_size))


def _fingerprint(
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    environment: dict[str, str],
    sources: str,
) -> str:
    # Without what neither programs nor tokens depend on.
    shape = dataclasses.replace(
        config,
        model="",
        model_cache=None,
        program_store=None,
        profile_directory="",
        max_step_s=1.0,
    )
    parts = {"sources": sources, "model": repr(model_config), "engine": repr(shape)}
    return hash_parts(environment | parts)


def _ignore_progress(stage: str, done: int, total: int) -> None:
    del stage, done, total
