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

from kernels.tpu.decode import decode_attention
from kernels.tpu.plan import page_windows, plan_decode, plan_prefill, plan_store
from kernels.tpu.prefill import prefill_attention
from kernels.tpu.store import store_pages
from kernels.tpu.tiling import BLOCK_KEYS, Tiling, choose_tiling

HEAD_DIM = 128
"""The head size that the kernels take: one row of lanes."""
MIN_TILE_BYTES = 32
"""Of one lane over the rows of the least page."""
_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


# Traced once however many layers call it: tracing the kernels takes a second.
@functools.partial(jax.jit, static_argnames=("sm_scale", "sliding_window", "tiling", "interpret"))
def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Write the new keys and values to their pages, then attend over the pages.

    Args:
        q: bf16 or f32 [T, H, D], rotated; D = 128.
        k: [T, K, D], rotated, dtype of q; K divides H.
        v: [T, K, D], dtype of q.
        kv_pages: [N, 2K, page, D] in q's dtype: keys of head h at row 2h, values at 2h + 1; page a
            power of two >= 16. Donate it: the update is then in place.
        kv_lens: i32 [S], tokens in the cache after this step.
        page_indices: i32 [S, P].
        cu_q_lens: i32 [S + 1], rows of sequence s are [cu_q_lens[s], cu_q_lens[s + 1]).
        num_seqs: i32 [1], sequences in use.
        sm_scale: factor of the scores.
        sliding_window: keys that a query sees, itself included; None for all.
        tiling: block sizes; None to choose them by shape.
        interpret: `pltpu.InterpretParams` to run without a TPU, for tests.

    Returns:
        The output [T, H, D] in q's dtype, zero past the last sequence's rows, and the pages.
        A row's sums do not depend on the batch or on chunking, given one tiling.

    Raises:
        ValueError: a shape or parameter does not fit.
        TypeError: a dtype is not supported.
    """
    _check(q, k, v, kv_pages)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_rows, page_size, _ = kv_pages.shape
    if tiling is None:
        tiling = choose_tiling(
            num_heads=num_heads,
            num_kv_heads=num_kv_rows // 2,
            page_size=page_size,
            kv_dtype=kv_pages.dtype,
        )
    kernel_options = {"vmem_limit_bytes": tiling.vmem_limit_bytes, "interpret": interpret}
    sequences = (kv_lens, cu_q_lens, num_seqs)
    min_q_len = tiling.decode_q_len + 1
    decode_shape, prefill_shape = tiling.shapes(
        num_heads=num_heads,
        num_kv_heads=num_kv_rows // 2,
        head_dim=head_dim,
        page_size=page_size,
        kv_dtype=kv_pages.dtype,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
    )
    block_size = decode_shape.block.num_keys
    windows = page_windows(page_indices)
    kv = jnp.stack([k, v], axis=2).reshape(num_rows, num_kv_rows, head_dim)
    qkv = jnp.concatenate([q, kv], axis=1)
    out, kv_pages = decode_attention(
        qkv,
        kv_pages,
        windows,
        plan_decode(
            *sequences,
            max_q_len=tiling.decode_q_len,
            block_size=block_size,
            sliding_window=sliding_window,
        ),
        jnp.zeros_like(q),
        shape=decode_shape,
        **kernel_options,
    )
    if num_rows < min_q_len:
        return out, kv_pages
    plan = plan_store(
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        num_rows=num_rows,
        min_q_len=min_q_len,
        page_size=page_size,
    )
    kv_pages = store_pages(qkv, kv_pages, plan, **kernel_options)
    plan = plan_prefill(
        *sequences,
        num_rows=num_rows,
        min_q_len=min_q_len,
        query_size=tiling.query_tokens,
        block_size=block_size,
        sliding_window=sliding_window,
    )
    out = prefill_attention(
        qkv, kv_pages, windows, plan, out, shape=prefill_shape, **kernel_options
    )
    return out, kv_pages


def _check(q: jax.Array, k: jax.Array, v: jax.Array, kv_pages: jax.Array) -> None:
    if q.dtype not in _FLOATS:
        raise TypeError(f"q must be bfloat16 or float32, got {q.dtype}")
    for name, array in (("k", k), ("v", v), ("kv_pages", kv_pages)):
        if array.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {array.dtype}")
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if k.shape != (num_rows, num_kv_heads, head_dim) or v.shape != k.shape:
        raise ValueError(f"k and v must be [T, K, D] as q {q.shape}, got {k.shape} and {v.shape}")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"the {num_heads} query heads must be a multiple of {num_kv_heads} kv heads"
        )
    if head_dim != HEAD_DIM:
        raise ValueError(f"head_dim must be {HEAD_DIM} on TPU, got {head_dim}")
    _, num_kv_rows, page_size, page_dim = kv_pages.shape
    if num_kv_rows != 2 * num_kv_heads or page_dim != head_dim:
        raise ValueError(
            f"kv_pages must be [N, {2 * num_kv_heads}, page, {head_dim}], got {kv_pages.shape}"
        )
    check_page_size(page_size, kv_pages.dtype)


def check_page_size(page_size: int, kv_dtype: Any) -> None:
    """Refuse pages that the kernels cannot write or hold.

    A page is written by tiles of rows: 8 of f32, 16 of bf16; and it must lie within a key block.

    Raises:
        ValueError: names the limits and what to do.
    """
    least = MIN_TILE_BYTES // jnp.dtype(kv_dtype).itemsize
    if not least <= page_size <= BLOCK_KEYS or page_size & (page_size - 1):
        raise ValueError(
            f"page_size {page_size}: the TPU attention kernels need a power of two in [{least}, "
            f"{BLOCK_KEYS}] with {jnp.dtype(kv_dtype).name} pages; set page_size to 128, or "
            "attention to 'reference'"
        )
