"""The work of one step, laid out for the attention kernels: which sequences, which key blocks.

Traced, a few hundred integers: every layer makes the same plan from the same arguments, so XLA
keeps one. Page ids are not part of it; the kernels stream them, and SMEM stays at a few KiB for
any context length. Invariant: key blocks begin at multiples of the block size from a sequence's
position 0, whatever part of it a step computes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

PAGE_WINDOW = 128
"""Page ids that the kernels fetch at once: one row of lanes, 512 bytes."""


class DecodePlan(NamedTuple):
    """Sequences with at most `max_q_len` new tokens, and their key blocks as one list of items.

    Item i belongs to the sequence j with `first_items[j] <= i < first_items[j + 1]` and is its key
    block `first_blocks[j] + i - first_items[j]`. Entries past the last such sequence are zeros.

    Attributes:
        seq_ids: row of the page table.
        kv_lens: tokens in the cache after the step.
        first_rows: first row in q.
        q_lens: rows in q.
        first_blocks: first key block that a row sees.
        first_items: [S + 1].
        num_items: [1].
    """

    seq_ids: jax.Array
    kv_lens: jax.Array
    first_rows: jax.Array
    q_lens: jax.Array
    first_blocks: jax.Array
    first_items: jax.Array
    num_items: jax.Array


def plan_decode(
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    max_q_len: int,
    block_size: int,
    sliding_window: int | None,
) -> DecodePlan:
    """List the key blocks of the sequences with 1 to `max_q_len` new tokens, in their order."""
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    is_chosen = _is_in_use(q_lens, num_seqs) & (q_lens <= max_q_len)
    seq_ids = compact(is_chosen)
    is_used = jnp.arange(kv_lens.shape[0]) < is_chosen.sum()
    kv_lens, q_lens, first_rows = (
        jnp.where(is_used, values[seq_ids], 0) for values in (kv_lens, q_lens, cu_q_lens[:-1])
    )
    first_blocks = jnp.zeros_like(kv_lens)
    if sliding_window is not None:
        oldest = jnp.maximum(kv_lens - q_lens - sliding_window + 1, 0)
        first_blocks = oldest // block_size
    num_blocks = -(-kv_lens // block_size) - first_blocks
    ends = jnp.cumsum(num_blocks)
    return DecodePlan(
        seq_ids=seq_ids,
        kv_lens=kv_lens,
        first_rows=first_rows,
        q_lens=q_lens,
        first_blocks=first_blocks,
        first_items=jnp.pad(ends, (1, 0)),
        num_items=ends[-1:],
    )


def page_windows(page_indices: jax.Array) -> jax.Array:
    """Cut the page table [S, P] into [S, W, 1, 128]: windows that a kernel can fetch by DMA."""
    num_seqs, num_pages = page_indices.shape
    num_windows = -(-num_pages // PAGE_WINDOW)
    padded = jnp.pad(page_indices, ((0, 0), (0, num_windows * PAGE_WINDOW - num_pages)))
    return padded.reshape(num_seqs, num_windows, 1, PAGE_WINDOW)


def compact(is_chosen: jax.Array) -> jax.Array:
    """Return the indices of the chosen entries in order, then zeros; a sum, since S is small."""
    size = is_chosen.shape[0]
    ranks = jnp.where(is_chosen, jnp.cumsum(is_chosen) - 1, size)
    is_at = ranks[None, :] == jnp.arange(size)[:, None]
    return jnp.where(is_at, jnp.arange(size)[None, :], 0).sum(axis=1, dtype=jnp.int32)


def _is_in_use(q_lens: jax.Array, num_seqs: jax.Array) -> jax.Array:
    return (jnp.arange(q_lens.shape[0]) < num_seqs[0]) & (q_lens > 0)
