"""Attention of blocks of queries to a cache of latents, whose rows are every head's key and value.

One loop over a flat list of (query block, key block) items, as in `prefill`; a decode step's query
blocks are single tokens, whose rows it also stores. All heads share a key block: rows of a
sub-block are (token, head), in the order in which queries lie in memory, and one product takes them
all through the latents. Sums are those of `block`: each part of a key block is normalised by its
own maximum and merged afterwards, so that a row's bits depend on its own sequence only; and one
part's products hide the softmax of another.

| array | shape | where |
|---|---|---|
| queries | [T, H, C] | HBM, by tokens |
| new rows | [T, 1, C] | HBM, by tokens |
| out | [T, H, R] | HBM, by tokens |
| pages | [N, 1, page, C] | HBM, whole pages in, tiles of rows out |
| page buffer | [2, block_pages, 1, page, C] | VMEM |
| state | [query tokens / sub tokens, rows, R + 256] f32 | VMEM |

C = 640 lanes hold a latent of R = 512 and a rotated key of 64, then zeros. Example: pages of 128
tokens, H = 128 heads on one device: blocks of 1,024 keys are 1.25 MiB.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.tpu.block import LANES, LOG2_E, NO_MAX, SUBLANES, sum_by_lane
from kernels.tpu.page_stream import IDS_SLOTS, SLOTS, Items, PageStream, stream_scratch
from kernels.tpu.plan import DecodePlan
from kernels.tpu.ragged import copy_rows, wait_rows


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Everything static about a call.

    Attributes:
        num_heads: H.
        num_lanes: C, a multiple of 128.
        num_value_dims: R, a multiple of 128.
        page_size: tokens per page.
        pages: pages per key block.
        part_keys: keys of a block that are normalised and merged at once; divides its keys.
        sub_tokens: tokens whose scores are computed at once.
        query_tokens: tokens of a query block, a multiple of `sub_tokens`.
        stores_new: the last token of each query block is new and to be stored; needs query blocks
            of one token.
        kv_dtype: of the pages, and of the operands of products.
        sm_scale: factor of the scores.
    """

    num_heads: int
    num_lanes: int
    num_value_dims: int
    page_size: int
    pages: int
    part_keys: int
    sub_tokens: int
    query_tokens: int
    stores_new: bool
    kv_dtype: Any
    sm_scale: float

    @property
    def has_scales(self) -> bool:
        """Pages are not of 8 bits."""
        return False

    @property
    def num_keys(self) -> int:
        """Keys per block."""
        return self.pages * self.page_size

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """Shape of a page."""
        return (1, self.page_size, self.num_lanes)

    @property
    def num_subs(self) -> int:
        """Sub-blocks of a query block."""
        return self.query_tokens // self.sub_tokens

    @property
    def sub_rows(self) -> int:
        """Rows of a sub-block: (token, head)."""
        return self.sub_tokens * self.num_heads

    @property
    def tile_rows(self) -> int:
        """Rows of a page that lie together in memory: the least that a DMA can write."""
        return SUBLANES * 4 // jnp.dtype(self.kv_dtype).itemsize

    def page_range(self, num_keys: Any, q_len: Any) -> tuple[Any, Any]:
        """Pages [begin, end) of the block that hold keys which a row sees."""
        del q_len
        shift = self.page_size.bit_length() - 1
        return 0, jnp.minimum((num_keys + self.page_size - 1) >> shift, self.pages)


class _Buffers(NamedTuple):
    q: Any
    new: Any
    tile: Any
    out: Any
    top: Any
    total: Any
    acc: Any
    num_outs: Any
    num_tiles: Any
    q_sem: Any
    new_sem: Any
    tile_sem: Any
    out_sem: Any


def latent_attention(
    q: jax.Array,
    new_rows: jax.Array,
    pages: jax.Array,
    page_windows: jax.Array,
    plan: DecodePlan,
    out: jax.Array,
    *,
    shape: LatentShape,
    vmem_limit_bytes: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend with the plan's query blocks; in place in `out` and, if `stores_new`, in the pages.

    Args:
        q: [T, H, C].
        new_rows: f32 [T, 1, C], rows of new tokens; only read if they are to be stored.
        pages: [N, 1, page, C].
        page_windows: i32 [S, W, 1, 128], see `plan.page_windows`.
        plan: query blocks and their key blocks.
        out: [T, H, R]; rows that are not in the plan keep their values.
        shape: static sizes.
        vmem_limit_bytes: what the compiler may use.
        interpret: parameters of TPU interpret mode, for tests.
    """
    tokens = (shape.query_tokens, shape.num_heads)
    sums = pltpu.VMEM((shape.num_subs, shape.sub_rows, LANES), jnp.float32)
    buffers = _Buffers(
        q=pltpu.VMEM((SLOTS, *tokens, shape.num_lanes), q.dtype),
        new=pltpu.VMEM((SLOTS, 1, shape.num_lanes), new_rows.dtype),
        tile=pltpu.VMEM((shape.tile_rows, shape.num_lanes), shape.kv_dtype),
        out=pltpu.VMEM((*tokens, shape.num_value_dims), out.dtype),
        top=sums,
        total=sums,
        acc=pltpu.VMEM((*sums.shape[:2], shape.num_value_dims), jnp.float32),
        num_outs=pltpu.SMEM((1,), jnp.int32),
        num_tiles=pltpu.SMEM((1,), jnp.int32),
        q_sem=pltpu.SemaphoreType.DMA((SLOTS,)),
        new_sem=pltpu.SemaphoreType.DMA((SLOTS,)),
        tile_sem=pltpu.SemaphoreType.DMA,
        out_sem=pltpu.SemaphoreType.DMA,
    )
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_run, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(plan),
            grid=(1,),
            in_specs=[any_space] * 5,
            out_specs=[any_space] * 2,
            scratch_shapes=[buffers, stream_scratch(shape, round_items=1)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, pages)],
        input_output_aliases={len(plan) + 3: 0, len(plan) + 4: 1},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="latent_decode" if shape.stores_new else "latent_prefill",
    )(*plan, page_windows, q, new_rows, out, pages)


def _run(shape: LatentShape, *refs: Any) -> None:
    plan = DecodePlan(*refs[: len(DecodePlan._fields)])
    windows, q, new_rows, _, _, out, pages, buffers, scratch = refs[len(plan) :]
    stream = PageStream(shape, 1, plan, windows, pages, None, scratch)
    kernel = _Kernel(shape, stream, q, new_rows, out, buffers)
    num_items = plan.num_items[0]
    buffers.num_outs[0] = 0
    buffers.num_tiles[0] = 0

    @pl.when(num_items > 0)
    def _() -> None:
        entry = stream.start_ids(0, jnp.int32(0))
        entry = stream.start_ids(1, entry)
        kernel.start_inputs(0)

        def run_item(index: jax.Array, entry: jax.Array) -> jax.Array:
            entry = stream.start_ids(index + 2, entry)
            kernel.start_inputs(index + 1)
            kernel.wait_inputs(index)
            kernel.finish_block(index)
            kernel.compute(index)
            kernel.end_queries(index)
            return entry

        lax.fori_loop(0, num_items, run_item, entry)
        stream.wait_ids(num_items + 1)
        kernel.wait_out()
        kernel.wait_tile()


@dataclass(frozen=True)
class _Kernel:
    """The stages of an item; `index` is its number."""

    shape: LatentShape
    stream: PageStream
    q: Any
    new_rows: Any
    out: Any
    buffers: _Buffers

    @property
    def item(self) -> Items:
        """What is known of the items."""
        return self.stream.scratch.items

    def start_inputs(self, index: Any) -> None:
        """Fetch the pages of an item, its queries if it is their first, its new row if the last."""
        self.stream.wait_ids(index)
        self.stream.start_pages(index, 0)
        ids_slot, buffers = index % IDS_SLOTS, self.buffers
        num_keys, first_row = self.item.num_keys[ids_slot, 0], self.item.first_row[ids_slot, 0]

        @pl.when((self.item.is_first[ids_slot, 0] != 0) & (num_keys > 0))
        def _() -> None:
            q_slot = self.item.parity[ids_slot, 0]
            copy_rows(
                self.q,
                buffers.q.at[q_slot],
                buffers.q_sem.at[q_slot],
                source_row=first_row,
                target_row=0,
                count=self.item.q_len[ids_slot, 0],
            )

        if self.shape.stores_new:

            @pl.when(self._is_last(num_keys))
            def _() -> None:
                self._new_copy(index % SLOTS, first_row).start()

    def wait_inputs(self, index: Any) -> None:
        """Wait for what was started; before a query block's first item, clear the sums."""
        ids_slot, buffers = index % IDS_SLOTS, self.buffers
        num_keys, q_len = self.item.num_keys[ids_slot, 0], self.item.q_len[ids_slot, 0]
        _, end = self.shape.page_range(num_keys, q_len)
        self.stream.wait_pages(index, end)

        @pl.when(self.item.is_first[ids_slot, 0] != 0)
        def _() -> None:
            q_slot = self.item.parity[ids_slot, 0]
            wait_rows(buffers.q.at[q_slot], buffers.q_sem.at[q_slot], count=q_len)
            buffers.top[...] = jnp.full(buffers.top.shape, NO_MAX)
            buffers.total[...] = jnp.zeros(buffers.total.shape)
            buffers.acc[...] = jnp.zeros(buffers.acc.shape)

        if self.shape.stores_new:

            @pl.when(self._is_last(num_keys))
            def _() -> None:
                self._new_copy(index % SLOTS, 0).wait()

    def finish_block(self, index: Any) -> None:
        """Where a query block's keys end: store its new row, and clear what follows.

        What follows may be anything, and weights of 0 meet it.
        """
        slot, ids_slot = index % SLOTS, index % IDS_SLOTS
        shape, pages = self.shape, self.stream.item_pages(slot, 0).pages
        num_keys, tile = self.item.num_keys[ids_slot, 0], shape.tile_rows

        def clear_tile(index: jax.Array, carry: None) -> None:
            page, first = index * tile // shape.page_size, index * tile % shape.page_size
            rows = pages.at[page, 0, pl.ds(pl.multiple_of(first, tile), tile)]
            key = index * tile + lax.broadcasted_iota(jnp.int32, rows.shape, 0)
            live = jnp.where(key < num_keys, rows[...].astype(jnp.float32), 0.0)
            rows[...] = live.astype(rows.dtype)
            return carry

        @pl.when(self._is_last(num_keys))
        def _() -> None:
            if shape.stores_new:
                self._store_new(slot, ids_slot, num_keys - 1)
            lax.fori_loop(num_keys // tile, shape.num_keys // tile, clear_tile, None)

    def compute(self, index: Any) -> None:
        """Attend to a key block with every sub-block that sees any of it."""
        slot, ids_slot = index % SLOTS, index % IDS_SLOTS
        shape = self.shape
        num_keys, q_len = self.item.num_keys[ids_slot, 0], self.item.q_len[ids_slot, 0]
        parity = self.item.parity[ids_slot, 0]
        first, tokens = num_keys - q_len, shape.sub_tokens  # key that the first query stands at
        num_subs = pl.cdiv(q_len, tokens)
        begin = jnp.minimum(jnp.maximum(-first, 0) // tokens, num_subs)
        diagonal = jnp.maximum(shape.num_keys - 1 - first, 0)
        masked_end = jnp.clip(pl.cdiv(diagonal, tokens), begin, num_subs)

        def attend(is_masked: bool, sub: jax.Array, carry: None) -> None:
            position = first + sub * tokens if is_masked else None
            self._attend(slot, parity, sub, position)
            return carry

        lax.fori_loop(begin, masked_end, functools.partial(attend, True), None)
        lax.fori_loop(masked_end, num_subs, functools.partial(attend, False), None)

    def end_queries(self, index: Any) -> None:
        """After a query block's last item: normalise and write."""
        ids_slot, buffers, shape = index % IDS_SLOTS, self.buffers, self.shape
        q_len = self.item.q_len[ids_slot, 0]

        @pl.when(self._is_last(self.item.num_keys[ids_slot, 0]))
        def _() -> None:
            self.wait_out()
            sub_shape = (shape.sub_tokens, shape.num_heads, shape.num_value_dims)

            def end_sub(sub: jax.Array, carry: None) -> None:
                total = buffers.total[sub].sum(axis=1, keepdims=True)
                out = (buffers.acc[sub] / total).reshape(sub_shape)
                tokens = pl.ds(sub * shape.sub_tokens, shape.sub_tokens)
                buffers.out[tokens] = out.astype(buffers.out.dtype)
                return carry

            lax.fori_loop(0, pl.cdiv(q_len, shape.sub_tokens), end_sub, None)
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

    def wait_tile(self) -> None:
        """Wait until the last stored row has left."""

        @pl.when(self.buffers.num_tiles[0] > 0)
        def _() -> None:
            self._tile_copy(0, 0).wait()
            self.buffers.num_tiles[0] = 0

    def _attend(self, slot: Any, parity: Any, sub: Any, first: Any | None) -> None:
        """One sub-block; its first token stands at key `first`, None for no mask."""
        shape, buffers = self.shape, self.buffers
        pages = self.stream.item_pages(slot, 0).pages
        rows = pages[:, 0].reshape(shape.num_keys, shape.num_lanes)
        tokens = pl.ds(sub * shape.sub_tokens, shape.sub_tokens)
        q = buffers.q[parity, tokens].reshape(shape.sub_rows, shape.num_lanes)
        begins = range(0, shape.num_keys, shape.part_keys)
        parts = [rows[begin : begin + shape.part_keys] for begin in begins]
        scores = self._scores(q, parts[0])
        for begin, part, following in zip(begins, parts, [*parts[1:], None], strict=True):
            own = scores
            if following is not None:  # asked for before this part's softmax, which hides them
                scores = self._scores(q, following)
            if first is not None:
                token = lax.broadcasted_iota(jnp.int32, own.shape, 0) // shape.num_heads
                key = begin + lax.broadcasted_iota(jnp.int32, own.shape, 1)
                own = jnp.where(key <= first + token, own, NO_MAX)
            self._merge(sub, own, part)

    def _scores(self, q: jax.Array, keys: jax.Array) -> jax.Array:
        product = lax.dot_general(
            q, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return product * (self.shape.sm_scale * LOG2_E)

    def _merge(self, sub: Any, scores: jax.Array, rows: jax.Array) -> None:
        """Weigh latents by scores, and add them to the sums."""
        shape, buffers = self.shape, self.buffers
        top = jnp.max(scores, axis=1, keepdims=True)
        weights = jnp.exp2(scores - top)
        product = lax.dot_general(
            weights.astype(shape.kv_dtype),
            rows[:, : shape.num_value_dims],
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        # As `block.merge_block`, of values that are wider than a row of lanes.
        old_top = buffers.top[sub]
        new_top = jnp.maximum(old_top, top)
        decay, block_decay = jnp.exp2(old_top - new_top), jnp.exp2(top - new_top)
        buffers.top[sub] = new_top
        buffers.total[sub] = buffers.total[sub] * decay + sum_by_lane(weights) * block_decay
        for lane in range(0, shape.num_value_dims, LANES):
            lanes = pl.ds(lane, LANES)
            own = product[:, lane : lane + LANES] * block_decay
            buffers.acc[sub, :, lanes] = buffers.acc[sub, :, lanes] * decay + own

    def _store_new(self, slot: Any, ids_slot: Any, key: Any) -> None:
        """Put the new row of key `key` into its block and into HBM."""
        shape, buffers = self.shape, self.buffers
        pages, tile = self.stream.item_pages(slot, 0).pages, shape.tile_rows
        page, slot_in_page = key // shape.page_size, key % shape.page_size
        first_row = pl.multiple_of(slot_in_page // tile * tile, tile)
        rows = pages.at[page, 0, pl.ds(first_row, tile)]
        is_row = lax.broadcasted_iota(jnp.int32, rows.shape, 0) == slot_in_page % tile
        new = buffers.new[slot].astype(jnp.float32)
        both = jnp.where(is_row, new, rows[...].astype(jnp.float32))
        rows[...] = both.astype(rows.dtype)
        self.wait_tile()
        buffers.tile[...] = rows[...]  # a copy, since the block is cleared while this is on its way
        page_id = self.stream.scratch.ids[self.item.first_id[ids_slot, 0] + page]
        self._tile_copy(first_row, page_id).start()
        buffers.num_tiles[0] = 1

    def _is_last(self, num_keys: Any) -> Any:
        """Whether an item is one and its query block's last."""
        return (num_keys > 0) & (num_keys <= self.shape.num_keys)

    def _new_copy(self, slot: Any, row: Any) -> Any:
        return pltpu.make_async_copy(
            self.new_rows.at[row], self.buffers.new.at[slot], self.buffers.new_sem.at[slot]
        )

    def _tile_copy(self, first_row: Any, page_id: Any) -> Any:
        tile = self.shape.tile_rows
        return pltpu.make_async_copy(
            self.buffers.tile,
            self.stream.pages.at[page_id, 0, pl.ds(pl.multiple_of(first_row, tile), tile)],
            self.buffers.tile_sem,
        )
