"""Attention of sequences with a few new tokens each: decode steps, speculative verification.

One loop over a flat list of (sequence, key block) items, several items per round: their scores and
partial sums do not depend on each other, so that one item's products fill the other's latencies,
and are then merged in order. Key blocks begin at absolute positions and a partial result does not
depend on the running maximum: a row's bits depend on its own sequence only.

Pages come as `page_stream` brings them, queries and new keys beside them. With three slots, round
r + 2 is asked for between the products of round r, which hide that work, while r + 1 is on its way;
with two, where three would not fit, r + 1 is before r is waited for.

| array | shape | where |
|---|---|---|
| queries, new keys and values | [T, H + 2K, D] | HBM, by rows; for 8-bit pages one of scales, too |
| out | [T, H, D] | HBM, by rows |
| pages | [N, 2K, page, D] | HBM, whole pages in, tiles of rows out |
| scales of 8-bit pages | [N, 2K, page] | HBM, those of whole pages in and out |
| page buffer | [slots, items * block_pages, 2K, page, D] | VMEM, nearly all there is |

Example: H = 32, K = 8, D = 128, pages of 128 tokens in bf16 are 512 KiB each; 2 items of 8 pages
make a round of 8 MiB and a buffer of 24 MiB.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
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
    BlockShape,
    attend_block,
    cast_rows,
    merge_block,
    new_state,
    normalise,
)
from kernels.tpu.page_stream import (
    IDS_SLOTS,
    Items,
    PageStream,
    stream_scratch,
)
from kernels.tpu.plan import DecodePlan
from kernels.tpu.ragged import wait_rows

_MAX_TILES = 2  # of 8 rows or more, that up to 8 new tokens lie in


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """Everything static about a call.

    Attributes:
        block: heads, sizes and dtypes of one item.
        round_items: items per round.
        num_slots: rounds whose inputs are in memory or on their way, 2 or 3.
    """

    block: BlockShape
    round_items: int
    num_slots: int

    @property
    def num_ahead(self) -> int:
        """Rounds whose inputs are on their way while one is computed."""
        return self.num_slots - 1


class _Pending(NamedTuple):
    """SMEM counters [slots] of what was started for a buffer slot and not waited for."""

    pages: Any
    rows: Any
    tiles: Any
    scales: Any
    outs: Any
    tails: Any


class _Buffers(NamedTuple):
    qkv: Any
    tiles: Any
    scales: Any
    out: Any
    top: Any
    total: Any
    acc: Any
    row_sem: Any
    tile_sem: Any
    scale_sem: Any
    out_sem: Any


def decode_attention[P: jax.Array | QuantizedPages](
    qkv: jax.Array,
    kv_pages: P,
    page_windows: jax.Array,
    plan: DecodePlan,
    out: jax.Array,
    sinks: jax.Array | None = None,
    *,
    shape: DecodeShape,
    vmem_limit_bytes: int,
    interpret: Any = False,
) -> tuple[jax.Array, P]:
    """Store the new keys and values of the plan's sequences and attend; in place in `out`.

    Args:
        qkv: [T, H + 2K, D], queries and then keys and values in the order of a page's rows; one
            array, so that a token is one DMA. With 8-bit pages one row more: element r of it is
            the scale of KV row r.
        kv_pages: [N, 2K, page, D] or such of 8 bits; updated in place when donated.
        page_windows: i32 [S, W, 1, 128], see `plan.page_windows`.
        plan: sequences and their blocks.
        out: [T, H, D]; rows of sequences that are not in the plan keep their values.
        sinks: f32 [R, 128] as rows of a block, each row one value; None without.
        shape: static sizes.
        vmem_limit_bytes: what the compiler may use.
        interpret: parameters of TPU interpret mode, for tests.
    """
    block = shape.block
    num_rows = shape.round_items * block.max_q_len
    by_row = pltpu.VMEM((block.num_rows, LANES), jnp.float32)
    num_slots = shape.num_slots
    counter = pltpu.SMEM((num_slots,), jnp.int32)
    semaphores = pltpu.SemaphoreType.DMA((num_slots,))
    row_shape = (block.num_heads, block.row_lanes)
    tiles = (num_slots, shape.round_items, _MAX_TILES)
    num_kv_rows = 2 * block.num_kv_heads
    scales = pltpu.VMEM((*tiles, num_kv_rows, block.page_size), jnp.float32)
    buffers = _Buffers(
        qkv=pltpu.VMEM((num_slots, num_rows, *qkv.shape[1:]), qkv.dtype),
        tiles=pltpu.VMEM((*tiles, num_kv_rows, block.tile_rows, block.row_lanes), block.kv_dtype),
        scales=scales if block.has_scales else None,
        out=pltpu.VMEM((num_slots, num_rows, *row_shape), out.dtype),
        top=by_row,
        total=by_row,
        acc=pltpu.VMEM((block.num_rows, block.row_lanes), jnp.float32),
        row_sem=semaphores,
        tile_sem=semaphores,
        scale_sem=semaphores if block.has_scales else None,
        out_sem=semaphores,
    )
    cache, cache_tree = jax.tree.flatten(kv_pages)
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    num_scalars = len(plan)
    extra = () if sinks is None else (sinks,)
    out, *cache = pl.pallas_call(
        functools.partial(_run, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(1,),
            in_specs=[any_space] * (3 + len(cache))
            + [pl.BlockSpec(memory_space=pltpu.VMEM) for _ in extra],
            out_specs=[any_space] * (1 + len(cache)),
            scratch_shapes=[
                buffers,
                stream_scratch(block, round_items=shape.round_items, num_slots=num_slots),
                _Pending(*[counter] * len(_Pending._fields)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, *cache)],
        input_output_aliases={num_scalars + 2 + i: i for i in range(1 + len(cache))},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="decode_attention",
    )(*plan, page_windows, qkv, out, *cache, *extra)
    return out, jax.tree.unflatten(cache_tree, cache)


def _run(shape: DecodeShape, *refs: Any) -> None:
    plan = DecodePlan(*refs[: len(DecodePlan._fields)])
    windows, qkv, *rest, buffers, scratch, pending = refs[len(plan) :]
    num_updated = 3 if shape.block.has_scales else 2
    sinks = rest[num_updated] if len(rest) > 2 * num_updated else None
    out, pages, scales = (*rest[-num_updated:], None)[:3]
    stream = PageStream(shape.block, shape.round_items, plan, windows, pages, scales, scratch)
    kernel = _Kernel(shape, stream, qkv, out, sinks, buffers, pending)
    num_rounds = pl.cdiv(plan.num_items[0], shape.round_items)
    for counter in pending:
        for slot in range(shape.num_slots):
            counter[slot] = 0

    @pl.when(num_rounds > 0)
    def _() -> None:
        ahead, num_slots = shape.num_ahead, shape.num_slots
        seq = jnp.int32(0)
        for index in range(ahead + 2):
            seq = stream.start_ids(index, seq)
        for index in range(ahead):
            stream.wait_ids(index)
            _call(kernel.input_starts(index))

        def run_round(index: jax.Array, seq: jax.Array) -> jax.Array:
            kernel.wait_outputs((index + ahead) % num_slots)  # of the round before this one
            stream.wait_ids(index + ahead)
            starts = kernel.input_starts(index + ahead)
            if ahead == 1:  # nothing else would be on its way once this round's inputs are there
                _call(starts)
                starts = []
            kernel.wait_inputs(index)
            kernel.finish_blocks(index)
            kernel.compute(index, starts)
            kernel.start_outs(index)
            # Last: this round's tables are free, and what is fetched has a whole round to land.
            return stream.start_ids(index + ahead + 2, seq)

        lax.fori_loop(0, num_rounds, run_round, seq)
        # Stages run ahead of the last round: what they started must land before the kernel ends.
        for index in range(2):
            stream.wait_ids(num_rounds + ahead + index)
        kernel.wait_outputs((num_rounds + ahead) % num_slots)


@dataclass(frozen=True)
class _Kernel:
    """The stages of a round; `index` is a round's number, `slot` its buffer."""

    shape: DecodeShape
    stream: PageStream
    qkv: Any
    out: Any
    sinks: Any
    buffers: _Buffers
    pending: _Pending

    @property
    def item(self) -> Items:
        """What is known of the items."""
        return self.stream.scratch.items

    def input_starts(self, index: Any) -> list[Callable[[], None]]:
        """Count a round's inputs; returns what fetches its pages, queries and new keys."""
        slot, ids_slot = index % self.shape.num_slots, index % IDS_SLOTS
        block = self.shape.block
        starts: list[Callable[[], None]] = []
        num_pages, num_rows, num_tails = 0, 0, 0

        def start_row(j: int, i: int, q_len: Any) -> None:
            @pl.when(i < q_len)
            def _() -> None:
                row = self.item.first_row[ids_slot, j] + i
                self._row_copy(slot, j * block.max_q_len + i, row).start()

        for j in range(self.shape.round_items):
            num_keys, q_len = self.item.num_keys[ids_slot, j], self.item.q_len[ids_slot, j]
            page_starts, count = self.stream.page_starts(index, j)
            starts += page_starts
            starts += [functools.partial(start_row, j, i, q_len) for i in range(block.max_q_len)]
            num_pages += count
            num_rows += q_len
            num_tails += block.has_tail(num_keys, q_len).astype(jnp.int32)
        self.pending.pages[slot] = num_pages
        self.pending.rows[slot] = num_rows
        self.pending.tails[slot] = num_tails
        return starts

    def wait_inputs(self, index: Any) -> None:
        """Wait for all inputs of a round."""
        slot = index % self.shape.num_slots
        buffers, pending = self.buffers, self.pending
        self.stream.wait_pages(index, pending.pages[slot])
        wait_rows(buffers.qkv.at[slot], buffers.row_sem.at[slot], count=pending.rows[slot])

    def finish_blocks(self, index: Any) -> None:
        """Put new keys and values into their blocks and into HBM, and clear what follows them."""
        slot, ids_slot = index % self.shape.num_slots, index % IDS_SLOTS

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

    def compute(self, index: Any, starts: list[Callable[[], None]]) -> None:
        """Attend to the blocks of a round and merge them into the running sums, in order.

        Between products it calls `starts`, which are scalar work: the products hide that.
        """
        slot, ids_slot = index % self.shape.num_slots, index % IDS_SLOTS
        block, buffers = self.shape.block, self.buffers
        state = (buffers.top[...], buffers.total[...], buffers.acc[...])
        sinks = None if self.sinks is None else self.sinks[...]
        share = pl.cdiv(len(starts), self.shape.round_items * len(block.chunks))
        remaining = iter(starts)

        def start_some() -> None:
            _call(itertools.islice(remaining, share))

        for j in range(self.shape.round_items):
            rows = pl.ds(j * block.max_q_len, block.max_q_len)
            partial = attend_block(
                block,
                buffers.qkv[slot, rows, pl.ds(0, block.num_heads)],
                self.stream.item_pages(slot, j),
                num_keys=self.item.num_keys[ids_slot, j],
                q_len=self.item.q_len[ids_slot, j],
                between=start_some,
            )
            is_first = self.item.is_first[ids_slot, j] != 0
            state = tuple(
                jnp.where(is_first, new, old)
                for new, old in zip(new_state(block, block.num_rows), state, strict=True)
            )
            state = merge_block(state, partial)
            buffers.out[slot, rows] = block.by_token(normalise(state, sinks)).astype(
                buffers.out.dtype
            )
        buffers.top[...], buffers.total[...], buffers.acc[...] = state

    def start_outs(self, index: Any) -> None:
        """Write the rows of the sequences that ended in a round."""
        slot, ids_slot = index % self.shape.num_slots, index % IDS_SLOTS
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
            if self.shape.block.has_scales:
                _repeat(self.pending.scales[slot], lambda: self._scale_copy(slot, 0, 0, 0).wait())
                self.pending.scales[slot] = 0

    def _store_new(self, slot: Any, ids_slot: Any, j: Any, num_keys: Any, q_len: Any) -> None:
        block = self.shape.block
        first_new = num_keys - q_len
        begin, end = jnp.maximum(-first_new, 0), jnp.minimum(q_len, block.num_keys - first_new)

        def store_row(i: jax.Array, carry: None) -> None:
            self._store_row(slot, j, i, first_new + i)
            return carry

        lax.fori_loop(begin, end, store_row, None)
        first_id = self.item.first_id[ids_slot, j]
        first, last = first_new + begin, first_new + end - 1
        self.pending.tiles[slot] += _for_each_unit(
            first,
            last,
            block.tile_tokens,
            lambda i, tile: self._write_tile(slot, j, i, tile, first_id),
        )
        if block.has_scales:
            self.pending.scales[slot] += _for_each_unit(
                first,
                last,
                block.page_size,
                lambda i, page: self._write_scales(slot, j, i, page, first_id),
            )

    def _store_row(self, slot: Any, j: Any, i: Any, key: Any) -> None:
        """Put the new token i of an item into its block."""
        block, buffers = self.shape.block, self.buffers
        refs = self.stream.item_pages(slot, j)
        page, slot_in_page = key // block.page_size, key % block.page_size
        row, tile = slot_in_page // block.row_tokens, block.tile_rows
        token, num_kv_rows = j * block.max_q_len + i, 2 * block.num_kv_heads
        new = buffers.qkv[slot, token, pl.ds(block.num_heads, num_kv_rows)].astype(jnp.float32)
        rows = pl.ds(pl.multiple_of(row // tile * tile, tile), tile)
        is_row = block.row_token(tile) == slot_in_page % block.tile_tokens
        for head in block.kv_rows:
            old = refs.pages[page, head, rows].astype(jnp.float32)
            both = jnp.where(is_row, new[head : head + 1], old)
            refs.pages[page, head, rows] = cast_rows(both, block.kv_dtype)
        if block.has_scales:
            scales = buffers.qkv[slot, token, pl.ds(block.num_heads + num_kv_rows, 1)]
            column = block.scale_column(scales.astype(jnp.float32))
            is_token = block.scale_token == slot_in_page
            refs.scales[page] = jnp.where(is_token, column, refs.scales[page])

    def _write_tile(self, slot: Any, j: Any, i: Any, tile: Any, first_id: Any) -> None:
        """Send the rows that hold tokens `tile` * tile_tokens and on of an item."""
        block, buffers = self.shape.block, self.buffers
        first_key = tile * block.tile_tokens
        page = first_key // block.page_size
        row = first_key % block.page_size // block.row_tokens
        rows = pl.ds(pl.multiple_of(row, block.tile_rows), block.tile_rows)
        # A copy, since the block is cleared below while this is on its way.
        buffers.tiles[slot, j, i] = self.stream.item_pages(slot, j).pages[page, :, rows]
        page_id = self.stream.scratch.ids[first_id + page]
        self._tile_copy(slot, j, i, row, page_id).start()

    def _write_scales(self, slot: Any, j: Any, i: Any, page: Any, first_id: Any) -> None:
        """Send the scales of a page of an item."""
        self.buffers.scales[slot, j, i] = self.stream.item_pages(slot, j).scales[page]
        page_id = self.stream.scratch.ids[first_id + page]
        self._scale_copy(slot, j, i, page_id).start()

    def _clear_values(self, slot: Any, j: Any, num_keys: Any, q_len: Any) -> None:
        """Zero what no row sees, see `BlockShape.cleared_rows`."""
        block, refs = self.shape.block, self.stream.item_pages(slot, j)
        tile = block.tile_tokens

        def clear_tile(index: jax.Array, carry: None) -> None:
            page = index * tile // block.page_size
            first = index * tile % block.page_size // block.row_tokens
            first = pl.multiple_of(first, block.tile_rows)
            keys = index * tile + block.row_token(block.tile_rows)
            is_live = block.is_live(keys, num_keys, q_len)
            for head in block.cleared_rows:
                ref = refs.pages.at[page, head, pl.ds(first, block.tile_rows)]
                ref[...] = cast_rows(
                    jnp.where(is_live, ref[...].astype(jnp.float32), 0.0), ref.dtype
                )
            return carry

        def clear_page(page: jax.Array, carry: None) -> None:
            for head in block.value_rows:
                ref = refs.pages.at[page, head]
                ref[...] = jnp.zeros(ref.shape, ref.dtype)
            return carry

        def clear_scales(page: jax.Array, carry: None) -> None:
            block.clear_scales(refs, page, num_keys, q_len)
            return carry

        begin, end = block.page_range(num_keys, q_len)
        page_tiles = block.page_size // tile
        first_page = jnp.minimum(num_keys // block.page_size, block.pages)
        if len(block.cleared_rows):
            first_tile = jnp.minimum(num_keys // tile, end * page_tiles)
            lax.fori_loop(first_tile, end * page_tiles, clear_tile, None)
            lax.fori_loop(end, block.pages, clear_page, None)
        if block.has_scales:
            lax.fori_loop(first_page, block.pages, clear_scales, None)
        if block.sliding_window is not None:
            oldest = block.oldest_key(num_keys, q_len)
            if len(block.cleared_rows):
                lax.fori_loop(begin * page_tiles, pl.cdiv(oldest, tile), clear_tile, None)
                lax.fori_loop(0, begin, clear_page, None)
            if block.has_scales:
                end = jnp.minimum(pl.cdiv(oldest, block.page_size), block.pages)
                lax.fori_loop(0, end, clear_scales, None)

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
            self.stream.pages.at[page_id, :, pl.ds(pl.multiple_of(first_row, tile), tile)],
            self.buffers.tile_sem.at[slot],
        )

    def _scale_copy(self, slot: Any, j: Any, i: Any, page_id: Any) -> Any:
        return pltpu.make_async_copy(
            self.buffers.scales.at[slot, j, i],
            self.stream.scales.at[page_id],
            self.buffers.scale_sem.at[slot],
        )


def _for_each_unit(first: Any, last: Any, size: int, action: Callable[[Any, Any], None]) -> Any:
    """Call action(i, unit) for the units of `size` keys that [first, last] lie in; count them."""
    first_unit = first // size

    def body(i: jax.Array, carry: None) -> None:
        action(i, first_unit + i)
        return carry

    count = jnp.where(first <= last, last // size - first_unit + 1, 0)
    lax.fori_loop(0, count, body, None)
    return count


def _call(actions: Iterable[Callable[[], None]]) -> None:
    for action in actions:
        action()


def _repeat(count: Any, action: Any) -> None:
    def body(_: jax.Array, carry: None) -> None:
        action()
        return carry

    lax.fori_loop(0, count, body, None)
