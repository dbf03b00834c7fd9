"""Attention of prompt chunks: blocks of queries, each against all key blocks up to itself.

One loop over a flat list of (query block, key block) items. Within an item, sub-blocks of queries
that the key block lies after are skipped, those that it lies wholly before are not masked, and only
those on the diagonal are. The sums are those of `block`: a row's bits are the same whether it is
computed here, in a chunk of any size, or by `decode`.

Stages as in `decode`: page ids of item i + 2, pages (and queries) of item i + 1, item i computed.
Rows of a sub-block are ordered (query head of the group, token), which strided loads and stores
give for nothing.

| array | shape | where |
|---|---|---|
| queries, new keys and values | [T, H + 2K, D] | HBM, by tokens |
| out | [T, H, D] | HBM, by tokens |
| pages | [N, 2K, page, D] | HBM, whole pages |
| page buffer | [2, block_pages, 2K, page, D] | VMEM |
| queries by head | [query tokens / sub tokens, K, rows, D] | VMEM |
| state | 3 x the same, f32 | VMEM |
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
from kernels.tpu.plan import PAGE_WINDOW, DecodePlan
from kernels.tpu.ragged import copy_rows, wait_rows

_IDS_SLOTS = 4
_SLOTS = 2
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


class _Item(NamedTuple):
    """SMEM tables [4] of what is known of an item.

    Attributes:
        num_keys: keys from the key block's first to the query block's last; 0 or less for no item.
        q_len: tokens of the query block.
        first_row: the first of them.
        first_id: index into `ids` of the key block's first page.
        is_first: 1 for the first key block of a query block.
        q_slot: parity of the query block.
    """

    num_keys: Any
    q_len: Any
    first_row: Any
    first_id: Any
    is_first: Any
    q_slot: Any


class _Buffers(NamedTuple):
    pages: Any
    q: Any
    rows: Any
    q_heads: Any
    out: Any
    top: Any
    total: Any
    acc: Any
    ids: Any
    num_outs: Any
    ids_sem: Any
    page_sem: Any
    q_sem: Any
    out_sem: Any


def prefill_attention(
    qkv: jax.Array,
    kv_pages: jax.Array,
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
        kv_pages: [N, 2K, page, D].
        page_windows: i32 [S, W, 1, 128], see `plan.page_windows`.
        plan: query blocks and their key blocks.
        out: [T, H, D], updated in place; rows that are not in the plan keep their values.
        sinks: f32 [K, rows, 128] as rows of a sub-block, each row one value; None without.
        shape: static sizes.
        vmem_limit_bytes: what the compiler may use.
        interpret: parameters of TPU interpret mode, for tests.
    """
    block = shape.block
    token = (block.num_heads, LANES)
    page = (2 * block.num_kv_heads, block.page_rows, LANES)
    sub = (shape.num_subs, block.num_kv_heads, block.head_rows, LANES)
    state = pltpu.VMEM(sub, jnp.float32)
    semaphores = pltpu.SemaphoreType.DMA((_SLOTS,))
    buffers = _Buffers(
        pages=pltpu.VMEM((_SLOTS, block.pages, *page), block.kv_dtype),
        q=pltpu.VMEM((_SLOTS, shape.query_tokens, *token), qkv.dtype),
        rows=pltpu.VMEM((shape.query_tokens * block.num_heads, LANES), jnp.float32),
        q_heads=pltpu.VMEM((*sub[:2], block.row_tokens * block.head_rows, LANES), block.dtype),
        out=pltpu.VMEM((shape.query_tokens, *token), out.dtype),
        top=state,
        total=state,
        acc=state,
        ids=pltpu.SMEM((_IDS_SLOTS * PAGE_WINDOW,), jnp.int32),
        num_outs=pltpu.SMEM((1,), jnp.int32),
        ids_sem=pltpu.SemaphoreType.DMA((_IDS_SLOTS,)),
        page_sem=semaphores,
        q_sem=semaphores,
        out_sem=pltpu.SemaphoreType.DMA,
    )
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    table = pltpu.SMEM((_IDS_SLOTS,), jnp.int32)
    extra = () if sinks is None else (sinks,)
    return pl.pallas_call(
        functools.partial(_run, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(plan),
            grid=(1,),
            in_specs=[any_space] * 4 + [pl.BlockSpec(memory_space=pltpu.VMEM) for _ in extra],
            out_specs=any_space,
            scratch_shapes=[buffers, _Item(*[table] * len(_Item._fields))],
        ),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={len(plan) + 3: 0},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="prefill_attention",
    )(*plan, page_windows, qkv, kv_pages, out, *extra)


def _run(shape: PrefillShape, *refs: Any) -> None:
    plan = DecodePlan(*refs[: len(DecodePlan._fields)])
    windows, qkv, pages, _, *extra, out, buffers, item = refs[len(plan) :]
    sinks = extra[0] if extra else None
    kernel = _Kernel(shape, plan, windows, qkv, out, pages, sinks, buffers, item)
    num_items = plan.num_items[0]
    buffers.num_outs[0] = 0

    @pl.when(num_items > 0)
    def _() -> None:
        entry = kernel.start_ids(0, jnp.int32(0))
        entry = kernel.start_ids(1, entry)
        kernel.start_inputs(0)

        def run_item(index: jax.Array, entry: jax.Array) -> jax.Array:
            entry = kernel.start_ids(index + 2, entry)
            kernel.start_inputs(index + 1)
            kernel.wait_pages(index)
            kernel.begin_queries(index)
            kernel.clear_values(index)
            kernel.compute(index)
            kernel.end_queries(index)
            return entry

        lax.fori_loop(0, num_items, run_item, entry)
        kernel.wait_ids(num_items + 1)
        kernel.wait_out()


@dataclass(frozen=True)
class _Kernel:
    """The stages of an item; `index` is its number."""

    shape: PrefillShape
    plan: DecodePlan
    windows: Any
    qkv: Any
    out: Any
    pages: Any
    sinks: Any
    buffers: _Buffers
    item: _Item

    def start_ids(self, index: Any, entry: jax.Array) -> jax.Array:
        """Describe an item and fetch its page ids; returns the next item's query block."""
        plan, block = self.plan, self.shape.block
        slot = index % _IDS_SLOTS
        first_page = (index + plan.block_offsets[entry]) * block.pages
        self.item.num_keys[slot] = plan.kv_lens[entry] - first_page * block.page_size
        self.item.q_len[slot] = plan.q_lens[entry]
        self.item.first_row[slot] = plan.first_rows[entry]
        self.item.first_id[slot] = slot * PAGE_WINDOW + first_page % PAGE_WINDOW
        self.item.is_first[slot] = (index == plan.first_items[entry]).astype(jnp.int32)
        self.item.q_slot[slot] = entry % _SLOTS
        pltpu.make_async_copy(
            self.windows.at[plan.seq_ids[entry], first_page // PAGE_WINDOW, 0],
            self.buffers.ids.at[pl.ds(slot * PAGE_WINDOW, PAGE_WINDOW)],
            self.buffers.ids_sem.at[slot],
        ).start()
        return jnp.where(index + 1 >= plan.first_items[entry + 1], entry + 1, entry)

    def wait_ids(self, index: Any) -> None:
        """Wait for the page ids of an item."""
        slot = index % _IDS_SLOTS
        ids = self.buffers.ids.at[pl.ds(slot * PAGE_WINDOW, PAGE_WINDOW)]
        pltpu.make_async_copy(ids, ids, self.buffers.ids_sem.at[slot]).wait()

    def start_inputs(self, index: Any) -> None:
        """Fetch the pages of an item, and the queries if it is its query block's first."""
        self.wait_ids(index)
        slot, ids_slot = index % _SLOTS, index % _IDS_SLOTS
        block, buffers = self.shape.block, self.buffers
        num_keys, q_len = self.item.num_keys[ids_slot], self.item.q_len[ids_slot]
        begin, end = block.page_range(num_keys, q_len)
        first_id = self.item.first_id[ids_slot]
        for page in range(block.pages):

            @pl.when((begin <= page) & (page < end))
            def _(page: int = page) -> None:
                pltpu.make_async_copy(
                    self.pages.at[buffers.ids[first_id + page]],
                    buffers.pages.at[slot, page],
                    buffers.page_sem.at[slot],
                ).start()

        @pl.when((self.item.is_first[ids_slot] != 0) & (num_keys > 0))
        def _() -> None:
            q_slot = self.item.q_slot[ids_slot]
            copy_rows(
                self.qkv.at[:, pl.ds(0, block.num_heads)],
                buffers.q.at[q_slot],
                buffers.q_sem.at[q_slot],
                source_row=self.item.first_row[ids_slot],
                target_row=0,
                count=q_len,
            )

    def wait_pages(self, index: Any) -> None:
        """Wait for the pages of an item."""
        slot, ids_slot = index % _SLOTS, index % _IDS_SLOTS
        begin, end = self.shape.block.page_range(
            self.item.num_keys[ids_slot], self.item.q_len[ids_slot]
        )
        wait_rows(self.buffers.pages.at[slot], self.buffers.page_sem.at[slot], count=end - begin)

    def begin_queries(self, index: Any) -> None:
        """Before a query block's first item: order its queries by head, and clear the sums."""
        ids_slot = index % _IDS_SLOTS
        block, buffers = self.shape.block, self.buffers

        @pl.when(self.item.is_first[ids_slot] != 0)
        def _() -> None:
            q_slot = self.item.q_slot[ids_slot]
            wait_rows(
                buffers.q.at[q_slot], buffers.q_sem.at[q_slot], count=self.item.q_len[ids_slot]
            )
            buffers.rows[...] = buffers.q[q_slot].reshape(buffers.rows.shape).astype(jnp.float32)

            def begin_sub(sub: jax.Array, carry: None) -> None:
                for kv_head in range(block.num_kv_heads):
                    parts = [
                        buffers.rows[self._rows_of_head(sub, kv_head * block.group + head)]
                        for head in range(block.group)
                    ]
                    rows = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)
                    buffers.q_heads[sub, kv_head] = block.spread(rows)
                    zero = new_state(block.head_rows)
                    self._set_state(sub, kv_head, zero)
                return carry

            lax.fori_loop(0, self._num_subs(ids_slot), begin_sub, None)

    def clear_values(self, index: Any) -> None:
        """Zero what lies past the query block's last key, see `BlockShape.cleared_rows`."""
        slot, ids_slot = index % _SLOTS, index % _IDS_SLOTS
        block, pages = self.shape.block, self.buffers.pages
        num_keys, q_len = self.item.num_keys[ids_slot], self.item.q_len[ids_slot]

        def clear_page(page: jax.Array, carry: None) -> None:
            keys = page * block.page_size + block.row_token(block.page_rows)
            is_live = block.is_live(keys, num_keys, q_len)
            for head in block.cleared_rows:
                ref = pages.at[slot, page, head]
                ref[...] = cast_rows(
                    jnp.where(is_live, ref[...].astype(jnp.float32), 0.0), ref.dtype
                )
            return carry

        first_page = num_keys // block.page_size
        lax.fori_loop(jnp.minimum(first_page, block.pages), block.pages, clear_page, None)
        if block.sliding_window is not None:
            oldest = block.oldest_key(num_keys, q_len)
            end = jnp.minimum(pl.cdiv(oldest, block.page_size), first_page)
            lax.fori_loop(0, end, clear_page, None)

    def compute(self, index: Any) -> None:
        """Attend to a key block with every sub-block that sees any of it."""
        slot, ids_slot = index % _SLOTS, index % _IDS_SLOTS
        block = self.shape.block
        num_keys, q_len = self.item.num_keys[ids_slot], self.item.q_len[ids_slot]
        first, tokens = num_keys - q_len, block.max_q_len  # key that the first query stands at
        head_step = math.gcd(block.num_kv_heads, HEADS_AT_ONCE)
        num_subs = self._num_subs(ids_slot)
        begin = jnp.minimum(jnp.maximum(-first, 0) // tokens, num_subs)
        masked_end = num_subs
        if block.sliding_window is None:
            diagonal = jnp.maximum(block.num_keys - 1 - first, 0)
            masked_end = jnp.clip(pl.cdiv(diagonal, tokens), begin, num_subs)

        def attend(is_masked: bool, sub: jax.Array, carry: None) -> None:
            position = first + sub * tokens if is_masked else None

            def attend_heads(index: jax.Array, carry: None) -> None:
                # A head's scores are asked for before the last one's softmax, which hides them.
                heads = [index * head_step + i for i in range(head_step)]
                scores = self._scores(slot, sub, heads[0])
                for kv_head, following in zip(heads, [*heads[1:], None], strict=True):
                    own = scores
                    if following is not None:
                        scores = self._scores(slot, sub, following)
                    self._attend(slot, sub, kv_head, own, position)
                return carry

            lax.fori_loop(0, block.num_kv_heads // head_step, attend_heads, None)
            return carry

        lax.fori_loop(begin, masked_end, functools.partial(attend, True), None)
        if block.sliding_window is None:
            lax.fori_loop(masked_end, num_subs, functools.partial(attend, False), None)

    def end_queries(self, index: Any) -> None:
        """After a query block's last item: normalise, order by token and write."""
        ids_slot = index % _IDS_SLOTS
        block, buffers = self.shape.block, self.buffers
        num_keys, q_len = self.item.num_keys[ids_slot], self.item.q_len[ids_slot]

        @pl.when(num_keys <= block.num_keys)
        def _() -> None:
            def end_sub(sub: jax.Array, carry: None) -> None:
                for kv_head in range(block.num_kv_heads):
                    sinks = None if self.sinks is None else self.sinks[kv_head]
                    rows = normalise(self._state(sub, kv_head), sinks)
                    for head in range(block.group):
                        part = rows[head * block.max_q_len : (head + 1) * block.max_q_len]
                        target = self._rows_of_head(sub, kv_head * block.group + head)
                        buffers.rows[target] = part
                return carry

            lax.fori_loop(0, self._num_subs(ids_slot), end_sub, None)
            self.wait_out()
            buffers.out[...] = (
                buffers.rows[...].reshape(buffers.out.shape).astype(buffers.out.dtype)
            )
            copy_rows(
                buffers.out,
                self.out,
                buffers.out_sem,
                source_row=0,
                target_row=self.item.first_row[ids_slot],
                count=q_len,
            )
            buffers.num_outs[0] = q_len

    def wait_out(self) -> None:
        """Wait until the last query block's rows have left."""
        wait_rows(self.buffers.out, self.buffers.out_sem, count=self.buffers.num_outs[0])

    def _scores(self, slot: Any, sub: Any, kv_head: Any) -> jax.Array:
        block = self.shape.block
        product = lax.dot_general(
            self.buffers.q_heads[sub, kv_head],
            block.load(self.buffers.pages.at[slot], 2 * kv_head),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return block.scores(product)

    def _attend(
        self, slot: Any, sub: Any, kv_head: Any, scores: jax.Array, first: Any | None
    ) -> None:
        """One KV head of one sub-block; its first token stands at key `first`, None for no mask."""
        block = self.shape.block
        scores = block.scale(scores)
        if first is not None:
            token = lax.broadcasted_iota(jnp.int32, scores.shape, 0) % block.max_q_len
            key = block.column_key(scores.shape[0])
            mask = key - token <= first
            if block.sliding_window is not None:
                mask &= key - token > first - block.sliding_window
            scores = jnp.where(mask, scores, NO_MAX)
        top = jnp.max(scores, axis=1, keepdims=True)
        weights = jnp.exp2(scores - top)
        product = lax.dot_general(
            block.spread_weights(weights),
            block.load(self.buffers.pages.at[slot], 2 * kv_head + 1),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        product = block.join(product)
        partial = (jnp.broadcast_to(top, product.shape), sum_by_lane(weights), product)
        self._set_state(sub, kv_head, merge_block(self._state(sub, kv_head), partial))

    def _state(self, sub: Any, kv_head: Any) -> tuple[jax.Array, ...]:
        buffers = self.buffers
        return tuple(ref[sub, kv_head] for ref in (buffers.top, buffers.total, buffers.acc))

    def _set_state(self, sub: Any, kv_head: Any, state: tuple[jax.Array, ...]) -> None:
        buffers = self.buffers
        for ref, value in zip((buffers.top, buffers.total, buffers.acc), state, strict=True):
            ref[sub, kv_head] = value

    def _num_subs(self, ids_slot: Any) -> Any:
        return pl.cdiv(self.item.q_len[ids_slot], self.shape.block.max_q_len)

    def _rows_of_head(self, sub: Any, head: int) -> Any:
        """Rows of one query head in [tokens * H, D]."""
        block = self.shape.block
        first = sub * block.max_q_len * block.num_heads + head
        return pl.ds(first, block.max_q_len, stride=block.num_heads)
