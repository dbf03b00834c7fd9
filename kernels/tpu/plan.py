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

_NEVER = 1 << 30
PAGE_WINDOW = 128
"""Page ids that the kernels fetch at once: one row of lanes, 512 bytes."""


class DecodePlan(NamedTuple):
    """Sequences with at most `max_q_len` new tokens, and their key blocks as one list of items.

    Item i belongs to the sequence j with `first_items[j] <= i < first_items[j + 1]` and is its key
    block `i + block_offsets[j]`. Past the last such sequence stands an empty one that never ends:
    what runs ahead of the list finds nothing to do there.

    Attributes:
        seq_ids: [S + 1], row of the page table.
        kv_lens: [S + 1], tokens in the cache after the step.
        first_rows: [S + 1], first row in q.
        q_lens: [S + 1], rows in q.
        block_offsets: [S + 1].
        first_items: [S + 2].
        num_items: [1].
    """

    seq_ids: jax.Array
    kv_lens: jax.Array
    first_rows: jax.Array
    q_lens: jax.Array
    block_offsets: jax.Array
    first_items: jax.Array
    num_items: jax.Array


def plan_decode(
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    min_q_len: int,
    max_q_len: int,
    block_size: int,
    sliding_window: int | None,
) -> DecodePlan:
    """List the key blocks of the sequences with `min_q_len` to `max_q_len` new tokens, in order."""
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    is_chosen = _is_in_use(q_lens, num_seqs) & (q_lens >= min_q_len) & (q_lens <= max_q_len)
    num_chosen = is_chosen.sum()
    seq_ids = compact(is_chosen)
    is_used = jnp.arange(seq_ids.shape[0]) < num_chosen
    return _list_items(
        seq_ids,
        jnp.where(is_used, kv_lens[seq_ids], 0),
        jnp.where(is_used, cu_q_lens[seq_ids], 0),
        jnp.where(is_used, q_lens[seq_ids], 0),
        num_chosen,
        block_size=block_size,
        sliding_window=sliding_window,
    )


def _list_items(
    seq_ids: jax.Array,
    kv_lens: jax.Array,
    first_rows: jax.Array,
    q_lens: jax.Array,
    num_used: jax.Array,
    *,
    block_size: int,
    sliding_window: int | None,
) -> DecodePlan:
    """Number the key blocks of a list of sequences; entries past `num_used` are zeros."""
    first_blocks = jnp.zeros_like(kv_lens)
    if sliding_window is not None:
        first_blocks = jnp.maximum(kv_lens - q_lens - sliding_window + 1, 0) // block_size
    ends = jnp.cumsum(-(-kv_lens // block_size) - first_blocks)
    first_items = jnp.pad(ends, (1, 1), mode="edge").at[0].set(0)
    is_past = jnp.arange(first_items.shape[0]) > num_used
    padding = (0, 1)
    return DecodePlan(
        seq_ids=jnp.pad(seq_ids, padding),
        kv_lens=jnp.pad(kv_lens, padding),
        first_rows=jnp.pad(first_rows, padding),
        q_lens=jnp.pad(q_lens, padding),
        block_offsets=jnp.pad(first_blocks, padding) - first_items[:-1],
        first_items=jnp.where(is_past, _NEVER, first_items),
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


class StorePlan(NamedTuple):
    """Pages that new tokens of prompts go to, one entry per page.

    Attributes:
        page_ids: [E].
        first_rows: [E], row in q of the page's first new token.
        first_slots: [E], its row in the page.
        num_tokens: [E], new tokens of the page.
        num_entries: [1].
    """

    page_ids: jax.Array
    first_rows: jax.Array
    first_slots: jax.Array
    num_tokens: jax.Array
    num_entries: jax.Array


def plan_store(
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    num_rows: int,
    min_q_len: int,
    page_size: int,
) -> StorePlan:
    """List the pages that sequences with at least `min_q_len` new tokens write."""
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    is_chosen = _is_in_use(q_lens, num_seqs) & (q_lens >= min_q_len)
    cached = kv_lens - q_lens
    first_pages = cached // page_size
    counts = jnp.where(is_chosen, (kv_lens - 1) // page_size - first_pages + 1, 0)
    max_seqs = min(kv_lens.shape[0], num_rows // min_q_len)
    size = num_rows // page_size + 2 * max_seqs
    seqs, index, is_used, num_entries = _expand(counts, size)
    page = first_pages[seqs] + index
    begin = jnp.maximum(page * page_size, cached[seqs])
    end = jnp.minimum((page + 1) * page_size, kv_lens[seqs])
    return StorePlan(
        page_ids=jnp.where(is_used, page_indices[seqs, page], 0),
        first_rows=jnp.where(is_used, cu_q_lens[seqs] + begin - cached[seqs], 0),
        first_slots=jnp.where(is_used, begin - page * page_size, 0),
        num_tokens=jnp.where(is_used, end - begin, 0),
        num_entries=num_entries,
    )


def plan_prefill(
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    num_rows: int,
    min_q_len: int,
    query_size: int,
    block_size: int,
    sliding_window: int | None,
) -> DecodePlan:
    """List the key blocks of each block of `query_size` tokens of sequences with at least
    `min_q_len` new ones: as if each block of queries were a sequence that ends with it."""
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    is_chosen = _is_in_use(q_lens, num_seqs) & (q_lens >= min_q_len)
    counts = jnp.where(is_chosen, -(-q_lens // query_size), 0)
    max_seqs = min(kv_lens.shape[0], num_rows // min_q_len)
    seqs, index, is_used, num_used = _expand(counts, num_rows // query_size + max_seqs)
    begin = index * query_size
    end = jnp.minimum(begin + query_size, q_lens[seqs])
    return _list_items(
        jnp.where(is_used, seqs, 0),
        jnp.where(is_used, kv_lens[seqs] - q_lens[seqs] + end, 0),
        jnp.where(is_used, cu_q_lens[seqs] + begin, 0),
        jnp.where(is_used, end - begin, 0),
        num_used[0],
        block_size=block_size,
        sliding_window=sliding_window,
    )


def _expand(counts: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Number `counts[s]` entries of each s in a list of `size`.

    Returns:
        s of each entry, its index within s, whether it is in use, and how many are, [1].
    """
    ends = jnp.cumsum(counts)
    entries = jnp.arange(size)
    owners = (entries[:, None] >= ends[None, :]).sum(axis=1)
    is_used = owners < counts.shape[0]
    owners = jnp.where(is_used, owners, 0)
    return owners, jnp.where(is_used, entries - (ends - counts)[owners], 0), is_used, ends[-1:]
