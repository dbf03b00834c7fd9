"""Ragged paged attention in plain jnp: what the native and Pallas kernels must compute.

Also the path that serves where there is no compiler. Query rows of one sequence go in blocks of 8
and keys in tiles at absolute positions, both by loops of fixed body shape: memory stays at one
tile, whatever the batch, and a row's bits depend on its own sequence only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK_ROWS = 8  # XLA's CPU dots and reductions are row-invariant from 8 rows on
_TILE_KEYS = 128
_NO_MAX = -1e30  # below every score, and finite: a fully masked tile is then an exact no-op


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
) -> tuple[jax.Array, jax.Array]:
    """Write the new keys and values to their pages, then attend over the pages.

    Query i of sequence s stands at position p = kv_lens[s] - q_len + i and sees the keys in
    [max(0, p - sliding_window + 1), p]. Scores, softmax and sums are f32.

    Args:
        q: [T, H, D], rotated.
        k: [T, K, D], rotated; K divides H.
        v: [T, K, D].
        kv_pages: [N, 2K, page, D]: keys of head h at row 2h, values at 2h + 1. Donate it: the
            update is then in place.
        kv_lens: i32 [S], tokens in the cache after this step.
        page_indices: i32 [S, P].
        cu_q_lens: i32 [S + 1], rows of sequence s are [cu_q_lens[s], cu_q_lens[s + 1]).
        num_seqs: i32 [1], sequences in use.
        sm_scale: factor of the scores.
        sliding_window: keys that a query sees, itself included; None for all.

    Returns:
        The output [T, H, D] in q's dtype, zero past the last sequence's rows, and the pages.
    """
    kv_pages = write_pages(k, v, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs)
    num_tokens = q.shape[0]
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    in_use = jnp.arange(kv_lens.shape[0]) < num_seqs[0]
    # Blocks of all sequences, numbered in order: those of sequence s are [ends[s - 1], ends[s]).
    ends = jnp.cumsum(jnp.where(in_use, -(-q_lens // _BLOCK_ROWS), 0))
    padded_q = jnp.pad(q, ((0, _BLOCK_ROWS), (0, 0), (0, 0)))

    def attend_block(block: jax.Array, out: jax.Array) -> jax.Array:
        s = jnp.searchsorted(ends, block, side="right")
        first_block = jnp.where(s == 0, 0, ends[s - 1])
        start = cu_q_lens[s] + (block - first_block) * _BLOCK_ROWS
        num_rows = jnp.minimum(cu_q_lens[s + 1] - start, _BLOCK_ROWS)
        rows = lax.dynamic_slice_in_dim(padded_q, start, _BLOCK_ROWS)
        block_out = _attend_rows(
            rows,
            kv_pages,
            page_indices[s],
            kv_lens[s] - (cu_q_lens[s + 1] - start),
            num_rows,
            sm_scale=sm_scale,
            sliding_window=sliding_window,
        )
        # Rows past the sequence are zeros here, and are written by the later block they belong to.
        return lax.dynamic_update_slice_in_dim(out, block_out, start, axis=0)

    out = lax.fori_loop(0, ends[-1], attend_block, jnp.zeros_like(padded_q))
    return out[:num_tokens], kv_pages


def write_pages(
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
) -> jax.Array:
    """Return the pages with the new keys and values stored; padding rows write nothing."""
    num_tokens, num_kv_heads, head_dim = k.shape
    num_pages, _, page_size, _ = kv_pages.shape
    rows = jnp.arange(num_tokens)
    s = jnp.minimum(jnp.searchsorted(cu_q_lens, rows, side="right") - 1, kv_lens.shape[0] - 1)
    positions = kv_lens[s] - (cu_q_lens[s + 1] - rows)
    pages = page_indices[s, jnp.maximum(positions, 0) // page_size]
    pages = jnp.where(rows < cu_q_lens[num_seqs[0]], pages, num_pages)  # past the end: dropped
    kv = jnp.stack([k, v], axis=2).reshape(num_tokens, 2 * num_kv_heads, head_dim)
    return kv_pages.at[pages, :, positions % page_size].set(kv.astype(kv_pages.dtype), mode="drop")


def _attend_rows(
    q: jax.Array,
    kv_pages: jax.Array,
    page_indices: jax.Array,
    first_position: jax.Array,
    num_rows: jax.Array,
    *,
    sm_scale: float,
    sliding_window: int | None,
) -> jax.Array:
    """Attend 8 consecutive rows [8, H, D] of one sequence; rows past num_rows give zeros."""
    block_rows, num_heads, head_dim = q.shape
    _, kv_rows, page_size, _ = kv_pages.shape
    num_kv_heads = kv_rows // 2
    tile_pages = max(1, _TILE_KEYS // page_size)
    tile_keys = tile_pages * page_size
    group = num_heads // num_kv_heads
    queries = q.reshape(block_rows, num_kv_heads, group, head_dim).swapaxes(0, 1)
    queries = queries.astype(jnp.float32).reshape(num_kv_heads, block_rows * group, head_dim)
    positions = first_position + jnp.arange(block_rows)
    num_keys = first_position + num_rows
    oldest = 0 if sliding_window is None else jnp.maximum(0, first_position - sliding_window + 1)

    def attend_tile(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = state
        slots = jnp.minimum(tile * tile_pages + jnp.arange(tile_pages), page_indices.shape[0] - 1)
        kv = kv_pages[page_indices[slots]]  # [tile_pages, 2K, page, D]
        kv = kv.swapaxes(0, 1).reshape(num_kv_heads, 2, tile_keys, head_dim)
        keys = tile * tile_keys + jnp.arange(tile_keys)
        # Keys that no row sees may be anything, NaN too: they are gone before any arithmetic.
        is_live = (keys >= oldest) & (keys < num_keys)
        kv = jnp.where(is_live[None, None, :, None], kv.astype(jnp.float32), 0.0)
        mask = is_live[None, :] & (keys[None, :] <= positions[:, None])
        if sliding_window is not None:
            mask &= keys[None, :] > positions[:, None] - sliding_window
        mask = jnp.repeat(mask, group, axis=0)[None]  # [1, 8 * group, tile_keys]
        scores = jnp.einsum("knd,ktd->knt", queries, kv[:, 0], precision="highest") * sm_scale
        scores = jnp.where(mask, scores, _NO_MAX)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
        decay = jnp.exp(top - new_top)
        total = total * decay + weights.sum(axis=-1)
        acc = acc * decay[..., None]
        acc = acc + jnp.einsum("knt,ktd->knd", weights, kv[:, 1], precision="highest")
        return new_top, total, acc

    shape = queries.shape[:2]
    state = (jnp.full(shape, _NO_MAX), jnp.zeros(shape), jnp.zeros(queries.shape))
    num_tiles = -(-num_keys // tile_keys)
    _, total, acc = lax.fori_loop(oldest // tile_keys, num_tiles, attend_tile, state)
    out = (acc / jnp.where(total == 0, 1.0, total)[..., None]).astype(q.dtype)
    out = out.reshape(num_kv_heads, block_rows, group, head_dim).swapaxes(0, 1)
    is_row = jnp.arange(block_rows)[:, None, None] < num_rows
    return jnp.where(is_row, out.reshape(q.shape), jnp.zeros((), q.dtype))
