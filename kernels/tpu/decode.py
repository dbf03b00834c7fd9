"""Attention of sequences with a few new tokens each: decode steps, speculative verification.

One loop over a flat list of (sequence, key block) items, several items per round: their scores and
partial sums do not depend on each other, so that one item's products fill the other's latencies,
and are then merged in order. Key blocks begin at absolute positions and a partial result does not
depend on the running maximum: a row's bits depend on its own sequence only.

Three stages run at once: page ids of round r + 2 on their way to SMEM, pages, queries and new keys
of round r + 1 on their way to VMEM, round r being computed. What a round needs to know of an item
is computed once, in the first stage, and kept in SMEM.

| array | shape | where |
|---|---|---|
| queries, new keys and values | [T, H + 2K, D] | HBM, by rows |
| out | [T, H, D] | HBM, by rows |
| pages | [N, 2K, page, D] | HBM, whole pages in, tiles of rows out |
| page windows | [S, W, 1, 128] | HBM, one window per item |
| page buffer | [2, items * block_pages, 2K, page, D] | VMEM, nearly all of the kernel's memory |

Example: H = 32, K = 8, D = 128, pages of 128 tokens in bf16 are 512 KiB each; 2 items of 8 pages
make a round of 8 MiB and a buffer of 16 MiB.
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

from kernels.tpu.block import (
    LANES,
    BlockShape,
    attend_block,
    cast_rows,
    merge_block,
    new_state,
    normalise,
)
from kernels.tpu.plan import PAGE_WINDOW, DecodePlan
from kernels.tpu.ragged import wait_rows

_IDS_SLOTS = 4
_SLOTS = 2
_MAX_TILES = 2  # of 8 rows or more, that up to 8 new tokens lie in


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """Everything static about a call.

    Attributes:
        block: heads, sizes and dtypes of one item.
        round_items: items per round.
    """

    block: BlockShape
    round_items: int


class _Item(NamedTuple):
    """SMEM tables [4, items] of what a round knows of its items.

    Attributes:
        num_keys: keys of the sequence from the block's first on: more than a block's, unless last;
            0 or less for no item.
        q_len: rows of q.
        first_row: the first of them.
        first_id: index into `ids` of the block's first page.
        is_first: 1 for the first block of a sequence.
    """

    num_keys: Any
    q_len: Any
    first_row: Any
    first_id: Any
    is_first: Any


class _Pending(NamedTuple):
    """SMEM counters [2] of what was started for a buffer slot and not waited for."""

    pages: Any
    rows: Any
    tiles: Any
    outs: Any
    tails: Any


class _Buffers(NamedTuple):
    pages: Any
    qkv: Any
    tiles: Any
    out: Any
    top: Any
    total: Any
    acc: Any
    ids: Any
    ids_sem: Any
    page_sem: Any
    row_sem: Any
    tile_sem: Any
    out_sem: Any


def decode_attention(
    qkv: jax.Array,
    kv_pages: jax.Array,
    page_windows: jax.Array,
    plan: DecodePlan,
    out: jax.Array,
    sinks: jax.Array | None = None,
    *,
    shape: DecodeShape,
    vmem_limit_bytes: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Store the new keys and values of the plan's sequences and attend; in place in `out`.

    Args:
        qkv: [T, H + 2K, D], queries and then keys and values in the order of a page's rows; one
            array, so that a token is one DMA.
        kv_pages: [N, 2K, page, D]; updated in place when donated.
        page_windows: i32 [S, W, 1, 128], see `plan.page_windows`.
        plan: sequences and their blocks.
        out: [T, H, D]; rows of sequences that are not in the plan keep their values.
        sinks: f32 [R, 128] as rows of a block, each row one value; None without.
        shape: static sizes.
        vmem_limit_bytes: what the compiler may use.
        interpret: parameters of TPU interpret mode, for tests.
    """
    block = shape.block
    num_pages = shape.round_items * block.pages
    num_rows = shape.round_items * block.max_q_len
    state = pltpu.VMEM((block.num_rows, LANES), jnp.float32)
    item_table = pltpu.SMEM((_IDS_SLOTS, shape.round_items), jnp.int32)
    counter = pltpu.SMEM((_SLOTS,), jnp.int32)
    semaphores = pltpu.SemaphoreType.DMA((_SLOTS,))
    row_shape = (block.num_heads, LANES)
    page_shape = (2 * block.num_kv_heads, block.page_rows, LANES)
    tile_shape = (2 * block.num_kv_heads, block.tile_rows, LANES)
    buffers = _Buffers(
        pages=pltpu.VMEM((_SLOTS, num_pages, *page_shape), block.kv_dtype),
        qkv=pltpu.VMEM((_SLOTS, num_rows, *qkv.shape[1:]), qkv.dtype),
        tiles=pltpu.VMEM((_SLOTS, shape.round_items, _MAX_TILES, *tile_shape), block.kv_dtype),
        out=pltpu.VMEM((_SLOTS, num_rows, *row_shape), out.dtype),
        top=state,
        total=state,
        acc=state,
        ids=pltpu.SMEM((_IDS_SLOTS * shape.round_items * PAGE_WINDOW,), jnp.int32),
        ids_sem=pltpu.SemaphoreType.DMA((_IDS_SLOTS,)),
        page_sem=semaphores,
        row_sem=semaphores,
        tile_sem=semaphores,
        out_sem=semaphores,
    )
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    num_scalars = len(plan)
    extra = () if sinks is None else (sinks,)
    return pl.pallas_call(
        functools.partial(_run, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(1,),
            in_specs=[any_space] * 4 + [pl.BlockSpec(memory_space=pltpu.VMEM) for _ in extra],
            out_specs=[any_space] * 2,
            scratch_shapes=[
                buffers,
                _Item(*[item_table] * len(_Item._fields)),
                _Pending(*[counter] * len(_Pending._fields)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(out.shape, out.dtype),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        ],
        input_output_aliases={num_scalars + 2: 0, num_scalars + 3: 1},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="decode_attention",
    )(*plan, page_windows, qkv, out, kv_pages, *extra)


def _run(shape: DecodeShape, *refs: Any) -> None:
    plan = DecodePlan(*refs[: len(DecodePlan._fields)])
    windows, qkv, _, _, *extra, out, pages, buffers, item, pending = refs[len(plan) :]
    sinks = extra[0] if extra else None
    kernel = _Kernel(shape, plan, windows, qkv, out, pages, sinks, buffers, item, pending)
    num_rounds = pl.cdiv(plan.num_items[0], shape.round_items)
    for counter in pending:
        for slot in range(_SLOTS):
            counter[slot] = 0

    @pl.when(num_rounds > 0)
    def _() -> None:
        seq = kernel.start_ids(0, jnp.int32(0))
        seq = kernel.start_ids(1, seq)
        kernel.start_inputs(0)

        def run_round(index: jax.Array, seq: jax.Array) -> jax.Array:
            seq = kernel.start_ids(index + 2, seq)
            kernel.wait_outputs((index + 1) % _SLOTS)
            kernel.start_inputs(index + 1)
            kernel.wait_inputs(index)
            kernel.finish_blocks(index)
            kernel.compute(index)
            kernel.start_outs(index)
            return seq

        lax.fori_loop(0, num_rounds, run_round, seq)
        # Stages run ahead of the last round: what they started must land before the kernel ends.
        kernel.wait_ids(num_rounds + 1)
        kernel.wait_outputs((num_rounds + 1) % _SLOTS)


@dataclass(frozen=True)
class _Kernel:
    """The stages of a round; `index` is a round's number, `slot` its buffer."""

    shape: DecodeShape
    plan: DecodePlan
    windows: Any
    qkv: Any
    out: Any
    pages: Any
    sinks: Any
    buffers: _Buffers
    item: _Item
    pending: _Pending

    def start_ids(self, index: Any, seq: jax.Array) -> jax.Array:
        """Describe a round's items and fetch their page ids; returns the next round's sequence."""
        plan, block = self.plan, self.shape.block
        slot = index % _IDS_SLOTS
        for j in range(self.shape.round_items):
            number = index * self.shape.round_items + j
            first_page = (number + plan.block_offsets[seq]) * block.pages
            self.item.num_keys[slot, j] = plan.kv_lens[seq] - first_page * block.page_size
            self.item.q_len[slot, j] = plan.q_lens[seq]
            self.item.first_row[slot, j] = plan.first_rows[seq]
            self.item.first_id[slot, j] = self._ids_base(slot, j) + first_page % PAGE_WINDOW
            self.item.is_first[slot, j] = (number == plan.first_items[seq]).astype(jnp.int32)
            pltpu.make_async_copy(
                self.windows.at[plan.seq_ids[seq], first_page // PAGE_WINDOW, 0],
                self.buffers.ids.at[pl.ds(self._ids_base(slot, j), PAGE_WINDOW)],
                self.buffers.ids_sem.at[slot],
            ).start()
            seq = jnp.where(number + 1 >= plan.first_items[seq + 1], seq + 1, seq)
        return seq

    def wait_ids(self, index: Any) -> None:
        """Wait for the page ids of a round, of all its items at once."""
        slot = index % _IDS_SLOTS
        num_ids = self.shape.round_items * PAGE_WINDOW
        ids = self.buffers.ids.at[pl.ds(self._ids_base(slot, 0), num_ids)]
        pltpu.make_async_copy(ids, ids, self.buffers.ids_sem.at[slot]).wait()

    def start_inputs(self, index: Any) -> None:
        """Fetch the pages, queries and new keys of a round's items."""
        self.wait_ids(index)
        slot, ids_slot = index % _SLOTS, index % _IDS_SLOTS
        block = self.shape.block
        num_pages, num_rows, num_tails = 0, 0, 0
        for j in range(self.shape.round_items):
            num_keys, q_len = self.item.num_keys[ids_slot, j], self.item.q_len[ids_slot, j]
            begin, end = block.page_range(num_keys, q_len)
            first_id = self.item.first_id[ids_slot, j]
            for page in range(block.pages):

                @pl.when((begin <= page) & (page < end))
                def _(j: int = j, page: int = page, first_id: Any = first_id) -> None:
                    page_id = self.buffers.ids[first_id + page]
                    self._page_copy(slot, j * block.pages + page, page_id).start()

            for i in range(block.max_q_len):

                @pl.when(i < q_len)
                def _(j: int = j, i: int = i) -> None:
                    row = self.item.first_row[ids_slot, j] + i
                    self._row_copy(slot, j * block.max_q_len + i, row).start()

            num_pages += jnp.maximum(end - begin, 0)
            num_rows += q_len
            num_tails += block.has_tail(num_keys, q_len).astype(jnp.int32)
        self.pending.pages[slot] = num_pages
        self.pending.rows[slot] = num_rows
        self.pending.tails[slot] = num_tails

    def wait_inputs(self, index: Any) -> None:
        """Wait for all inputs of a round: semaphores count bytes, so powers of two will do."""
        slot = index % _SLOTS
        buffers, pending = self.buffers, self.pending
        wait_rows(buffers.pages.at[slot], buffers.page_sem.at[slot], count=pending.pages[slot])
        wait_rows(buffers.qkv.at[slot], buffers.row_sem.at[slot], count=pending.rows[slot])

    def finish_blocks(self, index: Any) -> None:
        """Put new keys and values into their blocks and into HBM, and clear what follows them."""
        slot, ids_slot = index % _SLOTS, index % _IDS_SLOTS

        def finish_item(j: jax.Array, carry: None) -> None:
            num_keys, q_len = self.item.num_keys[ids_slot, j], self.item.q_len[ids_slot, j]

            @pl.when(self.shape.block.has_tail(num_keys, q_len))
            def _() -> None:
                self._store_new(slot, ids_slot, j, num_keys, q_len)
                self._clear_values(slot, j, num_keys, q_len)

            return carry

        @pl.when(self.pending.tails[slot] > 0)
        def _() -> None:
            lax.fori_loop(0, self.shape.round_items, finish_item, None)

    def compute(self, index: Any) -> None:
        """Attend to the blocks of a round and merge them into the running sums, in order."""
        slot, ids_slot = index % _SLOTS, index % _IDS_SLOTS
        block, buffers = self.shape.block, self.buffers
        state = (buffers.top[...], buffers.total[...], buffers.acc[...])
        sinks = None if self.sinks is None else self.sinks[...]
        for j in range(self.shape.round_items):
            rows = pl.ds(j * block.max_q_len, block.max_q_len)
            partial = attend_block(
                block,
                buffers.qkv[slot, rows, pl.ds(0, block.num_heads)],
                buffers.pages.at[slot, pl.ds(j * block.pages, block.pages)],
                num_keys=self.item.num_keys[ids_slot, j],
                q_len=self.item.q_len[ids_slot, j],
            )
            is_first = self.item.is_first[ids_slot, j] != 0
            state = tuple(
                jnp.where(is_first, new, old)
                for new, old in zip(new_state(block.num_rows), state, strict=True)
            )
            state = merge_block(state, partial)
            buffers.out[slot, rows] = block.by_token(normalise(state, sinks)).astype(
                buffers.out.dtype
            )
        buffers.top[...], buffers.total[...], buffers.acc[...] = state

    def start_outs(self, index: Any) -> None:
        """Write the rows of the sequences that ended in a round."""
        slot, ids_slot = index % _SLOTS, index % _IDS_SLOTS
        block = self.shape.block
        num_outs = 0
        for j in range(self.shape.round_items):
            num_keys, q_len = self.item.num_keys[ids_slot, j], self.item.q_len[ids_slot, j]
            num_rows = jnp.where(num_keys <= block.num_keys, q_len, 0)
            num_outs += num_rows
            for i in range(block.max_q_len):

                @pl.when(i < num_rows)
                def _(j: int = j, i: int = i) -> None:
                    row = self.item.first_row[ids_slot, j] + i
                    self._out_copy(slot, j * block.max_q_len + i, row).start()

        self.pending.outs[slot] = num_outs

    def wait_outputs(self, slot: Any) -> None:
        """Wait until what a slot's last round wrote has left: nothing, unless a sequence ended."""
        num_outs, num_tiles = self.pending.outs[slot], self.pending.tiles[slot]

        @pl.when(num_outs + num_tiles > 0)
        def _() -> None:
            _repeat(num_outs, lambda: self._out_copy(slot, 0, 0).wait())
            _repeat(num_tiles, lambda: self._tile_copy(slot, 0, 0, 0, 0).wait())
            self.pending.tiles[slot] = 0

    def _store_new(self, slot: Any, ids_slot: Any, j: Any, num_keys: Any, q_len: Any) -> None:
        block, buffers = self.shape.block, self.buffers
        first_new = num_keys - q_len
        begin, end = jnp.maximum(-first_new, 0), jnp.minimum(q_len, block.num_keys - first_new)
        tile = block.tile_rows

        def store_row(i: jax.Array, carry: None) -> None:
            key = first_new + i
            page, slot_in_page = j * block.pages + key // block.page_size, key % block.page_size
            row = slot_in_page // block.row_tokens
            new_rows = pl.ds(block.num_heads, 2 * block.num_kv_heads)
            new = buffers.qkv[slot, j * block.max_q_len + i, new_rows].astype(jnp.float32)
            rows = pl.ds(pl.multiple_of(row // tile * tile, tile), tile)
            is_row = block.row_token(tile) == slot_in_page % block.tile_tokens
            for head in range(2 * block.num_kv_heads):
                old = buffers.pages[slot, page, head, rows].astype(jnp.float32)
                both = jnp.where(is_row, new[head : head + 1], old)
                buffers.pages[slot, page, head, rows] = cast_rows(both, block.kv_dtype)
            return carry

        def write_tile(i: jax.Array, carry: None) -> None:
            first_key = (first_tile + i) * block.tile_tokens
            page = first_key // block.page_size
            row = first_key % block.page_size // block.row_tokens
            rows = pl.ds(pl.multiple_of(row, tile), tile)
            # A copy, since the block is cleared below while this is on its way.
            buffers.tiles[slot, j, i] = buffers.pages[slot, j * block.pages + page, :, rows]
            page_id = buffers.ids[self.item.first_id[ids_slot, j] + page]
            self._tile_copy(slot, j, i, row, page_id).start()
            return carry

        lax.fori_loop(begin, end, store_row, None)
        tokens = block.tile_tokens
        first_tile = (first_new + begin) // tokens
        num_tiles = jnp.where(begin < end, pl.cdiv(first_new + end, tokens) - first_tile, 0)
        lax.fori_loop(0, num_tiles, write_tile, None)
        self.pending.tiles[slot] += num_tiles

    def _clear_values(self, slot: Any, j: Any, num_keys: Any, q_len: Any) -> None:
        """Zero what no row sees, see `BlockShape.cleared_rows`."""
        block, pages = self.shape.block, self.buffers.pages
        tile = block.tile_tokens

        def clear_tile(index: jax.Array, carry: None) -> None:
            page = j * block.pages + index * tile // block.page_size
            first = index * tile % block.page_size // block.row_tokens
            first = pl.multiple_of(first, block.tile_rows)
            keys = index * tile + block.row_token(block.tile_rows)
            is_live = block.is_live(keys, num_keys, q_len)
            for head in block.cleared_rows:
                ref = pages.at[slot, page, head, pl.ds(first, block.tile_rows)]
                ref[...] = cast_rows(
                    jnp.where(is_live, ref[...].astype(jnp.float32), 0.0), ref.dtype
                )
            return carry

        def clear_page(page: jax.Array, carry: None) -> None:
            for head in range(1, 2 * block.num_kv_heads, 2):
                ref = pages.at[slot, j * block.pages + page, head]
                ref[...] = jnp.zeros(ref.shape, ref.dtype)
            return carry

        begin, end = block.page_range(num_keys, q_len)
        page_tiles = block.page_size // tile
        lax.fori_loop(
            jnp.minimum(num_keys // tile, end * page_tiles), end * page_tiles, clear_tile, None
        )
        lax.fori_loop(end, block.pages, clear_page, None)
        if block.sliding_window is not None:
            oldest = block.oldest_key(num_keys, q_len)
            lax.fori_loop(begin * page_tiles, pl.cdiv(oldest, tile), clear_tile, None)
            lax.fori_loop(0, begin, clear_page, None)

    def _ids_base(self, slot: Any, j: int) -> Any:
        return (slot * self.shape.round_items + j) * PAGE_WINDOW

    def _page_copy(self, slot: Any, page: Any, page_id: Any) -> Any:
        return pltpu.make_async_copy(
            self.pages.at[page_id],
            self.buffers.pages.at[slot, page],
            self.buffers.page_sem.at[slot],
        )

    def _row_copy(self, slot: Any, i: Any, row: Any) -> Any:
        return pltpu.make_async_copy(
            self.qkv.at[row], self.buffers.qkv.at[slot, i], self.buffers.row_sem.at[slot]
        )

    def _out_copy(self, slot: Any, i: Any, row: Any) -> Any:
        return pltpu.make_async_copy(
            self.buffers.out.at[slot, i], self.out.at[row], self.buffers.out_sem.at[slot]
        )

    def _tile_copy(self, slot: Any, j: Any, i: Any, first_row: Any, page_id: Any) -> Any:
        tile = self.shape.block.tile_rows
        return pltpu.make_async_copy(
            self.buffers.tiles.at[slot, j, i],
            self.pages.at[page_id, :, pl.ds(pl.multiple_of(first_row, tile), tile)],
            self.buffers.tile_sem.at[slot],
        )


def _repeat(count: Any, action: Any) -> None:
    def body(_: jax.Array, carry: None) -> None:
        action()
        return carry

    lax.fori_loop(0, count, body, None)
