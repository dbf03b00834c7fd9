"""From configuration to a running engine: device, weights, pages, programs, warm-up.

The one place that turns "auto" and None in an `EngineConfig` into values, and says once what it
chose.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels import reference
from kernels.cpu import library
from kernels.tpu import attention as tpu_attention
from replicas.config import EngineConfig, ModelConfig
from replicas.engine.engine import Engine
from replicas.engine.engine_loop import EngineLoop
from replicas.engine.model_runner import LaunchedStep, Model, ModelRunner, ProgressFn
from replicas.engine.page_allocator import PageAllocator
from replicas.engine.programs import ProgramStore, environment_key
from replicas.engine.scheduler import Scheduler
from replicas.models.kv_cache import allocate_kv_pages, bytes_per_page
from replicas.models.packing import pack_params
from replicas.models.registry import get_family, load_model_config
from replicas.models.sharding import (
    kv_pages_sharding,
    make_mesh,
    param_shardings,
    shard_forward,
    shard_logits,
)
from replicas.models.weights import load_params
from replicas.wire import ModelInfo, StepEvents

logger = logging.getLogger(__name__)

AttentionFn = Callable[..., tuple[jax.Array, jax.Array]]

_COMPUTE_NICENESS = 15
"""What Ray gives to whole workers by default; enough for others to preempt at once."""
_MIN_NICENESS_STEP = 4
_DEFAULT_PAGE_SIZE = {"cpu": 16, "tpu": 128}


def resolve_config(
    config: EngineConfig, model_config: ModelConfig, *, platform: str, has_native: bool
) -> EngineConfig:
    """Return the configuration with every None and "auto" replaced by a value.

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
    num_pages = config.num_pages
    if num_pages is None:
        page_bytes = bytes_per_page(
            model_config, page_size=page_size, dtype=jnp.dtype(config.dtype)
        )
        num_pages = 1 + config.kv_cache_bytes // page_bytes
        if num_pages < 2:
            raise ValueError(
                f"kv_cache_bytes {config.kv_cache_bytes} holds no page of {page_bytes} bytes"
            )
    attention = config.attention
    if attention == "auto":
        attention = "native" if platform == "cpu" and has_native else "reference"
        if platform == "tpu" and model_config.head_dim == tpu_attention.HEAD_DIM:
            attention = "pallas"
    if attention == "pallas" and (
        platform != "tpu" or model_config.head_dim != tpu_attention.HEAD_DIM
    ):
        raise ValueError(
            f"attention 'pallas' is for TPUs and a head_dim of {tpu_attention.HEAD_DIM}, got "
            f"{platform!r} and {model_config.head_dim}: set attention to 'auto'"
        )
    matmul = config.matmul
    if matmul == "auto":
        is_packable = config.dtype == "bfloat16" and config.tensor_parallel == 1
        matmul = "native" if platform == "cpu" and has_native and is_packable else "xla"
    return dataclasses.replace(
        config,
        platform=platform,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        attention=attention,
        matmul=matmul,
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
    loop = EngineLoop(build_engine(config, report_progress or _ignore_progress), on_step)
    loop.start()
    return loop


def build_engine(
    config: EngineConfig, report_progress: ProgressFn | None = None
) -> Engine[LaunchedStep]:
    """Return a warmed-up engine without a thread; what benches and tests drive directly."""
    report = report_progress or _ignore_progress
    started_s = time.monotonic()
    path = Path(config.model)
    model_config = load_model_config(path)
    platform = _platform(config)
    native_error = _load_native(config, platform)
    config = resolve_config(
        config, model_config, platform=platform, has_native=native_error is None
    )
    if "native" in (config.attention, config.matmul) and native_error is not None:
        raise ValueError(f"attention or matmul is 'native', but: {native_error}")
    assert config.page_size is not None
    assert config.num_pages is not None
    assert config.max_model_len is not None
    logger.info("engine configuration: %s", config)
    fingerprint = _fingerprint(config, model_config)
    mesh = make_mesh(config)
    store = None
    if config.program_store is not None:
        devices = mesh.devices.flatten().tolist()
        store = ProgramStore(Path(config.program_store), key=fingerprint, devices=devices)
    runner = _build_runner(path, model_config, config, mesh=mesh, store=store, report=report)
    runner.warm_up(report)
    logger.info("engine ready after %.1f s", time.monotonic() - started_s)
    scheduler = Scheduler(
        PageAllocator(config.num_pages, enable_prefix_caching=config.enable_prefix_caching),
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_mixed_tokens=config.max_mixed_tokens,
        break_even_context=_break_even_context(model_config),
    )
    model_info = ModelInfo(
        model_id=path.name,
        max_model_len=config.max_model_len,
        max_request_tokens=min(config.max_model_len, (config.num_pages - 1) * config.page_size),
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        fingerprint=fingerprint[:16],
    )
    return Engine(scheduler, runner, model_info=model_info)


def _build_runner(
    path: Path,
    model_config: ModelConfig,
    config: EngineConfig,
    *,
    mesh: Mesh,
    store: ProgramStore | None,
    report: ProgressFn,
) -> ModelRunner:
    """Lay weights and pages out over the mesh of this replica."""
    assert config.page_size is not None
    assert config.num_pages is not None
    dtype, num_shards = jnp.dtype(config.dtype), config.tensor_parallel
    family = get_family(model_config)
    specs = family.param_specs(model_config, num_shards=num_shards)
    forward = shard_forward(family.forward, mesh, specs)
    compute_logits = shard_logits(family.compute_logits, mesh, specs)
    attention = _attention(config)
    model = Model(
        forward=lambda params, kv_pages, inputs: forward(
            params, kv_pages, inputs, model_config, attention=attention
        ),
        compute_logits=lambda params, hidden: compute_logits(params, hidden, model_config),
    )
    is_sharded = num_shards > 1
    params = load_params(
        path,
        model_config,
        dtype=dtype,
        shardings=param_shardings(specs, mesh) if is_sharded else None,
        num_shards=num_shards,
        progress=lambda done, total: report("weights", done, total),
    )
    if config.matmul == "native":
        params = pack_params(params, model_config)
    kv_pages = allocate_kv_pages(
        model_config,
        num_pages=config.num_pages,
        page_size=config.page_size,
        dtype=dtype,
        num_shards=num_shards,
        sharding=kv_pages_sharding(mesh) if is_sharded else None,
    )
    return ModelRunner(
        model,
        config,
        params=params,
        kv_pages=kv_pages,
        replicated=NamedSharding(mesh, PartitionSpec()) if is_sharded else None,
        store=store,
    )


def _platform(config: EngineConfig) -> str:
    if config.platform == "cpu":
        # Keeps jax from probing for TPUs, which is slow and noisy where libtpu is installed.
        jax.config.update("jax_platforms", "cpu")
        _start_cpu_client()
    platform = jax.default_backend() if config.platform == "auto" else config.platform
    try:
        jax.devices(platform)
    except RuntimeError as error:
        raise ValueError(
            f"platform is {platform!r}, but jax has no such device: {error}"
        ) from error
    return platform


def _start_cpu_client() -> None:
    """Start XLA's CPU client so that its compute threads yield to the threads that serve.

    On CPU the compute threads keep every core busy, and a thread that wakes up to pass a token on
    would wait for its turn behind them. Threads inherit the niceness of the one that starts them
    (Linux), so a thread of its own starts the client.
    """

    def start() -> None:
        if sys.platform == "linux":
            thread_id = threading.get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread_id) + _MIN_NICENESS_STEP
            os.setpriority(os.PRIO_PROCESS, thread_id, max(niceness, _COMPUTE_NICENESS))
        jax.devices("cpu")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()


def _load_native(config: EngineConfig, platform: str) -> library.NativeUnavailable | None:
    """Load the native kernels unless the configuration rules them out."""
    is_ruled_out = config.attention == "reference" and config.matmul == "xla"
    if is_ruled_out or platform != "cpu":
        return library.NativeUnavailable("native kernels are for the CPU platform")
    try:
        library.load()
    except library.NativeUnavailable as error:
        return error
    return None


def _break_even_context(model_config: ModelConfig) -> int:
    """Context at which a token's attention takes as many FLOP as its projections.

    Projections: 2 per weight. Attention: 2 H D for a score and 2 H D for its value, per position.
    """
    attention_size = model_config.num_heads * model_config.head_dim
    kv_size = model_config.num_kv_heads * model_config.head_dim
    per_channel = 2 * attention_size + 2 * kv_size + 3 * model_config.intermediate_size
    return max(1, model_config.hidden_size * per_channel // (2 * attention_size))


def _attention(config: EngineConfig) -> AttentionFn:
    if config.attention == "native":
        from kernels.cpu import attention

        return attention.ragged_paged_attention
    if config.attention == "pallas":
        return tpu_attention.ragged_paged_attention
    return reference.ragged_paged_attention


def _fingerprint(config: EngineConfig, model_config: ModelConfig) -> str:
    """Digest of what determines the programs and, with equal weights, the tokens."""
    has_native = "native" in (config.attention, config.matmul)
    native = library.fingerprint() if has_native else ""
    shape = dataclasses.replace(config, model="", program_store=None)
    parts = (environment_key(), repr(model_config), repr(shape), native)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _ignore_progress(stage: str, done: int, total: int) -> None:
    del stage, done, total
