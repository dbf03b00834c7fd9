"""KV pages of 8-bit integers: how a row becomes one, and the arrays that hold them.

Each row, the keys or the values of one token and head, has a scale of its own: what a row is stored
as depends on nothing but the row. One definition for every kernel, down to the bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class QuantizedPages:
    """A cache whose element [n, c, t, d] stands for values[n, c, t, d] * scales[n, c, t].

    Attributes:
        values: int8, or on TPUs fp8, [N, 2K, page, D], or [L, N, 2K, page, D] of all layers.
        scales: f32 [N, 2K, page], or [L, N, 2K, page].
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.values.shape


def quantize_rows(rows: jax.Array, dtype: DTypeLike = jnp.int8) -> tuple[jax.Array, jax.Array]:
    """Return rows [..., D] as numbers of 8 bits of the same shape, and their scales, f32 [...].

    The largest magnitude becomes the largest number, 127 of int8. Scales are bf16 numbers, rounded
    up: a TPU kernel takes them along with a token's other bf16 rows. A row of zeros has scale 0.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    limit = jnp.iinfo(dtype).max if is_integer else float(jnp.finfo(dtype).max)
    rows = rows.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.abs(rows).max(axis=-1) * (1 / limit), jnp.uint32)
    bits = (bits + 0xFFFF) >> 16 << 16
    scales = lax.bitcast_convert_type(bits, jnp.float32)
    inverse = jnp.where(scales == 0, 0.0, 1 / scales)
    scaled = rows * inverse[..., None]
    return (jnp.round(scaled) if is_integer else scaled).astype(dtype), scales


def dequantize(pages: jax.Array | QuantizedPages, page_ids: jax.Array) -> jax.Array:
    """Return some pages [N, C, page, D] of either kind, f32."""
    if isinstance(pages, QuantizedPages):
        scales = pages.scales[page_ids]
        return pages.values[page_ids].astype(jnp.float32) * scales[..., None]
    return pages[page_ids].astype(jnp.float32)
