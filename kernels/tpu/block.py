"""Attention of a few rows to one block of keys, and how blocks add up: the arithmetic of decode.

Traced into the kernels, on values in registers and references in VMEM. A block's result is
normalised by the block's own maximum and merged afterwards, so that it does not depend on the
blocks before it. Invariant: scores, weights and sums are f32; only operands of products have the
cache's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
SUBLANES = 8
NO_MAX = -1e30
"""Below every score, and finite: a fully masked block is then an exact no-op."""
LOG2_E = 1.4426950408889634

State = tuple[jax.Array, ...]
"""Row maxima [R, D] (each row one value), sums by lane [R, D], weighted values [R, D]; all f32."""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Static sizes of a block and of the rows that attend to it.

    Attributes:
        num_heads: H.
        num_kv_heads: K.
        head_dim: D, 128.
        page_size: tokens per page.
        pages: pages per block.
        max_q_len: tokens of a sequence that attend at once.
        kv_dtype: of the pages and of the operands of products.
        sm_scale: factor of the scores.
        sliding_window: keys that a row sees, itself included; None for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    max_q_len: int
    kv_dtype: Any
    sm_scale: float
    sliding_window: int | None

    @property
    def num_keys(self) -> int:
        """Keys per block."""
        return self.pages * self.page_size

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_rows(self) -> int:
        """Rows that one KV head serves: (token, query head of the group)."""
        return self.max_q_len * self.group

    @property
    def num_rows(self) -> int:
        """R = (KV head, token, query head of the group)."""
        return self.num_kv_heads * self.head_rows

    @property
    def tile_rows(self) -> int:
        """Rows of a page that lie together in memory: the least that a DMA can write."""
        return SUBLANES * 4 // jnp.dtype(self.kv_dtype).itemsize

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """KV heads [first, end) that share products, so that their rows fill the sublanes."""
        size = max(1, SUBLANES // self.head_rows)
        starts = range(0, self.num_kv_heads, size)
        return [(first, min(first + size, self.num_kv_heads)) for first in starts]

    def oldest_key(self, num_keys: Any, q_len: Any) -> Any:
        """First key of the block that a row sees, if a window is set."""
        assert self.sliding_window is not None
        return jnp.maximum(num_keys - q_len - self.sliding_window + 1, 0)

    def page_range(self, num_keys: Any, q_len: Any) -> tuple[Any, Any]:
        """Pages [begin, end) of the block that hold keys which a row sees."""
        shift = self.page_size.bit_length() - 1  # a shift: division of signed numbers takes more
        end = jnp.minimum((num_keys + self.page_size - 1) >> shift, self.pages)
        if self.sliding_window is None:
            return 0, end
        return self.oldest_key(num_keys, q_len) // self.page_size, end

    def has_tail(self, num_keys: Any, q_len: Any) -> Any:
        """Whether new keys, the sequence's end or a window's begin lie in the block."""
        has_tail = (num_keys > 0) & (num_keys - q_len < self.num_keys)
        if self.sliding_window is not None:
            has_tail |= (num_keys > 0) & (self.oldest_key(num_keys, q_len) > 0)
        return has_tail

    def is_live(self, keys: jax.Array, num_keys: Any, q_len: Any) -> jax.Array:
        """Which keys of the block any row sees."""
        is_live = keys < num_keys
        if self.sliding_window is not None:
            is_live &= keys >= self.oldest_key(num_keys, q_len)
        return is_live

    def by_head(self, q: jax.Array) -> jax.Array:
        """[tokens, H, D] to rows [R, D]."""
        parts = [
            q[token, head * self.group : (head + 1) * self.group]
            for head in range(self.num_kv_heads)
            for token in range(self.max_q_len)
        ]
        return q[0] if self.max_q_len == 1 else jnp.concatenate(parts, axis=0)

    def by_token(self, rows: jax.Array) -> jax.Array:
        """Rows [R, D] to [tokens, H, D]."""
        if self.max_q_len == 1:
            return rows[None]
        parts = [
            rows[first : first + self.group]
            for token in range(self.max_q_len)
            for first in range(token * self.group, self.num_rows, self.head_rows)
        ]
        rows = jnp.concatenate(parts, axis=0)
        return rows.reshape(self.max_q_len, self.num_heads, self.head_dim)


def attend_block(
    shape: BlockShape, q: jax.Array, kv_ref: Any, *, num_keys: Any, q_len: Any
) -> State:
    """Attend to one block.

    KV heads with few rows share one product: their queries stand in a block diagonal, so that the
    zeros pick each row's own head. That is exact, and costs no more than the products one by one,
    since what they cost is the loading of keys and values.

    Args:
        shape: static sizes.
        q: [max_q_len, H, D]; rows past q_len may hold anything.
        kv_ref: [pages, 2K, page, D].
        num_keys: keys of the sequence from the block's first on.
        q_len: tokens in use; they are the sequence's last.
    """
    rows = shape.by_head(q.astype(jnp.float32))
    parts = []
    for first, end in shape.chunks:
        own = rows[first * shape.head_rows : end * shape.head_rows]
        parts.append(
            _attend_heads(shape, own, kv_ref, (first, end), num_keys=num_keys, q_len=q_len)
        )
    return tuple(
        part[0] if len(part) == 1 else jnp.concatenate(part, axis=0)
        for part in zip(*parts, strict=True)
    )


def new_state(num_rows: int, head_dim: int) -> State:
    """The state before the first block."""
    zeros = jnp.zeros((num_rows, head_dim), jnp.float32)
    return jnp.full((num_rows, head_dim), NO_MAX, jnp.float32), zeros, zeros


def merge_block(state: State, block: State) -> State:
    """Add a block's result to the state (online softmax, Milakov & Gimelshein 2018)."""
    top, total, acc = state
    block_top, block_total, block_acc = block
    new_top = jnp.maximum(top, block_top)
    decay, block_decay = jnp.exp2(top - new_top), jnp.exp2(block_top - new_top)
    total = total * decay + block_total * block_decay
    acc = acc * decay + block_acc * block_decay
    return new_top, total, acc


def normalise(state: State) -> jax.Array:
    """Return the weighted mean of the values, f32 [R, D]."""
    _, total, acc = state
    return acc / jnp.broadcast_to(total.sum(axis=1, keepdims=True), acc.shape)


def _attend_heads(
    shape: BlockShape,
    rows: jax.Array,
    kv_ref: Any,
    heads: tuple[int, int],
    *,
    num_keys: Any,
    q_len: Any,
) -> State:
    head_dim, num_heads = shape.head_dim, heads[1] - heads[0]
    row_head = lax.broadcasted_iota(jnp.int32, rows.shape, 0) // shape.head_rows
    scores = jnp.zeros((), jnp.float32)
    for head in range(num_heads):
        # One product per head: with heads side by side the compiler transposes keys by itself.
        own = rows if num_heads == 1 else jnp.where(row_head == head, rows, 0.0)
        keys = _head(shape, kv_ref, 2 * (heads[0] + head))
        scores += lax.dot_general(
            own.astype(shape.kv_dtype),
            keys,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
    mask = _score_mask(shape, rows.shape[0], num_keys, q_len)
    scores = jnp.where(mask, scores * (shape.sm_scale * LOG2_E), NO_MAX)
    top = jnp.max(scores, axis=1, keepdims=True)
    weights = jnp.exp2(scores - top)
    total = sum_by_lane(weights)
    values = [_head(shape, kv_ref, 2 * head + 1) for head in range(*heads)]
    product = lax.dot_general(
        weights.astype(shape.kv_dtype),
        values[0] if num_heads == 1 else jnp.concatenate(values, axis=1),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    acc = product[:, :head_dim]
    for head in range(1, num_heads):
        acc = jnp.where(row_head == head, product[:, head * head_dim : (head + 1) * head_dim], acc)
    return jnp.broadcast_to(top, rows.shape), total, acc


def sum_by_lane(weights: jax.Array) -> jax.Array:
    """Add the 128-lane columns [R, n * 128] up, in order."""
    total = weights[:, :LANES]
    for lane in range(LANES, weights.shape[1], LANES):
        total += weights[:, lane : lane + LANES]
    return total


def _head(shape: BlockShape, kv_ref: Any, row: int) -> jax.Array:
    return kv_ref[:, row].reshape(shape.num_keys, shape.head_dim)


def _score_mask(shape: BlockShape, num_rows: int, num_keys: Any, q_len: Any) -> jax.Array:
    keys = lax.broadcasted_iota(jnp.int32, (num_rows, shape.num_keys), 1)
    if shape.max_q_len == 1 and shape.sliding_window is None:
        return keys < num_keys
    token = lax.broadcasted_iota(jnp.int32, keys.shape, 0) % shape.head_rows // shape.group
    position = num_keys - q_len + token
    mask = keys <= position
    if shape.sliding_window is not None:
        mask &= keys > position - shape.sliding_window
    return mask
