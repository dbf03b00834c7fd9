"""KV pages of 8-bit integers: how a row becomes one, and the arrays that hold them.

Each row, the keys or the values of one token and head, has a scale of its own: what a row is stored
as depends on nothing but the row. One definition for every kernel, down to the bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

MAX_VALUE = 127
_TO_SCALE = 1 / MAX_VALUE


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class QuantizedPages:
    """A cache whose element [n, c, t, d] stands for values[n, c, t, d] * scales[n, c, t].

    Attributes:
        values: int8 [N, 2K, page, D], or [L, N, 2K, page, D] of all layers.
        scales: f32 [N, 2K, page], or [L, N, 2K, page].
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.values.shape


def quantize_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return rows [..., D] as int8 of the same shape, and their scales, f32 [...].

    The largest magnitude becomes 127. Scales are bf16 numbers, rounded up: a TPU kernel takes them
    along with a token's other bf16 rows. A row of zeros has scale 0.
    """
    rows = rows.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.abs(rows).max(axis=-1) * _TO_SCALE, jnp.uint32)
    bits = (bits + 0xFFFF) >> 16 << 16
    scales = lax.bitcast_convert_type(bits, jnp.float32)
    inverse = jnp.where(scales == 0, 0.0, 1 / scales)
    return jnp.round(rows * inverse[..., None]).astype(jnp.int8), scales


def dequantize(pages: jax.Array | QuantizedPages, page_ids: jax.Array) -> jax.Array:
    """Return some pages [N, C, page, D] of either kind, f32."""
    if isinstance(pages, QuantizedPages):
        scales = pages.scales[page_ids]
        return pages.values[page_ids].astype(jnp.float32) * scales[..., None]
    return pages[page_ids].astype(jnp.float32)
