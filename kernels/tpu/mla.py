"""Attention over a paged cache of latents on TPUs: same meaning as `kernels.mla_reference`.

Sequences with one new token go to a launch that also stores their rows; longer chunks have theirs
written by the store kernel first. Rows of pages have whole tiles of 128 lanes, zeros at their end.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels.tpu.block import LANES
from kernels.tpu.latent_kernel import LatentShape, latent_attention
from kernels.tpu.plan import page_windows, plan_decode, plan_prefill, plan_store
from kernels.tpu.store import store_pages
from kernels.tpu.tiling import padded_lanes

_VMEM_BYTES = 48 << 20
_MIN_PAGE = 16
_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


@dataclass(frozen=True, kw_only=True)
class LatentTiling:
    """Sizes that the kernel can be built with.

    Attributes:
        block_keys: keys of a block, a multiple of `part_keys`.
        part_keys: keys that are normalised and merged at once; a row's sums depend on it.
        sub_rows: rows, of tokens and heads, whose scores a chunk computes at once.
        num_subs: of a query block of a chunk, which the latents are read once for.
    """

    block_keys: int = 1024
    part_keys: int = 512
    sub_rows: int = 256
    num_subs: int = 4

    def sub_tokens(self, num_heads: int) -> int:
        """Tokens of a sub-block of a chunk."""
        return max(1, self.sub_rows // num_heads)


# Traced once however many layers call it.
@functools.partial(jax.jit, static_argnames=("sm_scale", "num_value_dims", "tiling", "interpret"))
def ragged_paged_latent_attention(
    q: jax.Array,
    latents: jax.Array,
    pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float,
    num_value_dims: int,
    tiling: LatentTiling = LatentTiling(),
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Write the new rows to their pages, then attend over the pages.

    Args:
        q: bf16 or f32 [T, H, C], for each head its query in latent space, then its rotated part.
        latents: [T, C], the new rows: latent, normalised, then the rotated key that heads share.
        pages: [N, 1, page, L] in q's dtype, L the next multiple of 128 from C on; page a power of
            two from 16 to a block's keys. Donate them: the update is then in place.
        kv_lens: i32 [S], tokens in the cache after this step.
        page_indices: i32 [S, P].
        cu_q_lens: i32 [S + 1], rows of sequence s are [cu_q_lens[s], cu_q_lens[s + 1]).
        num_seqs: i32 [1], sequences in use.
        sm_scale: factor of the scores.
        num_value_dims: R, the size of the latent, a multiple of 128.
        tiling: block sizes.
        interpret: `pltpu.InterpretParams` to run without a TPU, for tests.

    Returns:
        Weighted latents [T, H, R] in q's dtype, zero past the last sequence's rows, and the pages.
        A row's sums do not depend on the batch or on chunking, given one tiling.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype is not supported.
    """
    num_rows, num_heads, num_dims = q.shape
    _, _, page_size, num_lanes = pages.shape
    _check(q, pages, num_value_dims=num_value_dims, tiling=tiling)
    padding = num_lanes - num_dims
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding)))
    # In f32, of which a single row is a whole tile that a DMA can take.
    rows = jnp.pad(latents.astype(jnp.float32), ((0, 0), (0, padding)))[:, None]
    kernel_options = {"vmem_limit_bytes": _VMEM_BYTES, "interpret": interpret}
    sub_tokens = tiling.sub_tokens(num_heads)

    def shape(*, sub_tokens: int, query_tokens: int, stores_new: bool) -> LatentShape:
        return LatentShape(
            num_heads=num_heads,
            num_lanes=num_lanes,
            num_value_dims=num_value_dims,
            page_size=page_size,
            pages=tiling.block_keys // page_size,
            part_keys=tiling.part_keys,
            sub_tokens=sub_tokens,
            query_tokens=query_tokens,
            stores_new=stores_new,
            kv_dtype=pages.dtype,
            sm_scale=sm_scale,
        )

    sequences = (kv_lens, cu_q_lens, num_seqs)
    windows = page_windows(page_indices)
    blocks: dict[str, Any] = {"block_size": tiling.block_keys, "sliding_window": None}
    out = jnp.zeros((num_rows, num_heads, num_value_dims), q.dtype)
    out, pages = latent_attention(
        q,
        rows,
        pages,
        windows,
        plan_decode(*sequences, min_q_len=1, max_q_len=1, **blocks),
        out,
        shape=shape(sub_tokens=1, query_tokens=1, stores_new=True),
        **kernel_options,
    )
    if num_rows > 1:
        query_tokens = tiling.num_subs * sub_tokens
        sizes = {"num_rows": num_rows, "min_q_len": 2}
        indices = (kv_lens, page_indices, cu_q_lens, num_seqs)
        store_plan = plan_store(*indices, page_size=page_size, **sizes)
        pages = store_pages(rows, pages, store_plan, row_tokens=1, **kernel_options)
        out, pages = latent_attention(
            q,
            rows,
            pages,
            windows,
            plan_prefill(*sequences, query_size=query_tokens, **sizes, **blocks),
            out,
            shape=shape(sub_tokens=sub_tokens, query_tokens=query_tokens, stores_new=False),
            **kernel_options,
        )
    return out, pages


def _check(q: jax.Array, pages: jax.Array, *, num_value_dims: int, tiling: LatentTiling) -> None:
    if q.dtype not in _FLOATS or pages.dtype != q.dtype:
        raise TypeError(
            f"q and pages must both be bfloat16 or float32, got {q.dtype} and {pages.dtype}"
        )
    num_lanes = padded_lanes(q.shape[2])
    if pages.shape[1] != 1 or pages.shape[3] != num_lanes:
        raise ValueError(f"pages must be [N, 1, page, {num_lanes}], got {pages.shape}")
    if num_value_dims % LANES:
        raise ValueError(f"the latent must be a multiple of {LANES}, got {num_value_dims}")
    check_page_size(pages.shape[2], max_page_size=tiling.block_keys)


def check_page_size(page_size: int, *, max_page_size: int = LatentTiling().block_keys) -> None:
    """Refuse pages that the kernel cannot write or hold.

    Raises:
        ValueError: names the limits and what to do.
    """
    if not _MIN_PAGE <= page_size <= max_page_size or page_size & (page_size - 1):
        raise ValueError(
            f"page_size {page_size}: the TPU kernel for latents needs a power of two in "
            f"[{_MIN_PAGE}, {max_page_size}]; set page_size to 128, or attention to 'reference'"
        )
