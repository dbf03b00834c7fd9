"""Ragged paged attention on TPUs: same signature and meaning as `kernels.reference`.

Sequences with few new tokens go to the decode kernel, which also writes their keys and values;
longer chunks have theirs written by the store kernel and attend in the prefill kernel. Each kernel
works through a list made here from the step's arrays, and an empty list costs a launch. Invariant:
key blocks stand at multiples of one block size in all of them, so that a row's sums are the same
whichever computes it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels.quantized_pages import QuantizedPages, quantize_rows
from kernels.tpu.block import LANES
from kernels.tpu.decode import decode_attention
from kernels.tpu.plan import page_windows, plan_decode, plan_prefill, plan_store
from kernels.tpu.prefill import prefill_attention
from kernels.tpu.store import store_pages
from kernels.tpu.tiling import (
    BLOCK_KEYS,
    Tiling,
    choose_tiling,
    padded_head_dim,
    padded_lanes,
    tokens_per_row,
)

MAX_HEAD_DIM = 256
"""Larger heads would take more VMEM than their blocks leave."""
MIN_TILE_BYTES = 32
"""Of one lane over the rows of the least page."""
_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


# Traced once however many layers call it: tracing the kernels takes a second.
@functools.partial(
    jax.jit,
    static_argnames=(
        "sm_scale",
        "sliding_window",
        "soft_cap",
        "decode_q_len",
        "tiling",
        "interpret",
    ),
)
def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array | QuantizedPages,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    decode_q_len: int = 1,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | QuantizedPages]:
    """Write the new keys and values to their pages, then attend over the pages.

    Args:
        q: bf16 or f32 [T, H, D], rotated; D up to `MAX_HEAD_DIM`. 64 and multiples of 128 are
            computed as they are, others with zeros up to the next of these, W.
        k: [T, K, D], rotated, dtype of q; K divides H.
        v: [T, K, D], dtype of q.
        kv_pages: keys of head h at row 2h, values at 2h + 1. [N, 2K, page, W], for W = 64 the same
            bytes as [N, 2K, page / 2, 128]: two tokens a row. In q's dtype, or for multiples of
            128 quantised; page a power of two, see `check_page_size`. Donate it: the update is
            then in place.
        kv_lens: i32 [S], tokens in the cache after this step.
        page_indices: i32 [S, P].
        cu_q_lens: i32 [S + 1], rows of sequence s are [cu_q_lens[s], cu_q_lens[s + 1]).
        num_seqs: i32 [1], sequences in use.
        sm_scale: factor of the scores.
        sliding_window: keys that a query sees, itself included; None for all.
        soft_cap: scores s become c tanh(s / c); None to leave them.
        sinks: f32 [H], a score of each query head that takes weight and has no value.
        decode_q_len: new tokens of a sequence up to which it goes to the decode kernel, 1 to 8:
            more than 1 costs another launch.
        tiling: block sizes; None to choose them by shape.
        interpret: `pltpu.InterpretParams` to run without a TPU, for tests.

    Returns:
        The output [T, H, D] in q's dtype, zero past the last sequence's rows, and the pages.
        A row's sums do not depend on the batch or on chunking, given one tiling.

    Raises:
        ValueError: a shape or parameter does not fit.
        TypeError: a dtype is not supported.
    """
    head_dim = q.shape[2]
    if (padding := padded_head_dim(head_dim) - head_dim) > 0:
        widths = ((0, 0), (0, 0), (0, padding))
        out, kv_pages = ragged_paged_attention(
            *(jnp.pad(rows, widths) for rows in (q, k, v)),
            kv_pages,
            kv_lens,
            page_indices,
            cu_q_lens,
            num_seqs,
            sm_scale=sm_scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            decode_q_len=decode_q_len,
            tiling=tiling,
            interpret=interpret,
        )
        return out[..., :head_dim], kv_pages
    values = kv_pages.values if isinstance(kv_pages, QuantizedPages) else kv_pages
    _check(q, k, v, values, is_quantized=values is not kv_pages)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    num_rows, num_heads, _ = q.shape
    num_kv_heads, row_tokens = k.shape[1], tokens_per_row(head_dim)
    page_size = values.shape[2] * row_tokens
    if tiling is None:
        tiling = choose_tiling(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            kv_dtype=values.dtype,
            head_dim=head_dim,
            decode_q_len=decode_q_len,
        )
    kernel_options = {"vmem_limit_bytes": tiling.vmem_limit_bytes, "interpret": interpret}
    sequences = (kv_lens, cu_q_lens, num_seqs)
    min_q_len = tiling.decode_q_len + 1
    decode_shapes, prefill_shape = tiling.shapes(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        kv_dtype=values.dtype,
        dtype=q.dtype,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    block_size = prefill_shape.block.num_keys
    windows = page_windows(page_indices)
    q_rows, kv_rows = _rows(q, k, v, values.dtype)
    qkv = jnp.concatenate([q_rows, kv_rows], axis=1)
    # With two tokens a row the halves of an output row are still to be added: in f32.
    out_dtype = q.dtype if row_tokens == 1 else jnp.float32
    out = jnp.zeros((num_rows, num_heads, values.shape[3]), out_dtype)
    max_q_len = 0
    for shape in decode_shapes:
        plan = plan_decode(
            *sequences,
            min_q_len=max_q_len + 1,
            max_q_len=shape.block.max_q_len,
            block_size=block_size,
            sliding_window=sliding_window,
        )
        max_q_len = shape.block.max_q_len
        out, kv_pages = decode_attention(
            qkv,
            kv_pages,
            windows,
            plan,
            out,
            None if sinks is None else shape.block.rows_of_heads(sinks),
            shape=shape,
            **kernel_options,
        )
    if num_rows >= min_q_len:
        store_plan = plan_store(
            kv_lens,
            page_indices,
            cu_q_lens,
            num_seqs,
            num_rows=num_rows,
            min_q_len=min_q_len,
            page_size=page_size,
        )
        kv_pages = store_pages(
            kv_rows, kv_pages, store_plan, row_tokens=row_tokens, **kernel_options
        )
        plan = plan_prefill(
            *sequences,
            num_rows=num_rows,
            min_q_len=min_q_len,
            query_size=tiling.query_tokens,
            block_size=block_size,
            sliding_window=sliding_window,
        )
        out = prefill_attention(
            q_rows,
            kv_pages,
            windows,
            plan,
            out,
            None if sinks is None else prefill_shape.rows_of_heads(sinks),
            shape=prefill_shape,
            **kernel_options,
        )
    if row_tokens == 2:
        out = out[..., :head_dim] + out[..., head_dim:]
    return out.astype(q.dtype), kv_pages


def _rows(q: jax.Array, k: jax.Array, v: jax.Array, kv_dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Queries [T, H, W], and keys and values [T, 2K, W] ready to be stored, in q's dtype.

    Decode copies a token's at once and wants them in one array; longer chunks copy the two apart,
    and from one array could not, unless H is a multiple of 8.

    Heads of 64 stand twice in a row: each token takes the half that is its own. For pages of 8 bits
    keys and values are the numbers that these hold, and one row more has their scales.
    """
    num_rows, _, head_dim = q.shape
    num_kv_rows = 2 * k.shape[1]
    kv = jnp.stack([k, v], axis=2).reshape(num_rows, num_kv_rows, head_dim)
    if jnp.dtype(kv_dtype).itemsize == 1:
        kv, scales = quantize_rows(kv, kv_dtype)
        scales = jnp.pad(scales, ((0, 0), (0, head_dim - num_kv_rows)))
        kv = jnp.concatenate([kv.astype(q.dtype), scales[:, None].astype(q.dtype)], axis=1)
    if tokens_per_row(head_dim) == 1:
        return q, kv
    return jnp.concatenate([q, q], axis=2), jnp.concatenate([kv, kv], axis=2)


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, kv_pages: jax.Array, *, is_quantized: bool
) -> None:
    if q.dtype not in _FLOATS:
        raise TypeError(f"q must be bfloat16 or float32, got {q.dtype}")
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {array.dtype}")
    if is_quantized != (kv_pages.dtype.itemsize == 1):
        raise TypeError(f"kv_pages are quantised if they have 8 bits, got {kv_pages.dtype}")
    if not is_quantized and kv_pages.dtype != q.dtype:
        raise TypeError(
            f"kv_pages must be quantised or have q's dtype {q.dtype}, got {kv_pages.dtype}"
        )
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if k.shape != (num_rows, num_kv_heads, head_dim) or v.shape != k.shape:
        raise ValueError(f"k and v must be [T, K, D] as q {q.shape}, got {k.shape} and {v.shape}")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"the {num_heads} query heads must be a multiple of {num_kv_heads} kv heads"
        )
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM} on TPU, got {head_dim}")
    if is_quantized and (head_dim % LANES or 2 * num_kv_heads > LANES):
        raise ValueError(
            f"quantised kv_pages need a head_dim of a multiple of {LANES} and at most 64 KV heads "
            f"on TPU, got {head_dim} and {num_kv_heads}"
        )
    _, num_kv_rows, page_rows, num_lanes = kv_pages.shape
    lanes = padded_lanes(head_dim)
    if num_kv_rows != 2 * num_kv_heads or num_lanes != lanes:
        raise ValueError(
            f"kv_pages must be [N, {2 * num_kv_heads}, rows, {lanes}], got {kv_pages.shape}"
        )
    page_size = page_rows * tokens_per_row(head_dim)
    check_page_size(page_size, kv_pages.dtype, head_dim=head_dim)


def check_page_size(page_size: int, kv_dtype: Any, *, head_dim: int) -> None:
    """Refuse pages that the kernels cannot write or hold.

    A page is written by tiles of rows, 8 of f32, 16 of bf16, 32 of 8 bits, of one or two tokens
    each; and it must lie within a key block. The scales of a page of 8 bits are rows of lanes.

    Raises:
        ValueError: names the limits and what to do.
    """
    least = MIN_TILE_BYTES // jnp.dtype(kv_dtype).itemsize * tokens_per_row(head_dim)
    if jnp.dtype(kv_dtype).itemsize == 1:
        least = LANES
    if not least <= page_size <= BLOCK_KEYS or page_size & (page_size - 1):
        raise ValueError(
            f"page_size {page_size}: the TPU attention kernels need a power of two in [{least}, "
            f"{BLOCK_KEYS}] with {jnp.dtype(kv_dtype).name} pages; set page_size to 128, or "
            "attention to 'reference'"
        )
