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

With heads of 64, a row holds two tokens (`BlockShape.row_tokens`): pages are then
[N, 2K, page / 2, 128], and tokens come with each half of their row alike.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.tpu.block import cast_rows
from kernels.tpu.plan import StorePlan
from kernels.tpu.ragged import copy_rows, wait_rows

_SLOTS = 2


def store_pages(
    qkv: jax.Array,
    kv_pages: jax.Array,
    plan: StorePlan,
    *,
    row_tokens: int,
    vmem_limit_bytes: int,
    interpret: Any = False,
) -> jax.Array:
    """Return the pages, updated in place when donated, with the plan's tokens stored."""
    _, num_kv_rows, page_rows, head_dim = kv_pages.shape
    page_size = page_rows * row_tokens
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    semaphores = pltpu.SemaphoreType.DMA((_SLOTS,))
    return pl.pallas_call(
        functools.partial(_run, qkv.shape[1] - num_kv_rows, row_tokens),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(plan),
            grid=(1,),
            in_specs=[any_space] * 2,
            out_specs=any_space,
            scratch_shapes=[
                pltpu.VMEM((_SLOTS, page_size, num_kv_rows, head_dim), qkv.dtype),
                pltpu.VMEM((page_size * num_kv_rows, head_dim), jnp.float32),
                pltpu.VMEM((_SLOTS, num_kv_rows, page_rows, head_dim), kv_pages.dtype),
                semaphores,
                semaphores,
                semaphores,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        input_output_aliases={len(plan) + 1: 0},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="store_pages",
    )(*plan, qkv, kv_pages)


def _run(num_heads: int, row_tokens: int, *refs: Any) -> None:
    plan = StorePlan(*refs[: len(StorePlan._fields)])
    qkv, _, pages, tokens, by_head, page_buffer, token_sem, in_sem, out_sem = refs[len(plan) :]
    _, page_size, num_kv_rows, _ = tokens.shape

    def in_copy(entry: Any, slot: Any) -> Any:
        return pltpu.make_async_copy(
            pages.at[plan.page_ids[entry]], page_buffer.at[slot], in_sem.at[slot]
        )

    def out_copy(entry: Any, slot: Any) -> Any:
        return pltpu.make_async_copy(
            page_buffer.at[slot], pages.at[plan.page_ids[entry]], out_sem.at[slot]
        )

    def start(entry: Any) -> None:
        slot = entry % _SLOTS

        @pl.when(entry >= _SLOTS)
        def _() -> None:
            out_copy(entry - _SLOTS, slot).wait()

        @pl.when(plan.num_tokens[entry] < page_size)
        def _() -> None:
            in_copy(entry, slot).start()

        copy_rows(
            qkv.at[:, pl.ds(num_heads, num_kv_rows)],
            tokens.at[slot],
            token_sem.at[slot],
            source_row=plan.first_rows[entry],
            target_row=plan.first_slots[entry],
            count=plan.num_tokens[entry],
        )

    num_entries = plan.num_entries[0]

    @pl.when(num_entries > 0)
    def _() -> None:
        start(0)

    def store(entry: jax.Array, carry: None) -> None:
        slot = entry % _SLOTS

        @pl.when(entry + 1 < num_entries)
        def _() -> None:
            start(entry + 1)

        first, count = plan.first_slots[entry], plan.num_tokens[entry]

        @pl.when(count < page_size)
        def _() -> None:
            in_copy(entry, slot).wait()

        wait_rows(tokens.at[slot], token_sem.at[slot], count=count)
        by_head[...] = tokens[slot].reshape(by_head.shape).astype(jnp.float32)
        _put(by_head, page_buffer.at[slot], first=first, count=count, row_tokens=row_tokens)
        out_copy(entry, slot).start()
        return carry

    lax.fori_loop(0, num_entries, store, None)

    def drain(entry: jax.Array, carry: None) -> None:
        out_copy(entry, entry % _SLOTS).wait()
        return carry

    lax.fori_loop(jnp.maximum(num_entries - _SLOTS, 0), num_entries, drain, None)


def _put(by_head: Any, page: Any, *, first: Any, count: Any, row_tokens: int) -> None:
    """Take tokens [first, first + count) of a page's buffer [page * 2K, D] into [2K, page, D]."""
    num_kv_rows, page_rows, head_dim = page.shape
    part = lax.broadcasted_iota(jnp.int32, (page_rows, head_dim), 1) // (head_dim // row_tokens)
    token = lax.broadcasted_iota(jnp.int32, part.shape, 0) * row_tokens + part
    is_new = (token >= first) & (token < first + count)
    for head in range(num_kv_rows):
        new = by_head[pl.ds(head, page_rows, stride=row_tokens * num_kv_rows)]
        if row_tokens == 2:
            second = by_head[pl.ds(num_kv_rows + head, page_rows, stride=2 * num_kv_rows)]
            new = jnp.where(part == 0, new, second)
        old = page[head].astype(jnp.float32)
        page[head] = cast_rows(jnp.where(is_new, new, old), page.dtype)
