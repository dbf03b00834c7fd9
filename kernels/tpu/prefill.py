"""Attention of prompt chunks: blocks of queries, each against all key blocks up to itself.

One loop over a flat list of (query block, key block) items. Within an item, sub-blocks of queries
that the key block lies after are skipped, those that it lies wholly before are not masked, and only
those on the diagonal are. The sums are those of `block`: a row's bits are the same whether it is
computed here, in a chunk of any size, or by `decode`.

Pages come as `page_stream` brings them, an item a round, and queries with a query block's first.
Rows of a sub-block are ordered (query head of the group, token), which strided loads and stores
give for nothing.

| array | shape | where |
|---|---|---|
| queries, new keys and values | [T, H + 2K, D] | HBM, by tokens |
| out | [T, H, D] | HBM, by tokens |
| pages | [N, 2K, page, D] | HBM, whole pages |
| queries by head | [query tokens / sub tokens, K, rows, D] | VMEM |
| state | 3 x the same, f32 | VMEM |
| mask | [rows, keys] f32 | VMEM, of the sub-block on the diagonal |
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.quantized_pages import QuantizedPages
from kernels.tpu.block import (
    LANES,
    LOG2_E,
    NO_MAX,
    BlockShape,
    cast_rows,
    merge_block,
    new_state,
    normalise,
    sum_by_lane,
)
from kernels.tpu.page_stream import IDS_SLOTS, SLOTS, Items, PageStream, stream_scratch
from kernels.tpu.plan import DecodePlan
from kernels.tpu.ragged import copy_rows, wait_rows

HEADS_AT_ONCE = 4
"""KV heads in one body of code, if they divide: more take the compiler too long."""


@dataclass(frozen=True, kw_only=True)
class PrefillShape:
    """Everything static about a call.

    Attributes:
        block: heads, sizes and dtypes; `max_q_len` is the tokens of a sub-block.
        query_tokens: tokens of a query block, a multiple of a sub-block's.
    """

    block: BlockShape
    query_tokens: int

    @property
    def num_subs(self) -> int:
        """Sub-blocks of a query block."""
        return self.query_tokens // self.block.max_q_len

    def rows_of_heads(self, sinks: jax.Array) -> jax.Array:
        """Scores of heads [H], for powers of two, in the rows [K, rows, 128] of a sub-block."""
        block = self.block
        rows = jnp.repeat(sinks.astype(jnp.float32) * LOG2_E, block.max_q_len)
        rows = rows.reshape(block.num_kv_heads, block.head_rows, 1)
        return jnp.broadcast_to(rows, (*rows.shape[:2], LANES))


class _Buffers(NamedTuple):
    q: Any
    rows: Any
    q_heads: Any
    out: Any
    top: Any
    total: Any
    acc: Any
    mask: Any
    num_outs: Any
    q_sem: Any
    out_sem: Any


def prefill_attention(
    qkv: jax.Array,
    kv_pages: jax.Array | QuantizedPages,
    page_windows: jax.Array,
    plan: DecodePlan,
    out: jax.Array,
    sinks: jax.Array | None = None,
    *,
    shape: PrefillShape,
    vmem_limit_bytes: int,
    interpret: Any = False,
) -> jax.Array:
    """Attend with the plan's query blocks to pages that hold their keys already.

    Args:
        qkv: [T, H, D] or more; only the first H, the queries, are read.
        kv_pages: [N, 2K, page, D], or such of 8 bits.
        page_windows: i32 [S, W, 1, 128], see `plan.page_windows`.
        plan: query blocks and their key blocks.
        out: [T, H, D], updated in place; rows that are not in the plan keep their values.
        sinks: f32 [K, rows, 128] as rows of a sub-block, each row one value; None without.
        shape: static sizes.
        vmem_limit_bytes: what the compiler may use.
        interpret: parameters of TPU interpret mode, for tests.
    """
    block = shape.block
    lanes = block.row_lanes
    token = (block.num_heads, lanes)
    sub = (shape.num_subs, block.num_kv_heads, block.head_rows)
    by_row = pltpu.VMEM((*sub, LANES), jnp.float32)
    buffers = _Buffers(
        q=pltpu.VMEM((SLOTS, shape.query_tokens, *token), qkv.dtype),
        rows=pltpu.VMEM((lanes // LANES, shape.query_tokens * block.num_heads, LANES), jnp.float32),
        q_heads=pltpu.VMEM((*sub[:2], block.row_tokens * block.head_rows, lanes), block.dtype),
        out=pltpu.VMEM((shape.query_tokens, *token), out.dtype),
        top=by_row,
        total=by_row,
        acc=pltpu.VMEM((*sub, lanes), jnp.float32),
        mask=pltpu.VMEM((block.head_rows, block.num_keys), jnp.float32),
        num_outs=pltpu.SMEM((1,), jnp.int32),
        q_sem=pltpu.SemaphoreType.DMA((SLOTS,)),
        out_sem=pltpu.SemaphoreType.DMA,
    )
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    cache = jax.tree.leaves(kv_pages)
    extra = () if sinks is None else (sinks,)
    return pl.pallas_call(
        functools.partial(_run, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(plan),
            grid=(1,),
            in_specs=[any_space] * (3 + len(cache))
            + [pl.BlockSpec(memory_space=pltpu.VMEM) for _ in extra],
            out_specs=any_space,
            scratch_shapes=[buffers, stream_scratch(block, round_items=1)],
        ),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={len(plan) + 2: 0},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="prefill_attention",
    )(*plan, page_windows, qkv, out, *cache, *extra)


def _run(shape: PrefillShape, *refs: Any) -> None:
    plan = DecodePlan(*refs[: len(DecodePlan._fields)])
    windows, qkv, _, *rest, out, buffers, scratch = refs[len(plan) :]
    num_arrays = 2 if shape.block.has_scales else 1
    pages, scales = (*rest[:num_arrays], None)[:2]
    sinks = rest[num_arrays] if len(rest) > num_arrays else None
    stream = PageStream(shape.block, 1, plan, windows, pages, scales, scratch)
    kernel = _Kernel(shape, stream, qkv, out, sinks, buffers)
    num_items = plan.num_items[0]
    buffers.num_outs[0] = 0

    @pl.when(num_items > 0)
    def _() -> None:
        entry = stream.start_ids(0, jnp.int32(0))
        entry = stream.start_ids(1, entry)
        kernel.start_inputs(0)

        def run_item(index: jax.Array, entry: jax.Array) -> jax.Array:
            entry = stream.start_ids(index + 2, entry)
            kernel.start_inputs(index + 1)
            kernel.wait_pages(index)
            kernel.begin_queries(index)
            kernel.clear_unseen(index)
            kernel.compute(index)
            kernel.end_queries(index)
            return entry

        lax.fori_loop(0, num_items, run_item, entry)
        stream.wait_ids(num_items + 1)
        kernel.wait_out()


@dataclass(frozen=True)
class _Kernel:
    """The stages of an item; `index` is its number."""

    shape: PrefillShape
    stream: PageStream
    qkv: Any
    out: Any
    sinks: Any
    buffers: _Buffers

    @property
    def item(self) -> Items:
        """What is known of the items."""
        return self.stream.scratch.items

    def start_inputs(self, index: Any) -> None:
        """Fetch the pages of an item, and the queries if it is its query block's first."""
        self.stream.wait_ids(index)
        self.stream.start_pages(index, 0)
        ids_slot = index % IDS_SLOTS
        block, buffers = self.shape.block, self.buffers
        has_keys = self.item.num_keys[ids_slot, 0] > 0

        @pl.when((self.item.is_first[ids_slot, 0] != 0) & has_keys)
        def _() -> None:
            q_slot = self.item.parity[ids_slot, 0]
            copy_rows(
                self.qkv.at[:, pl.ds(0, block.num_heads)],
                buffers.q.at[q_slot],
                buffers.q_sem.at[q_slot],
                source_row=self.item.first_row[ids_slot, 0],
                target_row=0,
                count=self.item.q_len[ids_slot, 0],
            )

    def wait_pages(self, index: Any) -> None:
        """Wait for the pages of an item."""
        ids_slot = index % IDS_SLOTS
        begin, end = self.shape.block.page_range(
            self.item.num_keys[ids_slot, 0], self.item.q_len[ids_slot, 0]
        )
        self.stream.wait_pages(index, end - begin)

    def begin_queries(self, index: Any) -> None:
        """Before a query block's first item: order its queries by head, and clear the sums."""
        ids_slot = index % IDS_SLOTS
        block, buffers = self.shape.block, self.buffers

        @pl.when(self.item.is_first[ids_slot, 0] != 0)
        def _() -> None:
            q_slot = self.item.parity[ids_slot, 0]
            wait_rows(
                buffers.q.at[q_slot], buffers.q_sem.at[q_slot], count=self.item.q_len[ids_slot, 0]
            )
            for part in range(buffers.rows.shape[0]):
                rows = buffers.q[q_slot, :, :, pl.ds(part * LANES, LANES)]
                buffers.rows[part] = rows.reshape(-1, LANES).astype(jnp.float32)

            def begin_sub(sub: jax.Array, carry: None) -> None:
                for kv_head in range(block.num_kv_heads):
                    parts = [
                        self._load_rows(sub, kv_head * block.group + head)
                        for head in range(block.group)
                    ]
                    rows = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)
                    buffers.q_heads[sub, kv_head] = block.spread(rows)
                    zero = new_state(block, block.head_rows)
                    self._set_state(sub, kv_head, zero)
                return carry

            lax.fori_loop(0, self._num_subs(ids_slot), begin_sub, None)

    def clear_unseen(self, index: Any) -> None:
        """Zero what no query of the block sees: past its last key, before its window.

        Keys as well as values: a mask that is added would not undo a NaN.
        """
        slot, ids_slot = index % SLOTS, index % IDS_SLOTS
        block, refs = self.shape.block, self.stream.item_pages(slot, 0)
        num_keys, q_len = self.item.num_keys[ids_slot, 0], self.item.q_len[ids_slot, 0]
        has_floats = not jnp.issubdtype(block.kv_dtype, jnp.integer)  # integers are finite

        def clear_part(page: jax.Array, carry: None) -> None:
            keys = page * block.page_size + block.row_token(block.page_rows)
            is_live = block.is_live(keys, num_keys, q_len)
            for row in block.kv_rows if has_floats else ():
                ref = refs.pages.at[page, row]
                ref[...] = cast_rows(
                    jnp.where(is_live, ref[...].astype(jnp.float32), 0.0), ref.dtype
                )
            if block.has_scales:
                block.clear_scales(refs, page, num_keys, q_len)
            return carry

        def clear_whole(page: jax.Array, carry: None) -> None:
            if has_floats:
                refs.pages[page] = jnp.zeros(block.page_shape, block.kv_dtype)
            if block.has_scales:
                refs.scales[page] = jnp.zeros(refs.scales.shape[1:], jnp.float32)
            return carry

        first = jnp.minimum(num_keys // block.page_size, block.pages)
        first_whole = jnp.minimum(first + 1, block.pages)
        lax.fori_loop(first, first_whole, clear_part, None)
        lax.fori_loop(first_whole, block.pages, clear_whole, None)
        if block.sliding_window is not None:
            oldest = block.oldest_key(num_keys, q_len)
            end = jnp.minimum(pl.cdiv(oldest, block.page_size), first)
            lax.fori_loop(0, end, clear_part, None)

    def compute(self, index: Any) -> None:
        """Attend to a key block with every sub-block that sees any of it."""
        slot, ids_slot = index % SLOTS, index % IDS_SLOTS
        block = self.shape.block
        num_keys, q_len = self.item.num_keys[ids_slot, 0], self.item.q_len[ids_slot, 0]
        first, tokens = num_keys - q_len, block.max_q_len  # key that the first query stands at
        head_step = math.gcd(block.num_kv_heads, HEADS_AT_ONCE)
        num_subs = self._num_subs(ids_slot)
        begin = jnp.minimum(jnp.maximum(-first, 0) // tokens, num_subs)
        masked_end = num_subs
        if block.sliding_window is None:
            diagonal = jnp.maximum(block.num_keys - 1 - first, 0)
            masked_end = jnp.clip(pl.cdiv(diagonal, tokens), begin, num_subs)

        def attend(is_masked: bool, sub: jax.Array, carry: None) -> None:
            if is_masked:
                self._set_mask(first + sub * tokens)

            def attend_heads(index: jax.Array, carry: None) -> None:
                # A head's scores are asked for before the last one's softmax, which hides them.
                heads = [index * head_step + i for i in range(head_step)]
                scores = self._scores(slot, sub, heads[0])
                for kv_head, following in zip(heads, [*heads[1:], None], strict=True):
                    own = scores
                    if following is not None:
                        scores = self._scores(slot, sub, following)
                    self._attend(slot, sub, kv_head, own, is_masked=is_masked)
                return carry

            lax.fori_loop(0, block.num_kv_heads // head_step, attend_heads, None)
            return carry

        lax.fori_loop(begin, masked_end, functools.partial(attend, True), None)
        if block.sliding_window is None:
            lax.fori_loop(masked_end, num_subs, functools.partial(attend, False), None)

    def end_queries(self, index: Any) -> None:
        """After a query block's last item: normalise, order by token and write."""
        ids_slot = index % IDS_SLOTS
        block, buffers = self.shape.block, self.buffers
        num_keys, q_len = self.item.num_keys[ids_slot, 0], self.item.q_len[ids_slot, 0]

        @pl.when(num_keys <= block.num_keys)
        def _() -> None:
            def end_sub(sub: jax.Array, carry: None) -> None:
                for kv_head in range(block.num_kv_heads):
                    sinks = None if self.sinks is None else self.sinks[kv_head]
                    rows = normalise(self._state(sub, kv_head), sinks)
                    for head in range(block.group):
                        part = rows[head * block.max_q_len : (head + 1) * block.max_q_len]
                        self._store_rows(sub, kv_head * block.group + head, part)
                return carry

            lax.fori_loop(0, self._num_subs(ids_slot), end_sub, None)
            self.wait_out()
            for part in range(buffers.rows.shape[0]):
                own = buffers.out.at[:, :, pl.ds(part * LANES, LANES)]
                own[...] = buffers.rows[part].reshape(own.shape).astype(own.dtype)
            copy_rows(
                buffers.out,
                self.out,
                buffers.out_sem,
                source_row=0,
                target_row=self.item.first_row[ids_slot, 0],
                count=q_len,
            )
            buffers.num_outs[0] = q_len

    def wait_out(self) -> None:
        """Wait until the last query block's rows have left."""
        wait_rows(self.buffers.out, self.buffers.out_sem, count=self.buffers.num_outs[0])

    def _scores(self, slot: Any, sub: Any, kv_head: Any) -> jax.Array:
        block, refs = self.shape.block, self.stream.item_pages(slot, 0)
        product = lax.dot_general(
            self.buffers.q_heads[sub, kv_head],
            block.load(refs, 2 * kv_head),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        if block.has_scales:
            product *= block.load_scales(refs, 2 * kv_head)
        return block.scores(product)

    def _set_mask(self, first: Any) -> None:
        """Note what a sub-block, whose first token stands at key `first`, does not see.

        Once for all heads: as what to add to scores, one operation in place of two or three.
        """
        block, mask = self.shape.block, self.buffers.mask
        token = lax.broadcasted_iota(jnp.int32, mask.shape, 0) % block.max_q_len
        key, position = block.column_key(block.head_rows), first + token
        is_seen = key <= position
        if block.sliding_window is not None:
            is_seen &= key > position - block.sliding_window
        mask[...] = jnp.where(is_seen, 0.0, NO_MAX)

    def _attend(
        self, slot: Any, sub: Any, kv_head: Any, scores: jax.Array, *, is_masked: bool
    ) -> None:
        """One KV head of one sub-block."""
        block, refs = self.shape.block, self.stream.item_pages(slot, 0)
        scores = block.scale(scores)
        if is_masked:
            scores += self.buffers.mask[...]
        top = jnp.max(scores, axis=1, keepdims=True)
        weights = jnp.exp2(scores - top)
        total = sum_by_lane(weights)
        if block.has_scales:
            weights *= block.load_scales(refs, 2 * kv_head + 1)
        product = lax.dot_general(
            block.spread_weights(weights),
            block.load(refs, 2 * kv_head + 1),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        product = block.join(product)
        partial = (jnp.broadcast_to(top, total.shape), total, product)
        self._set_state(sub, kv_head, merge_block(self._state(sub, kv_head), partial))

    def _state(self, sub: Any, kv_head: Any) -> tuple[jax.Array, ...]:
        buffers = self.buffers
        return tuple(ref[sub, kv_head] for ref in (buffers.top, buffers.total, buffers.acc))

    def _set_state(self, sub: Any, kv_head: Any, state: tuple[jax.Array, ...]) -> None:
        buffers = self.buffers
        for ref, value in zip((buffers.top, buffers.total, buffers.acc), state, strict=True):
            ref[sub, kv_head] = value

    def _num_subs(self, ids_slot: Any) -> Any:
        return pl.cdiv(self.item.q_len[ids_slot, 0], self.shape.block.max_q_len)

    def _load_rows(self, sub: Any, head: int) -> jax.Array:
        """Rows [tokens, D] of one query head: a strided load takes 128 lanes."""
        rows, own = self.buffers.rows, self._rows_of_head(sub, head)
        parts = [rows[part, own] for part in range(rows.shape[0])]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def _store_rows(self, sub: Any, head: int, values: jax.Array) -> None:
        rows, own = self.buffers.rows, self._rows_of_head(sub, head)
        for part in range(rows.shape[0]):
            rows[part, own] = values[:, part * LANES : (part + 1) * LANES]

    def _rows_of_head(self, sub: Any, head: int) -> Any:
        """Where the rows of one query head stand among [tokens * H]."""
        block = self.shape.block
        first = sub * block.max_q_len * block.num_heads + head
        return pl.ds(first, block.max_q_len, stride=block.num_heads)
