"""Chooses the kernels that an engine runs, by platform and model where the config says "auto"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels import mla_reference, reference, token_masks
from kernels.cpu import attention as native_attention
from kernels.cpu import library
from kernels.cpu import token_masks as native_token_masks
from kernels.tpu import attention as tpu_attention
from kernels.tpu import mla as tpu_mla
from replicas.config import AttentionImpl, EngineConfig, MatmulImpl, ModelConfig
from replicas.engine.guided import ApplyTokenMasks
from replicas.models.packing import has_packable_sizes

AttentionFn = Callable[..., tuple[jax.Array, Any]]


def choose_attention(
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    platform: str,
    page_size: int,
    has_native: bool,
) -> AttentionImpl:
    """Return the kernel for "auto", or that of the configuration if it takes the model.

    Raises:
        ValueError: it does not, or not pages of this size; says what it takes.
    """
    attention = _attention_of(config, model_config, platform=platform, has_native=has_native)
    if attention == "pallas" and model_config.mla is not None:
        tpu_mla.check_page_size(page_size)
    elif attention == "pallas":
        tpu_attention.check_page_size(
            page_size, jnp.dtype(config.kv_dtype), head_dim=model_config.head_dim
        )
    return attention


def choose_matmul(
    config: EngineConfig, model_config: ModelConfig, *, platform: str, has_native: bool
) -> MatmulImpl:
    """Return the kernel for "auto", or that of the configuration."""
    if config.matmul != "auto":
        return config.matmul
    is_native = platform == "cpu" and has_native and config.has_packable_weights
    if config.quantization == "none":
        is_native = is_native and has_packable_sizes(model_config)
    return "native" if is_native else "xla"


def _attention_of(
    config: EngineConfig, model_config: ModelConfig, *, platform: str, has_native: bool
) -> AttentionImpl:
    has_latents = model_config.mla is not None
    # A head of another size runs on the reference kernel, slower: the native one has vectors of 8.
    is_aligned = model_config.head_dim % native_attention.HEAD_DIM_MULTIPLE == 0
    has_pallas = platform == "tpu" and _has_pallas(config, model_config)
    if config.attention == "auto":
        if has_pallas:
            return "pallas"
        is_native = platform == "cpu" and has_native and is_aligned and not has_latents
        return "native" if is_native else "reference"
    if config.attention == "pallas" and not has_pallas:
        raise ValueError(
            f"attention 'pallas' is for TPUs and a head_dim of up to {tpu_attention.MAX_HEAD_DIM} "
            "(of a multiple of 128 with 8-bit pages), or latents of a multiple of 128; got "
            f"{platform!r}, {model_config.head_dim}, kv_cache_dtype {config.kv_cache_dtype!r} and "
            f"family {model_config.family!r}: set attention to 'auto'"
        )
    if config.attention == "native" and has_latents:
        raise ValueError(
            f"attention 'native' has no kernel for latents, which {model_config.family!r} attends "
            "over: set attention to 'auto'"
        )
    if config.attention == "native" and has_native and not is_aligned:
        raise ValueError(
            "attention 'native' needs a head_dim that is a multiple of "
            f"{native_attention.HEAD_DIM_MULTIPLE}, got {model_config.head_dim}: set attention to "
            "'auto'"
        )
    return config.attention


def _has_pallas(config: EngineConfig, model_config: ModelConfig) -> bool:
    """Whether the TPU kernels take a model's heads or latents."""
    if model_config.mla is not None:
        return model_config.mla.kv_lora_rank % tpu_mla.LANES == 0
    if config.kv_cache_dtype != "auto" and model_config.head_dim % tpu_mla.LANES:
        return False
    return model_config.head_dim <= tpu_attention.MAX_HEAD_DIM


def load_native(config: EngineConfig, platform: str) -> library.NativeUnavailable | None:
    """Load the native kernels unless the configuration rules them out."""
    is_ruled_out = config.attention == "reference" and config.matmul == "xla"
    if is_ruled_out or platform != "cpu":
        return library.NativeUnavailable("native kernels are for the CPU platform")
    try:
        library.load()
    except library.NativeUnavailable as error:
        return error
    return None


def bind_attention(config: EngineConfig, model_config: ModelConfig) -> AttentionFn:
    """Return the kernel of a resolved configuration."""
    if model_config.mla is not None:
        kernel = tpu_mla if config.attention == "pallas" else mla_reference
        return kernel.ragged_paged_latent_attention
    if config.attention == "native":
        return native_attention.ragged_paged_attention
    if config.attention == "pallas":
        num_drafts = config.num_speculative_tokens if config.speculation != "none" else 0
        return functools.partial(tpu_attention.ragged_paged_attention, decode_q_len=1 + num_drafts)
    return reference.ragged_paged_attention


def bind_token_masks(config: EngineConfig, *, is_sharded: bool) -> ApplyTokenMasks:
    """Return the kernel for token masks: the native one where others are native, too."""
    if config.has_native_kernels and not is_sharded:
        return native_token_masks.apply_token_masks
    return token_masks.apply_token_masks
