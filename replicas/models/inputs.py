"""The arrays that one step of a model reads: token ids, positions and the page table.

Shared by every family and by the engine, which builds them; padded to a bucket, so their shapes
are the compile key. Invariant: rows past `cu_q_lens[num_seqs]` are padding and reach no page but
the null page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxtyping import Array, Int32


class ModelInputs(NamedTuple):
    """One step, padded to a bucket of T token rows, S sequences and P pages per sequence.

    Attributes:
        token_ids: in [0, V); padding rows hold any valid id.
        positions: absolute position of each token row, from 0.
        kv_lens: tokens in the cache after this step; 0 for padding sequences.
        page_indices: pages of each sequence in order; unused entries are the null page 0.
        cu_q_lens: rows of sequence s are [cu_q_lens[s], cu_q_lens[s + 1]); padding sequences repeat
            the last value.
        num_seqs: sequences in use.
    """

    token_ids: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    kv_lens: Int32[Array, " S"]
    page_indices: Int32[Array, "S P"]
    cu_q_lens: Int32[Array, " S+1"]
    num_seqs: Int32[Array, " 1"]

    @property
    def num_tokens(self) -> Int32[Array, " 1"]:
        """Token rows in use: the `num_rows` of every matmul over token rows."""
        return self.cu_q_lens[-1:]
