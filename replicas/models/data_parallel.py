"""Attention by sequence instead of by head: each device attends over the pages that it holds.

For caches without heads to divide, as those of latents: on a mesh every device would hold all of
it. Here it holds the pages of its own sequences, and attends for these with all heads; projections
stay sharded by head, so queries are gathered before and outputs scattered after. Page ids are
global: device d holds [d N, (d + 1) N), and the first of them is its null page. Invariant: a row's
result is that of one device, bit by bit: exactly one device adds it to zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import lax

from replicas.models.inputs import ModelInputs

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32


class OwnSequences(NamedTuple):
    """A step as the device sees it that holds some of its sequences: these come first.

    Attributes:
        kv_lens: [S], 0 past the own sequences.
        page_indices: [S, P], of the device's own pages.
        cu_q_lens: [S + 1], of rows in `order`.
        num_seqs: [1], own sequences.
        order: [T], rows of the step, own ones first.
        places: [T], where each row of the step stands in `order`.
        is_own: [T], rows of own sequences, in the step's order.
        axis_name: mesh axis of the devices.
    """

    kv_lens: Int32[Array, " S"]
    page_indices: Int32[Array, "S P"]
    cu_q_lens: Int32[Array, " S+1"]
    num_seqs: Int32[Array, " 1"]
    order: Int32[Array, " T"]
    places: Int32[Array, " T"]
    is_own: Bool[Array, " T"]
    axis_name: str

    def attend(
        self,
        attend: Callable[[Float[Array, "T H C"], Float[Array, "T C"]], Float[Array, "T H R"]],
        q: Float[Array, "T h C"],
        latents: Float[Array, "T C"],
    ) -> Float[Array, "T h R"]:
        """Return what attention gives this device's heads for all rows.

        Args:
            attend: attends for rows in `order`, those past the own ones being junk.
            q: of this device's heads, for all rows.
            latents: new rows of the cache, the same on every device.
        """
        q = lax.all_gather(q, self.axis_name, axis=1, tiled=True)
        out = attend(q[self.order], latents[self.order])
        out = jnp.where(self.is_own[:, None, None], out[self.places], 0)
        return lax.psum_scatter(out, self.axis_name, scatter_dimension=1, tiled=True)


def find_own_sequences(inputs: ModelInputs, *, num_pages: int, axis_name: str) -> OwnSequences:
    """Pick the sequences whose pages this device holds; once a step, for all layers.

    Args:
        inputs: of the whole step. All pages of a sequence lie on one device.
        num_pages: that each device holds, its null page included.
        axis_name: mesh axis of the devices.
    """
    device = lax.axis_index(axis_name)
    cu_q_lens, num_rows = inputs.cu_q_lens, inputs.token_ids.shape[0]
    in_use = jnp.arange(inputs.kv_lens.shape[0]) < inputs.num_seqs
    is_own = in_use & (inputs.page_indices[:, 0] // num_pages == device)
    sequences = jnp.argsort(~is_own, stable=True)
    q_lens = jnp.where(is_own, cu_q_lens[1:] - cu_q_lens[:-1], 0)[sequences]
    ends = jnp.cumsum(q_lens, dtype=jnp.int32)
    rows = jnp.arange(num_rows)
    sequence_of = jnp.searchsorted(cu_q_lens, rows, side="right") - 1
    is_own_row = is_own[jnp.minimum(sequence_of, is_own.shape[0] - 1)] & (rows < cu_q_lens[-1])
    order = jnp.argsort(~is_own_row, stable=True).astype(jnp.int32)
    # Unused entries name page 0, which only the first device holds.
    pages = jnp.maximum(inputs.page_indices - device * num_pages, 0)
    return OwnSequences(
        kv_lens=jnp.where(is_own, inputs.kv_lens, 0)[sequences],
        page_indices=jnp.where(is_own[:, None], pages, 0)[sequences],
        cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        num_seqs=jnp.sum(is_own, dtype=jnp.int32)[None],
        order=order,
        places=jnp.argsort(order).astype(jnp.int32),
        is_own=is_own_row,
        axis_name=axis_name,
    )
