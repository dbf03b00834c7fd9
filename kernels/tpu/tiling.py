"""Block sizes of the TPU attention kernels, and the memory they take.

Chosen by the static cost of the compiled kernels (docs/tpu.md has the table), within the smallest
VMEM of the generations that we compile for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from kernels.tpu.block import LANES, BlockShape
from kernels.tpu.decode import DecodeShape
from kernels.tpu.prefill import PrefillShape

_VMEM_BYTES = 48 << 20
"""Limit of a kernel: three quarters of a TPU7x core's 64 MiB; v5e and v6e have 128 MiB."""
BLOCK_KEYS = 1024
"""Keys of a block where a key has 256 bytes, and the largest page; more where it has fewer."""
_ROUND_BYTES = 8 << 20
"""Of a decode round's pages; three such rounds fit, and no larger ones."""
_MAX_ROUND_ITEMS = 8
_SUB_ROWS = 256
_SUBS = 2


def padded_lanes(num_dims: int) -> int:
    """Lanes of the rows of a TPU's memory that hold so many elements each."""
    return -(-num_dims // LANES) * LANES


def padded_head_dim(head_dim: int) -> int:
    """Elements of a head as the attention kernels compute it, zeros included: 64, or whole rows."""
    half = LANES // 2
    return half if head_dim <= half else padded_lanes(head_dim)


def tokens_per_row(head_dim: int) -> int:
    """Tokens that share a row of lanes: 2 of heads of up to 64, else 1."""
    return max(1, LANES // padded_head_dim(head_dim))


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes that a kernel can be built with.

    Attributes:
        block_keys: keys of a block; a row's sums depend on it.
        round_items: blocks that decode computes at once.
        decode_slots: decode rounds in memory or on their way, 2 or 3.
        decode_q_len: new tokens of a sequence up to which decode takes it, 1 to 8.
        sub_tokens: tokens whose scores prefill computes at once, a multiple of 8.
        query_tokens: tokens of a prefill query block.
        vmem_limit_bytes: what the compiler may use.
    """

    block_keys: int
    round_items: int
    decode_q_len: int
    sub_tokens: int
    query_tokens: int
    decode_slots: int = 3
    vmem_limit_bytes: int = _VMEM_BYTES

    def shapes(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        kv_dtype: Any,
        dtype: Any,
        sm_scale: float,
        sliding_window: int | None,
        soft_cap: float | None = None,
    ) -> tuple[tuple[DecodeShape, ...], PrefillShape]:
        """Static shapes: decode of 1 token, of 2 to `decode_q_len` if that is more, and prefill.

        A row of a sequence with one new token costs the same beside others that verify drafts.
        """

        def block(max_q_len: int) -> BlockShape:
            return BlockShape(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                row_tokens=tokens_per_row(head_dim),
                row_lanes=padded_lanes(head_dim),
                page_size=page_size,
                pages=self.block_keys // page_size,
                max_q_len=max_q_len,
                kv_dtype=kv_dtype,
                dtype=dtype,
                sm_scale=sm_scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
            )

        return (
            tuple(
                DecodeShape(
                    block=block(q_len), round_items=self.round_items, num_slots=self.decode_slots
                )
                for q_len in sorted({1, self.decode_q_len})
            ),
            PrefillShape(block=block(self.sub_tokens), query_tokens=self.query_tokens),
        )


def choose_tiling(
    *,
    num_heads: int,
    num_kv_heads: int,
    page_size: int,
    kv_dtype: Any,
    head_dim: int = LANES,
    decode_q_len: int = 1,
) -> Tiling:
    """Choose sizes for a shape.

    A decode round reads about 8 MiB: enough work to hide one block's latencies behind another's.
    Where a block alone is more, only two of them fit.
    A prefill sub-block has 256 rows per KV head: with fewer, loading keys costs more than using
    them; with more, scores spill.
    """
    key_bytes = padded_head_dim(head_dim) * jnp.dtype(kv_dtype).itemsize
    block_keys = max(BLOCK_KEYS, page_size) * max(1, 256 // key_bytes)
    block_bytes = 2 * num_kv_heads * block_keys * key_bytes
    round_items = max(1, min(_MAX_ROUND_ITEMS, _ROUND_BYTES // block_bytes))
    group = num_heads // num_kv_heads
    sub_rows = _SUB_ROWS * BLOCK_KEYS // block_keys
    sub_tokens = max(8, sub_rows // group // 8 * 8)
    return Tiling(
        block_keys=block_keys,
        round_items=round_items,
        decode_slots=3 if block_bytes <= _ROUND_BYTES else 2,
        decode_q_len=decode_q_len,
        sub_tokens=sub_tokens,
        query_tokens=_SUBS * sub_tokens,
    )
