"""Attention of a few rows to one block of keys, and how blocks add up: the arithmetic of decode.

Traced into the kernels, on values in registers and references in VMEM. A block's result is
normalised by the block's own maximum and merged afterwards, so that it does not depend on the
blocks before it. Invariant: scores, weights and sums are f32; only operands of products have the
cache's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LANES = 128
SUBLANES = 8
NO_MAX = -1e30
"""Below every score, and finite: a fully masked block is then an exact no-op."""
LOG2_E = 1.4426950408889634

State = tuple[jax.Array, ...]
"""Row maxima [R, 128] (each row one value), sums by lane [R, 128], weighted values [R, D]; f32."""


class BlockRefs(NamedTuple):
    """A block's keys and values in VMEM.

    Attributes:
        pages: [pages, 2K, page_rows, row_lanes].
        scales: f32 [pages, 2K, page], of pages of 8 bits; None for others.
    """

    pages: Any
    scales: Any


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Static sizes of a block and of the rows that attend to it.

    Attributes:
        num_heads: H.
        num_kv_heads: K.
        row_tokens: tokens that share a row of lanes: 1 where a head has 128 elements or more, 2
            where it has 64. Tokens 2r and 2r + 1 of a page stand in its row r.
        row_lanes: lanes of a row, a multiple of 128: D, or 128 for two tokens.
        page_size: tokens per page.
        pages: pages per block.
        max_q_len: tokens of a sequence that attend at once.
        kv_dtype: of the pages.
        dtype: of the operands of products.
        sm_scale: factor of the scores.
        sliding_window: keys that a row sees, itself included; None for all.
        soft_cap: scores s become c tanh(s / c); None to leave them.
    """

    num_heads: int
    num_kv_heads: int
    row_tokens: int
    page_size: int
    pages: int
    max_q_len: int
    kv_dtype: Any
    dtype: Any
    sm_scale: float
    sliding_window: int | None
    soft_cap: float | None = None
    row_lanes: int = LANES

    @property
    def page_rows(self) -> int:
        """Rows of lanes per page and KV row."""
        return self.page_size // self.row_tokens

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
    def tile_tokens(self) -> int:
        """Tokens in these rows."""
        return self.tile_rows * self.row_tokens

    @property
    def has_scales(self) -> bool:
        """Whether each token of a KV row has a factor: where pages are of 8 bits."""
        return jnp.dtype(self.kv_dtype).itemsize == 1

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """Shape of a page, [2K, page_rows, row_lanes]."""
        return (2 * self.num_kv_heads, self.page_rows, self.row_lanes)

    @property
    def value_rows(self) -> range:
        """KV rows in which nothing but finite numbers may stand, beside live keys or not.

        Values, since a weight of 0 times anything must be 0. Integers are always finite.
        """
        if jnp.issubdtype(self.kv_dtype, jnp.integer):
            return range(0)
        return range(1, 2 * self.num_kv_heads, 2)

    @property
    def cleared_rows(self) -> range:
        """KV rows in which nothing but finite numbers may stand beside live keys.

        Values; and where two tokens share a row, keys as well, since a query multiplies its key's
        neighbour by 0.
        """
        return self.value_rows if self.row_tokens == 1 else self.kv_rows

    @property
    def scale_token(self) -> jax.Array:
        """Token of each element of a page's scales [2K, page], from the page's first."""
        shape = (2 * self.num_kv_heads, self.page_size)
        return lax.broadcasted_iota(jnp.int32, shape, 1)

    @property
    def kv_rows(self) -> range:
        """Keys and values of every head."""
        return range(2 * self.num_kv_heads)

    def row_token(self, num_rows: int) -> jax.Array:
        """Token of each element of rows [num_rows, row_lanes], from the first row's first."""
        shape = (num_rows, self.row_lanes)
        token = lax.broadcasted_iota(jnp.int32, shape, 0) * self.row_tokens
        return token if self.row_tokens == 1 else token + self._lane_half(shape)

    def column_key(self, num_rows: int) -> jax.Array:
        """Key of each column of scores [num_rows, num_keys], see `scores`."""
        column = lax.broadcasted_iota(jnp.int32, (num_rows, self.num_keys), 1)
        if self.row_tokens == 1:
            return column
        half = self.num_keys // 2
        return jnp.where(column < half, 2 * column, 2 * (column - half) + 1)

    def load(self, refs: BlockRefs, row: Any) -> jax.Array:
        """Keys or values of one KV row, as an operand [num_keys / row_tokens, row_lanes]."""
        rows = refs.pages[:, row].reshape(self.num_keys // self.row_tokens, self.row_lanes)
        return rows.astype(self.dtype)

    def load_scales(self, refs: BlockRefs, row: Any) -> jax.Array:
        """Factors of one KV row's tokens, f32 [1, num_keys]."""
        pages = [refs.scales[page, pl.ds(row, 1)] for page in range(self.pages)]
        return pages[0] if len(pages) == 1 else jnp.concatenate(pages, axis=1)

    def spread(self, rows: jax.Array) -> jax.Array:
        """Query rows as operands. With two tokens a row: [q, 0] rows, then [0, q] rows.

        The zeros pick the token; one product then loads each row of keys once for both.
        """
        if self.row_tokens == 1:
            return rows.astype(self.dtype)
        half = self._lane_half(rows.shape)
        parts = [jnp.where(half == i, rows.astype(jnp.float32), 0.0) for i in range(2)]
        return jnp.concatenate(parts, axis=0).astype(self.dtype)

    def scores(self, product: jax.Array) -> jax.Array:
        """Products of `spread` rows with keys, as [rows, num_keys]: of even tokens, then of odd."""
        if self.row_tokens == 1:
            return product
        middle = product.shape[0] // 2
        return jnp.concatenate([product[:middle], product[middle:]], axis=1)

    def spread_weights(self, weights: jax.Array) -> jax.Array:
        """The opposite of `scores`, as operands."""
        if self.row_tokens == 1:
            return weights.astype(self.dtype)
        middle = weights.shape[1] // 2
        parts = [weights[:, :middle], weights[:, middle:]]
        return jnp.concatenate(parts, axis=0).astype(self.dtype)

    def join(self, product: jax.Array) -> jax.Array:
        """Products of `spread_weights` with values, one row again: each half of its own tokens.

        The halves of a row are to be added, which is left to whoever reads the output.
        """
        if self.row_tokens == 1:
            return product
        middle = product.shape[0] // 2
        half = self._lane_half((middle, LANES))
        return jnp.where(half == 0, product[:middle], product[middle:])

    def clear_scales(self, refs: BlockRefs, page: Any, num_keys: Any, q_len: Any) -> None:
        """Zero the factors of keys that no row sees in a page of a block.

        Weights of 0 meet them, and what was never written may be NaN.
        """
        is_live = self.is_live(page * self.page_size + self.scale_token, num_keys, q_len)
        refs.scales[page] = jnp.where(is_live, refs.scales[page], 0.0)

    def scale_column(self, row: jax.Array) -> jax.Array:
        """A token's factors [1, row_lanes], element r that of KV row r, as a column [2K, 1]."""
        shape = (2 * self.num_kv_heads, self.row_lanes)
        lane = lax.broadcasted_iota(jnp.int32, shape, 1)
        is_own = lane == lax.broadcasted_iota(jnp.int32, shape, 0)
        return jnp.where(is_own, row, 0.0).sum(axis=1, keepdims=True)

    def scale(self, scores: jax.Array) -> jax.Array:
        """Scale and cap scores, for powers of two."""
        if self.soft_cap is None:
            return scores * (self.sm_scale * LOG2_E)
        capped = jnp.tanh(scores * (self.sm_scale / self.soft_cap))
        return capped * (self.soft_cap * LOG2_E)

    @staticmethod
    def _lane_half(shape: tuple[int, ...]) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, shape, 1) // (LANES // 2)

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

    def rows_of_heads(self, sinks: jax.Array) -> jax.Array:
        """Scores of heads [H], for powers of two, in the rows [R, 128] of `by_head`."""
        by_head = sinks.reshape(self.num_kv_heads, 1, self.group) * LOG2_E
        shape = (self.num_kv_heads, self.max_q_len, self.group)
        rows = jnp.broadcast_to(by_head, shape).reshape(-1, 1)
        return jnp.broadcast_to(rows.astype(jnp.float32), (self.num_rows, LANES))

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
        return rows.reshape(self.max_q_len, self.num_heads, self.row_lanes)


def attend_block(
    shape: BlockShape,
    q: jax.Array,
    refs: BlockRefs,
    *,
    num_keys: Any,
    q_len: Any,
    between: Callable[[], None],
) -> State:
    """Attend to one block.

    KV heads with few rows share one product: their queries stand in a block diagonal, so that the
    zeros pick each row's own head. That is exact, and costs no more than the products one by one,
    since what they cost is the loading of keys and values.

    Args:
        shape: static sizes.
        q: [max_q_len, H, D]; rows past q_len may hold anything.
        refs: its keys and values.
        num_keys: keys of the sequence from the block's first on.
        q_len: tokens in use; they are the sequence's last.
        between: emits scalar work, once per element of `shape.chunks`, for the products to hide.
    """
    rows = shape.by_head(q.astype(jnp.float32))
    chunks = shape.chunks
    # A chunk's scores are asked for before the last one's softmax, which hides them.
    scores = _product_with_keys(shape, rows, refs, chunks[0])
    parts = []
    for heads, following in zip(chunks, [*chunks[1:], None], strict=True):
        own = scores
        if following is not None:
            scores = _product_with_keys(shape, rows, refs, following)
        between()
        parts.append(_attend_heads(shape, own, refs, heads, num_keys=num_keys, q_len=q_len))
    return tuple(
        part[0] if len(part) == 1 else jnp.concatenate(part, axis=0)
        for part in zip(*parts, strict=True)
    )


def new_state(shape: BlockShape, num_rows: int) -> State:
    """The state before the first block."""
    zeros = jnp.zeros((num_rows, LANES), jnp.float32)
    acc = jnp.zeros((num_rows, shape.row_lanes), jnp.float32)
    return jnp.full((num_rows, LANES), NO_MAX, jnp.float32), zeros, acc


def merge_block(state: State, block: State) -> State:
    """Add a block's result to the state (online softmax, Milakov & Gimelshein 2018)."""
    top, total, acc = state
    block_top, block_total, block_acc = block
    new_top = jnp.maximum(top, block_top)
    decay, block_decay = jnp.exp2(top - new_top), jnp.exp2(block_top - new_top)
    total = total * decay + block_total * block_decay
    acc = acc * _widen(decay, acc) + block_acc * _widen(block_decay, acc)
    return new_top, total, acc


def normalise(state: State, sinks: jax.Array | None = None) -> jax.Array:
    """Return the weighted mean of the values, f32 [R, D].

    Args:
        state: after the last block.
        sinks: [R, 128], a score per row as a power of two, which takes weight and has no value.
    """
    top, total, acc = state
    total = jnp.broadcast_to(total.sum(axis=1, keepdims=True), total.shape)
    if sinks is None:
        return acc / _widen(total, acc)
    new_top = jnp.maximum(top, sinks)
    decay = jnp.exp2(top - new_top)
    total = total * decay + jnp.exp2(sinks - new_top)
    return acc * _widen(decay, acc) / _widen(total, acc)


def _widen(rows: jax.Array, like: jax.Array) -> jax.Array:
    """Rows [R, 128] of one value each, as wide as `like`."""
    count = like.shape[1] // LANES
    return rows if count == 1 else jnp.concatenate([rows] * count, axis=1)


def _product_with_keys(
    shape: BlockShape, rows: jax.Array, refs: BlockRefs, heads: tuple[int, int]
) -> jax.Array:
    """Products of a chunk's heads' rows with their keys, see `BlockShape.scores`."""
    num_heads = heads[1] - heads[0]
    rows = rows[heads[0] * shape.head_rows : heads[1] * shape.head_rows]
    row_head = lax.broadcasted_iota(jnp.int32, rows.shape, 0) // shape.head_rows
    scores = jnp.zeros((), jnp.float32)
    for head in range(num_heads):
        # One product per head: with heads side by side the compiler transposes keys by itself.
        own = rows if num_heads == 1 else jnp.where(row_head == head, rows, 0.0)
        product = lax.dot_general(
            shape.spread(own),
            shape.load(refs, 2 * (heads[0] + head)),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        if shape.has_scales:
            product *= shape.load_scales(refs, 2 * (heads[0] + head))
        scores += product
    return shape.scores(scores)


def _attend_heads(
    shape: BlockShape,
    scores: jax.Array,
    refs: BlockRefs,
    heads: tuple[int, int],
    *,
    num_keys: Any,
    q_len: Any,
) -> State:
    num_heads, num_rows, lanes = heads[1] - heads[0], scores.shape[0], shape.row_lanes
    row_head = lax.broadcasted_iota(jnp.int32, (num_rows, lanes), 0) // shape.head_rows
    mask = _score_mask(shape, num_rows, num_keys, q_len)
    scores = jnp.where(mask, shape.scale(scores), NO_MAX)
    top = jnp.max(scores, axis=1, keepdims=True)
    weights = jnp.exp2(scores - top)
    total = sum_by_lane(weights)
    if shape.has_scales:
        weights *= _value_scales(shape, refs, heads, weights.shape)
    values = [shape.load(refs, 2 * head + 1) for head in range(*heads)]
    product = lax.dot_general(
        shape.spread_weights(weights),
        values[0] if num_heads == 1 else jnp.concatenate(values, axis=1),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    parts = [shape.join(product[:, i * lanes : (i + 1) * lanes]) for i in range(num_heads)]
    acc = parts[0]
    for head in range(1, num_heads):
        acc = jnp.where(row_head == head, parts[head], acc)
    return jnp.broadcast_to(top, total.shape), total, acc


def _value_scales(
    shape: BlockShape, refs: BlockRefs, heads: tuple[int, int], weights_shape: tuple[int, ...]
) -> jax.Array:
    """Factors of the values that each row's own head weighs, [rows, num_keys]."""
    row_head = lax.broadcasted_iota(jnp.int32, weights_shape, 0) // shape.head_rows
    scales = jnp.broadcast_to(shape.load_scales(refs, 2 * heads[0] + 1), weights_shape)
    for head in range(1, heads[1] - heads[0]):
        own = shape.load_scales(refs, 2 * (heads[0] + head) + 1)
        scales = jnp.where(row_head == head, own, scales)
    return scales


def cast_rows(rows: jax.Array, dtype: Any) -> jax.Array:
    """f32 rows as pages hold them; for pages of integers they are whole already."""
    if jnp.issubdtype(dtype, jnp.integer):
        rows = rows.astype(jnp.int32)
    return rows.astype(dtype)


def sum_by_lane(weights: jax.Array) -> jax.Array:
    """Add the 128-lane columns [R, n * 128] up, in order."""
    total = weights[:, :LANES]
    for lane in range(LANES, weights.shape[1], LANES):
        total += weights[:, lane : lane + LANES]
    return total


def _score_mask(shape: BlockShape, num_rows: int, num_keys: Any, q_len: Any) -> jax.Array:
    keys = shape.column_key(num_rows)
    if shape.max_q_len == 1 and shape.sliding_window is None:
        return keys < num_keys
    token = lax.broadcasted_iota(jnp.int32, keys.shape, 0) % shape.head_rows // shape.group
    position = num_keys - q_len + token
    mask = keys <= position
    if shape.sliding_window is not None:
        mask &= keys > position - shape.sliding_window
    return mask
