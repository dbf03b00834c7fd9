"""The KV pages of a model: their shape, their size and their allocation.

Page tables belong to the engine's page allocator; this file only knows memory. Layout of a layer:
[N, 2K, page, D], key of KV head h at row 2h and its value at row 2h + 1. Invariant: page 0 is the
null page, which padded writes may hit and no sequence owns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from replicas.config import ModelConfig
from replicas.models.sharding import num_sharded_kv_heads

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from jaxtyping import Array, Float


def kv_pages_shape(
    config: ModelConfig, *, num_pages: int, page_size: int, num_shards: int = 1
) -> tuple[int, int, int, int]:
    """Return the global shape [N, 2K, page, D] of one layer's pages over `num_shards` devices."""
    num_heads = num_sharded_kv_heads(config, num_shards)
    return (num_pages, 2 * num_heads, page_size, config.head_dim)


def bytes_per_page(
    config: ModelConfig, *, page_size: int, dtype: DTypeLike, num_shards: int = 1
) -> int:
    """Return the bytes of one page over all layers and devices."""
    _, rows, _, head_dim = kv_pages_shape(
        config, num_pages=1, page_size=page_size, num_shards=num_shards
    )
    return config.num_layers * rows * page_size * head_dim * jnp.dtype(dtype).itemsize


def allocate_kv_pages(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    dtype: DTypeLike,
    num_shards: int = 1,
    sharding: jax.sharding.Sharding | None = None,
) -> tuple[Float[Array, "N 2K page D"], ...]:
    """Allocate zeroed pages, one array per layer, straight in their sharding."""
    return tuple(
        jnp.zeros(layer.shape, layer.dtype, device=sharding)
        for layer in abstract_kv_pages(
            config, num_pages=num_pages, page_size=page_size, dtype=dtype, num_shards=num_shards
        )
    )


def abstract_kv_pages(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    dtype: DTypeLike,
    num_shards: int = 1,
    sharding: jax.sharding.Sharding | None = None,
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return what `allocate_kv_pages` would allocate, without memory."""
    shape = kv_pages_shape(config, num_pages=num_pages, page_size=page_size, num_shards=num_shards)
    layer = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    return (layer,) * config.num_layers
