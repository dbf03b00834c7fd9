"""Native ragged paged attention: the traced wrapper around the C++ kernel.

Owns the checks of shape and dtype, which happen once, when a program is traced; values (lengths,
page indices) are checked by the kernel at every call. Same signature as `kernels.reference`, plus a
`layer` for a cache that holds all layers in one array: one argument of a program instead of many.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels.cpu import library
from kernels.quantized_pages import QuantizedPages

HEAD_DIM_MULTIPLE = 8
"""What the size of a head must be a multiple of."""

_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
_NO_WINDOW = 1 << 40


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array | QuantizedPages,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
    layer: int | None = None,
) -> tuple[jax.Array, jax.Array | QuantizedPages]:
    """Write the new keys and values to their pages, then attend over the pages.

    Args:
        q: bf16 or f32 [T, H, D], rotated; D a multiple of 8.
        k: [T, K, D], rotated, dtype of q; K divides H.
        v: [T, K, D], dtype of q.
        kv_pages: bf16 or f32 [N, 2K, page, D]: keys of head h at row 2h, values at 2h + 1; page a
            power of two >= 8. Or quantised ones. Or those of all layers, [L, N, 2K, page, D], with
            `layer`. Donated: updated in place, with no copy through a chain of layers.
        kv_lens: i32 [S], tokens in the cache after this step.
        page_indices: i32 [S, P].
        cu_q_lens: i32 [S + 1], rows of sequence s are [cu_q_lens[s], cu_q_lens[s + 1]).
        num_seqs: i32 [1], sequences in use.
        sm_scale: factor of the scores.
        sliding_window: keys that a query sees, itself included; None for all.
        sinks: f32 [H], the score of one more key with a value of zero; None for no such key.
        layer: which of L layers to attend over, where the pages of all were given.

    Returns:
        The output [T, H, D] in q's dtype, zero past the last sequence's rows, and the pages.
        A row's bits depend on its own sequence only: not on the batch, on chunking, on the page
        size or on the number of threads. (They do depend on the instruction set.)

    Raises:
        ValueError: a shape or parameter does not fit.
        TypeError: a dtype is not supported.
        kernels.cpu.library.NativeUnavailable: the kernels cannot be built here.
        jax.errors.JaxRuntimeError: at run time, lengths or page indices outside the buffers.
    """
    _check_dtypes(q, k, v, kv_pages)
    _check_indices(kv_lens, page_indices, cu_q_lens, num_seqs)
    _check_shapes(q, k, v, kv_pages, layer)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if sinks is None:
        sinks = jnp.zeros(0, jnp.float32)
    elif sinks.shape != (q.shape[1],) or sinks.dtype != jnp.float32:
        raise ValueError(f"sinks must be f32 [{q.shape[1]}], got {sinks.dtype} {sinks.shape}")
    library.load()
    attributes = {
        "scale": np.float32(sm_scale),
        "window": _NO_WINDOW if sliding_window is None else sliding_window,
        "layer": layer or 0,
    }
    indices = (kv_lens, page_indices, cu_q_lens, num_seqs, sinks)
    if isinstance(kv_pages, QuantizedPages):
        arguments = (q, k, v, kv_pages.values, kv_pages.scales)
        call = jax.ffi.ffi_call(
            "systole_quantized_paged_attention",
            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *arguments[3:])),
            input_output_aliases={3: 1, 4: 2},
        )
        out, values, scales = call(*arguments, *indices, **attributes)
        return out, QuantizedPages(values=values, scales=scales)
    call = jax.ffi.ffi_call(
        "systole_ragged_paged_attention",
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, kv_pages)),
        input_output_aliases={3: 1},
    )
    out, pages = call(q, k, v, kv_pages, *indices, **attributes)
    return out, pages


def _check_dtypes(
    q: jax.Array, k: jax.Array, v: jax.Array, kv_pages: jax.Array | QuantizedPages
) -> None:
    if q.dtype not in _FLOATS:
        raise TypeError(f"q must be bfloat16 or float32, got {q.dtype}")
    if isinstance(kv_pages, QuantizedPages):
        dtypes = (kv_pages.values.dtype, kv_pages.scales.dtype)
        if dtypes != (jnp.int8, jnp.float32):
            raise TypeError(f"quantised kv_pages must be int8 with float32 scales, got {dtypes}")
    elif kv_pages.dtype not in _FLOATS:
        raise TypeError(f"kv_pages must be bfloat16 or float32, or quantised, got {kv_pages.dtype}")
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {array.dtype}")


def _check_shapes(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array | QuantizedPages,
    layer: int | None,
) -> None:
    pages_ndim = 4 if layer is None else 5
    is_quantized = isinstance(kv_pages, QuantizedPages)
    pages = kv_pages.values if is_quantized else kv_pages
    expected = (("q", q, 3), ("k", k, 3), ("v", v, 3), ("kv_pages", pages, pages_ndim))
    for name, array, ndim in expected:
        if array.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions, got shape {array.shape}")
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if k.shape != (num_tokens, num_kv_heads, head_dim) or v.shape != k.shape:
        raise ValueError(f"k and v must be [T, K, D] as q {q.shape}, got {k.shape} and {v.shape}")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"the {num_heads} query heads must be a multiple of {num_kv_heads} kv heads"
        )
    if head_dim == 0 or head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(f"head_dim must be a multiple of {HEAD_DIM_MULTIPLE}, got {head_dim}")
    if layer is not None and not 0 <= layer < kv_pages.shape[0]:
        raise ValueError(f"layer must lie in [0, {kv_pages.shape[0]}), got {layer}")
    rows, page_size, page_dim = kv_pages.shape[-3:]
    if rows != 2 * num_kv_heads or page_dim != head_dim:
        raise ValueError(
            f"kv_pages must be [..., N, {2 * num_kv_heads}, page, {head_dim}], got {kv_pages.shape}"
        )
    if page_size < 8 or page_size & (page_size - 1):
        raise ValueError(f"the page size must be a power of two >= 8, got {page_size}")
    if is_quantized and kv_pages.scales.shape != pages.shape[:-1]:
        raise ValueError(
            f"scales of kv_pages {pages.shape} must be {pages.shape[:-1]}, got "
            f"{kv_pages.scales.shape}"
        )


def _check_indices(
    kv_lens: jax.Array, page_indices: jax.Array, cu_q_lens: jax.Array, num_seqs: jax.Array
) -> None:
    arrays = {
        "kv_lens": (kv_lens, 1),
        "page_indices": (page_indices, 2),
        "cu_q_lens": (cu_q_lens, 1),
        "num_seqs": (num_seqs, 1),
    }
    for name, (array, ndim) in arrays.items():
        if array.dtype != jnp.int32:
            raise TypeError(f"{name} must be int32, got {array.dtype}")
        if array.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions, got shape {array.shape}")
    rows = kv_lens.shape[0]
    if page_indices.shape[0] != rows or cu_q_lens.shape[0] != rows + 1 or num_seqs.shape[0] != 1:
        raise ValueError(
            f"for kv_lens [{rows}], page_indices [{rows}, P], cu_q_lens [{rows + 1}] and num_seqs "
            f"[1] were expected, got {page_indices.shape}, {cu_q_lens.shape}, {num_seqs.shape}"
        )
