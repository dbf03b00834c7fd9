"""The key blocks of a plan on their way to a kernel: what is known of them, page ids, pages.

What decode and prefill have in common. Items, each a key block of an entry of the plan, come in
rounds: while one is computed, pages of the next go to VMEM, or of as many as there are slots for,
and page ids of one or two after these to SMEM. What a round needs to know of an item is computed
once, with its page ids, and kept in SMEM. Knows nothing of queries.

| array | shape | where |
|---|---|---|
| page windows | [S, W, 1, 128] | HBM, one window per item |
| pages | [N, 2K, page, D] | HBM, whole pages |
| scales of 8-bit pages | [N, 2K, page] f32 | HBM, those of whole pages |
| page buffer | [slots, items * block_pages, 2K, page, D] | VMEM, and one for scales |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.tpu.block import BlockRefs
from kernels.tpu.plan import PAGE_WINDOW, DecodePlan
from kernels.tpu.ragged import wait_rows

IDS_SLOTS = 4
SLOTS = 2


class Items(NamedTuple):
    """SMEM tables [4, items] of what a round knows of its items.

    Attributes:
        num_keys: keys of the entry from the block's first on: more than a block's, unless last; 0
            or less for no item.
        q_len: rows of q.
        first_row: the first of them.
        first_id: index into `ids` of the block's first page.
        is_first: 1 for the first block of an entry.
        parity: of the entry's number.
    """

    num_keys: Any
    q_len: Any
    first_row: Any
    first_id: Any
    is_first: Any
    parity: Any


class StreamScratch(NamedTuple):
    """Memory of a stream; scales are None where pages have none."""

    items: Items
    pages: Any
    scales: Any
    ids: Any
    ids_sem: Any
    page_sem: Any
    scale_sem: Any


class StreamBlock(Protocol):
    """What a stream knows of a key block: its sizes, as in `BlockShape`."""

    @property
    def pages(self) -> int:
        """Pages per block."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """Shape of a page."""
        ...

    @property
    def kv_dtype(self) -> Any:
        """Dtype of the pages."""
        ...

    @property
    def has_scales(self) -> bool:
        """Whether each token of a KV row has a factor."""
        ...

    def page_range(self, num_keys: Any, q_len: Any) -> tuple[Any, Any]:
        """Pages [begin, end) of the block that hold keys which a row sees."""
        ...


def stream_scratch(
    block: StreamBlock, *, round_items: int, num_slots: int = SLOTS
) -> StreamScratch:
    """Shapes of the memory of a stream with so many items a round, and so many rounds at once."""
    table = pltpu.SMEM((IDS_SLOTS, round_items), jnp.int32)
    num_pages, num_kv_rows = round_items * block.pages, block.page_shape[0]
    scales = pltpu.VMEM((num_slots, num_pages, num_kv_rows, block.page_size), jnp.float32)
    return StreamScratch(
        items=Items(*[table] * len(Items._fields)),
        pages=pltpu.VMEM((num_slots, num_pages, *block.page_shape), block.kv_dtype),
        scales=scales if block.has_scales else None,
        ids=pltpu.SMEM((IDS_SLOTS * round_items * PAGE_WINDOW,), jnp.int32),
        ids_sem=pltpu.SemaphoreType.DMA((IDS_SLOTS,)),
        page_sem=pltpu.SemaphoreType.DMA((num_slots,)),
        scale_sem=pltpu.SemaphoreType.DMA((num_slots,)) if block.has_scales else None,
    )


@dataclass(frozen=True)
class PageStream:
    """The stream of a call.

    Attributes:
        block: static sizes.
        round_items: items of a round.
        plan: in SMEM.
        windows: page windows.
        pages: in HBM.
        scales: in HBM, or None.
        scratch: its memory.
    """

    block: StreamBlock
    round_items: int
    plan: DecodePlan
    windows: Any
    pages: Any
    scales: Any
    scratch: StreamScratch

    @property
    def num_slots(self) -> int:
        """Rounds whose pages are in memory or on their way."""
        return self.scratch.pages.shape[0]

    def start_ids(self, index: Any, entry: jax.Array) -> jax.Array:
        """Describe a round's items and fetch their page ids; returns the next round's entry."""
        plan, block, items = self.plan, self.block, self.scratch.items
        slot, last_window = index % IDS_SLOTS, self.windows.shape[1] - 1
        for j in range(self.round_items):
            number = index * self.round_items + j
            first_page = (number + plan.block_offsets[entry]) * block.pages
            items.num_keys[slot, j] = plan.kv_lens[entry] - first_page * block.page_size
            items.q_len[slot, j] = plan.q_lens[entry]
            items.first_row[slot, j] = plan.first_rows[entry]
            items.first_id[slot, j] = self._ids_base(slot, j) + first_page % PAGE_WINDOW
            items.is_first[slot, j] = (number == plan.first_items[entry]).astype(jnp.int32)
            items.parity[slot, j] = entry % 2
            # Past the last item a block's number grows on, beyond the table.
            window = jnp.minimum(first_page // PAGE_WINDOW, last_window)
            pltpu.make_async_copy(
                self.windows.at[plan.seq_ids[entry], window, 0],
                self.scratch.ids.at[pl.ds(self._ids_base(slot, j), PAGE_WINDOW)],
                self.scratch.ids_sem.at[slot],
            ).start()
            entry = jnp.where(number + 1 >= plan.first_items[entry + 1], entry + 1, entry)
        return entry

    def wait_ids(self, index: Any) -> None:
        """Wait for the page ids of a round, of all its items at once."""
        slot = index % IDS_SLOTS
        num_ids = self.round_items * PAGE_WINDOW
        ids = self.scratch.ids.at[pl.ds(self._ids_base(slot, 0), num_ids)]
        pltpu.make_async_copy(ids, ids, self.scratch.ids_sem.at[slot]).wait()

    def start_pages(self, index: Any, j: int) -> Any:
        """Fetch the pages of an item that hold keys which a row sees; returns how many."""
        starts, count = self.page_starts(index, j)
        for start in starts:
            start()
        return count

    def page_starts(self, index: Any, j: int) -> tuple[list[Callable[[], None]], Any]:
        """What fetches each page of an item, if a row sees it; and how many pages these are.

        Apart, so that a kernel can issue them between its products.
        """
        slot, ids_slot = index % self.num_slots, index % IDS_SLOTS
        scratch = self.scratch
        num_keys, q_len = scratch.items.num_keys[ids_slot, j], scratch.items.q_len[ids_slot, j]
        begin, end = self.block.page_range(num_keys, q_len)
        first_id = scratch.items.first_id[ids_slot, j]

        def start(page: int) -> None:
            @pl.when((begin <= page) & (page < end))
            def _() -> None:
                page_id = scratch.ids[first_id + page]
                target = j * self.block.pages + page
                pltpu.make_async_copy(
                    self.pages.at[page_id],
                    scratch.pages.at[slot, target],
                    scratch.page_sem.at[slot],
                ).start()
                if self.scales is not None:
                    pltpu.make_async_copy(
                        self.scales.at[page_id],
                        scratch.scales.at[slot, target],
                        scratch.scale_sem.at[slot],
                    ).start()

        starts = [functools.partial(start, page) for page in range(self.block.pages)]
        return starts, jnp.maximum(end - begin, 0)

    def wait_pages(self, index: Any, count: Any) -> None:
        """Wait for `count` pages of a round: semaphores count bytes, so powers of two will do."""
        slot, scratch = index % self.num_slots, self.scratch
        wait_rows(scratch.pages.at[slot], scratch.page_sem.at[slot], count=count)
        if self.scales is not None:
            wait_rows(scratch.scales.at[slot], scratch.scale_sem.at[slot], count=count)

    def item_pages(self, slot: Any, j: Any) -> BlockRefs:
        """The pages of an item, in VMEM."""
        pages = pl.ds(j * self.block.pages, self.block.pages)
        scales = self.scratch.scales
        return BlockRefs(
            pages=self.scratch.pages.at[slot, pages],
            scales=None if scales is None else scales.at[slot, pages],
        )

    def _ids_base(self, slot: Any, j: int) -> Any:
        return (slot * self.round_items + j) * PAGE_WINDOW
