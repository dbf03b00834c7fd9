"""Ragged paged attention in plain jnp: what the native and Pallas kernels must compute.

Also the path that serves where there is no compiler. Query rows of one sequence go in blocks of 8
and keys in tiles at absolute positions, both by loops of fixed body shape: memory stays at one
tile, whatever the batch, and a row's bits depend on its own sequence only.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kernels.quantized_pages import QuantizedPages, dequantize, quantize_rows

Pages = jax.Array | QuantizedPages

_BLOCK_ROWS = 8  # XLA's CPU dots and reductions are row-invariant from 8 rows on
_TILE_KEYS = 128
_NO_MAX = -1e30  # below every score, and finite: a fully masked tile is then an exact no-op


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: Pages,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Pages]:
    """Write the new keys and values to their pages, then attend over the pages.

    Query i of sequence s stands at position p = kv_lens[s] - q_len + i and sees the keys in
    [max(0, p - sliding_window + 1), p]. Scores, softmax and sums are f32.

    Args:
        q: [T, H, D], rotated.
        k: [T, K, D], rotated; K divides H.
        v: [T, K, D].
        kv_pages: [N, 2K, page, D]: keys of head h at row 2h, values at 2h + 1; quantised ones are
            written and read at their precision. Donate it: the update is then in place.
        kv_lens: i32 [S], tokens in the cache after this step.
        page_indices: i32 [S, P].
        cu_q_lens: i32 [S + 1], rows of sequence s are [cu_q_lens[s], cu_q_lens[s + 1]).
        num_seqs: i32 [1], sequences in use.
        sm_scale: factor of the scores.
        sliding_window: keys that a query sees, itself included; None for all.
        sinks: f32 [H], the score of one more key with a value of zero; None for no such key.

    Returns:
        The output [T, H, D] in q's dtype, zero past the last sequence's rows, and the pages.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    rows = jnp.stack([k, v], axis=2).reshape(num_tokens, 2 * num_kv_heads, head_dim)
    indices = (kv_lens, page_indices, cu_q_lens, num_seqs)
    kv_pages = write_rows(rows, kv_pages, *indices)

    def split(tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        tile = tile.reshape(num_kv_heads, 2, *tile.shape[1:])
        return tile[:, 0], tile[:, 1]

    out = attend_pages(
        q,
        kv_pages,
        *indices,
        split=split,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        sinks=sinks,
    )
    return out, kv_pages


def attend_pages(
    q: jax.Array,
    kv_pages: Pages,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    split: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    sm_scale: float,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend over pages that already hold the new rows; arguments as above but for one.

    Args:
        q: [T, H, D].
        kv_pages: [N, C, page, D], whatever the C rows of a token are.
        kv_lens: i32 [S].
        page_indices: i32 [S, P].
        cu_q_lens: i32 [S + 1].
        num_seqs: i32 [1].
        split: (f32 [C, keys, D]) -> keys [K, keys, D] and values [K, keys, V].
        sm_scale: factor of the scores.
        sliding_window: keys that a query sees, itself included.
        sinks: f32 [H].

    Returns:
        [T, H, V] in q's dtype.
    """
    num_tokens, num_heads, _ = q.shape
    if sinks is None:
        top, total = jnp.full(num_heads, _NO_MAX), jnp.zeros(num_heads)
    else:
        top, total = sinks.astype(jnp.float32), jnp.ones(num_heads)
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
            top,
            total,
            split=split,
            sm_scale=sm_scale,
            sliding_window=sliding_window,
        )
        # Rows past the sequence are zeros here, and are written by the later block they belong to.
        return lax.dynamic_update_slice_in_dim(out, block_out, start, axis=0)

    _, values = jax.eval_shape(split, jax.ShapeDtypeStruct(kv_pages.shape[1:], jnp.float32))
    out = jnp.zeros((*padded_q.shape[:2], values.shape[-1]), q.dtype)
    return lax.fori_loop(0, ends[-1], attend_block, out)[:num_tokens]


def write_rows(
    new_rows: jax.Array,
    kv_pages: Pages,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
) -> Pages:
    """Return the pages with new rows [T, C, D] stored; padding rows write nothing."""
    num_pages, _, page_size, _ = kv_pages.shape
    rows = jnp.arange(new_rows.shape[0])
    s = jnp.minimum(jnp.searchsorted(cu_q_lens, rows, side="right") - 1, kv_lens.shape[0] - 1)
    positions = kv_lens[s] - (cu_q_lens[s + 1] - rows)
    pages = page_indices[s, jnp.maximum(positions, 0) // page_size]
    pages = jnp.where(rows < cu_q_lens[num_seqs[0]], pages, num_pages)  # past the end: dropped
    slots = positions % page_size
    if isinstance(kv_pages, QuantizedPages):
        values, scales = quantize_rows(new_rows)
        return QuantizedPages(
            values=kv_pages.values.at[pages, :, slots].set(values, mode="drop"),
            scales=kv_pages.scales.at[pages, :, slots].set(scales, mode="drop"),
        )
    new_rows = new_rows.astype(kv_pages.dtype)
    return kv_pages.at[pages, :, slots].set(new_rows, mode="drop")


def _attend_rows(
    q: jax.Array,
    kv_pages: Pages,
    page_indices: jax.Array,
    first_position: jax.Array,
    num_rows: jax.Array,
    top: jax.Array,
    total: jax.Array,
    *,
    split: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    sm_scale: float,
    sliding_window: int | None,
) -> jax.Array:
    """Attend 8 consecutive rows [8, H, D] of one sequence; rows past num_rows give zeros.

    Maximum and sum of each head's softmax start as `top` and `total`, f32 [H].
    """
    block_rows, num_heads, head_dim = q.shape
    _, kv_rows, page_size, _ = kv_pages.shape
    tile_pages = max(1, _TILE_KEYS // page_size)
    tile_keys = tile_pages * page_size
    tile_shape = jax.ShapeDtypeStruct((kv_rows, tile_keys, head_dim), jnp.float32)
    num_kv_heads, _, value_dim = jax.eval_shape(split, tile_shape)[1].shape
    group = num_heads // num_kv_heads
    queries = q.reshape(block_rows, num_kv_heads, group, head_dim).swapaxes(0, 1)
    queries = queries.astype(jnp.float32).reshape(num_kv_heads, block_rows * group, head_dim)
    positions = first_position + jnp.arange(block_rows)
    num_keys = first_position + num_rows
    oldest = 0 if sliding_window is None else jnp.maximum(0, first_position - sliding_window + 1)

    def attend_tile(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = state
        slots = jnp.minimum(tile * tile_pages + jnp.arange(tile_pages), page_indices.shape[0] - 1)
        kv = dequantize(kv_pages, page_indices[slots])  # [tile_pages, C, page, D]
        kv = kv.swapaxes(0, 1).reshape(kv_rows, tile_keys, head_dim)
        keys = tile * tile_keys + jnp.arange(tile_keys)
        # Keys that no row sees may be anything, NaN too: they are gone before any arithmetic.
        is_live = (keys >= oldest) & (keys < num_keys)
        key_rows, values = split(jnp.where(is_live[None, :, None], kv, 0.0))
        mask = is_live[None, :] & (keys[None, :] <= positions[:, None])
        if sliding_window is not None:
            mask &= keys[None, :] > positions[:, None] - sliding_window
        mask = jnp.repeat(mask, group, axis=0)[None]  # [1, 8 * group, tile_keys]
        scores = jnp.einsum("knd,ktd->knt", queries, key_rows, precision="highest") * sm_scale
        scores = jnp.where(mask, scores, _NO_MAX)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
        decay = jnp.exp(top - new_top)
        total = total * decay + weights.sum(axis=-1)
        acc = acc * decay[..., None]
        acc = acc + jnp.einsum("knt,ktd->knd", weights, values, precision="highest")
        return new_top, total, acc

    def of_rows(per_head: jax.Array) -> jax.Array:
        return jnp.tile(per_head.reshape(num_kv_heads, group), (1, block_rows))

    acc = jnp.zeros((num_kv_heads, block_rows * group, value_dim))
    num_tiles = -(-num_keys // tile_keys)
    state = (of_rows(top), of_rows(total), acc)
    _, total, acc = lax.fori_loop(oldest // tile_keys, num_tiles, attend_tile, state)
    out = (acc / jnp.where(total == 0, 1.0, total)[..., None]).astype(q.dtype)
    out = out.reshape(num_kv_heads, block_rows, group, value_dim).swapaxes(0, 1)
    out = out.reshape(block_rows, num_heads, value_dim)
    is_row = jnp.arange(block_rows)[:, None, None] < num_rows
    return jnp.where(is_row, out, jnp.zeros((), q.dtype))
