"""The KV pages of a model: their shape, their size, their allocation and attention over them.

Page tables belong to the engine's page allocator; this file only knows memory. Layout of a layer:
[N, 2K, page, D], key of KV head h at row 2h and its value at row 2h + 1; or [N, 1, page, R + P] of
latents and rotated key parts (see `mla`). A cache is an array per layer, or one array
[L, N, 2K, page, D] for a kernel that updates one layer of it in place: fewer arguments. Where pages
are of 8 bits, `QuantizedPages` stand for each array. Invariant: page 0 is the null page, which
padded writes may hit and no sequence owns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp

from kernels.quantized_pages import QuantizedPages
from kernels.tpu.tiling import padded_lanes, tokens_per_row
from replicas.config import ModelConfig
from replicas.models.inputs import ModelInputs
from replicas.models.sharding import num_sharded_kv_heads

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from jaxtyping import Array, Float, Float32

type Pages = "Array | QuantizedPages"
type KVPages = "Pages | tuple[Pages, ...]"
type Attention = Callable[..., tuple[Array, Pages]]

_SCALE_BYTES = 4


def kv_pages_shape(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    num_shards: int = 1,
    fills_lanes: bool = False,
) -> tuple[int, int, int, int]:
    """Return the global shape [N, 2K, page, D] of one layer's pages over `num_shards` devices.

    Of latents it is [N, 1, page, R + P]. With `fills_lanes` rows are as the TPU kernels want them:
    heads of up to 64 two to a row, [N, 2K, page / 2, 128]; others, and latents, with zeros up to
    the next multiple of 128, as a TPU would store them anyway.
    """
    if config.mla is not None:
        cache_dim = config.mla.cache_dim
        return (num_pages, 1, page_size, padded_lanes(cache_dim) if fills_lanes else cache_dim)
    num_heads = num_sharded_kv_heads(config, num_shards)
    if not fills_lanes:
        return (num_pages, 2 * num_heads, page_size, config.head_dim)
    num_rows = page_size // tokens_per_row(config.head_dim)
    return (num_pages, 2 * num_heads, num_rows, padded_lanes(config.head_dim))


def bytes_per_page(
    config: ModelConfig,
    *,
    page_size: int,
    dtype: DTypeLike,
    num_shards: int = 1,
    fills_lanes: bool = False,
) -> int:
    """Return the bytes of one page over all layers and devices; those of int8 include scales."""
    _, num_kv_rows, num_rows, row_size = kv_pages_shape(
        config,
        num_pages=1,
        page_size=page_size,
        num_shards=num_shards,
        fills_lanes=fills_lanes,
    )
    page_bytes = num_kv_rows * num_rows * row_size * jnp.dtype(dtype).itemsize
    if jnp.dtype(dtype) == jnp.int8:
        page_bytes += num_kv_rows * page_size * _SCALE_BYTES
    return config.num_layers * page_bytes


def allocate_kv_pages(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    dtype: DTypeLike,
    num_shards: int = 1,
    sharding: jax.sharding.Sharding | None = None,
    is_stacked: bool = False,
) -> KVPages:
    """Allocate zeroed pages straight in their sharding.

    Returns:
        One array [N, 2K, page, D] per layer, or one [L, N, 2K, page, D] if `is_stacked`.
    """
    pages = abstract_kv_pages(
        config,
        num_pages=num_pages,
        page_size=page_size,
        dtype=dtype,
        num_shards=num_shards,
        sharding=sharding,
        is_stacked=is_stacked,
    )
    return zeros(pages)


def zeros[T](shapes: T) -> T:
    """Allocate a tree of shapes, each leaf straight in its sharding."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), shapes
    )


def abstract_kv_pages(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    dtype: DTypeLike,
    num_shards: int = 1,
    sharding: jax.sharding.Sharding | None = None,
    is_stacked: bool = False,
    fills_lanes: bool = False,
) -> Any:
    """Return the shapes of what `allocate_kv_pages` would allocate, without memory."""
    shape = kv_pages_shape(
        config,
        num_pages=num_pages,
        page_size=page_size,
        num_shards=num_shards,
        fills_lanes=fills_lanes,
    )
    if is_stacked:
        return _abstract_pages((config.num_layers, *shape), dtype, sharding)
    return (_abstract_pages(shape, dtype, sharding),) * config.num_layers


def _abstract_pages(
    shape: tuple[int, ...], dtype: DTypeLike, sharding: jax.sharding.Sharding | None
) -> Any:
    values = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    if values.dtype != jnp.int8:
        return values
    scales: Any = jax.ShapeDtypeStruct(shape[:-1], jnp.float32, sharding=sharding)
    return QuantizedPages(values=cast("Any", values), scales=scales)


def num_kv_heads(kv_pages: KVPages) -> int:
    """Return the KV heads in the cache, or in one shard of it."""
    pages = kv_pages[0] if isinstance(kv_pages, tuple) else kv_pages
    return pages.shape[-3] // 2


def attend(
    attention: Attention,
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    kv_pages: KVPages,
    inputs: ModelInputs,
    *,
    layer: int,
    sm_scale: float,
    sliding_window: int | None,
    sinks: Float32[Array, " H"] | None = None,
) -> tuple[Float[Array, "T H D"], KVPages]:
    """Write a layer's keys and values to its pages and attend over them.

    Args:
        attention: `kernels.reference.ragged_paged_attention` or a function of that signature; with
            a stacked cache, one that takes the `layer` as well.
        q: rotated.
        k: rotated.
        v: the values.
        kv_pages: in either layout.
        inputs: the step.
        layer: index of the layer.
        sm_scale: factor of the scores.
        sliding_window: keys that a query sees, itself included; None for all.
        sinks: the score of one more key without a value; only for an attention that takes them.
    """
    indices = (inputs.kv_lens, inputs.page_indices, inputs.cu_q_lens, inputs.num_seqs)
    options: dict[str, Any] = {"sm_scale": sm_scale, "sliding_window": sliding_window}
    if sinks is not None:
        options["sinks"] = sinks
    if isinstance(kv_pages, tuple):
        out, pages = attention(q, k, v, kv_pages[layer], *indices, **options)
        return out, (*kv_pages[:layer], pages, *kv_pages[layer + 1 :])
    return attention(q, k, v, kv_pages, *indices, layer=layer, **options)
