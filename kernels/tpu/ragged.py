"""DMA of a number of rows that is known at run time only: as powers of two, which are static."""

from __future__ import annotations

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def copy_rows(
    source: Any, target: Any, semaphore: Any, *, source_row: Any, target_row: Any, count: Any
) -> None:
    """Start copies of `count` rows in all; neither side holds fewer than its first row + count."""
    limit = min(source.shape[0], target.shape[0])
    done = 0
    for size in powers_of_two(limit)[::-1]:

        @pl.when((count & size) != 0)
        def _(size: int = size, done: Any = done) -> None:
            pltpu.make_async_copy(
                source.at[pl.ds(source_row + done, size)],
                target.at[pl.ds(target_row + done, size)],
                semaphore,
            ).start()

        done += count & size


def wait_rows(target: Any, semaphore: Any, *, count: Any) -> None:
    """Wait until `count` rows of `target`'s kind have been copied, whichever: bytes count."""
    for size in powers_of_two(target.shape[0]):

        @pl.when((count & size) != 0)
        def _(size: int = size) -> None:
            rows = target.at[pl.ds(0, size)]
            pltpu.make_async_copy(rows, rows, semaphore).wait()


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`: every count up to it is a sum of some of these."""
    return [1 << bit for bit in range(limit.bit_length())]
