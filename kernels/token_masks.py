"""Applies masks of allowed tokens to rows of logits: the jnp reference, which also serves on TPUs.

A mask has a bit for each token, 32 to a word, the lowest first. Nothing here computes: results are
copies and comparisons of logits, so every implementation gives the same bits.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float32, Int32

_GROUP_ROWS = 8


def apply_token_masks(
    logits: Float32[Array, "R V"],
    rows: Int32[Array, " N"],
    masks: Int32[Array, "N W"],
    needs_logits: Bool[Array, " N"],
    num_rows: Int32[Array, " 1"],
) -> tuple[Float32[Array, "N V"], Int32[Array, " N"]]:
    """Return the allowed logits and the most likely allowed token of each row; traced.

    Args:
        logits: of all rows.
        rows: which of them each of N rows reads; clipped to [0, R).
        masks: of each of N rows, W = ceil(V / 32).
        needs_logits: rows whose allowed logits are wanted, too.
        num_rows: in [0, N], the first rows that are in use; of the others nothing is computed.

    Returns:
        The logits with minus infinity where a token is not allowed, arbitrary in a row that does
        not need them; and the allowed token with the largest, the lowest id among equals (0 where
        none is allowed), arbitrary in a row that is not in use.

    Raises:
        ValueError: a shape does not fit, or N is no multiple of 8.
    """
    check_shapes(logits, rows, masks, needs_logits)
    del needs_logits  # selecting is as cheap as skipping where memory is fast
    count, vocab_size = rows.shape[0], logits.shape[1]
    if count % _GROUP_ROWS:
        raise ValueError(f"the number of rows must be a multiple of {_GROUP_ROWS}, got {count}")

    def mask_group(group: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        allowed, best = carry
        start = group * _GROUP_ROWS
        own_rows = lax.dynamic_slice_in_dim(rows, start, _GROUP_ROWS)
        is_allowed = unpack_bits(lax.dynamic_slice_in_dim(masks, start, _GROUP_ROWS), vocab_size)
        own = jnp.where(is_allowed, logits.at[own_rows].get(mode="clip"), -jnp.inf)
        is_best = own == jnp.max(own, axis=1, keepdims=True)
        token_ids = lax.broadcasted_iota(jnp.int32, own.shape, 1)
        lowest = jnp.min(jnp.where(is_best, token_ids, vocab_size - 1), axis=1)
        return (
            lax.dynamic_update_slice_in_dim(allowed, own, start, axis=0),
            lax.dynamic_update_slice_in_dim(best, lowest, start, axis=0),
        )

    carry = jnp.zeros((count, vocab_size), jnp.float32), jnp.zeros(count, jnp.int32)
    num_groups = (num_rows[0] + _GROUP_ROWS - 1) // _GROUP_ROWS
    return lax.fori_loop(0, num_groups, mask_group, carry)


def unpack_bits(words: Int32[Array, "G W"], count: int) -> Bool[Array, "G count"]:
    """Return the first `count` bits of each row; traced."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    return bits.reshape(words.shape[0], -1)[:, :count] > 0


def check_shapes(logits: Array, rows: Array, masks: Array, needs_logits: Array) -> None:
    """Check what `apply_token_masks` is given.

    Raises:
        ValueError: a shape does not fit.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must be [R, V], got shape {logits.shape}")
    count, num_words = rows.shape[0], -(-logits.shape[1] // 32)
    if masks.shape != (count, num_words):
        raise ValueError(f"masks must be [{count}, {num_words}], got shape {masks.shape}")
    if needs_logits.shape != (count,):
        raise ValueError(f"needs_logits must be [{count}], got shape {needs_logits.shape}")
