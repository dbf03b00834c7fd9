"""Writes the keys and values of prompt chunks into their pages.

One page per round, the next one's tokens on their way meanwhile. Tokens come token-major, by rows
of the projection's output, and land in the buffer at their rows of the page: a copy by whole
tokens needs no alignment. Turning [token, head] into [head, token] is a strided load. A page that
is not filled whole is read first, so that nothing else in it changes.

| array | shape | where |
|---|---|---|
| queries, new keys and values | [T, H + 2K, D] | HBM, by tokens |
| pages | [N, 2K, page, D] | HBM, whole pages |
| token buffer | [2, page, 2K, D] | VMEM |
| page buffer | [2, 2K, page, D] | VMEM |

Of pages of 8 bits, tokens are what is to be stored, and their last row is their scales, which go to
an array of their own, [N, 2K, page].

With heads of 64, a row holds two tokens (`BlockShape.row_tokens`): pages are then
[N, 2K, page / 2, 128], and tokens come with each half of their row alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.quantized_pages import QuantizedPages
from kernels.tpu.block import LANES, cast_rows
from kernels.tpu.plan import StorePlan
from kernels.tpu.ragged import copy_rows, wait_rows

_SLOTS = 2


def store_pages[P: jax.Array | QuantizedPages](
    qkv: jax.Array,
    kv_pages: P,
    plan: StorePlan,
    *,
    row_tokens: int,
    vmem_limit_bytes: int,
    interpret: Any = False,
) -> P:
    """Return the pages, updated in place when donated, with the plan's tokens stored."""
    cache, cache_tree = jax.tree.flatten(kv_pages)
    _, num_kv_rows, page_rows, head_dim = cache[0].shape
    page_size = page_rows * row_tokens
    num_new_rows = num_kv_rows + len(cache) - 1
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    semaphores = pltpu.SemaphoreType.DMA((_SLOTS,))
    cache = pl.pallas_call(
        functools.partial(_run, row_tokens),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(plan),
            grid=(1,),
            in_specs=[any_space] * (1 + len(cache)),
            out_specs=[any_space] * len(cache),
            scratch_shapes=[
                pltpu.VMEM((_SLOTS, page_size, num_new_rows, head_dim), qkv.dtype),
                pltpu.VMEM((head_dim // LANES, page_size * num_new_rows, LANES), jnp.float32),
                semaphores,
                [_CacheBuffer.scratch(x, semaphores) for x in cache],
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache],
        input_output_aliases={len(plan) + 1 + i: i for i in range(len(cache))},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="store_pages",
    )(*plan, qkv, *cache)
    return jax.tree.unflatten(cache_tree, cache)


class _CacheBuffer(NamedTuple):
    """Pages of one array of the cache on their way in and out."""

    pages: Any
    in_sem: Any
    out_sem: Any

    @classmethod
    def scratch(cls, array: jax.Array, semaphores: Any) -> _CacheBuffer:
        """What a buffer takes."""
        return cls(pltpu.VMEM((_SLOTS, *array.shape[1:]), array.dtype), semaphores, semaphores)


def _run(row_tokens: int, *refs: Any) -> None:
    plan = StorePlan(*refs[: len(StorePlan._fields)])
    qkv, *arrays, tokens, by_head, token_sem, buffers = refs[len(plan) :]
    kernel = _Kernel(
        row_tokens, plan, qkv, arrays[len(buffers) :], tokens, by_head, token_sem, buffers
    )
    num_entries = plan.num_entries[0]

    @pl.when(num_entries > 0)
    def _() -> None:
        kernel.start(0)

    def store(entry: jax.Array, carry: None) -> None:
        @pl.when(entry + 1 < num_entries)
        def _() -> None:
            kernel.start(entry + 1)

        kernel.store(entry)
        return carry

    lax.fori_loop(0, num_entries, store, None)

    def drain(entry: jax.Array, carry: None) -> None:
        kernel.wait_written(entry)
        return carry

    lax.fori_loop(jnp.maximum(num_entries - _SLOTS, 0), num_entries, drain, None)


@dataclass(frozen=True)
class _Kernel:
    """The stages of an entry of the plan."""

    row_tokens: int
    plan: StorePlan
    qkv: Any
    cache: Sequence[Any]
    tokens: Any
    by_head: Any
    token_sem: Any
    buffers: Sequence[_CacheBuffer]

    def start(self, entry: Any) -> None:
        """Fetch an entry's tokens, and its page unless they fill it."""
        slot, count = entry % _SLOTS, self.plan.num_tokens[entry]
        _, page_size, num_new_rows, _ = self.tokens.shape
        num_heads = self.qkv.shape[1] - num_new_rows

        @pl.when(entry >= _SLOTS)
        def _() -> None:
            self.wait_written(entry - _SLOTS)

        @pl.when(count < page_size)
        def _() -> None:
            for copy in self._reads(entry):
                copy.start()

        copy_rows(
            self.qkv.at[:, pl.ds(num_heads, num_new_rows)],
            self.tokens.at[slot],
            self.token_sem.at[slot],
            source_row=self.plan.first_rows[entry],
            target_row=self.plan.first_slots[entry],
            count=count,
        )

    def store(self, entry: Any) -> None:
        """Put an entry's tokens into its page and write it."""
        slot, count = entry % _SLOTS, self.plan.num_tokens[entry]
        _, page_size, num_new_rows, _ = self.tokens.shape

        @pl.when(count < page_size)
        def _() -> None:
            for copy in self._reads(entry):
                copy.wait()

        wait_rows(self.tokens.at[slot], self.token_sem.at[slot], count=count)
        for part in range(self.by_head.shape[0]):
            rows = self.tokens[slot, :, :, pl.ds(part * LANES, LANES)]
            self.by_head[part] = rows.reshape(-1, LANES).astype(jnp.float32)
        first = self.plan.first_slots[entry]
        new = _NewTokens(self.by_head, num_new_rows, self.row_tokens, first, count)
        new.put(self.buffers[0].pages.at[slot])
        for scales in self.buffers[1:]:
            new.put_scales(scales.pages.at[slot])
        for copy in self._writes(entry):
            copy.start()

    def wait_written(self, entry: Any) -> None:
        """Wait until an entry's page has left."""
        for copy in self._writes(entry):
            copy.wait()

    def _reads(self, entry: Any) -> list[Any]:
        slot, page_id = entry % _SLOTS, self.plan.page_ids[entry]
        return [
            pltpu.make_async_copy(pages.at[page_id], buffer.pages.at[slot], buffer.in_sem.at[slot])
            for pages, buffer in zip(self.cache, self.buffers, strict=True)
        ]

    def _writes(self, entry: Any) -> list[Any]:
        slot, page_id = entry % _SLOTS, self.plan.page_ids[entry]
        return [
            pltpu.make_async_copy(buffer.pages.at[slot], pages.at[page_id], buffer.out_sem.at[slot])
            for pages, buffer in zip(self.cache, self.buffers, strict=True)
        ]


@dataclass(frozen=True)
class _NewTokens:
    """Tokens [first, first + count) of a page.

    Attributes:
        by_head: f32 [D / 128, page * rows, 128], the rows of each token: a strided load takes 128
            lanes.
        num_rows: of a token.
        row_tokens: tokens that share a row of the page.
        first: the first.
        count: how many.
    """

    by_head: Any
    num_rows: int
    row_tokens: int
    first: Any
    count: Any

    def put(self, page: Any) -> None:
        """Take keys and values into a page [2K, page, D]."""
        num_kv_rows, page_rows, head_dim = page.shape
        part = lax.broadcasted_iota(jnp.int32, (page_rows, head_dim), 1)
        part //= head_dim // self.row_tokens
        token = lax.broadcasted_iota(jnp.int32, part.shape, 0) * self.row_tokens + part
        is_new = self._is_new(token)
        for head in range(num_kv_rows):
            new = self._rows(head, page_rows)
            if self.row_tokens == 2:
                new = jnp.where(part == 0, new, self._rows(self.num_rows + head, page_rows))
            old = page[head].astype(jnp.float32)
            page[head] = cast_rows(jnp.where(is_new, new, old), page.dtype)

    def put_scales(self, scales: Any) -> None:
        """Take the last row of each token, element r the scale of KV row r, into [2K, page]."""
        num_kv_rows, page_size = scales.shape
        new = self._rows(num_kv_rows, page_size)[:, :LANES].T[:num_kv_rows]
        is_new = self._is_new(lax.broadcasted_iota(jnp.int32, scales.shape, 1))
        scales[...] = jnp.where(is_new, new, scales[...])

    def _rows(self, first: int, count: int) -> jax.Array:
        """Rows `first` and on, one of each of the tokens that begin a row of the page."""
        rows = pl.ds(first, count, stride=self.row_tokens * self.num_rows)
        parts = [self.by_head[part, rows] for part in range(self.by_head.shape[0])]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def _is_new(self, token: jax.Array) -> jax.Array:
        return (token >= self.first) & (token < self.first + self.count)
