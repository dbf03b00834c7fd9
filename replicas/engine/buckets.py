"""The static shapes that steps are padded to. A bucket is the only compile key.

Knows nothing of what runs in a step. Invariant: the last bucket holds the largest step.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import astuple, dataclass

MIN_ROWS = 8
"""Fewest rows of a matmul or row reduction: below 8, XLA's CPU reductions give other bits."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A padded step shape.

    Attributes:
        num_tokens: T, rows of the token dimension.
        num_seqs: S, sequences; the output head and the sampler run on this many rows: one for each
            sequence, and with speculation one for each draft.
    """

    num_tokens: int
    num_seqs: int

    def __str__(self) -> str:
        return "x".join(str(value) for value in astuple(self))


def _powers_of_two(first: int, last: int) -> list[int]:
    """First, 2 first, ... and `last` itself, which need not be a power of two."""
    values: list[int] = []
    value = first
    while value < last:
        values.append(value)
        value *= 2
    return [*values, last]


def make_buckets(
    *,
    max_num_seqs: int,
    max_mixed_tokens: int,
    max_num_batched_tokens: int,
    is_head_cost_fixed: bool = False,
) -> tuple[Bucket, ...]:
    """List all step shapes, smallest first.

    Every shape costs start-up time, so only those that pay are listed. Up to `max_mixed_tokens`,
    where decode steps are, the sequence count follows the token count; the largest mixed step, the
    usual one while prompts are computed beside running streams, gets every sequence count, because
    the head's cost follows it; pure prefill steps get the fewest and the most sequences.

    With `is_head_cost_fixed`, as on TPUs, where the head takes as long as its weights take to be
    read, one sequence count for each token count is enough.
    """
    seq_counts = _powers_of_two(MIN_ROWS, max(MIN_ROWS, max_num_seqs))
    buckets: set[Bucket] = set()
    for num_tokens in _powers_of_two(MIN_ROWS, max(MIN_ROWS, max_num_batched_tokens)):
        if is_head_cost_fixed or 2 * num_tokens <= max_mixed_tokens:
            counts = [min(num_tokens, seq_counts[-1])]
        elif num_tokens // 2 < max_mixed_tokens:
            counts = seq_counts
        else:
            counts = [seq_counts[0], seq_counts[-1]]
        buckets.update(Bucket(num_tokens, count) for count in counts if count <= num_tokens)
    return tuple(sorted(buckets))


def smallest_bucket(buckets: SequenceOf[Bucket], *, num_tokens: int, num_seqs: int) -> Bucket:
    """The first bucket that holds a step of this size.

    Raises:
        AssertionError: no bucket holds it; the scheduler exceeded its own limits.
    """
    for bucket in buckets:
        if bucket.num_tokens >= num_tokens and bucket.num_seqs >= num_seqs:
            return bucket
    raise AssertionError(f"no bucket holds {num_tokens} tokens and {num_seqs} sequences")
