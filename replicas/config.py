"""Frozen configuration of a replica: what the model is and how the engine runs it.

No jax here: the app reads these too. "auto" values are resolved by functions that return a new
config (`EngineConfig.resolve` in engine start-up), never by mutation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Platform = Literal["auto", "cpu", "tpu"]
AttentionImpl = Literal["auto", "native", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one replica runs its model.

    Attributes:
        model: local directory with config.json, tokenizer files and safetensors.
        platform: device kind; "auto" takes a TPU when one is attached.
        dtype: compute and weight dtype, "bfloat16" or "float32".
        page_size: tokens per KV page, a power of two; None: 16 on CPU, 128 on TPU.
        num_pages: KV pages including the null page; None: as many as `kv_cache_bytes` holds.
        kv_cache_bytes: memory for KV pages on CPU, or when `num_pages` is None.
        max_num_seqs: slots, i.e. sequences in one step.
        max_model_len: longest prompt + output in tokens; None: the model's own limit.
        max_num_batched_tokens: tokens in one step.
        max_mixed_tokens: tokens in a step that also contains decode rows: bounds the delay that a
            long prompt adds to running streams.
        enable_prefix_caching: keep full pages of finished sequences for reuse.
        attention: kernel choice; "auto" is native on CPU where a compiler was found.
        tensor_parallel: devices that one model is sharded over.
        program_store: directory of compiled programs, or None to compile at every start.
    """

    model: str
    platform: Platform = "auto"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    page_size: int | None = None
    num_pages: int | None = None
    kv_cache_bytes: int = 1 << 29
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_mixed_tokens: int = 64
    enable_prefix_caching: bool = True
    attention: AttentionImpl = "auto"
    tensor_parallel: int = 1
    program_store: str | None = None

    def __post_init__(self) -> None:
        if self.page_size is not None and (self.page_size < 8 or self.page_size & (self.page_size - 1)):
            raise ValueError(f"page_size must be a power of two >= 8, got {self.page_size}")
        if not 1 <= self.max_num_seqs <= 1024:
            raise ValueError(f"max_num_seqs must be in [1, 1024], got {self.max_num_seqs}")
        if self.max_num_batched_tokens < 8:
            raise ValueError(
                f"max_num_batched_tokens must be >= 8, got {self.max_num_batched_tokens}"
            )
        if self.max_mixed_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_mixed_tokens ({self.max_mixed_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs one token in a step"
            )
        if self.max_num_batched_tokens < self.max_mixed_tokens:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_mixed_tokens ({self.max_mixed_tokens})"
            )
        if self.num_pages is not None and self.num_pages < 2:
            raise ValueError(f"num_pages must be >= 2 (page 0 is the null page), got {self.num_pages}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be >= 2, got {self.max_model_len}")
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel must be >= 1, got {self.tensor_parallel}")
